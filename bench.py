"""The benchmark: how fast, against which floor, beside what others do, and what the promise costs.

    python bench.py                                  everything, on the default model of the device
    python bench.py latency --only C,D64             a part, some workloads
    python bench.py --model qwen3-8b --json FILE --plot FILE.png
    python bench.py serve --help                     a server under load (benchmarks/serve.py)
    python bench.py receipts --out FOLDER            the promise in six experiments (benchmarks/experiments.py)

Parts: throughput (A, B and U, a load of your own: --user), latency (C, D, E, G), kernels (each op against its floor
and a library), memory, price (against a twin that may follow the batch), start (a fresh process to its first token).
Workloads: benchmarks/workloads.py. Every run begins with a check that a request keeps its bits in any company, and
every workload is checked before it is timed; where a check fails, no speed is printed. The last line is one JSON
object: seconds, or milliseconds a step, as each key says.
"""

import argparse
import importlib.util
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

import checkpoint
from benchmarks import experiments, report, serve
from benchmarks.ops import BitsDiffer, measure_ops, measure_roof
from benchmarks.serving import Server, Skipped, start_seconds
from benchmarks.workloads import LIMITS, SHAPES, Workload, model_options, workloads
from engine import DEFAULT_MODEL, pick_device, pick_dtype
from kernels import Ops, make_ops
from model import ModelConfig
from receipts import processor_kind

PARTS = ("throughput", "latency", "price", "memory", "kernels", "start")
TARGETS = {"C": 2, "D8": 2, "D64": 2, "D256": 6, "A": 6, "B": 6}  # percent that the promise may cost
NO_CLAIM = "CPU figures are no claim"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all of these), or receipts")
    add("--model", help=f"folder, Hub id, or a shape with random weights: {', '.join(SHAPES)} (default: qwen3-8b on a "
        f"GPU, {DEFAULT_MODEL} on a CPU)")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--only", metavar="C,D64,A", help="only these workloads (parts without workloads run if they are named); "
        "receipts: only these experiments, as in 1,4")
    add("--workloads", choices=["full", "small"], help="full: as the peers' (default on a GPU); small: for a CPU")
    add("--user", metavar="N,IN,OUT", help="workload U: N requests of IN prompt tokens and OUT output tokens")
    add("--reps", type=int, default=None, metavar="N", help="timed passes; A, B, E, G at most 2 (default: 3, CPU: 1)")
    add("--max-num-seqs", type=int, metavar="N", help="most sequences in a step (default: the engine's)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step (default: the engine's)")
    add("--num-gpu-blocks-override", type=int, metavar="N", help="size of the KV cache in blocks of 64 tokens, which "
        "several engines that share a GPU need (default: what the memory allows)")
    add("--tensor-parallel-size", type=int, metavar="N", help="GPUs that share the model (default: 1)")
    add("--tp-style", choices=["column", "row"], help="how they share it (default: the engine's)")
    add("--expert-parallel", action="store_true", default=None, help="GPUs share experts out, not the columns of each")
    add("--threads", type=int, metavar="N", help="CPU threads (default: 1 for small workloads, which gain nothing from "
        "more and lose much on a busy machine)")
    add("--json", metavar="FILE", help="write the result to this file, too, as it grows")
    add("--plot", metavar="FILE.png", help="draw it (needs matplotlib: pip install -e '.[bench]')")
    add("--out", metavar="FOLDER", help="receipts: a JSON file and, with matplotlib, a figure an experiment")
    add("--minutes", type=float, metavar="N", help="receipts: length of the search (default: 2, small: 0.4)")
    add("--seed", type=int, metavar="N", default=0, help="receipts: the search's first case (default: 0; with "
        "--minutes 0 that case alone)")
    return parser


def environment(device: torch.device, argv: list[str]) -> dict:
    """Where and what this run is: device, versions, commit if git is there, command."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    env = {"GPU": gpu, "device": gpu or processor_kind(), "torch": torch.__version__, "triton": None,
           "python": platform.python_version(), "threads": torch.get_num_threads(), "commit": None,
           "command": shlex.join(["python", "bench.py", *argv])}
    if gpu:
        import triton

        env["triton"] = triton.__version__
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        env["commit"] = subprocess.run(command, cwd=Path(__file__).parent, text=True, capture_output=True,
                                       check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass  # no git, or no checkout
    return env


class Bench:
    """One run: what was asked for, the result so far, and a method a part."""

    def __init__(self, args: argparse.Namespace, argv: list[str], ops: Ops | None):
        self.args, self.ops, self.device = args, ops, pick_device(args.device)
        gpu = self.device.type == "cuda"
        self.small = (args.workloads or ("full" if gpu else "small")) == "small"
        if not gpu and (threads := args.threads or (1 if self.small else None)):
            torch.set_num_threads(threads)
        self.model, options = model_options(args.model, gpu)
        folder = checkpoint.resolve(options["model"])
        self.config = ModelConfig.from_dict(checkpoint.read_json(folder, "config.json"))
        self.dtype = pick_dtype("auto", self.config, self.device)
        limits = {name: value for name in LIMITS if (value := getattr(args, name)) is not None}
        if self.small and not gpu:
            limits.setdefault("num_gpu_blocks_override", 512)  # 32,768 tokens: enough here, and quick to make
        self.options = options | {"device": args.device} | limits
        user = tuple(map(int, args.user.split(","))) if args.user else None
        if user and (len(user) != 3 or min(user) < 1):
            raise ValueError(f"--user {args.user}: give three numbers of at least 1, as in 64,512,128")
        every = workloads(self.config.vocab_size, self.small, user)
        only = args.only.split(",") if args.only else list(every)
        if unknown := [name for name in only if name not in every]:
            raise ValueError(f"unknown workload {unknown[0]!r}: these are {', '.join(every)}")
        self.chosen = [workload for name, workload in every.items() if name in only]
        self.peers = report.load_peers() if self.model == "qwen3-8b" and gpu and not self.small else {"peers": {}}
        self.roof = measure_roof(self.device, self.dtype)
        self.result = {"env": environment(self.device, argv), "model": self.model, "dtype": str(self.dtype),
                       "claim": None if gpu else NO_CLAIM, "workloads": "small" if self.small else "full",
                       "roof": asdict(self.roof), "details": {}, "price": {}, "kernels": [], "memory": None,
                       "skipped": {}}
        canary = max((w for w in every.values() if w.name[0] == "D"), key=lambda w: len(w.outputs))
        self.server = Server(self.options, self.config, self.device, ops, self.roof, canary,
                             args.reps or (3 if gpu else 1))

    def begin(self) -> None:
        """The bit check of the engine, then who and where."""
        canary, env, roof = self.server.canary, self.result["env"], self.roof
        first = min(self.chosen, key=self.server.is_long)  # so that its engine is not made for the check alone
        self.result["fingerprint"] = self.server.engine(first).fingerprint
        print(f"{self.model} in {self.dtype} on {env['device']}, torch {env['torch']}, {self.result['fingerprint']}")
        if self.result["claim"]:
            print(f"{NO_CLAIM}: the engine is made for GPUs, and the workloads here are {self.result['workloads']}")
        print(f"bit check: {len(canary.outputs)} prompts together, alone and in chunks: same tokens and logprob bits")
        print(f"floor: reads {roof.read / 1e12:.3g} TB/s, copies {roof.copy / 1e12:.3g} TB/s (read + written), "
              f"library product {roof.rate / 1e12:.3g} TFLOP/s", flush=True)

    def save(self) -> None:
        if self.args.json:
            Path(self.args.json).write_text(json.dumps(self.result, indent=1) + "\n")

    def skip(self, name: str, reason: Exception) -> None:
        self.result["skipped"][name] = str(reason).splitlines()[0]
        print(f"  {name}: skipped: {self.result['skipped'][name]}", flush=True)

    def serving(self, parts: list[str]) -> None:
        """throughput and latency: what fits the short engine first, so that each engine is made once."""
        def part(w: Workload) -> str:
            return "throughput" if w.figure == "wall_s" else "latency"

        details = self.result["details"]
        for w in sorted((w for w in self.chosen if part(w) in parts), key=self.server.is_long):
            try:
                details[w.name] = self.server.measure(w).record()
            except Skipped as reason:
                self.skip(w.name, reason)
                continue
            figure = details[w.name][w.figure]
            if w.name != "U":
                self.result[f"{w.name}_{w.figure}"] = figure
            print(f"  {w.name}: {w.figure} {report.number(figure)}", flush=True)
            self.save()
        for name in ("throughput", "latency"):
            rows = {w.name: details[w.name] for w in self.chosen if w.name in details and part(w) == name}
            if rows:
                report.serving_table(name, rows, self.peers["peers"])
        if self.peers["peers"]:
            print(f"peers: {self.peers['source']}", flush=True)

    def price(self) -> None:
        priced = [w for w in self.chosen if w.name in ("A", "B", "C") or w.name[0] == "D"]
        for w, twin in [(w, False) for w in priced] + [(w, True) for w in priced]:  # one engine at a time
            try:
                ours = self.server.measure(w).figure
                if twin:
                    other = self.server.measure(w, twin=True).figure
                    self.result["price"][w.name] = {
                        "figure": w.figure, "samebits": ours, "twin": other, "price_percent": (ours / other - 1) * 100,
                        "target_percent": None if self.small else TARGETS.get(w.name)}
                    print(f"  {w.name} twin: {w.figure} {report.number(other)}", flush=True)
            except Skipped as reason:
                self.skip(f"price {w.name}", reason)
            except (RuntimeError, TypeError) as reason:  # the twin does not work here: no reason to lose the rest
                self.skip("price", reason)
                break
        if self.result["price"]:
            report.price_table(self.result["price"], claims=not self.result["claim"])

    def memory(self) -> None:
        self.result["memory"] = self.server.memory()
        report.memory_table(self.result["memory"])

    def kernels(self) -> None:
        self.server.release()
        self.result["kernels"] = measure_ops(self.config, self.ops or make_ops(self.device), self.dtype, self.device,
                                             self.roof, self.small)
        report.ops_table(self.result["kernels"])

    def start(self) -> None:
        """A fresh process twice over one Triton cache folder: empty the first time, warm the second."""
        self.server.release()
        rows, peers = [], self.peers["peers"]
        with tempfile.TemporaryDirectory() as cache:
            for name in ("start_cold_s", "start_warm_s"):
                try:
                    if name == "start_cold_s" and self.device.type == "cpu":
                        raise Skipped("nothing is compiled on a CPU")
                    self.result[name] = start_seconds(self.options, cache)
                    rows.append([name, self.result[name], *[report.spread(p.get("start_s")) for p in peers.values()]])
                except Skipped as reason:
                    self.skip(name, reason)
        report.table("start: seconds from process to first token", ["Triton cache", "samebits", *peers], rows)


def main(argv: list[str] | None = None, ops: Ops | None = None) -> int:
    """Entry point; `ops` replaces the engine's op table. Exit code 0, 1 (bits differ), 2 (bad arguments or model)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["serve"]:
        return serve.main(argv[1:], environment(pick_device("auto"), argv))
    args = (parser := build_parser()).parse_args(argv)
    if args.parts == ["receipts"]:
        try:
            return experiments.main(args, environment(pick_device(args.device), argv), ops)
        except (ValueError, OSError, torch.OutOfMemoryError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    parts = args.parts or (["throughput", "latency"] if args.only else list(PARTS))
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}: these are {', '.join(PARTS)}")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib, which is not installed: pip install -e '.[bench]'")
    try:
        bench = Bench(args, argv, ops)
        bench.begin()
        if "memory" in parts:
            bench.memory()
        if "throughput" in parts or "latency" in parts:
            bench.serving(parts)
        for part in ("price", "kernels", "start"):
            if part in parts:
                getattr(bench, part)()
                bench.save()
    except BitsDiffer as error:
        print(f"error: {error}: no speed is worth printing", file=sys.stderr)
        print(json.dumps({"error": str(error)}))
        return 1
    except (ValueError, OSError, Skipped, torch.OutOfMemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.plot:
        report.plot(bench.result, bench.peers["peers"], args.plot)
    print(json.dumps(bench.result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
