"""Matrix product with a fixed order of K, plain or ending in SwiGLU: `linear`."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.tiles import LinearSchedule, leaf_length
from kernels.work import Routing


@triton.jit
def swiglu(gate_up):
    """silu(gate) * up in fp32 (Shazeer 2020, arXiv:2002.05202). Columns are gate and up in turn: a thread has both."""
    gate, up = tl.split(tl.reshape(gate_up, (gate_up.shape[0], gate_up.shape[1] // 2, 2)).to(tl.float32))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def add_partial(acc, offs, mask, partial_ptr, arrived_ptr, leaf, size, LEAVES: tl.constexpr):
    """Leave one leaf's sum in memory and count it; the last program to arrive gets (sum in leaf order, True). The order
    of arrival, an integer count, decides who adds, never how."""
    tl.store(partial_ptr + leaf.to(tl.int64) * size + offs, acc, mask=mask)
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == LEAVES - 1
    if last:
        tl.store(arrived_ptr, 0)
        acc = tl.load(partial_ptr + offs, mask=mask, other=0.0, cache_modifier=".cg")
        for i in tl.static_range(1, LEAVES):
            acc += tl.load(partial_ptr + tl.cast(i, tl.int64) * size + offs, mask=mask, other=0.0, cache_modifier=".cg")
    return acc, last


@triton.jit
def leaf_sum(x, w, m, n, k_start, M, N: tl.constexpr, K: tl.constexpr, LEAF: tl.constexpr, EVEN_K: tl.constexpr,
             TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # The chain along K. `tl.dot` onto one accumulator gives the same bits for every tile shape (design law 1).
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if TMA:  # the copy engine fetches and clips
        for k in range(k_start, k_start + LEAF, BLOCK_K):
            acc = tl.dot(x.load([m, k]), w.load([n, k]).T, acc, input_precision="ieee")
    else:
        offs_m, offs_n = m + tl.arange(0, BLOCK_M)[:, None], n + tl.arange(0, BLOCK_N)[:, None]
        offs_k = tl.arange(0, BLOCK_K)[None, :]
        x_ptrs, w_ptrs = x + offs_m.to(tl.int64) * K + offs_k, w + offs_n.to(tl.int64) * K + offs_k
        for k in range(k_start, k_start + LEAF, BLOCK_K):
            mask_k = True if EVEN_K else k + offs_k < min(k_start + LEAF, K)
            x_tile = tl.load(x_ptrs + k, mask=(offs_m < M) & mask_k, other=0.0)
            w_tile = tl.load(w_ptrs + k, mask=(offs_n < N) & mask_k, other=0.0)
            acc = tl.dot(x_tile, w_tile.T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def linear_kernel(x, w, bias_ptr, out, partial_ptr, arrived_ptr, tiles_ptr, M, N: tl.constexpr, K: tl.constexpr,
                  ROWS_W: tl.constexpr, LEAVES: tl.constexpr, LEAF: tl.constexpr, SPLIT: tl.constexpr,
                  GATED: tl.constexpr, TMA: tl.constexpr, OUT_TMA: tl.constexpr, STRIDE: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    # Persistent: programs walk tiles, or leaves of tiles.
    PARTS: tl.constexpr = LEAVES if SPLIT else 1
    EVEN_K: tl.constexpr = LEAF % BLOCK_K == 0 and LEAF * LEAVES == K
    first_tile = 0 if tiles_ptr is None else tl.load(tiles_ptr)
    tiles_m = tl.cdiv(M, BLOCK_M) if tiles_ptr is None else tl.load(tiles_ptr + 1) - first_tile
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    WIDTH: tl.constexpr = 2 if GATED else 1  # columns of the product that make one of the result
    for part in tl.range(tl.program_id(0), tiles_m * tiles_n * PARTS, tl.num_programs(0), flatten=TMA and LEAVES == 1):
        tile = part // PARTS
        leaf = part % PARTS
        # Neighbours share rows of x and of w in the L2: walk GROUP_M row tiles before the next column tile.
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        group_m = min(tiles_m - first_m, GROUP_M)
        m = (first_tile + first_m + tile % (GROUP_M * tiles_n) % group_m) * BLOCK_M
        n = tile % (GROUP_M * tiles_n) // group_m * BLOCK_N
        offs_m = m + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        offs_n = n + tl.arange(0, BLOCK_N)[None, :]
        row_w = n if tiles_ptr is None else n + tl.load(tiles_ptr + 2 + m // BLOCK_M) * N
        acc = leaf_sum(x, w, m, row_w, leaf * LEAF, M, ROWS_W, K, LEAF, EVEN_K, TMA, BLOCK_M, BLOCK_N, BLOCK_K)
        last = True
        if SPLIT:
            acc, last = add_partial(acc, offs_m * N + offs_n, (offs_m < M) & (offs_n < N), partial_ptr,
                                    arrived_ptr + tile, leaf, tl.cast(M, tl.int64) * N, LEAVES)
        else:
            for i in tl.static_range(1, LEAVES):
                acc += leaf_sum(x, w, m, row_w, i * LEAF, M, ROWS_W, K, LEAF, EVEN_K, TMA, BLOCK_M, BLOCK_N, BLOCK_K)
        if last:
            if bias_ptr is not None:
                acc = acc + tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
            dtype: tl.constexpr = out.dtype if OUT_TMA else out[0].dtype.element_ty
            result = (swiglu(acc.to(dtype)) if GATED else acc).to(dtype)
            if OUT_TMA:
                out.store([m, n // WIDTH], result)
            else:
                columns = n // WIDTH + tl.arange(0, BLOCK_N // WIDTH)[None, :]
                mask = (offs_m < M) & (columns < N // WIDTH)
                for i in tl.static_range(len(out)):
                    tl.store(out[i] + offs_m * STRIDE + columns, result, mask=mask)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, leaves: int, out_dtype: torch.dtype,
           schedule: LinearSchedule, arrived: torch.Tensor, out: torch.Tensor | list[torch.Tensor] | None = None,
           gated: bool = False, routing: Routing | None = None) -> torch.Tensor:
    """out = x @ weight.T + bias or, if `gated`, silu(gate) * up, that sum's columns being gate and up in turn.

    x: [M, K] bf16, fp16 or fp32, contiguous
    weight: [N, K], dtype of x, contiguous; bias: [N] or None
    routing: None, or of a weight [num_experts * N, K] which rows each row tile of x meets. Tiles not in use stay as
        they are; if `routing.is_part`, a new result (not a gated one) has zeros in the tiles of other ranks
    arrived: [>= tiles] int32 zeros, left zero: the arrival counters of a split sum
    out: [M, N] ([M, N / 2] if gated) in `out_dtype`, or several of one row stride that all get the result
    returns the (first) `out`, or a new tensor if there is none

    Reduction order: K in `leaves` leaves of tiles.leaf_length, each one fp32 `tl.dot` chain from first element to last;
        leaves are added in order as a chain, then the bias; rounded once. SwiGLU of that: in fp32, rounded once more.
    Schedule: tile shape, warps, stages, row grouping, whether leaves share a program, and whether the copy engine
        fetches tiles for persistent programs; all may follow M."""
    M, K = x.shape
    N, width = len(weight) // (routing.num_experts if routing else 1), 2 if gated else 1
    assert weight.shape[1] == K and x.dtype == weight.dtype, (x.shape, x.dtype, weight.shape, weight.dtype)
    assert x.is_contiguous() and weight.is_contiguous() and (routing is None or routing.tile == schedule.BLOCK_M)
    new = x.new_zeros if routing and routing.is_part and not gated else x.new_empty  # of others' rows: ranks add them
    outs = out if isinstance(out, list) else [new((M, N // width), dtype=out_dtype) if out is None else out]
    out, stride = outs[0], outs[0].stride(0)
    assert all(o.shape == (M, N // width) and o.stride() == (stride, 1) and o.dtype == out_dtype for o in outs)
    tiles = triton.cdiv(M, schedule.BLOCK_M) * triton.cdiv(N, schedule.BLOCK_N)
    length = leaf_length(K, leaves)
    tma = schedule.tma and length % schedule.BLOCK_K == 0 and length * leaves == K
    programs = schedule.programs if tma else arrived.numel()
    split = schedule.split and leaves > 1 and tiles * leaves <= programs
    partial = torch.empty((leaves, M, N), dtype=torch.float32, device=x.device) if split else out
    BLOCK_M, BLOCK_N, BLOCK_K = shape = (schedule.BLOCK_M, schedule.BLOCK_N, schedule.BLOCK_K)
    out_tma = tma and out_dtype == x.dtype and len(outs) == 1 and stride * out.element_size() % 16 == 0
    pair = [TensorDescriptor.from_tensor(operand, [rows, BLOCK_K]) if tma else operand
            for operand, rows in ((x, BLOCK_M), (weight, BLOCK_N))]
    target = TensorDescriptor.from_tensor(out, [BLOCK_M, BLOCK_N // width]) if out_tma else tuple(outs)
    linear_kernel[(min(tiles * (leaves if split else 1), programs),)](
        *pair, bias, target, partial, arrived, routing and routing.tiles, M, N, K, len(weight), leaves, length, split,
        gated, tma, out_tma, stride, *shape, schedule.GROUP_M, num_warps=schedule.num_warps,
        num_stages=schedule.num_stages, enable_fp_fusion=False)
    return out
