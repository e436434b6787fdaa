"""A mixture of experts: `route` tokens to experts, the experts' products (`expert_linear`), and `combine`.

A slot is one (token, expert) pair: token * top_k + place, a token's experts in ascending id. Every product's row goes
to its slot, so where a slot stands among its expert's rows, and in which tile, decides no bit.
"""

import torch
import triton
import triton.language as tl

from kernels.linear import add_partial, leaf_sum
from kernels.logprobs import mass
from kernels.tiles import LOGPROB_SCALE_BITS, LinearSchedule, leaf_length
from kernels.work import Routing

FEW_SLOTS = 32  # up to here two tokens seldom meet in an expert: reading its weights twice costs less than a launch
TILE_FIELDS = 3  # expert, first of its rows in the tile, end of all its rows


@triton.jit
def route_kernel(logits_ptr, slot_mapping_ptr, weights_ptr, ids_ptr, rows_ptr, tiles_ptr, E: tl.constexpr,
                 TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ALONE: tl.constexpr, FIELDS: tl.constexpr,
                 SCALE_BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < E
    x = tl.load(logits_ptr + row * E + expert, mask=exists, other=float("-inf"))
    ranked = tl.where(x == x, x, float("-inf"))  # a NaN comes last: a broken row too has TOP_K experts, all different
    peak = tl.max(ranked, 0)
    taken = expert >= E
    for _ in range(TOP_K):
        best = tl.max(tl.where(taken, float("-inf"), ranked), 0)
        first = tl.min(tl.where((ranked == best) & (taken == 0), expert, BLOCK), 0)
        taken = taken | (expert == first)
    chosen = taken & exists
    total = tl.sum(tl.where(chosen if NORMALISE else exists, mass(x, peak, SCALE_BITS), 0), 0)
    weight = tl.exp2((x - peak) * 1.4426950408889634) / (total.to(tl.float32) * (1.0 / (1 << SCALE_BITS)))
    out = row * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1  # an integer count: the places are in ascending id
    is_padding = tl.load(slot_mapping_ptr + row) < 0
    tl.store(weights_ptr + out, weight, mask=chosen)
    tl.store(ids_ptr + out, tl.where(is_padding, E, expert), mask=chosen)
    if ALONE:  # each slot is a tile of its own, empty if it is padding: nothing is left to group
        tile_ptr = tiles_ptr + (1 + out) * FIELDS
        tl.store(rows_ptr + out, out.to(tl.int32), mask=chosen)
        tl.store(tile_ptr, expert, mask=chosen)
        tl.store(tile_ptr + 1, out.to(tl.int32), mask=chosen)
        tl.store(tile_ptr + 2, tl.where(is_padding, out, out + 1).to(tl.int32), mask=chosen)
        if row == 0:
            tl.store(tiles_ptr, tl.num_programs(0) * TOP_K)


@triton.jit(do_not_specialize=["S"])
def group_kernel(ids_ptr, rows_ptr, tiles_ptr, S, E: tl.constexpr, BLOCK_M: tl.constexpr, FIELDS: tl.constexpr,
                 BINS: tl.constexpr, BLOCK: tl.constexpr):
    # A stable counting sort without an atomic in memory: each expert's program counts all ids, then lists its own.
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, S, BLOCK):
        counts += tl.histogram(tl.load(ids_ptr + start + offs, mask=start + offs < S, other=E), BINS)
    bins = tl.arange(0, BINS)
    num_tiles = tl.where(bins < E, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    if expert == 0:
        tl.store(tiles_ptr, tl.sum(num_tiles, 0))
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    end = first + tl.sum(tl.where(bins == expert, counts, 0), 0)
    tile_ptr = tiles_ptr + (1 + tl.sum(tl.where(bins < expert, num_tiles, 0), 0)) * FIELDS
    for row in range(first, end, BLOCK_M):
        tl.store(tile_ptr, expert)
        tl.store(tile_ptr + 1, row)
        tl.store(tile_ptr + 2, end)
        tile_ptr += FIELDS
    if first < end:
        for start in range(0, S, BLOCK):
            mine = tl.load(ids_ptr + start + offs, mask=start + offs < S, other=E) == expert
            place = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(rows_ptr + first + place - 1, start + offs, mask=mine)
            first += tl.sum(mine.to(tl.int32), 0)


def group(ids: torch.Tensor, num_experts: int, BLOCK_M: int, rows: torch.Tensor, tiles: torch.Tensor) -> None:
    """List the slots of each expert, and the tiles of BLOCK_M rows that hold them.

    ids: [num_slots] int32, contiguous, `num_experts` where the slot is padding
    rows: [num_slots] int32; tiles: [1 + most tiles, TILE_FIELDS] int32; both as in `Routing`, written here

    Reduction order: none; integer counts, so that an expert's slots are in ascending order.
    Schedule: ids a block, warps, rows a tile.
    """
    S = ids.numel()
    assert ids.is_contiguous() and len(rows) == S and len(tiles) > min(S, S // BLOCK_M + num_experts)
    group_kernel[(num_experts,)](ids, rows, tiles, S, num_experts, BLOCK_M, TILE_FIELDS,
                                 max(32, triton.next_power_of_2(num_experts + 1)), 256 if S <= 256 else 2048,
                                 num_warps=4, enable_fp_fusion=False)


def route(logits: torch.Tensor, top_k: int, normalise: bool, slot_mapping: torch.Tensor,
          schedule: LinearSchedule) -> Routing:
    """The `top_k` experts of each token, their weights, and the rows and tiles of each expert.

    logits: [num_tokens, num_experts] fp32, contiguous
    normalise: whether a token's weights add up to one; otherwise they are those of a softmax over all experts
    slot_mapping: [num_tokens] int32, negative where a token is padding, which no expert computes
    schedule: of the products to come; the tiles have its BLOCK_M rows

    Reduction order: none; max is exact, ties go to the lowest id, and the normaliser is an int64 sum of
        exp(x - max) * 2^44. Rows are grouped by integer counts, in ascending slot.
    Schedule: warps, ids a block, rows a tile; up to FEW_SLOTS slots are not grouped. The number of tiles has a bound
        that shapes alone decide.
    """
    M, E = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32 and 0 < top_k <= E, (logits.shape, top_k)
    assert slot_mapping.shape == (M,) and slot_mapping.dtype == torch.int32
    S, BLOCK_M = M * top_k, schedule.BLOCK_M
    weights = torch.empty((M, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((M, top_k), dtype=torch.int32, device=logits.device)
    rows = torch.empty(S, dtype=torch.int32, device=logits.device)
    alone = S <= FEW_SLOTS
    # Grouped, an expert's last tile may be partly filled, and no tile is empty. Row 0 holds their number.
    bound = S if alone else min(S, S // BLOCK_M + E)
    tiles = torch.empty((1 + bound, TILE_FIELDS), dtype=torch.int32, device=logits.device)
    route_kernel[(M,)](logits, slot_mapping, weights, ids, rows, tiles, E, top_k, normalise, alone, TILE_FIELDS,
                       LOGPROB_SCALE_BITS, max(32, triton.next_power_of_2(E)), num_warps=1, enable_fp_fusion=False)
    if not alone:
        group(ids, E, BLOCK_M, rows, tiles)
    return Routing(weights, ids, rows, tiles, schedule)


@triton.jit(do_not_specialize=["S"])
def expert_linear_kernel(x_ptr, w_ptr, out_ptr, rows_ptr, tiles_ptr, partial_ptr, arrived_ptr, S, N: tl.constexpr,
                         K: tl.constexpr, SHARE: tl.constexpr, FIELDS: tl.constexpr, LEAVES: tl.constexpr,
                         LEAF: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_K: tl.constexpr, PRECISION: tl.constexpr):
    # Neighbouring programs share an expert's rows, then its weights: columns go first, then row tiles.
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // TILES_N
    if tile >= tl.load(tiles_ptr):
        return
    tile_ptr = tiles_ptr + (1 + tile) * FIELDS
    expert = tl.load(tile_ptr).to(tl.int64)
    first = tl.load(tile_ptr + 1)
    end = tl.load(tile_ptr + 2)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    live = row < end
    slot = tl.load(rows_ptr + row, mask=live, other=0).to(tl.int64)
    offs_n = tl.program_id(0) % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = live[:, None]
    mask_n = offs_n[:, None] < N
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = LEAF % BLOCK_K == 0 and LEAF * LEAVES == K
    x_ptrs = x_ptr + (slot // SHARE)[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + (expert * N + offs_n)[:, None] * K + offs_k[None, :]
    offs_out = slot[:, None] * N + offs_n[None, :]
    mask_out = mask_m & (offs_n[None, :] < N)
    if SPLIT:
        leaf = tl.program_id(1)
        acc = leaf_sum(x_ptrs, w_ptrs, mask_m, mask_n, leaf * LEAF, K, LEAF, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N,
                       BLOCK_K, PRECISION)
        acc, last = add_partial(acc, offs_out, mask_out, partial_ptr, arrived_ptr + tl.program_id(0), leaf,
                                tl.cast(S, tl.int64) * N, LEAVES)
        if not last:
            return
    else:
        acc = leaf_sum(x_ptrs, w_ptrs, mask_m, mask_n, 0, K, LEAF, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
                       PRECISION)
        for i in tl.static_range(1, LEAVES):
            acc = acc + leaf_sum(x_ptrs, w_ptrs, mask_m, mask_n, i * LEAF, K, LEAF, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N,
                                 BLOCK_K, PRECISION)
    tl.store(out_ptr + offs_out, acc.to(out_ptr.dtype.element_ty), mask=mask_out)


def expert_linear(x: torch.Tensor, weight: torch.Tensor, leaves: int, routing: Routing,
                  arrived: torch.Tensor) -> torch.Tensor:
    """Each slot's row times its expert's weight.

    x: [num_tokens, K], one row for all slots of a token, or [num_slots, K]; bf16, fp16 or fp32, contiguous
    weight: [num_experts, N, K], dtype of x, contiguous
    leaves: of one expert's sum, by the shape of its full weight
    arrived: [*] int32 zeros, left zero: the arrival counters of a split sum
    returns [num_slots, N], dtype of x; rows of padding tokens are not written

    Reduction order: that of kernels.linear, in its code: leaves as chains along K, added in order, one rounding.
    Schedule: tile shape, warps, stages, and whether leaves share a program; all may follow the number of rows.
    """
    (_, N, K), S, schedule = weight.shape, routing.ids.numel(), routing.schedule
    assert x.shape[1] == K and x.dtype == weight.dtype and S % len(x) == 0, (x.shape, x.dtype, weight.shape, S)
    assert x.is_contiguous() and weight.is_contiguous()
    out = torch.empty((S, N), dtype=x.dtype, device=x.device)
    programs = (len(routing.tiles) - 1) * triton.cdiv(N, schedule.BLOCK_N)
    split = schedule.split and leaves > 1 and programs <= arrived.numel()
    partial = torch.empty((leaves, S, N), dtype=torch.float32, device=x.device) if split else out
    expert_linear_kernel[(programs, leaves if split else 1)](
        x, weight, out, routing.rows, routing.tiles, partial, arrived, S, N, K, S // len(x), TILE_FIELDS, leaves,
        leaf_length(K, leaves), split, schedule.BLOCK_M, schedule.BLOCK_N, schedule.BLOCK_K, "ieee",
        num_warps=schedule.num_warps, num_stages=schedule.num_stages, enable_fp_fusion=False)
    return out


@triton.jit
def combine_kernel(y_ptr, weights_ptr, out_ptr, N: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y_ptrs = y_ptr + row * TOP_K * N + offs
    total = tl.load(weights_ptr + row * TOP_K) * tl.load(y_ptrs, mask=offs < N, other=0.0).to(tl.float32)
    for i in tl.static_range(1, TOP_K):
        y = tl.load(y_ptrs + i * N, mask=offs < N, other=0.0).to(tl.float32)
        total = total + tl.load(weights_ptr + row * TOP_K + i) * y
    tl.store(out_ptr + row * N + offs, total.to(out_ptr.dtype.element_ty), mask=offs < N)


def combine(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """out = sum over a token's experts of weight * y.

    y: [num_slots, N], contiguous
    returns [num_tokens, N], dtype of y; rows of padding tokens hold anything

    Reduction order: products in fp32, added as a chain in ascending expert id, rounded once.
    Schedule: block and warps.
    """
    (M, top_k), N = routing.weights.shape, y.shape[1]
    assert len(y) == M * top_k and y.is_contiguous()
    out = torch.empty((M, N), dtype=y.dtype, device=y.device)
    BLOCK = min(1024, triton.next_power_of_2(N))
    combine_kernel[(M, triton.cdiv(N, BLOCK))](y, routing.weights, out, N, top_k, BLOCK, num_warps=4,
                                               enable_fp_fusion=False)
    return out
