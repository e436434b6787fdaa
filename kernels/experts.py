"""A mixture of experts around `linear`: who computes what (`route`), and the weighted sum of their results (`combine`).

An expert's rows lie in tiles of their own, in the order of tokens; a product looks up whose weight a row tile meets."""

import torch
import triton
import triton.language as tl

from kernels.sample import mass, rank
from kernels.tiles import LOGPROB_SCALE_BITS
from kernels.work import Routing


@triton.jit
def choose_kernel(logits_ptr, weights_ptr, experts_ptr, tallies_ptr, E: tl.constexpr, TOP_K: tl.constexpr,
                  NORMALISE: tl.constexpr, SCALE_BITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    token, ids = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + token * E + ids, mask=ids < E, other=float("-inf"))
    x = tl.where(x != x, float("nan"), x)  # of either sign it ranks highest, and shows
    ranks = rank(x, ids, E)  # no two alike: exactly TOP_K have fewer than TOP_K above them
    chosen = tl.sum((ranks[:, None] > ranks[None, :]).to(tl.int32), 0) < TOP_K  # down a column: a thread has it all
    scaled = x - tl.max(x, 0)
    counted = chosen if NORMALISE else ids < E
    total = tl.sum(tl.where(counted, mass(scaled, SCALE_BITS), 0), 0).to(tl.float32) / (1 << SCALE_BITS)
    places = token * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tally_ptrs = tallies_ptr + 3 * (token // CHUNK * BLOCK + ids)
    tl.atomic_add(tally_ptrs, 1, mask=chosen, sem="relaxed")
    tl.store(tally_ptrs + 1, tl.load(tally_ptrs + 2), mask=token % CHUNK == 0)  # no launch to reset; may overflow
    tl.store(experts_ptr + places, ids, mask=chosen)
    tl.store(weights_ptr + places, tl.exp2(scaled * 1.4426950408889634) / total, mask=chosen)


@triton.jit(do_not_specialize=["first_here", "last_here"])
def group_kernel(x_ptr, experts_ptr, tallies_ptr, places_ptr, rows_ptr, tiles_ptr, first_here, last_here,
                 TOP_K: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
                 BLOCK: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    # A program a token. Its row among an expert's follows those of earlier chunks, and of earlier tokens of its own.
    token, ids, columns = tl.program_id(0), tl.arange(0, EXPERTS), tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + token.to(tl.int64) * K + columns, mask=columns < K)
    slots, others = token * TOP_K + tl.arange(0, SLOTS), token // CHUNK * CHUNK * TOP_K + tl.arange(0, BLOCK)
    own = tl.load(experts_ptr + slots, mask=slots < (token + 1) * TOP_K, other=-1)
    others = tl.load(experts_ptr + others, mask=others < token * TOP_K, other=-2)
    counts, earlier = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for i in range(0, tl.cdiv(tl.num_programs(0), CHUNK)):
        tally_ptrs = tallies_ptr + 3 * (i * EXPERTS + ids)
        count = tl.load(tally_ptrs) - tl.load(tally_ptrs + 1)
        tl.store(tally_ptrs + 2, tl.load(tally_ptrs), mask=token == 0)
        counts, earlier = counts + count, earlier + tl.where(i < token // CHUNK, count, 0)
    tiles = (counts + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    places = tl.sum(tl.where(ids[None, :] == own[:, None], ((ends - tiles) * TILE + earlier)[None, :], 0), 1)
    places += tl.sum((others[None, :] == own[:, None]).to(tl.int32), 1)
    tl.store(places_ptr + slots, places, mask=own >= 0)
    here = (own >= first_here) & (own <= last_here)
    tl.store(rows_ptr + places.to(tl.int64)[:, None] * K + columns, x, mask=here[:, None] & (columns < K))
    of = tl.sum((ends[None, :] <= slots[:, None]).to(tl.int32), 1)  # of tiles, of which there are no more than slots
    tl.store(tiles_ptr + 2 + slots, of - first_here, mask=of < EXPERTS)
    tl.store(tiles_ptr + 0 * ids, ends - tiles, mask=ids == first_here)  # by the thread that holds it
    tl.store(tiles_ptr + 0 * ids + 1, ends, mask=ids == last_here)


def route(x: torch.Tensor, logits: torch.Tensor, top_k: int, normalise: bool, tile: int, rows: int,
          tallies: torch.Tensor, here: range | None = None, chunk: int = 256) -> Routing:
    """The `top_k` likeliest experts of each token, ties to the lowest id, by softmax; and its row, for each of them.

    x: [num_tokens, K]; logits: [num_tokens, num_experts] fp32; both contiguous; tile, rows: of the `Routing`
    tallies: [.., 3] int32, zeros at first: slots by chunk of tokens and expert, ever, before this call, up to the last
    here: experts whose rows this rank computes [all]; normalise: a token's weights add up to one [all experts' do]

    Reduction order: none; a softmax is exp(x - max) over an int64 sum of the same * 2^44, and rows are counted.
    Schedule: tile, chunk. A token's row goes where a stable sort by expert puts it; which one it is changes no bit."""
    (M, K), E, S, here = x.shape, logits.shape[1], len(x) * top_k, here or range(logits.shape[1])
    size, slots, columns, block = map(triton.next_power_of_2, (E, top_k, K, 512 if S <= 512 else chunk * top_k))
    assert x.is_contiguous() and logits.is_contiguous() and logits.dtype == torch.float32 and 0 < top_k <= E
    if triton.cdiv(M, chunk) * size > len(tallies):
        raise ValueError(f"{M} tokens a step are too many for {E} experts: lower max_num_batched_tokens")
    weights, gathered = logits.new_empty((M, top_k)), x.new_empty(((num_tiles := min(S, S // tile + E)) * tile, K))
    tiles, (experts, places) = tallies.new_empty(2 + num_tiles), tallies.new_empty((2, M, top_k))
    try:
        choose_kernel[(M,)](logits, weights, experts, tallies, E, top_k, normalise, LOGPROB_SCALE_BITS, chunk, size,
                            num_warps=max(4, size // 32), enable_fp_fusion=False)
        group_kernel[(M,)](x, experts, tallies, places, gathered, tiles, here[0], here[-1], top_k, tile, chunk, size,
                           block, slots, K, columns, num_warps=8, enable_fp_fusion=False)
    except BaseException:
        tallies.zero_()  # one kernel without the other would leave its counts to the next call
        raise
    return Routing(gathered, weights, places, tiles, tile, len(here), len(here) < E, rows)


@triton.jit
def combine_kernel(y_ptr, weights_ptr, places_ptr, out, N, STRIDE, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token, offs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        y = tl.load(y_ptr + tl.load(places_ptr + token * TOP_K + i).to(tl.int64) * N + offs, mask=offs < N, other=0.0)
        acc += tl.load(weights_ptr + token * TOP_K + i) * y.to(tl.float32)
    for i in tl.static_range(len(out)):
        tl.store(out[i] + token * STRIDE + offs, acc.to(y_ptr.dtype.element_ty), mask=offs < N)


def combine(weights: torch.Tensor, places: torch.Tensor, y: torch.Tensor,
            out: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The sum over a token's experts of weight * y.

    weights, places: [num_tokens, top_k], of a `Routing`; y: [num_tiles * tile, N], contiguous
    out: [num_tokens, N], dtype of y, some of one row stride that all get the result; returns the first, or a new one

    Reduction order: products in fp32, added as a chain in ascending expert id, rounded once.
    Schedule: block and warps."""
    (M, top_k), N, outs = weights.shape, y.shape[1], tuple(out or [y.new_empty((len(weights), y.shape[1]))])
    combine_kernel[(M, triton.cdiv(N, 1024))](y, weights, places, outs, N, outs[0].stride(0), top_k, 1024,
                                              num_warps=4, enable_fp_fusion=False)
    return outs[0]
