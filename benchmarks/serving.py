"""Workloads served by the engine: checked for their bits first, then timed. Also memory, and the time to a first token.

One engine lives at a time, made as the peer was: greedy, end tokens ignored, no prefix cache, a limit of 4,096 tokens
where that is enough. Its twin (twins.library) is the same engine with ops that may follow the batch.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.ops import BitsDiffer, Roof, step_floor_s
from benchmarks.twins import library
from benchmarks.workloads import Workload
from cache import BlockManager
from engine import LLM
from kernels import Ops, make_ops
from model import ModelConfig
from sampler import SamplingParams
from scheduler import Scheduler

ROOT = Path(__file__).parent.parent
SHORT = 4096  # max_model_len of an engine for workloads that fit it
CHECKED = 32  # tokens of a request that is served once more, alone
FIRST_TOKEN = """
import json, sys, time
from engine import LLM
from sampler import SamplingParams
llm = LLM(**json.loads(sys.argv[1]), progress=False)
for _ in llm.stream([1] * 128, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)):
    print(time.time())
    break
"""


class Skipped(Exception):
    """A workload cannot run here; the message says why."""


@dataclass
class Measured:
    """A workload's timed passes, in seconds: `walls` of whole passes, `firsts` of passes that end at the first token;
    per request `ttfts` and `tpots` (seconds a token after the first); the floor of the steps that were run."""

    workload: Workload
    walls: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    floor_wall: float = 0.0
    floor_first: float = 0.0

    def _figure(self, wall: float, first: float) -> float:
        steps = self.workload.outputs[0] - 1
        return (wall - first) / steps * 1e3 if self.workload.figure == "step_ms" else wall

    @property
    def figure(self) -> float:
        """What the workload is known by, from medians: seconds, or milliseconds a step."""
        return self._figure(statistics.median(self.walls), statistics.median(self.firsts or [0.0]))

    @property
    def floor(self) -> float:
        """The floor of `figure`, in its unit."""
        return self._figure(self.floor_wall, self.floor_first)

    def record(self) -> dict:
        """For the JSON: times in seconds, but for `figure` and `floor`, which are in the figure's unit."""
        w, wall = self.workload, statistics.median(self.walls)
        record = {"load": w.load, "in_tokens": sum(map(len, w.prompts)), "out_tokens": sum(w.outputs),
                  w.figure: self.figure, "floor": self.floor, "walls_s": self.walls,
                  "out_tokens_per_s": sum(w.outputs) / wall}
        for name, values in (("ttft", self.ttfts), ("tpot", self.tpots)):
            if values:
                record |= {f"{name}_p{p}_s": float(np.percentile(values, p)) for p in (50, 99)}
        return record


def bits(output, count: int) -> tuple[list[int], bytes]:
    """The first `count` tokens of a request and the words of their log-probabilities."""
    out = output.outputs[0]
    return out.token_ids[:count], np.array(out.logprobs[:count], np.float32).tobytes()


class Server:
    """Serves workloads on engines made with `options` (arguments of `LLM`), `reps` timed passes each.

    ops: the table of the engine that is measured, None for the device's own; canary: the workload whose bits every
    new engine must keep before anything is timed.
    """

    def __init__(self, options: dict, config: ModelConfig, device: torch.device, ops: Ops | None, roof: Roof,
                 canary: Workload, reps: int):
        self.options, self.config, self.device, self.ops, self.roof = options, config, device, ops, roof
        self.canary, self.reps = canary, reps
        self.llm: LLM | None = None
        self.key = None
        self.results: dict[tuple[str, bool], Measured | str] = {}

    def release(self) -> None:
        """Free the engine's memory."""
        self.llm = self.key = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def is_long(self, workload: Workload) -> bool:
        return workload.longest > SHORT

    def engine(self, workload: Workload, twin: bool = False) -> LLM:
        """The engine for a workload; BitsDiffer if a new one's bits follow the batch (a twin's may)."""
        key = twin, self.is_long(workload)
        if self.key != key:
            self.release()
            ops, fit = library(make_ops(self.device)) if twin else (self.ops, None)
            limit = self.config.max_position_embeddings
            try:
                self.llm = LLM(**self.options, max_model_len=None if key[1] else min(SHORT, limit), ops=ops,
                               enable_prefix_caching=False, progress=sys.stderr.isatty())
            except ValueError as error:
                raise Skipped(f"no engine: {error}") from error
            if fit:
                fit(self.llm.runner)
            else:
                canary = replace(self.canary, outputs=[min(n, 16) for n in self.canary.outputs])
                self.check(canary, self.serve(canary, logprobs=0)[1])
            self.key = key
        return self.llm

    def serve(self, workload: Workload, tokens: int | None = None, logprobs: int | None = None) -> tuple[float, list]:
        """(seconds, outputs) of one pass, all requests at once; `tokens` ends every request early."""
        params = [SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=tokens or n, ignore_eos=True,
                                 logprobs=logprobs) for n in workload.outputs]
        begin = time.perf_counter()
        outputs = self.llm.generate(workload.prompts, params)
        seconds = time.perf_counter() - begin
        for output, wanted in zip(outputs, params, strict=True):
            if output.error or len(output.outputs[0].token_ids) != wanted.max_tokens:
                raise Skipped(f"a request failed: {output.error or 'too few tokens'}")
        return seconds, outputs

    def check(self, workload: Workload, whole: list) -> None:
        """Serve the first and the last request of a pass once more, alone, in one prefill and in odd chunks."""
        budget = self.llm.scheduler.max_num_batched_tokens
        for i in sorted({0, len(whole) - 1}):
            n = min(workload.outputs[i], CHECKED)
            alone = replace(workload, prompts=[workload.prompts[i]], outputs=[n])
            for chunk in (budget, min(len(workload.prompts[i]) * 2 // 5 + 1, budget // 2)):
                self.limit_tokens(chunk)
                try:
                    output = self.serve(alone, logprobs=0)[1][0]
                finally:
                    self.limit_tokens(budget)
                if bits(output, n) != bits(whole[i], n):
                    raise BitsDiffer(f"request {i} of workload {workload.name}, alone in chunks of {chunk} tokens, has "
                                     "other tokens or log-probabilities than among the others")

    def limit_tokens(self, max_num_batched_tokens: int) -> None:
        """Let a step have so many tokens, on every rank, of an engine without requests."""
        old = self.llm.scheduler
        blocks = BlockManager(old.blocks.num_blocks, enable_prefix_caching=False)
        scheduler = Scheduler(blocks, old.max_num_seqs, max_num_batched_tokens)
        self.llm.ranks.tell("__setattr__", "scheduler", scheduler)
        self.llm.scheduler = scheduler

    @contextmanager
    def steps(self) -> Iterator[list[float]]:
        """Collects the floor of every step that is launched, in seconds: its work, dealt to the ranks evenly."""
        runner, floors, ranks = self.llm.runner, [], self.llm.ranks.size
        launch = runner.launch

        def launched(seqs):
            floors.append(step_floor_s(self.config, self.roof, self.llm.model.embed_tokens.itemsize, seqs) / ranks)
            return launch(seqs)

        runner.launch = launched
        try:
            yield floors
        finally:
            del runner.launch

    def measure(self, workload: Workload, twin: bool = False) -> Measured:
        """Check and time a workload, once. Raises Skipped, or BitsDiffer before a speed is known."""
        key = workload.name, twin
        if key not in self.results:
            try:
                self.results[key] = self._measure(workload, twin)
            except Skipped as error:
                self.results[key] = str(error)
            except torch.OutOfMemoryError as error:
                self.results[key] = f"out of GPU memory: {str(error).splitlines()[0][:120]}"
                self.release()
        if isinstance(self.results[key], str):
            raise Skipped(self.results[key])
        return self.results[key]

    def _measure(self, workload: Workload, twin: bool) -> Measured:
        llm, found = self.engine(workload, twin), Measured(workload)
        if workload.longest > llm.max_model_len:
            raise Skipped(f"a request has {workload.longest} tokens; model and cache allow {llm.max_model_len}")
        with self.steps() as floors:  # compiles and captures, too
            whole = self.serve(workload, logprobs=0)[1]
        found.floor_wall = sum(floors)
        has_steps = workload.figure == "step_ms"
        if has_steps:
            with self.steps() as floors:
                self.serve(workload, tokens=1)
            found.floor_first = sum(floors)
        if not twin:
            self.check(workload, whole)
        for _ in range(self.reps if workload.name[0] in "CD" else min(self.reps, 2)):
            seconds, outputs = self.serve(workload)
            if not twin and any(a.outputs[0].token_ids != b.outputs[0].token_ids
                                for a, b in zip(outputs, whole, strict=True)):
                raise BitsDiffer(f"a second pass of workload {workload.name} gave other tokens")
            found.walls.append(seconds)
            found.firsts += [self.serve(workload, tokens=1)[0]] if has_steps else []
            times = [output.timings for output in outputs]
            found.ttfts += [t["ttft_s"] for t in times]
            found.tpots += [(t["total_s"] - t["ttft_s"]) / (n - 1)
                            for t, n in zip(times, workload.outputs, strict=True) if n > 1]
        if found.figure <= 0:
            raise Skipped("too noisy: passes that end at the first token took longer than whole ones")
        return found

    def memory(self) -> dict:
        """Bytes by use, and how many sequences of some lengths the cache holds at once. None: not known here."""
        llm, c = self.engine(self.canary), self.config
        cache = llm.runner.kv_cache
        budget, max_num_seqs = llm.scheduler.max_num_batched_tokens, llm.scheduler.max_num_seqs
        workspace = reserved = total = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            llm.runner.profile(budget)
            workspace = torch.cuda.max_memory_allocated(self.device) - before
            reserved, total = torch.cuda.memory_reserved(self.device), torch.cuda.mem_get_info(self.device)[1]
        tokens = cache.shape[2] * cache.shape[4]
        lengths = [n for n in (256, 1024, 4096, 32768) if n <= c.max_position_embeddings]
        return {"weights": llm.model.weight_bytes, "cache": cache.nbytes, "cache_tokens": tokens,
                "bytes_per_token": cache.nbytes // tokens, "workspace": workspace, "step_tokens": budget,
                "step_sequences": max_num_seqs, "reserved": reserved, "device": total,
                "largest_batch": {str(n): cache.shape[2] // -(-n // cache.shape[4]) for n in lengths}}


def start_seconds(options: dict, triton_cache: str) -> float:
    """Seconds from the start of a fresh process to its first token, with this Triton cache folder."""
    begin = time.time()
    done = subprocess.run([sys.executable, "-c", FIRST_TOKEN, json.dumps(options)], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {
                              "TRITON_CACHE_DIR": triton_cache, "OMP_NUM_THREADS": str(torch.get_num_threads())})
    if done.returncode:
        raise Skipped(f"the process failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return float(done.stdout.split()[-1]) - begin
