"""Time the linear kernel over schedules and leaf counts; prints what tiles.py should say.

    python benchmarks/tune_linear.py leaves     small M and the column shards of tensor parallelism, by leaf count
    python benchmarks/tune_linear.py rows       every bucket of M at the leaf counts that tiles.py fixes

For each weight of Qwen3-8B: the best microseconds, beside cuBLAS and the floor (bytes at 4.27 TB/s, operations at 790
TFLOP/s). Small M run in a CUDA graph, with weights rotating past the L2. A configuration whose bits differ from the
reference schedule's is reported and left out.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from kernels.tiles import leaf_count

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
HEAD = {"head": (151936, 4096)}  # its logits are fp32
SMALL = {1: [(16, 64, 128, 4, 5), (16, 32, 256, 4, 4), (16, 128, 128, 4, 4), (16, 64, 256, 4, 3)],
         64: [(64, 64, 128, 4, 4), (64, 128, 64, 4, 5), (64, 32, 128, 4, 4)]}
LARGE = {256: [(128, 128, 64, 8, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4)],
         8192: [(128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4)]}
SHORT = [(16, 64, 128, 4, 5), (16, 64, 256, 4, 4), (16, 32, 256, 4, 4), (16, 32, 128, 4, 6), (16, 128, 128, 4, 3),
         (16, 64, 256, 4, 3), (16, 32, 512, 4, 3)]
TALL = [(64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 128, 64, 4, 5), (64, 128, 128, 4, 3), (64, 128, 128, 4, 4),
        (64, 256, 64, 4, 4), (128, 64, 64, 4, 5), (128, 128, 64, 4, 4), (128, 128, 64, 4, 5), (128, 128, 64, 8, 4),
        (128, 128, 64, 8, 5), (128, 128, 64, 8, 6), (128, 256, 64, 8, 3)]
POINTERS = [(64, 64, 128, 4, 4), (64, 128, 64, 4, 4)]


def leaf_cases():
    for name, (N, K) in SHAPES.items():
        for part, M, leaves in itertools.product((1, 4, 8), SMALL, (1, 2, 4, 8)):
            for tile in SMALL[M]:
                yield name, N // part, K, M, leaves, tile, "split" if leaves > 1 else ""
        for M, leaves in itertools.product(LARGE, (1, 2, 4)):
            for tile in LARGE[M]:
                yield name, N, K, M, leaves, tile, ""


def row_cases(rows):
    for name, (N, K) in (SHAPES | HEAD).items():
        leaves = leaf_count(N, K)
        for M in rows:
            kinds = ("", " split") if leaves > 1 and M <= 512 else ("",)
            for tile, kind in itertools.product(SHORT if M <= 16 else TALL, kinds):
                yield name, N, K, M, leaves, tile, "tma" + kind
            for tile, kind in itertools.product(SHORT if M <= 16 else POINTERS if M <= 64 else (), kinds):
                yield name, N, K, M, leaves, tile, kind


def launcher(case):
    from kernels.linear import linear
    from kernels.tiles import LinearSchedule

    leaves, tile, kind = case[4:]
    schedule = LinearSchedule(*tile, split="split" in kind, tma="tma" in kind)
    arrived = torch.zeros(16384, dtype=torch.int32, device="cuda")
    return lambda x, w, out: linear(x, w, None, leaves, out.dtype, schedule, arrived, out)


def compile_case(case):
    name, N, K, M, *_ = case
    make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    try:
        launcher(case)(make(M, K), make(N, K), make(M, N).to(torch.float32 if name in HEAD else torch.bfloat16))
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{case}: {type(error).__name__} {str(error)[:80]}"


def main():
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["leaves", "rows"])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256, 512, 2048, 8192], help="values of M")
    parser.add_argument("--json", help="write all timings to this file")
    args = parser.parse_args()
    todo = list(leaf_cases() if args.what == "leaves" else row_cases(args.rows))
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        unique = list({(c[1], c[2], *c[4:]): c for c in todo}.values())  # M is no constant: one compilation serves all
        errors = [error for error in pool.imap_unordered(compile_case, unique, chunksize=2) if error]
    print(f"{len(unique)} configurations compiled, {len(errors)} failed", *errors[:5], sep="\n", flush=True)
    from kernels import same_bits
    best: dict[tuple, dict] = {}
    for (name, N, K, M), group in itertools.groupby(todo, key=lambda c: c[:4]):
        copies = max(1, min(16, int(300e6 / (N * K * 2)) + 1)) if M <= 64 else 1
        weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(M, N, device="cuda", dtype=torch.float32 if name in HEAD else torch.bfloat16)
        bench = triton.testing.do_bench_cudagraph if M <= 256 else triton.testing.do_bench

        def time_us(call):
            return bench(lambda: [call(x, w, out) for w in weights], rep=12, return_mode="median") / copies * 1e3  # noqa: B023

        floor = max(N * K * 2 / 4.27e6, 2 * M * N * K / 790e6)
        product = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        library = time_us(lambda x, w, out: torch.mm(x, w.T, out=product))  # noqa: B023
        rows: dict[int, list] = {}
        expected = {}
        for case in group:
            leaves, call = case[4], launcher(case)
            try:
                call(x, weights[0], out)
            except Exception:
                continue
            if leaves not in expected:
                expected[leaves] = torch.empty_like(out)
                launcher((*case[:5], (64, 64, 64, 4, 3), ""))(x, weights[0], expected[leaves])
            if same_bits(out, expected[leaves]):
                rows.setdefault(leaves, []).append((round(time_us(call), 1), *case[5:]))
            else:
                print("BITS DIFFER", case, flush=True)
        best[name, N, K, M] = {leaves: sorted(found) for leaves, found in rows.items()}
        print(f"{name:8s} N={N:5d} K={K:5d} M={M:4d} floor {floor:7.1f} cuBLAS {library:7.1f}  " + "  ".join(
            f"{leaves}: {found[:3]}" for leaves, found in best[name, N, K, M].items()), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({str(k): v for k, v in best.items()}, indent=1))


if __name__ == "__main__":
    main()
