"""Root mean square normalisation: `rms_norm`, with or without the residual add; and `rotary_and_cache`, QK-norm, rotary
embedding and the write into the paged cache in one pass over the qkv rows."""

import torch
import triton
import triton.language as tl

from kernels.tiles import KV_TILE, ROPE_TILE_HEADS, row_block
from kernels.work import AttentionWork


@triton.jit
def round_mul(x, weight, dtype: tl.constexpr):
    # dtype(x) * weight in dtype, as Hugging Face does: a product of two 16-bit floats is exact in fp32.
    return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0)
    if residual_ptr is not None:
        x = (tl.load(residual_ptr + row * N + offs, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * N + offs, x, mask=mask)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    x32 = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x32 * x32, 0) / N + eps)
    tl.store(out_ptr + row * N + offs, round_mul(x32 * rstd, weight, x.dtype), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """out = dtype(x * rsqrt(mean(x^2) + eps)) * weight; with a residual, x is first added to it, in place.

    x: [num_tokens, N], contiguous, 16-byte aligned; weight: [N]
    residual: [num_tokens, N] or None; overwritten with dtype(residual + x)
    returns [num_tokens, N], dtype of x (Zhang and Sennrich 2019, arXiv:1910.07467)

    Reduction order: one `tl.sum` over the row in the layout of tiles.row_block(N); fp32.
    Schedule: nothing varies; block, warps, alignment and dtype decide the layout of the sum."""
    M, N = x.shape
    assert x.is_contiguous() and weight.numel() == N and x.data_ptr() % 16 == 0, "rms_norm needs an aligned row"
    assert residual is None or (residual.is_contiguous() and residual.data_ptr() % 16 == 0)
    out = torch.empty_like(x)
    size, warps = row_block(N)
    rms_norm_kernel[(M,)](x, residual, weight, out, eps, N, size, num_warps=warps, num_stages=1, enable_fp_fusion=False)
    return out


@triton.jit
def rotary_and_cache_kernel(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, q_ptr, k_cache_ptr,
                            v_cache_ptr, eps, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
                            HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    TOTAL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    offs = tl.arange(0, HALF)[None, :]
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < TOTAL)
    row_ptrs = qkv_ptr + token * TOTAL * HEAD_DIM + head * HEAD_DIM + offs  # [HEADS, HALF]
    x1, x2 = tl.load(row_ptrs, mask=head < TOTAL, other=0.0), tl.load(row_ptrs + HALF, mask=head < TOTAL, other=0.0)
    a, b = x1.to(tl.float32), x2.to(tl.float32)
    if q_norm_ptr is not None:
        rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
        w1 = tl.where(is_q, tl.load(q_norm_ptr + offs), tl.load(k_norm_ptr + offs))
        w2 = tl.where(is_q, tl.load(q_norm_ptr + HALF + offs), tl.load(k_norm_ptr + HALF + offs))
        a, b = round_mul(a * rstd, w1, x1.dtype).to(tl.float32), round_mul(b * rstd, w2, x1.dtype).to(tl.float32)
    cos_ptrs = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM + offs
    cos, sin = tl.load(cos_ptrs), tl.load(cos_ptrs + HALF)
    r1, r2 = (a * cos - b * sin).to(x1.dtype), (b * cos + a * sin).to(x1.dtype)
    q_ptrs = q_ptr + (token * NUM_HEADS + head) * HEAD_DIM + offs
    tl.store(q_ptrs, r1, mask=is_q)
    tl.store(q_ptrs + HALF, r2, mask=is_q)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:  # padding rows of a CUDA graph have slot -1 and write no cache
        page, place = slot // BLOCK_SIZE * NUM_KV_HEADS, slot % BLOCK_SIZE
        k_ptrs = k_cache_ptr + ((page + head - NUM_HEADS) * BLOCK_SIZE + place) * HEAD_DIM + offs
        tl.store(k_ptrs, r1, mask=is_k)
        tl.store(k_ptrs + HALF, r2, mask=is_k)
        v_ptrs = v_cache_ptr + ((page + head - NUM_HEADS - NUM_KV_HEADS) * BLOCK_SIZE + place) * HEAD_DIM + offs
        tl.store(v_ptrs, x1, mask=is_v)
        tl.store(v_ptrs + HALF, x2, mask=is_v)


def rotary_and_cache(qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float,
                     cos_sin: torch.Tensor, work: AttentionWork, k_cache: torch.Tensor, v_cache: torch.Tensor,
                     num_heads: int) -> torch.Tensor:
    """Normalise and rotate q and k, store k and v into their pages, return q.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], heads in the order q, k, v; 16-byte aligned
    q_norm, k_norm: [head_dim] or None (no QK-norm); k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim]
    cos_sin: [max_model_len, head_dim] fp32, cosines then sines (rotate-half convention; Su et al. 2021)
    work: its positions and slot_mapping say where each token stands and where its key goes; slot -1 stores nothing
    returns q: [num_tokens, num_heads, head_dim]

    Reduction order: the square sum of a head is `tl.sum` of its first half plus `tl.sum` of its second, each in the
        layout of a [ROPE_TILE_HEADS, head_dim / 2] tile with one warp; fp32.
    Schedule: nothing varies."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    total = num_heads + 2 * num_kv_heads
    assert qkv.is_contiguous() and qkv.shape[1] == total * head_dim and qkv.data_ptr() % 16 == 0
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape[2] == KV_TILE
    q = torch.empty((len(qkv), num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    rotary_and_cache_kernel[(len(qkv), triton.cdiv(total, ROPE_TILE_HEADS))](
        qkv, q_norm, k_norm, cos_sin, work.positions, work.slot_mapping, q, k_cache, v_cache, eps, num_heads,
        num_kv_heads, head_dim, KV_TILE, ROPE_TILE_HEADS, num_warps=1, num_stages=1, enable_fp_fusion=False)
    return q
