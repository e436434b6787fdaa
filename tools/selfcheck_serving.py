"""The contract, tested where it runs: a few prompts served in a dozen ways by one engine, compared bit for bit.

    python engine.py --selfcheck [--model FOLDER ...]

Needles are the requests compared, by token ids and the words of their fp32 logprobs; fillers only share their steps.
The yardstick is each needle served alone, cold. On a GPU the kernels' schedules are compared first (selfcheck.py).
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cache import BlockManager
from kernels.tiles import KV_TILE
from sampler import SamplingParams

LENGTHS = (1, 63, 130, 257)  # a token, under a block, over two, over a KV split
OUTPUT, FILLERS = 12, 12


@dataclass(frozen=True)
class Cell:
    """One way of serving: how many words (token ids and logprobs) were compared, how many differ, and a remark."""

    how: str
    words: int
    differing: int
    remark: str = ""


def words(output) -> np.ndarray:
    """[2, num_tokens] int64: token ids, and the bits of their logprobs."""
    out = output.outputs[0]
    if output.error:
        raise ValueError(output.error)
    return np.array([out.token_ids, np.array(out.logprobs, np.float32).view(np.int32).tolist()], np.int64)


def differing(a: np.ndarray, b: np.ndarray) -> int:
    """How many of the words differ; those that one of the two lacks differ."""
    n = min(a.shape[1], b.shape[1])
    return int((a[:, :n] != b[:, :n]).sum()) + 2 * (max(a.shape[1], b.shape[1]) - n)


@contextmanager
def settings(llm, chunk: int | None = None, num_blocks: int | None = None, use_graphs: bool | None = None,
             async_scheduling: bool | None = None) -> Iterator[None]:
    """An idle engine with a cold cache and other limits: `chunk` tokens a step, `num_blocks` of the cache, with CUDA
    graphs or not, scheduled ahead or not. None leaves a setting alone. Afterwards it is as it was."""
    scheduler, runner = llm.scheduler, llm.runner
    before = scheduler.max_num_batched_tokens, scheduler.blocks, runner.use_graphs, llm.async_scheduling
    scheduler.max_num_batched_tokens = min(chunk or before[0], before[0])
    scheduler.blocks = BlockManager(min(num_blocks or len(before[1].ref_count), len(before[1].ref_count)),
                                    enable_prefix_caching=True)
    runner.use_graphs = before[2] and use_graphs is not False
    llm.async_scheduling = before[3] if async_scheduling is None else async_scheduling
    try:
        yield
    finally:
        scheduler.max_num_batched_tokens, scheduler.blocks, runner.use_graphs, llm.async_scheduling = before
        scheduler.blocks.reset_prefix_cache()  # its blocks were written to


class Serving:
    """Needles and fillers over one idle engine."""

    def __init__(self, llm):
        self.llm, rng = llm, random.Random(0)
        size, longest = llm.config.vocab_size, llm.max_model_len - OUTPUT
        self.needles = [[rng.randrange(1, size) for _ in range(min(n, longest))] for n in LENGTHS]
        self.fillers = [[rng.randrange(1, size) for _ in range(min(rng.randint(1, 90), longest))]
                        for _ in range(FILLERS)]
        chosen = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 1})
        self.params = [SamplingParams(max_tokens=OUTPUT, ignore_eos=True, logprobs=0, **chosen[i % 2])
                       for i in range(len(LENGTHS))]
        others = ({"temperature": 0.0, "logprobs": 3}, {"temperature": 1.0, "seed": 9, "min_p": 0.05},
                  {"temperature": 0.7, "repetition_penalty": 1.2}, {"temperature": 0.0, "prompt_logprobs": 1})
        self.other_params = [SamplingParams(max_tokens=3 + i % 8, ignore_eos=True, **others[i % 4])
                             for i in range(FILLERS)]

    def serve(self, fillers: bool = True, order: Callable = list) -> list[np.ndarray]:
        """The words of all needles, sent at once in the order that `order` makes of them and the fillers."""
        requests = list(zip(self.needles, self.params)) + list(zip(self.fillers, self.other_params)) * fillers
        places = order(range(len(requests)))
        done = dict(zip(places, self.llm.generate(*map(list, zip(*[requests[i] for i in places])))))
        return [words(done[i]) for i in range(len(self.needles))]

    def alone(self) -> list:
        """The outputs of all needles, served one after the other."""
        return [self.llm.generate([needle], params)[0] for needle, params in zip(self.needles, self.params)]

    def arriving(self) -> list[np.ndarray]:
        """Needles and fillers that come one a step, while the others are being served; some fillers are aborted."""
        llm, outputs = self.llm, []
        for i in range(FILLERS):
            filler = llm.add_request(self.fillers[i], self.other_params[i])
            if i % 3 == 0:
                needle = llm.add_request(self.needles[i // 3], self.params[i // 3])
                outputs.append(llm.requests[needle])
            llm.step()
            if i % 4 == 1:
                llm.abort(filler)
        while llm.has_unfinished_requests:
            llm.step()
        return [words(output) for output in outputs]

    def cells(self) -> Iterator[Cell]:
        """Serve in every way, and compare with each needle alone."""
        llm, scheduler = self.llm, self.llm.scheduler
        tiny = -(-(max(map(len, self.needles)) + OUTPUT) // KV_TILE) + 1
        with settings(llm):
            outputs = self.alone()
            expected = [words(output) for output in outputs]
            total = sum(e.size for e in expected)
            again = [words(output) for output in self.alone()]

        def cell(how: str, found: list[np.ndarray], remark: str = "") -> Cell:
            return Cell(how, total, sum(map(differing, found, expected)), remark)

        def shuffled(places):
            return random.Random(1).sample(list(places), len(places))

        def reverse(places):
            return list(reversed(places))

        yield cell("again, from the prefix cache", again)
        ways = [("all at once", {}, (False,)), (f"among {FILLERS} others", {}, ()),
                ("the others first", {}, (True, reverse)),
                ("in chunks of 16 tokens, among others", {"chunk": 16}, ()),
                ("in chunks of 50 tokens, shuffled", {"chunk": 50}, (True, shuffled)),
                (f"in a cache of {tiny} blocks, shuffled", {"num_blocks": tiny}, (True, shuffled)),
                ("without asynchronous scheduling" if llm.async_scheduling else "with asynchronous scheduling",
                 {"async_scheduling": not llm.async_scheduling}, ())]
        if llm.runner.use_graphs:
            ways.append(("eagerly, without CUDA graphs", {"use_graphs": False}, ()))
        for how, changes, arguments in ways:
            preempted = scheduler.num_preemptions
            with settings(llm, **changes):
                found = self.serve(*arguments)
            count = scheduler.num_preemptions - preempted
            yield cell(how, found, f"{count} preempted" if count or "num_blocks" in changes else "")
        with settings(llm):
            yield cell("arriving one by one, others aborted", self.arriving())
            yield cell("shuffled, from the prefix cache", self.serve(True, shuffled))
        scores = [llm.score(needle, e[0].tolist()) for needle, e in zip(self.needles, expected)]
        yield cell("scored, in one prefill", [np.stack([e[0], np.array(score, np.float32).view(np.int32)])
                                              for score, e in zip(scores, expected)])
        verdicts = [llm.verify(llm.receipt(output)) for output in outputs]
        yield Cell("receipts, every token drawn again", total, sum(not v.verified for v in verdicts),
                   "; ".join(problem for v in verdicts for problem in v.problems))


def selfcheck(llm) -> int:
    """Print what was compared on this machine, with this model. Exit code 0, or 1 if anything differs."""
    if llm.ranks.size > 1:
        raise ValueError("the self-check takes tensor_parallel_size 1: it changes settings of a running engine")
    begin, config = time.perf_counter(), llm.config
    print(f"selfcheck of {llm.folder.name} on {llm.device.type}, {llm.fingerprint}")
    same = True
    if llm.ops.name == "triton":
        from kernels import refusal, triton_ops
        from kernels.tiles import schedules
        from tools.selfcheck import check_schedules, report, without

        c, sparse = config, len(config.sparse_layers)
        inner = {c.intermediate_size} if sparse < c.num_layers else set()
        in_experts = {c.hidden_size, c.moe_intermediate_size} if sparse else set()
        lengths = {c.hidden_size, c.num_heads * c.head_dim} | inner | in_experts
        table = schedules("auto", torch.cuda.get_device_capability(llm.device))
        shapes = ((config.num_heads, config.num_kv_heads, config.head_dim),)  # its own: less to compile
        done = [check for K in (None, *sorted(lengths))
                for check in check_schedules(llm.device, llm.dtype, table, K, shapes, K in in_experts)]
        same = report(done)
        failed = {check.schedule for check in done if not check.same and check.schedule}
        if failed:
            file = Path(refusal(llm.device))
            print(f"not used: {', '.join(map(str, failed))}\n{file} says so to later runs; delete it to try them again")
            with suppress(OSError):  # a read-only home: later runs do not know
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("\n".join(map(str, failed)) + "\n")
            llm.ops = llm.model.ops = llm.runner.ops = triton_ops(llm.device, table=without(table, failed))
    else:
        print("schedules: a CPU has one, so there are none to compare")
    cells = list(Serving(llm).cells())
    width = max(len(cell.how) for cell in cells)
    print(f"\n{'how it was served':{width}s}   words  differ   (against each prompt alone, with a cold cache)")
    for cell in cells:
        print(f"{cell.how:{width}s}  {cell.words:6d}  {cell.differing:6d}   {cell.remark}".rstrip())
    bad = [cell for cell in cells if cell.differing]
    print(f"\n{'DIFFERENT' if bad or not same else 'same bits'}: {len(cells)} ways of serving {len(LENGTHS)} prompts, "
          f"{time.perf_counter() - begin:.1f} s", flush=True)
    return 0 if same and not bad else 1

