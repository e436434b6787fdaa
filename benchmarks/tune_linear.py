"""Time the linear kernel over leaf counts, schedules and column shards; prints what tiles.py should say.

    python benchmarks/tune_linear.py [--json FILE]

For each weight of Qwen3-8B, at its full N and at the N/4 and N/8 of a tensor-parallel rank: the best microseconds a
leaf count allows, beside cuBLAS and the time that reading the weight takes. Small M run in a CUDA graph, with weights
rotating past the L2.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
SMALL = {1: [(16, 64, 128, 4, 5), (16, 32, 256, 4, 4), (16, 128, 128, 4, 4), (16, 64, 256, 4, 3)],
         64: [(64, 64, 128, 4, 4), (64, 128, 64, 4, 5), (64, 32, 128, 4, 4)]}
LARGE = {256: [(128, 128, 64, 8, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4)],
         8192: [(128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4)]}


def cases():
    for name, (N, K) in SHAPES.items():
        for part, M, leaves in itertools.product((1, 4, 8), SMALL, (1, 2, 4, 8)):
            for tile, split in itertools.product(SMALL[M], (False, True) if leaves > 1 else (False,)):
                if split or leaves == 1:
                    yield name, N // part, K, M, leaves, tile, split
        for M, leaves in itertools.product(LARGE, (1, 2, 4)):
            for tile in LARGE[M]:
                yield name, N, K, M, leaves, tile, False


def launcher(case):
    from kernels.linear import linear
    from kernels.tiles import LinearSchedule

    _, N, K, M, leaves, tile, split = case
    schedule = LinearSchedule(*tile, split=split)
    arrived = torch.zeros(16384, dtype=torch.int32, device="cuda")
    return lambda x, w, out: linear(x, w, None, leaves, torch.bfloat16, schedule, arrived, out)


def compile_case(case):
    _, N, K, M, *_ = case
    make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    try:
        launcher(case)(make(M, K), make(N, K), make(M, N))
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{case}: {type(error).__name__} {str(error)[:80]}"


def main():
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all timings to this file")
    args = parser.parse_args()
    todo = list(cases())
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        failed = {c for c, error in zip(todo, pool.map(compile_case, todo, chunksize=4), strict=True) if error}
    print(f"{len(todo)} configurations compiled, {len(failed)} failed", flush=True)
    best: dict[tuple, tuple] = {}
    for (name, N, K, M), group in itertools.groupby(todo, key=lambda c: c[:4]):
        copies = max(1, min(16, int(300e6 / (N * K * 2)) + 1)) if M <= 64 else 1
        weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        bench = triton.testing.do_bench_cudagraph if M <= 256 else triton.testing.do_bench

        def time_us(call):
            return bench(lambda: [call(x, w, out) for w in weights], rep=12, return_mode="median") / copies * 1e3  # noqa: B023

        floor = max(N * K * 2 / 4.27e6, 2 * M * N * K / 790e6)
        library = time_us(lambda x, w, out: torch.mm(x, w.T, out=out))
        row = {}
        for case in group:
            if case not in failed:
                took = time_us(launcher(case))
                leaves = case[4]
                if leaves not in row or took < row[leaves][0]:
                    row[leaves] = (round(took, 2), case[5:])
        best[name, N, K, M] = row
        print(f"{name:8s} N={N:5d} K={K:5d} M={M:4d} floor {floor:7.1f} cuBLAS {library:7.1f}  " +
              "  ".join(f"{leaves}: {t:.1f} {tile}" for leaves, (t, tile) in row.items()), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({str(k): v for k, v in best.items()}, indent=1))


if __name__ == "__main__":
    main()
