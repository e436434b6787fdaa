"""The reduction law, tested where it runs: every schedule of a table against the reference schedule, bit for bit.

    python tools/selfcheck.py [--dtype bfloat16] [--table auto]
    python engine.py --selfcheck [--model ...]      the schedules this model uses, then tools/selfcheck_serving.py

The law says that tiles, warps, stages and the way work is shared leave the bits alone. That is an observation about a
compiler and a chip, so it is checked on the machine at hand, on random and on hard inputs. Exit code 1 if a schedule
differs.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from kernels import same_bits
from kernels.tiles import (
    CONSERVATIVE,
    KV_TILE,
    PLAIN,
    REFERENCE,
    WALK,
    AttentionSchedule,
    LinearSchedule,
    Schedules,
    schedules,
)
from kernels.work import AttentionWork, plan_decode, plan_prefill

INPUTS = {  # what numbers look like, by name: shape, generator -> fp32 tensor
    "random": lambda shape, g: torch.randn(shape, generator=g, device=g.device),
    "heavy tails": lambda shape, g: torch.randn(shape, generator=g, device=g.device).pow(5),
    "cancellation": lambda shape, g: torch.randn(shape, generator=g, device=g.device)
    * torch.where(torch.rand(shape, generator=g, device=g.device) < 0.5, 1e4, 1e-4),
    "near zero": lambda shape, g: torch.randn(shape, generator=g, device=g.device) * 1e-20,
    "sparse": lambda shape, g: torch.randn(shape, generator=g, device=g.device)
    * (torch.rand(shape, generator=g, device=g.device) < 0.02),
}
LENGTHS = (512, 576, 1536, 2048, 3072, 4096, 9728, 12288)
ROWS = (1, 7, 16, 17, 64, 128, 257)
ATTENTION_SHAPES = ((32, 8, 128), (9, 3, 64), (4, 2, 256))  # heads, KV heads, head_dim


@dataclass(frozen=True)
class Check:
    """One comparison: what was compared, and whether all bits agreed."""

    op: str
    what: str
    same: bool
    schedule: LinearSchedule | AttentionSchedule | None = None  # the one that is to blame if it is not


def check_linear(device, dtype, schedules: list[LinearSchedule], K: int) -> Iterator[Check]:
    """Each schedule at each number of rows against the reference schedule on all rows at once."""
    from kernels.linear import linear

    arrived = torch.zeros(16384, dtype=torch.int32, device=device)
    reference = REFERENCE.linear_for(ROWS[-1], 272, 1, dtype.itemsize)
    for kind, make in INPUTS.items():
        generator = torch.Generator(device).manual_seed(K)
        x, w = make((ROWS[-1], K), generator).to(dtype), make((272, K), generator).to(dtype)
        for leaves in (1, 2):
            expected = {(out, gated): linear(x, w, None, leaves, out, reference, arrived, gated=gated)
                        for out, gated in ((torch.float32, False), (dtype, False), (dtype, True))}
            for schedule in schedules:
                same = all(same_bits(linear(x[:m], w, None, leaves, out, schedule, arrived, gated=gated),
                                     expected[out, gated][:m]) for m in ROWS for out, gated in expected
                           if schedule.fits(out.itemsize))
                yield Check("linear", f"{dtype}, K={K}, {leaves} leaves, {kind}, {schedule}", same, schedule)


def check_experts(device, dtype, schedules: list[LinearSchedule], K: int) -> Iterator[Check]:
    """Each schedule of the experts' products, row by row, against `linear` on the row's token and expert: experts of
    many tiles, of one, and without a row."""
    from kernels.experts import route
    from kernels.linear import linear

    E, top_k, M, N = 8, 2, 400, 272
    arrived, tallies = (torch.zeros(n, dtype=torch.int32, device=device) for n in (16384, (64, 3)))
    reference = REFERENCE.linear_for(M, N, 1, dtype.itemsize)
    generator = torch.Generator(device).manual_seed(K)
    x, w = INPUTS["random"]((M, K), generator).to(dtype), INPUTS["random"]((E * N, K), generator).to(dtype)
    logits = torch.randn((M, E), generator=generator, device=device)
    logits += torch.tensor([0, 3, 0, -99, 1, -2, -2, -4.0], device=device)
    for leaves in (1, 2):
        every = torch.stack([linear(x, one, None, leaves, dtype, reference, arrived) for one in w.split(N)])
        for schedule in schedules:
            same = True
            for m in (1, 17, M):
                routing = route(x[:m], logits[:m], top_k, True, schedule.BLOCK_M, m, tallies)
                out = linear(routing.x, w, None, leaves, dtype, schedule, arrived, routing=routing)
                of = routing.tiles[2:][routing.places // routing.tile].long()
                same &= same_bits(out[routing.places], every[of, torch.arange(m, device=device)[:, None]])
            yield Check("experts", f"{dtype}, K={K}, {leaves} leaves, {schedule}", same, schedule)


def attention_inputs(device, dtype, heads: int, kv_heads: int, head_dim: int, length: int):
    """q for every position of one sequence of `length`, and its cache, NaN past the end."""
    generator = torch.Generator(device).manual_seed(head_dim)
    blocks = -(-length // KV_TILE) + 1
    caches = torch.full((2, blocks, kv_heads, KV_TILE, head_dim), float("nan"), dtype=dtype, device=device)
    table = torch.randperm(blocks, generator=generator, device=device)[:-1].to(torch.int32)
    slots = torch.arange(length, device=device)
    rows = torch.randn((2, length, kv_heads, head_dim), generator=generator, device=device).to(dtype) * 2
    for cache, values in zip(caches, rows, strict=True):
        cache[table[slots // KV_TILE].long(), :, slots % KV_TILE] = values
    q = torch.randn((length, heads, head_dim), generator=generator, device=device).to(dtype) * 2
    return q, caches[0], caches[1], table[None]


def attention_work(device, table, positions: np.ndarray, query_tile: int | None, slots: int) -> AttentionWork:
    """Work over one sequence: a chunk of consecutive positions, or, without a query tile, one decode row each."""
    n = len(positions)
    if query_tile:
        prefill = plan_prefill([0], [n], [positions[-1] + 1], query_tile)
        decode, merges = plan_decode([0], [n], [positions[-1] + 1], 0)
    else:
        prefill = plan_prefill([], [], [], 1)
        decode, merges = plan_decode(np.arange(n), np.ones(n, int), positions + 1, slots)
        table = table.expand(n, -1).contiguous()
    counts = len(prefill), len(decode), len(merges)
    grid = len(prefill), min(slots, len(decode)) or len(decode), len(merges)  # a program walks its slot's items
    where, *lists = [torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device)
                     for a in (positions, prefill, decode, merges, counts)]
    return AttentionWork(where, where, table, *lists, grid, max_partials=int(merges[:, 2].sum()))


def check_attention(device, dtype, table: Schedules, shapes, length: int = 1111) -> Iterator[Check]:
    """Prefill whole and in odd chunks, decode rows walked and split, against the reference prefill."""
    from kernels.attention import paged_attention

    for heads, kv_heads, head_dim in shapes:
        q, k, v, blocks = attention_inputs(device, dtype, heads, kv_heads, head_dim, length)
        row_bytes = head_dim * dtype.itemsize
        decodes, prefill = table.attention_for(row_bytes)
        reference = REFERENCE.attention_for(row_bytes)[1]
        group = heads // kv_heads

        def run(rows, schedule, query_tile, slots=0):
            work = attention_work(device, blocks, rows, query_tile, slots)  # noqa: B023
            index = torch.from_numpy(rows).to(device)
            return paged_attention(q[index], k, v, work, head_dim**-0.5, schedule, schedule)  # noqa: B023

        every = np.arange(length)
        expected = run(every, reference, reference.BLOCK_M // group)
        tile = max(prefill.BLOCK_M, group) // group
        for cuts in ([0, length], [0, 77, 640, 1000, length]):
            parts = [run(every[a:b], prefill, tile) for a, b in zip(cuts, cuts[1:], strict=False)]
            yield Check("attention", f"{dtype}, {heads}/{kv_heads}x{head_dim}, prefill cut at {cuts}, {prefill}",
                        same_bits(torch.cat(parts), expected), prefill)
        rows = np.unique(np.concatenate([every[::37], [0, 1, 63, 64, 255, 256, 257, length - 1]]))
        # Sequences whole, in runs of splits, each split alone.
        for decode, slots in itertools.product(sorted(set(decodes), key=str), (0, 40, 10**6)):
            yield Check("attention", f"{dtype}, {heads}/{kv_heads}x{head_dim}, decode in {slots} slots, {decode}",
                        same_bits(run(rows, decode, None, slots), expected[torch.from_numpy(rows).to(device)]), decode)


def check_norm(device, dtype) -> Iterator[Check]:
    """Fused against unfused, alone against in a batch, and aligned against a slice of a larger buffer."""
    from kernels.norm import rms_norm

    generator = torch.Generator(device).manual_seed(0)
    for N in (576, 1024, 4096, 5120):
        x, residual = (torch.randn((257, N), generator=generator, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(N, generator=generator, device=device).to(dtype)
        summed = (x.float() + residual.float()).to(dtype)
        expected = rms_norm(summed, weight, 1e-6)
        yield Check("rms_norm", f"{dtype}, N={N}, fused residual", same_bits(
            rms_norm(x, weight, 1e-6, residual.clone()), expected))
        yield Check("rms_norm", f"{dtype}, N={N}, one row", same_bits(
            rms_norm(summed[100:101], weight, 1e-6), expected[100:101]))
        shifted = torch.empty(257 * N + 8, dtype=dtype, device=device)[8:].view(257, N).copy_(summed)
        yield Check("rms_norm", f"{dtype}, N={N}, sliced", same_bits(rms_norm(shifted, weight, 1e-6), expected))


def check_rotary(device, dtype, shapes) -> Iterator[Check]:
    """QK-norm fused with rotary against QK-norm, then rotary: rotating by position 0 leaves the norm alone."""
    from kernels.norm import rotary_and_cache

    generator = torch.Generator(device).manual_seed(0)
    for heads, kv_heads, D in shapes:
        total, n = heads + 2 * kv_heads, 33
        qkv = torch.randn((n, total * D), generator=generator, device=device).to(dtype)
        weights = [torch.randn(D, generator=generator, device=device).to(dtype) for _ in range(2)]
        angle = torch.rand((64, D // 2), generator=generator, device=device) * 6
        table = torch.cat([angle.cos(), angle.sin()], 1)
        table[0] = torch.cat([torch.ones(D // 2), torch.zeros(D // 2)]).to(device)
        positions = torch.arange(1, n + 1, device=device, dtype=torch.int32)
        slots = torch.arange(n, device=device, dtype=torch.int32)

        def run(qkv, weights, positions, slots):
            k, v = torch.zeros((2, 1, kv_heads, KV_TILE, D), dtype=dtype, device=device)  # noqa: B023
            none = slots[:0, None]
            work = AttentionWork(positions, slots, none, none, none, none, none, (0, 0, 0), 0)
            q = rotary_and_cache(qkv, *weights, 1e-6, table, work, k, v, heads)  # noqa: B023
            return q, k[0].transpose(0, 1)[: len(qkv)], v[0].transpose(0, 1)[: len(qkv)]

        fused = run(qkv, weights, positions, slots)
        normed = torch.cat([part.reshape(n, -1) for part in run(qkv, weights, 0 * positions, slots)], 1)
        unfused = run(normed.contiguous(), (None, None), positions, slots)
        alone = run(qkv[9:10].contiguous(), weights, positions[9:10], slots[:1])
        yield Check("rotary", f"{dtype}, {heads}/{kv_heads}x{D}, fused QK-norm", all(map(same_bits, fused, unfused)))
        yield Check("rotary", f"{dtype}, {heads}/{kv_heads}x{D}, one row",
                    all(same_bits(a[9:10], b) for a, b in zip(fused, alone, strict=True)))


def check_schedules(device: torch.device, dtype: torch.dtype, table: Schedules, K: int | None,
                    shapes=ATTENTION_SHAPES, experts: bool = False) -> Iterator[Check]:
    """Every schedule of `table` for this dtype; yields as it goes. Products of length K, also those of experts if asked
    for, or, without, the other ops, of attention for `shapes`."""
    if dtype == torch.float32:  # plain cores: one schedule, so the rows and the sharing of leaves are what is left
        one = table.linear_for(1, 272, 1, 4)
        products = [one, replace(one, split=True)]
    else:
        products = sorted({one for _, *kinds in table.linear for kind in kinds for one in kind}, key=str)
    if K:
        yield from check_linear(device, dtype, products, K)
        if experts:
            yield from check_experts(device, dtype, products, K)
    else:
        yield from check_norm(device, dtype)
        yield from check_rotary(device, dtype, shapes)
        yield from check_attention(device, dtype, table, shapes)


def without(table: Schedules, failed: set) -> Schedules:
    """`table` with the reference's schedule in the place of each that failed, and, since all of a number of rows have
    one height of tile, of those beside it."""
    def passed(one, instead):
        return instead if one in failed else one

    linear = tuple((bound, *kinds) if failed.isdisjoint(sum(kinds, ())) else (bound, (PLAIN,), (PLAIN,))
                   for bound, *kinds in table.linear)
    return replace(table, linear=linear, decode=tuple(passed(one, WALK) for one in table.decode),
                   prefill=passed(table.prefill, WALK))


def report(done: list[Check]) -> bool:
    """Print what differs, and the counts by op. Whether all agree."""
    for check in done:
        if not check.same:
            print(f"DIFFERS: {check.op}: {check.what}")
    for (op, same), count in sorted(Counter((c.op, c.same) for c in done).items()):
        print(f"{op:10s} {count:5d} {'same bits' if same else 'DIFFERENT'}")
    return all(c.same for c in done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--table", choices=["auto", "conservative"], default="auto")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU here; the schedules are the GPU's", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    table = CONSERVATIVE if args.table == "conservative" else schedules("auto", torch.cuda.get_device_capability())
    done = [check for K in tqdm((None, *LENGTHS), "lengths of K", leave=False)
            for check in check_schedules(device, getattr(torch, args.dtype), table, K, experts=K == 2048)]
    return 0 if report(done) else 1


if __name__ == "__main__":
    sys.exit(main())
