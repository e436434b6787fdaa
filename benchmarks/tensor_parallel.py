"""Decode and prefill on 1 to N GPUs, and what an exchange between them costs.

    python benchmarks/tensor_parallel.py [--model qwen3-32b] [--sizes 1 2] [--styles column row] [--json FILE]
    python benchmarks/tensor_parallel.py exchanges [--sizes 2]

The first prints, for each number of GPUs, milliseconds a decode step at several batch sizes (prompts of 128 tokens,
greedy; the difference between generating 65 tokens and 1, over 64) and a prefill of 8,192 tokens, and checks that every
number of GPUs gives the bits of the first (in style "row": that batches of any size give the same). The second times
`gather` and `all_reduce` in a CUDA graph, beside NCCL's.
"""

import argparse
import json
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.workloads import model_options
from engine import LLM
from kernels.collectives import FIRST, LOGITS, SECOND, TOTALS, make_collectives
from sampler import SamplingParams

HIDDEN, MLP = 4096, 12288  # of Qwen3-8B, for the exchanges


def measure(model: str, size: int, style: str, batches: list[int], prefill: int) -> tuple[dict, list]:
    """(figures, [tokens and logprobs of the first prompt at each batch size]) of an engine on `size` GPUs."""
    begin = time.perf_counter()
    llm = LLM(**model_options(model, True)[1], tensor_parallel_size=size, tp_style=style, progress=False,
              max_model_len=prefill + 128, enable_prefix_caching=False)
    figures = {"gpus": size, "style": style, "hardware": llm.hardware, "start_s": time.perf_counter() - begin}
    rng = random.Random(2)
    prompts = [[rng.randrange(1, llm.config.vocab_size) for _ in range(128)] for _ in range(max(batches))]
    long = [rng.randrange(1, llm.config.vocab_size) for _ in range(prefill)]
    found = []

    def run(some: list, tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        start = time.perf_counter()
        outputs = llm.generate(some, params)
        if tokens == 65:
            found.append((outputs[0].outputs[0].token_ids, outputs[0].outputs[0].logprobs))
        return time.perf_counter() - start

    with llm:
        for batch in batches:
            run(prompts[:batch], 4)  # compiles and captures
            one = min(run(prompts[:batch], 1) for _ in range(2))
            figures[f"D{batch}_step_ms"] = (min(run(prompts[:batch], 65) for _ in range(2)) - one) / 64e-3
        run([long], 1)
        figures["prefill_s"] = statistics.median(run([long], 1) for _ in range(3))
    return figures, found


def exchange_times(rank: int, size: int) -> list[dict]:
    """Microseconds of each exchange of a layer, on one of `size` ranks."""
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rows = 8192
    num_bytes = {FIRST: rows * MLP * 2, SECOND: rows * HIDDEN * 4, LOGITS: 16, TOTALS + FIRST: rows * HIDDEN * 2,
                 TOTALS + SECOND: rows * HIDDEN * 2}
    ours = make_collectives(rank, size, device, num_bytes, True)

    def time_us(call) -> float:
        call(), call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        dist.barrier()
        return begin.elapsed_time(end) / 60 * 1e3

    table = []
    for M in (1, 8, 64, 256, 8192):
        row = {"rows": M, "exchange": ours.name}
        for name, width, region in (("hidden", HIDDEN, SECOND), ("mlp", MLP, FIRST)):
            widths = [width // size] * size
            x = torch.randn(M, width // size, device=device).bfloat16()
            other = FIRST if region == SECOND else SECOND
            if M * width * 2 > num_bytes[SECOND]:
                other = region  # timing only: the bytes do not matter here
            row[f"gather_{name}_us"] = time_us(lambda: (ours.gather(x, widths, region),  # noqa: B023
                                                        ours.gather(x, widths, other))) / 2  # noqa: B023
        reduced = torch.randn(M, HIDDEN, device=device).bfloat16()
        row["all_reduce_us"] = time_us(lambda: [ours.all_reduce(ours.partial(M, HIDDEN, region), torch.bfloat16, region)  # noqa: B023
                                                for region in (FIRST, SECOND)]) / 2
        row["nccl_all_reduce_us"] = time_us(lambda: dist.all_reduce(reduced))  # noqa: B023
        table.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["engine", "exchanges", "rank"], default="engine")
    parser.add_argument("--model", default="qwen3-32b")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--styles", nargs="+", choices=["column", "row"], default=["column", "row"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prefill", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.what == "rank":  # one of those that `exchanges` starts
        import os

        exchange_times(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return 0
    if torch.cuda.device_count() < max(args.sizes):
        print(f"error: {max(args.sizes)} GPUs asked for, {torch.cuda.device_count()} here", file=sys.stderr)
        return 2
    command = shlex.join(["python", "benchmarks/tensor_parallel.py", *sys.argv[1:]])
    result = {"env": {"GPU": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "command": command,
                      "torch": torch.__version__, "python": platform.python_version()}}
    if args.what == "exchanges":
        for size in args.sizes:
            done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                                   str(size), __file__, "rank"], text=True, stdout=subprocess.PIPE, check=True)
            result[f"{size} GPUs"] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            print(done.stdout, end="")
    else:
        result |= {"model": args.model, "engines": []}
        first = None
        for size in args.sizes:
            for style in args.styles if size > 1 else args.styles[:1]:
                figures, found = measure(args.model, size, style, args.batch, args.prefill)
                expected = first if first and style == "column" else found[0]
                first = first or found[0]
                figures["same_bits"] = all(one == expected for one in found)
                result["engines"].append(figures)
                print(json.dumps(figures), flush=True)
                torch.cuda.empty_cache()
        if not all(figures["same_bits"] for figures in result["engines"]):
            print("error: bits differ: no speed is worth printing", file=sys.stderr)
            return 1
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
