"""A server under load: a sweep of request rates against any OpenAI-compatible URL, and the price of HTTP.

    python bench.py serve --base-url http://127.0.0.1:8000/v1 --rates 1,4,16
    python bench.py serve --model qwen3-8b --json FILE      starts our own server, and compares it with the library

Requests have the lengths of a workload (benchmarks/workloads.py), fresh prompts of token ids (of text where a server
takes no ids), and come at random, independent of what is under way (Poisson); TTFT counts from when a request was due.
All the while two probes, one greedy and one sampled, are asked again and again: token ids and logprob bits must be what
they were on the idle server, else no speed is printed. With our own server, workload A is first served by the library,
then over HTTP, all requests at once: the same bits, and HTTP's price. The last line is one JSON object, in seconds.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import report
from benchmarks.client import Client, Refused
from benchmarks.ops import BitsDiffer
from benchmarks.serving import SHORT, Skipped
from benchmarks.workloads import Workload, model_options, workloads
from engine import LLM, pick_device
from sampler import SamplingParams

ROOT = Path(__file__).parent.parent
OVERHEAD_TARGET = 5  # percent
ONLY_OURS = {"ignore_eos": True, "return_token_ids": True}  # ours and vLLM's; left out where they are refused
PROBE_TOKENS = 32
PROBES = ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 11})


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.py serve", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", metavar="URL", help="a running server, with its /v1 (default: start our own)")
    add("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY")
    add("--model", help="what the server calls it (default: its first); of our own server, as in bench.py")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="of our own server")
    add("--server-args", default="", metavar="TEXT", help="more arguments for our own server")
    add("--rates", default=None, metavar="R,R", help="requests a second (default: 10,30,60,90; on a CPU 1,2)")
    add("--seconds", type=float, default=8.0, metavar="S", help="of arrivals at each rate (default: %(default)s)")
    add("--workload", default="A", metavar="NAME", help="whose lengths the requests have (default: %(default)s)")
    add("--workloads", choices=["full", "small"], help="as in bench.py (default with --base-url: full)")
    add("--user", metavar="N,IN,OUT", help="workload U: IN prompt tokens and OUT output tokens")
    add("--vocab-size", type=int, metavar="N", help="prompt ids are below it (default: the model's; with --base-url "
        "10000)")
    add("--seed", type=int, default=0, help="of arrivals and prompts (default: %(default)s)")
    add("--probe-every", type=float, default=0.5, metavar="S", help="seconds between probes; 0 compares no bits")
    add("--timeout", type=float, default=120.0, metavar="S", help="seconds for one answer (default: %(default)s)")
    add("--reps", type=int, default=2, metavar="N", help="timed passes of workload A (default: %(default)s)")
    add("--no-overhead", action="store_true", help="the sweep alone")
    add("--json", metavar="FILE", help="write the result to this file, too, as it grows")
    return parser


def bits(token_ids: list, logprobs: list[float]) -> tuple[list, list[int]]:
    """Logprobs as integers, all 64 bits of each."""
    return list(token_ids), np.array(logprobs, np.float64).view(np.int64).tolist()


def percentiles(name: str, values: list[float]) -> dict:
    return {f"{name}_p{p}_s": float(np.percentile(values, p)) if values else None for p in (50, 99)}


class Load:
    """Requests to one server, each with the lengths of one of `workload`'s."""

    def __init__(self, client: Client, model: str | None, workload: Workload, vocab_size: int, seed: int,
                 timeout: float):
        self.client, self.model, self.vocab_size, self.seed, self.timeout = client, model, vocab_size, seed, timeout
        self.sizes = [(len(prompt), n) for prompt, n in zip(workload.prompts, workload.outputs, strict=True)]
        self.takes_ids, self.extras = True, ONLY_OURS
        rng = random.Random(5)
        self.probes = [self.draw(rng, 64) for _ in PROBES]
        self.alone: list | None = None  # the probes' bits on an idle server

    def draw(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(1, self.vocab_size) for _ in range(length)]

    def body(self, prompt: list[int], tokens: int, **fields) -> dict:
        text = " ".join(f"w{token}" for token in prompt[: max(1, len(prompt) // 3)])  # some three tokens a word
        return {"model": self.model, "prompt": prompt if self.takes_ids else text, "max_tokens": tokens,
                "temperature": 0.0, **self.extras, **fields}

    async def connect(self) -> None:
        """Find the model's name and what the server takes. Raises OSError if there is none, ValueError if it does not
        complete prompts."""
        self.model = self.model or (await self.client.fetch("GET", "/models"))["data"][0]["id"]
        refusal = None
        for self.takes_ids, self.extras in ((True, ONLY_OURS), (True, {}), (False, ONLY_OURS), (False, {})):
            try:
                await self.complete([1, 2, 3], 1)
                return
            except Refused as error:
                refusal = error  # the last asked for least
        raise ValueError(f"{self.client.base_url} completes no prompt: {refusal}")

    async def complete(self, prompt: list[int], tokens: int, **fields) -> dict:
        fetched = self.client.fetch("POST", "/completions", self.body(prompt, tokens, **fields))
        return (await asyncio.wait_for(fetched, self.timeout))["choices"][0]

    async def probe(self) -> list:
        found = []
        for prompt, fields in zip(self.probes, PROBES, strict=True):
            choice = await self.complete(prompt, PROBE_TOKENS, logprobs=1, **fields)
            logprobs = choice["logprobs"]
            found.append(bits(choice.get("token_ids") or logprobs["tokens"], logprobs["token_logprobs"]))
        return found

    async def timed(self, due: float, prompt: list[int], tokens: int) -> tuple[float, float, int]:
        """(when the first token came, when the last, how many) of one streamed request."""
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        first = last = None
        count, usage = 0, None
        body = self.body(prompt, tokens, stream=True, stream_options={"include_usage": True})
        async for now, event in self.client.events("/completions", body):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if choice.get("text") or choice.get("token_ids"):
                    count, last = count + len(choice.get("token_ids") or "1"), now
                    first = first or now
        if first is None:
            raise EOFError
        return first, last, usage["completion_tokens"] if usage else count

    async def stage(self, rate: float, seconds: float, probe_every: float) -> dict:
        """Serve Poisson arrivals of `rate` a second. Raises BitsDiffer."""
        rng = random.Random(f"{self.seed} {rate}")
        count, at, arrivals = max(1, round(rate * seconds)), 0.0, []
        for _ in range(count):
            at += rng.expovariate(rate)
            length, tokens = rng.choice(self.sizes)
            arrivals.append((at, self.draw(rng, length), tokens))
        begin, errors, done = time.perf_counter() + 0.1, Counter(), []
        num_probes = 0

        async def one(at: float, prompt: list[int], tokens: int) -> None:
            try:
                limit = at + 0.1 + self.timeout
                first, last, got = await asyncio.wait_for(self.timed(begin + at, prompt, tokens), limit)
                done.append((first - begin - at, (last - first) / (got - 1) if got > 1 else None, got, last))
            except Refused as error:
                errors[f"HTTP {error.status}"] += 1
            except asyncio.TimeoutError:
                errors["timeout"] += 1
            except (OSError, EOFError, ValueError) as error:
                errors[type(error).__name__] += 1
            bar.update()

        async def probing() -> None:
            nonlocal num_probes
            is_over = not probe_every
            while not is_over:
                await asyncio.sleep(probe_every)
                is_over = load.done()  # an attempt that began under load is seen to its end
                with suppress(Refused, OSError, EOFError, asyncio.TimeoutError):  # a full server: asked again later
                    found = await self.probe()
                    num_probes += 1
                    is_over = load.done()
                    if found != self.alone:
                        raise BitsDiffer(f"at {rate:g} requests a second a probe had other tokens or log-probabilities "
                                         "than on the idle server")

        with tqdm(total=count, desc=f"{rate:g}/s", disable=not sys.stderr.isatty()) as bar:
            load = asyncio.gather(*(one(*arrival) for arrival in arrivals))
            probes = asyncio.ensure_future(probing())
            try:
                await asyncio.gather(load, probes)
            finally:
                load.cancel()
                probes.cancel()
                await asyncio.gather(load, probes, return_exceptions=True)
        if probe_every and not num_probes:
            raise Skipped(f"no probe was answered at {rate:g} requests a second: its bits are not known")
        wall = max((last for *_, last in done), default=begin) - begin
        row = {"rate": rate, "requests": count, "completed": len(done), "errors": dict(errors), "probes": num_probes}
        if done:
            row |= {"wall_s": wall, "requests_per_s": len(done) / wall,
                    "out_tokens_per_s": sum(got for _, _, got, _ in done) / wall}
        return (row | percentiles("ttft", [ttft for ttft, *_ in done])
                | percentiles("tpot", [tpot for _, tpot, *_ in done if tpot is not None]))

    async def all_at_once(self, workload: Workload, **fields) -> tuple[float, list[dict]]:
        """(seconds, choices) of a whole workload."""
        begin = time.perf_counter()
        choices = await asyncio.gather(*(self.complete(prompt, n, repetition_penalty=1.0, **fields)
                                         for prompt, n in zip(workload.prompts, workload.outputs, strict=True)))
        return time.perf_counter() - begin, choices


def offline(options: dict, workload: Workload, probes: list[list[int]], reps: int) -> dict:
    """The library's walls, tokens and bits of a workload, its bits of the probes, and its model's vocabulary."""
    llm = LLM(**options, progress=False)

    def serve(**fields) -> tuple[float, list]:
        params = [SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=n, ignore_eos=True, **fields)
                  for n in workload.outputs]
        begin = time.perf_counter()
        outputs = llm.generate(workload.prompts, params)
        return time.perf_counter() - begin, [output.outputs[0] for output in outputs]

    found = {"bits": [bits(out.token_ids, out.logprobs) for out in serve(logprobs=0)[1]]}
    found["walls_s"] = [serve()[0] for _ in range(reps)]
    params = [SamplingParams(max_tokens=PROBE_TOKENS, ignore_eos=True, logprobs=1, **fields) for fields in PROBES]
    found["probes"] = [bits(out.token_ids, out.logprobs) for prompt, own in zip(probes, params, strict=True)
                       for out in llm.generate([prompt], own)[0].outputs]
    return found | {"fingerprint": llm.fingerprint}


def flags(options: dict) -> list[str]:
    """`LLM` arguments as the command line spells them."""
    words = [] if options.get("enable_prefix_caching", True) else ["--no-enable-prefix-caching"]
    for name, value in options.items():
        if name != "enable_prefix_caching" and value is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    return words


@contextmanager
def own_server(options: dict, more: list[str]):
    """A server in a process of its own; yields its URL. Raises ValueError with its last words if it does not start."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, str(ROOT / "server.py"), "--port", "0", *flags(options), *more],
                                   stdout=subprocess.DEVNULL, stderr=log, env=os.environ | {
                                       "OMP_NUM_THREADS": str(torch.get_num_threads())})
        try:
            url = None
            while url is None:
                ended = process.poll() is not None  # before the look at what it said
                log.seek(0)
                lines = log.read().splitlines()
                url = next((json.loads(line)["url"] for line in lines if '"serving"' in line), None)
                if url is None and ended:
                    raise ValueError(f"the server did not start: {(lines or ['it said nothing'])[-1]}")
                time.sleep(0.05)
            yield url + "/v1"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def show(result: dict) -> None:
    """The tables, in the end: until then a bit might have moved."""
    if result["claim"]:
        print(result["claim"])
    ms = [f"{name}_p{p}_s" for name in ("ttft", "tpot") for p in (50, 99)]
    report.table(f"{result['model']}: requests like those of workload {result['workload']}; times in milliseconds",
                 ["rate/s", "requests", "errors", "req/s", "out tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "probes"],
                 [[f"{row['rate']:g}", row["requests"], sum(row["errors"].values()), row.get("requests_per_s"),
                   row.get("out_tokens_per_s"), *[None if row[key] is None else row[key] * 1e3 for key in ms],
                   f"{row['probes']} alike" if row["probes"] else "not asked"] for row in result["rates"]])
    if price := result.get("overhead"):
        print(f"\nHTTP on workload {price['workload']}: {report.number(price['http_s'])} s, the library "
              f"{report.number(price['offline_s'])} s: {price['percent']:+.1f} % (target {OVERHEAD_TARGET}), same bits",
              flush=True)


async def measure(load: Load, args: argparse.Namespace, rates: list[float], result: dict, reference: dict | None,
                  workload: Workload | None) -> None:
    """Fill `result`, saving it as it grows."""
    await load.connect()
    result |= {"model": load.model, "rates": [], "token_ids": load.takes_ids}
    if args.probe_every:
        load.alone = await load.probe()
        if await load.probe() != load.alone:
            raise BitsDiffer("a probe had other tokens or log-probabilities when it was asked again, alone")
        if reference and reference["probes"] != load.alone:
            raise BitsDiffer("a probe has other tokens or log-probabilities over HTTP than from the library")
    if reference:
        _, choices = await load.all_at_once(workload, logprobs=0)
        if [bits(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices] != reference["bits"]:
            raise BitsDiffer(f"workload {workload.name} has other tokens or log-probabilities over HTTP")
        walls = [(await load.all_at_once(workload))[0] for _ in range(args.reps)]
        ours, theirs = statistics.median(walls), statistics.median(reference["walls_s"])
        result["overhead"] = {"workload": workload.name, "http_s": ours, "http_walls_s": walls, "offline_s": theirs,
                              "offline_walls_s": reference["walls_s"], "percent": (ours / theirs - 1) * 100,
                              "target_percent": OVERHEAD_TARGET, "fingerprint": reference["fingerprint"]}
        save(result, args.json)
    for rate in rates:
        result["rates"].append(await load.stage(rate, args.seconds, args.probe_every))
        save(result, args.json)


def save(result: dict, file: str | None) -> None:
    if file:
        Path(file).write_text(json.dumps(result, indent=1) + "\n")


def run(args: argparse.Namespace, result: dict) -> None:
    gpu = not args.base_url and pick_device(args.device).type == "cuda"
    small = (args.workloads or ("full" if args.base_url or gpu else "small")) == "small"
    user = tuple(map(int, args.user.split(","))) if args.user else None
    result["claim"] = None if args.base_url or gpu else "CPU figures are no claim"
    rates = [float(rate) for rate in (args.rates or ("10,30,60,90" if gpu or args.base_url else "1,2")).split(",")]
    if min(rates) <= 0 or args.seconds <= 0 or (user and (len(user) != 3 or min(user) < 1)):
        raise ValueError("--rates and --seconds must be above 0, and --user three numbers of at least 1")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # a connection a request, on either side
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16) if hard > 0 else 1 << 16, hard))

    def made(vocab_size: int, url: str) -> tuple[Load, dict[str, Workload]]:
        every = workloads(vocab_size, small, user)
        if args.workload not in every:
            raise ValueError(f"unknown workload {args.workload!r}: these are {', '.join(every)}")
        client = Client(url, args.api_key or os.environ.get("OPENAI_API_KEY" if args.base_url else "SAMEBITS_API_KEY"))
        model = args.model if args.base_url else None
        return Load(client, model, every[args.workload], vocab_size, args.seed, args.timeout), every

    if args.base_url:
        load, _ = made(args.vocab_size or 10000, args.base_url)
        return asyncio.run(measure(load, args, rates, result, None, None))
    name, options = model_options(args.model, gpu)
    config = json.loads((Path(options["model"]) / "config.json").read_text())
    options |= {"device": args.device, "enable_prefix_caching": False,
                "max_model_len": min(SHORT, config["max_position_embeddings"])}
    if not gpu:
        options["num_gpu_blocks_override"] = 512
        if small:
            torch.set_num_threads(1)  # more gain nothing there, and lose much on a busy machine
    load, every = made(args.vocab_size or config["vocab_size"], "")
    reference, workload = None, every["A"]
    if not args.no_overhead:
        reference = offline(options, workload, load.probes, args.reps)
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    with own_server(options, ["--served-model-name", name, *shlex.split(args.server_args)]) as url:
        load, _ = made(load.vocab_size, url)
        asyncio.run(measure(load, args, rates, result, reference, workload))


def main(argv: list[str], environment: dict) -> int:
    """Entry point; `environment` goes into the result. Exit code 0, 1 (bits differ), 2 (bad arguments, no server)."""
    args = build_parser().parse_args(argv)
    result = {"env": environment, "workload": args.workload, "seed": args.seed, "seconds": args.seconds}
    try:
        run(args, result)
    except BitsDiffer as error:
        print(f"error: {error}: no speed is worth printing", file=sys.stderr)
        save({"error": str(error)}, args.json)
        print(json.dumps({"error": str(error)}))
        return 1
    except (ValueError, OSError, EOFError, Refused, Skipped, asyncio.TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    show(result)
    print(json.dumps(result))
    return 0
