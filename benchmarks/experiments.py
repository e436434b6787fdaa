"""The promise in six experiments, each with a figure: ours beside an engine whose bits may follow the batch.

    python bench.py receipts [--only 1,4] [--out FOLDER] [--minutes 10] [--model qwen3-8b]

1 product    one row of a matrix product, alone and in batches: by the library, and by our kernel
2 feynman    one question asked many times at temperature 0, while other traffic comes and goes
3 price      a load of short requests: what the promise costs
4 trainer    a sampler's log-probabilities against a trainer's scoring pass
5 search     a random search for a way of serving that changes a bit
6 receipt    one long completion: the time of its proof against that of its generation

Bits are compared as integers. Exit code 1 if ours ever differ. With --out, what is known so far is written as it comes.
"""

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint
from benchmarks import figures, report
from benchmarks.ops import measure_roof
from benchmarks.serving import Server, Skipped
from benchmarks.twins import batch_dependent
from benchmarks.workloads import LIMITS, model_options, workloads
from engine import LLM, pick_device, pick_dtype
from kernels import Ops, make_ops
from kernels.tiles import KV_TILE, leaf_count
from model import ModelConfig
from sampler import SamplingParams
from tools.selfcheck_serving import differing, settings, words
from tools.verify import replay

NAMES = {"1": "product", "2": "feynman", "3": "price", "4": "trainer", "5": "search", "6": "receipt"}
QUESTION = "Tell me about Richard Feynman"
# every: steps between questions; limit: seconds of questions an engine; sampled: sequences, tokens; search: longest
# prompt and output, requests a case, ways of serving them, most steps that chunks may make of them; receipt: tokens
FULL = {"rows": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "questions": 1000, "answer": 1000,
        "every": 5.0, "limit": 200, "sampled": (256, 256), "search": (8000, 64), "needles": (4, 48, 192), "ways": 5,
        "steps": 200, "minutes": 2.0, "receipt": 1000}
SMALL = {"rows": (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512), "questions": 32, "answer": 48, "every": 2.0, "limit": 60,
         "sampled": (16, 24), "search": (200, 16), "needles": (1, 2, 4), "ways": 2, "steps": 60, "minutes": 0.4,
         "receipt": 120}


@dataclass
class Arrival:
    """A request and the step it comes at; `aborted`: steps after which its client goes away."""

    step: int
    prompt: list[int]
    params: SamplingParams
    aborted: int | None = None


def drive(llm: LLM, arrivals: list[Arrival], seconds: float = 1e9, progress: bool = False) -> list:
    """Serve requests that come while others are being served; their outputs, in the order given. After `seconds` all
    that is unfinished is aborted, and what has not come is None."""
    outputs: list = [None] * len(arrivals)
    order = deque(sorted(range(len(arrivals)), key=lambda i: arrivals[i].step))
    leaving: dict[int, list[str]] = {}
    step, begin = 0, time.perf_counter()
    with tqdm(total=len(arrivals), desc="requests", disable=not progress, mininterval=10) as bar:
        while order or llm.has_unfinished_requests:
            while order and arrivals[order[0]].step <= step:
                i = order.popleft()
                request_id = llm.add_request(arrivals[i].prompt, arrivals[i].params)
                outputs[i] = llm.requests[request_id]
                if arrivals[i].aborted is not None:
                    leaving.setdefault(step + arrivals[i].aborted, []).append(request_id)
            bar.update(sum(output.finished for output in llm.step()))
            for request_id in leaving.pop(step, ()):
                llm.abort(request_id)
            step += 1
            if time.perf_counter() - begin > seconds:
                order.clear()
                for request_id in list(llm.requests):
                    llm.abort(request_id)
    return outputs


def random_prompt(rng: random.Random, vocab_size: int, longest: int) -> list[int]:
    return rng.choices(range(1, vocab_size), k=rng.randint(1, longest))


def logprob_words(logprobs: list[float]) -> np.ndarray:
    return np.array(logprobs, np.float32).view(np.int32).astype(np.int64)


def neighbour(rng: random.Random, vocab_size: int, output: int) -> SamplingParams:
    """Parameters as somebody else may ask for them."""
    extra = rng.choice(({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7, "top_k": 20},
                        {"temperature": 1.2, "min_p": 0.05, "logprobs": 5}, {"temperature": 0.0, "prompt_logprobs": 1},
                        {"temperature": 0.8, "repetition_penalty": 1.2}, {"temperature": 0.0, "presence_penalty": 0.5},
                        {"temperature": 1.0, "logit_bias": {rng.randrange(vocab_size): 3.0}}))
    return SamplingParams(max_tokens=rng.randint(1, output), ignore_eos=rng.random() < 0.5, seed=rng.getrandbits(40),
                          **extra)


class Experiments:
    """One run. `options`: the arguments of `LLM`; `ops`: the table of the engine called ours, None for the device's;
    `size`: FULL, SMALL or a test's; `minutes` and `seed` are the search's: its length and its first case."""

    def __init__(self, options: dict, config: ModelConfig, device: torch.device, dtype: torch.dtype, size: dict,
                 small: bool, ops: Ops | None = None, minutes: float | None = None, seed: int = 0,
                 peers: dict | None = None):
        self.options, self.config, self.device, self.dtype, self.size, self.small = (
            options, config, device, dtype, size, small)
        self.ops, self.seed, self.peers = ops, seed, peers or {}
        self.minutes = size["minutes"] if minutes is None else minutes
        self.fingerprint: str | None = None
        self.keep: Callable[[dict], None] = lambda result: None  # takes what is known of a result so far

    @contextmanager
    def engine(self, twin: bool = False):
        """An engine, ours or the batch-dependent twin, once the last one's memory is free."""
        self.free()
        llm = LLM(**self.options, ops=batch_dependent(make_ops(self.device)) if twin else self.ops,
                  progress=sys.stderr.isatty())
        if not twin:
            self.fingerprint = llm.fingerprint
        yield llm

    def free(self) -> None:
        gc.collect()  # an engine holds itself in a circle
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def both(self, measure: Callable[[LLM], dict]) -> dict:
        """{"samebits": ..., "twin": ...}, one engine at a time."""
        found = {}
        for name in ("samebits", "twin"):
            with self.engine(name == "twin") as llm:
                found[name] = measure(llm)
            del llm
            self.keep(found)
        return found

    def product(self) -> dict:
        """Words of the first row of x @ w.T that change when other rows join it, by number of rows."""
        N, K = self.config.hidden_size, self.config.intermediate_size  # down_proj: the longest sum of a layer
        ops, generator = self.ops or make_ops(self.device), torch.Generator(self.device).manual_seed(0)
        dtype = ops.weight_dtype(self.dtype)
        x, w = (torch.randn(shape, generator=generator, device=self.device).to(dtype)
                for shape in ((max(self.size["rows"]), K), (N, K)))
        integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        products = {"library": lambda x: F.linear(x, w), "samebits": lambda x: ops.linear(
            x, w, None, leaf_count(N, K), dtype, None)}
        result = {"N": N, "K": K, "dtype": str(dtype), "rows": list(self.size["rows"])}
        for name, run in products.items():
            alone, differ, largest = run(x[:1])[0], [], []
            for rows in self.size["rows"]:
                row = run(x[:rows])[0]
                differ.append(int((row.view(integer) != alone.view(integer)).sum()))
                largest.append(float((row.double() - alone.double()).abs().max()))
            result[name] = {"words": differ, "largest": largest}
        result["differences"] = sum(result["samebits"]["words"])
        report.table(f"1. the first row of x [rows, {K}] @ w [{N}, {K}].T in {dtype}, against the same row alone: of "
                     f"{N} words differ, and the largest difference",
                     ["rows", "library", "largest", "samebits", "largest"],
                     [[str(rows), *[value for name in products for value in (
                         result[name]["words"][i], f"{result[name]['largest'][i]:.2g}")]]
                      for i, rows in enumerate(self.size["rows"])])
        return result

    def feynman(self) -> dict:
        """One greedy question, asked again and again amid random traffic."""
        def ask(llm: LLM) -> dict:
            rng, V, answer = random.Random(0), self.config.vocab_size, self.size["answer"]
            prompt = llm.tokenizer.encode(QUESTION) if llm.tokenizer else random_prompt(rng, V, 8)
            mine = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=answer, ignore_eos=True,
                                  logprobs=0)
            arrivals, step, phase = [], 0, -(-self.size["questions"] // 8)
            for i in range(self.size["questions"]):  # they come in rushes and lulls, so that batches grow and shrink
                step += rng.randint(0, round(4 * self.size["every"])) if i // phase % 2 else 0
                arrivals.append(Arrival(step, prompt, mine))
                for _ in range(rng.randint(0, 2)):
                    arrivals.append(Arrival(step + rng.randint(0, 9), random_prompt(rng, V, 96),
                                            neighbour(rng, V, min(answer, 256)), rng.choice((None, None, 5))))
            done = drive(llm, arrivals, self.size["limit"], not self.small)
            found = [words(output) for output, a in zip(done, arrivals)
                     if a.params is mine and output and output.outputs[0].finish_reason == "length"]
            if not found:
                raise Skipped(f"no answer was complete after {self.size['limit']} s")
            tokens, bits = (np.stack([f[row] for f in found]) for row in (0, 1))
            prefixes, same = [], np.zeros(len(found), np.int64)  # same: one number for rows that are alike so far
            for column in tokens.T:
                _, same = np.unique(same * self.config.vocab_size + column, return_inverse=True)
                prefixes.append(int(same.max()) + 1)
            changed = np.flatnonzero((bits != bits[0]).any(0) | (tokens != tokens[0]).any(0))
            return {"answers": len(found), "unique_answers": prefixes[-1], "unique_answers_by_position": prefixes,
                    "unique_bits": len({f.tobytes() for f in found}),
                    "first_token_that_differs": next((i for i, n in enumerate(prefixes) if n > 1), None),
                    "first_logprob_that_differs": int(changed[0]) if len(changed) else None,
                    "others": len(arrivals) - self.size["questions"]}

        result = {"question": QUESTION, "asked": self.size["questions"], "tokens": self.size["answer"],
                  **self.both(ask)}
        result["differences"] = result["samebits"]["unique_bits"] - 1
        report.table(f"2. \"{QUESTION}\", asked {result['asked']} times at temperature 0 amid other traffic, "
                     f"{result['tokens']} tokens each", ["", "different answers", "different bits",
                                                         "first token that differs", "first logprob that differs"],
                     [[name, r["unique_answers"], r["unique_bits"], r["first_token_that_differs"],
                       r["first_logprob_that_differs"]] for name, r in ((n, result[n]) for n in ("samebits", "twin"))])
        return result

    def price(self) -> dict:
        """Workload A: 1,000 requests of 90 to 110 tokens (a few on a CPU), ours and the library's twin."""
        self.free()
        every = workloads(self.config.vocab_size, self.small)
        load = every["A"]
        canary = max((w for w in every.values() if w.name[0] == "D"), key=lambda w: len(w.outputs))
        server = Server(self.options, self.config, self.device, self.ops, measure_roof(self.device, self.dtype), canary,
                        2)
        ours, self.fingerprint = server.measure(load), server.engine(load).fingerprint
        twin = server.measure(load, twin=True)
        server.release()
        peers = {name: {"what": peer["what"], "wall_s": peer["A_wall_s"]} for name, peer in self.peers.items()}
        result = {"load": load.load, "out_tokens": sum(load.outputs), "samebits": {"walls_s": ours.walls},
                  "twin": {"walls_s": twin.walls}, "price_percent": (ours.figure / twin.figure - 1) * 100,
                  "peers": peers, "differences": 0}  # the server checks the bits before it measures
        report.table(f"3. the price: seconds for {load.load} tokens", ["", "seconds", "tokens/s"],
                     [[name, seconds, result["out_tokens"] / seconds] for name, seconds in (
                         ("samebits", ours.figure), ("twin: library products, free splits", twin.figure),
                         *[(p["what"], min(p["wall_s"])) for p in peers.values()])])
        print(f"price of the promise: {result['price_percent']:+.1f} %")
        return result

    def trainer(self) -> dict:
        """Per-token KL between what a sampler reported while decoding and what scoring the same text gives."""
        def sample(llm: LLM) -> dict:
            rng, (count, tokens) = random.Random(1), self.size["sampled"]
            prompts = [random_prompt(rng, self.config.vocab_size, 96) for _ in range(count)]
            params = [SamplingParams(temperature=1.0, top_p=1.0, repetition_penalty=1.0, max_tokens=tokens,
                                     ignore_eos=True, logprobs=0, seed=i) for i in range(count)]
            done = [output.outputs[0] for output in llm.generate(prompts, params)]
            scored = [llm.score(prompt, out.token_ids) for prompt, out in zip(prompts, done)]
            sampler, trainer = (np.array(rows, np.float32) for rows in ([out.logprobs for out in done], scored))
            ratio = trainer.astype(np.float64) - sampler  # of log-probabilities
            kl = np.expm1(ratio) - ratio  # unbiased for KL(sampler || trainer), and never negative
            differ = sampler.view(np.int32) != trainer.view(np.int32)
            return {"tokens": ratio.size, "differing_words": int(differ.sum()),
                    "kl": float(kl.mean()), "largest_log_ratio": float(np.abs(ratio).max()),
                    "kl_by_position": kl.mean(0).tolist()}

        result = self.both(sample)
        result["differences"] = result["samebits"]["differing_words"]
        report.table("4. sampler against trainer: logprobs while decoding against one scoring pass of the same text",
                     ["", "tokens", "words that differ", "KL a token, nats", "largest log ratio"],
                     [[name, result[name]["tokens"], result[name]["differing_words"], f"{result[name]['kl']:.3g}",
                       f"{result[name]['largest_log_ratio']:.3g}"] for name in ("samebits", "twin")])
        return result

    def search_case(self, llm: LLM, seed: int) -> tuple[int, int, list[dict]]:
        """(tokens compared, words that differ, the ways of serving) of one case, all of it drawn from its seed.

        Each request is served in several ways among others. The yardstick is the same request alone, cold: its tokens
        drawn again, and all its logprobs, by one prefill each; one request is decoded alone, too."""
        rng, V, (longest, output) = random.Random(seed), self.config.vocab_size, self.size["search"]
        longest = min(longest, llm.max_model_len - output)
        shared, needles = rng.choices(range(1, V), k=longest), []
        for _ in range(rng.choice(self.size["needles"])):
            n = rng.choice((rng.randint(1, longest), int(longest ** rng.random())))
            if rng.random() < 0.3:  # it decodes over the border of a block, and may then have to make room
                n = min(max(1, n // KV_TILE * KV_TILE - rng.randint(0, 3)), longest)
            own = rng.choice((0, n - 1, rng.randrange(n)))  # tokens of the prompt that it shares with others
            extra = rng.choice(({"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0},
                                {"temperature": 0.8, "top_p": 0.9, "top_k": 50}, {"temperature": 1.1, "min_p": 0.02},
                                {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.2}))
            needles.append((shared[:own] + rng.choices(range(1, V), k=n - own), SamplingParams(
                max_tokens=rng.randint(1, output), ignore_eos=True, logprobs=0, seed=rng.getrandbits(40), **extra)))
        total = sum(len(prompt) + params.max_tokens for prompt, params in needles)
        need = -(-(longest + output) // KV_TILE)
        tokens, differ, ways, expected = 0, 0, [], []
        for _ in range(self.size["ways"]):
            chunk = rng.choice((None, None, 1 << rng.randint(3, 12), rng.randint(1, 4096)))
            how = {"chunk": chunk and max(chunk, total // self.size["steps"]),
                   "num_blocks": rng.choice((None, None, max(need, total // KV_TILE // rng.choice((3, 8))))),
                   "use_graphs": rng.random() < 0.7, "async_scheduling": rng.random() < 0.5}
            others, spread = rng.choice((0, 1, 2, 6) if self.small else (0, 3, 12, 40)), rng.choice((0, 0, 5, 30))
            share = rng.choice((0.0, 0.5, 1.0, 1.0))
            scored = [rng.random() < share for _ in needles]  # those whose prompts' logprobs are compared, too
            arrivals = [Arrival(rng.randint(0, spread), prompt, replace(params, prompt_logprobs=0 if score else None))
                        for (prompt, params), score in zip(needles, scored)]
            arrivals += [Arrival(rng.randint(0, spread), shared[: rng.randint(0, 90)] + random_prompt(rng, V, 90),
                                 neighbour(rng, V, output), rng.choice((None, None, 0, 4))) for _ in range(others)]
            order = rng.sample(range(len(arrivals)), len(arrivals))
            warm, preempted = rng.random() < 0.2, llm.scheduler.num_preemptions
            with settings(llm, **how):
                for _ in range(1 + warm):
                    done = dict(zip(order, drive(llm, [arrivals[i] for i in order])))
            ways.append(how | {"requests": len(needles), "others": others, "spread": spread, "warm": warm,
                               "preemptions": llm.scheduler.num_preemptions - preempted})
            with settings(llm):
                if not expected:
                    made = [done[i].outputs[0].token_ids for i in range(len(needles))]
                    for (prompt, params), ids in zip(needles, made):
                        drawn, logprobs, _ = replay(llm, prompt, params, ids, False)
                        again = llm.score(prompt[:1], prompt[1:] + ids)
                        expected.append((np.stack([drawn, logprob_words(logprobs)]), logprob_words(again)))
                    alone = rng.randrange(len(needles))
                    compared = [(words(llm.generate([needles[alone][0]], needles[alone][1])[0]), expected[alone][0])]
                    compared += [(score[None, len(score) - drawn.shape[1] :], drawn[1:]) for drawn, score in expected]
                else:
                    compared = []
            for i, (drawn, score) in enumerate(expected):
                compared.append((words(done[i]), drawn))
                if scored[i]:
                    found = logprob_words([logprob for logprob, _ in done[i].prompt_logprobs[1:]])
                    compared.append((found[None], score[None, : len(found)]))
            tokens += sum(b.shape[1] for _, b in compared)
            differ += sum(differing(a, b) for a, b in compared)
        return tokens, differ, ways

    def search(self) -> dict:
        """Cases until the time is up; every case can be run again by its seed."""
        found = {"minutes": self.minutes, "first_seed": self.seed, "cases": 0, "requests": 0, "tokens": 0,
                 "differences": 0, "failing_seeds": [], "preemptions": 0, "prompts": [1, self.size["search"][0]],
                 "tokens_by_second": [[0.0, 0, 0]]}
        with self.engine() as llm:
            begin = time.perf_counter()
            for seed in itertools.count(self.seed):
                compared, count, ways = self.search_case(llm, seed)
                seconds = time.perf_counter() - begin
                for name, more in (("cases", 1), ("tokens", compared), ("differences", count),
                                   ("requests", sum(way["requests"] + way["others"] for way in ways)),
                                   ("preemptions", sum(way["preemptions"] for way in ways))):
                    found[name] += more
                found["tokens_by_second"].append([round(seconds, 2), found["tokens"], found["differences"]])
                if count:
                    found["failing_seeds"].append(seed)
                    print(f"  seed {seed}: {count} words of {compared} tokens differ: {ways}", flush=True)
                if not self.small:
                    print(f"  {seconds:.0f} s: case {seed}, {found['tokens']:,} tokens compared", flush=True)
                self.keep(found)
                if seconds >= self.minutes * 60:
                    break
        del llm
        again = f" (again: --only 5 --minutes 0 --seed {found['failing_seeds'][0]})" if found["failing_seeds"] else ""
        report.table("5. the search: random ways of serving, against each request alone",
                     ["minutes", "cases", "tokens", "preemptions", "words that differ"],
                     [[f"{found['tokens_by_second'][-1][0] / 60:.2f}", found["cases"], found["tokens"],
                       found["preemptions"], f"{found['differences']}{again}"]])
        return found

    def receipt(self) -> dict:
        """One completion, generated alone and then verified; each once before it is timed, to compile and capture."""
        count = self.size["receipt"]
        with self.engine() as llm:
            prompt = random_prompt(random.Random(2), self.config.vocab_size, 32)
            params = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, logprobs=0, seed=2)
            output = [llm.generate([prompt], params)[0] for _ in range(2)][-1]
            made = llm.receipt(output)
            verdicts = [llm.verify(made) for _ in range(4)]
        del llm
        proofs = [verdict.seconds for verdict in verdicts[1:]]
        result = {"tokens": count, "generation_s": made["seconds"], "first_proof_s": verdicts[0].seconds,
                  "proofs_s": proofs, "speedup": made["seconds"] / median(proofs),
                  "problems": [problem for verdict in verdicts for problem in verdict.problems]}
        result["differences"] = len(result["problems"])
        report.table(f"6. a receipt of {count} tokens: seconds to generate them alone, and to prove them",
                     ["generation", "proof", "times as fast", "problems"],
                     [[result["generation_s"], median(proofs), result["speedup"], str(result["problems"] or "none")]])
        return result

    def run(self, chosen: list[str], env: dict, out: Path | None) -> dict:
        """The chosen experiments by number; each result, with what it ran on, to `out` as JSON and PNG."""
        results = {}
        for number in chosen:
            name, begin = NAMES[number], time.perf_counter()

            def keep(result: dict, file: Path | None = out and out / f"{number}-{name}.json",
                     begin: float = begin) -> dict:
                result = result | {"seconds": round(time.perf_counter() - begin, 1)}
                if file:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(env | {"fingerprint": self.fingerprint} | result) + "\n")
                return result

            self.keep = lambda result, keep=keep: keep(result | {"partial": True})
            try:
                results[name] = keep(getattr(self, name)())
                if out:
                    figures.draw(name, results[name], env | {"fingerprint": self.fingerprint},
                                 out / f"{number}-{name}.png")
            except Skipped as reason:
                print(f"{number}. {name}: skipped: {reason}")
                results[name] = {"skipped": str(reason), "differences": 0}
        return results


def numbers(only: str | None) -> list[str]:
    """The experiments that `--only 1,search` names, in order."""
    by_name = {name: number for number, name in NAMES.items()}
    wanted = [by_name.get(word, word) for word in only.split(",")] if only else list(NAMES)
    if unknown := [word for word in wanted if word not in NAMES]:
        raise ValueError(f"unknown experiment {unknown[0]!r}: these are {', '.join(map(' '.join, NAMES.items()))}")
    return sorted(set(wanted))


def main(args: argparse.Namespace, env: dict, ops: Ops | None) -> int:
    """`python bench.py receipts`. Exit code 0, or 1 if ours differ; ValueError for bad arguments."""
    chosen, device = numbers(args.only), pick_device(args.device)
    gpu = device.type == "cuda"
    small = (args.workloads or ("full" if gpu else "small")) == "small"
    model, options = model_options(args.model, gpu)
    folder = checkpoint.resolve(options["model"])
    config = ModelConfig.from_dict(checkpoint.read_json(folder, "config.json"))
    limits = {name: value for name in LIMITS if (value := getattr(args, name))}
    if not gpu:  # in the checkpoint's own dtype, as a GPU would: in fp32 a twin's flaw takes longer to show
        torch.set_num_threads(args.threads or 1)
        limits |= {"num_gpu_blocks_override": 512, "dtype": config.dtype}
    peers = report.load_peers()["peers"] if model == "qwen3-8b" and gpu and not small else {}
    dtype, size = pick_dtype(config.dtype, config, device), SMALL if small else FULL
    experiments = Experiments(options | {"device": args.device} | limits, config, device, dtype, size, small, ops,
                              args.minutes, args.seed, peers)
    env = env | {"model": model, "dtype": str(experiments.dtype), "size": "small" if small else "full"}
    results = experiments.run(chosen, env, Path(args.out) if args.out else None)
    summary = {name: {k: v for k, v in r.items() if k != "tokens_by_second"} for name, r in results.items()}
    failed = [name for name, r in results.items() if r["differences"]]
    print(f"\nsamebits: {'bits differ in ' + ', '.join(failed) if failed else 'no bit differs'}")
    print(json.dumps(env | {"fingerprint": experiments.fingerprint, "receipts": summary}))
    return 1 if failed else 0
