"""A mixture of experts around `linear`: who computes what (`route`), and the weighted sum of their results (`combine`).

An expert's rows lie in tiles of their own, in the order of tokens; a product looks up whose weight a row tile meets."""

import torch
import triton
import triton.language as tl

from kernels.sample import mass, rank
from kernels.tiles import LOGPROB_SCALE_BITS
from kernels.work import Routing


@triton.jit
def choose_kernel(logits_ptr, weights_ptr, experts_ptr, counts_ptr, E, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
                  SCALE_BITS: tl.constexpr, BLOCK: tl.constexpr):
    token, ids = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + token * E + ids, mask=ids < E, other=float("-inf"))
    x = tl.where(x != x, float("nan"), x)  # of either sign it ranks highest, and shows
    ranks = rank(x, ids, E)  # no two alike: exactly TOP_K have fewer than TOP_K above them
    chosen = tl.sum((ranks[:, None] > ranks[None, :]).to(tl.int32), 0) < TOP_K  # down a column: a thread has it all
    scaled = x - tl.max(x, 0)
    counted = chosen if NORMALISE else ids < E
    total = tl.sum(tl.where(counted, mass(scaled, SCALE_BITS), 0), 0).to(tl.float32) / (1 << SCALE_BITS)
    places = token * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.atomic_add(counts_ptr + ids, 1, mask=chosen, sem="relaxed")
    tl.store(experts_ptr + places, ids, mask=chosen)
    tl.store(weights_ptr + places, tl.exp2(scaled * 1.4426950408889634) / total, mask=chosen)


@triton.jit(do_not_specialize=["num_slots", "first_here", "last_here"])
def group_kernel(experts_ptr, counts_ptr, places_ptr, sources_ptr, tiles_ptr, num_slots, first_here, last_here,
                 TOP_K: tl.constexpr, TILE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    # A program an expert. What each has decides where the next one's tiles begin.
    own, ids, offs = tl.program_id(0), tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    tiles = (tl.load(counts_ptr + ids, mask=ids < tl.num_programs(0), other=0) + TILE - 1) // TILE
    first = tl.sum(tl.where(ids < own, tiles, 0), 0)
    end = tl.sum(tl.where(ids <= own, tiles, 0), 0)
    if own == first_here:
        tl.store(tiles_ptr, first)
    if own == last_here:
        tl.store(tiles_ptr + 1, end)
    row = first * TILE
    for start in range(0, num_slots, BLOCK):
        slots = start + offs
        mine = tl.load(experts_ptr + slots, mask=slots < num_slots, other=-1) == own
        places = row + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(places_ptr + slots, places, mask=mine)
        tl.store(sources_ptr + places, slots // TOP_K, mask=mine)
        row += tl.sum(mine.to(tl.int32), 0)
    for start in range(first, end, BLOCK):
        tl.store(tiles_ptr + 2 + start + offs, own - first_here, mask=start + offs < end)


def route(logits: torch.Tensor, top_k: int, normalise: bool, tile: int, rows: int,
          here: range | None = None) -> Routing:
    """The `top_k` likeliest experts of each token, ties to the lowest id, by softmax.

    logits: [num_tokens, num_experts] fp32, contiguous; tile, rows: of the `Routing`
    here: the experts whose rows this rank computes [all]
    normalise: whether a token's weights add up to one, or are those of a softmax over all experts

    Reduction order: none; a softmax is exp(x - max) over an int64 sum of the same * 2^44, and rows are counted.
    Schedule: tile. A token's row goes where a stable sort by expert puts it; which one it is changes no bit."""
    (M, E), S = logits.shape, len(logits) * top_k
    assert logits.is_contiguous() and logits.dtype == torch.float32 and 0 < top_k <= E
    weights, size, num_tiles = logits.new_empty((M, top_k)), triton.next_power_of_2(E), min(S, S // tile + E)
    experts, places = torch.empty((2, M, top_k), dtype=torch.int32, device=logits.device)
    counts, sources = experts.new_zeros(E + num_tiles * tile).split([E, num_tiles * tile])
    tiles, here = experts.new_empty(2 + num_tiles), here or range(E)
    choose_kernel[(M,)](logits, weights, experts, counts, E, top_k, normalise, LOGPROB_SCALE_BITS, size, num_warps=4,
                        enable_fp_fusion=False)
    group_kernel[(E,)](experts, counts, places, sources, tiles, S, here[0], here[-1], top_k, tile, size,
                       512 if S <= 512 else 4096, num_warps=8, enable_fp_fusion=False)
    return Routing(weights, places, sources, tiles, tile, len(here), len(here) < E, rows)


@triton.jit
def combine_kernel(y_ptr, weights_ptr, places_ptr, out, N, STRIDE, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token, offs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        row_ptr = y_ptr + tl.load(places_ptr + token * TOP_K + i).to(tl.int64) * N
        y = tl.load(row_ptr + offs, mask=offs < N, other=0.0).to(tl.float32)
        acc += tl.load(weights_ptr + token * TOP_K + i) * y
    for i in tl.static_range(len(out)):
        tl.store(out[i] + token * STRIDE + offs, acc.to(y_ptr.dtype.element_ty), mask=offs < N)


def combine(weights: torch.Tensor, places: torch.Tensor, y: torch.Tensor,
            out: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The sum over a token's experts of weight * y.

    weights, places: [num_tokens, top_k], of a `Routing`; y: [num_tiles * tile, N], contiguous
    out: [num_tokens, N], dtype of y, some of one row stride that all get the result
    returns the first `out`, or a new tensor

    Reduction order: products in fp32, added as a chain in ascending expert id, rounded once.
    Schedule: block and warps."""
    (M, top_k), N = weights.shape, y.shape[1]
    outs = tuple(out or [y.new_empty((M, N))])
    combine_kernel[(M, triton.cdiv(N, 1024))](y, weights, places, outs, N, outs[0].stride(0), top_k, 1024,
                                              num_warps=4, enable_fp_fusion=False)
    return outs[0]
