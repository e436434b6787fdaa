"""Root mean square normalisation, with or without the residual add: `rms_norm`."""

import torch
import triton
import triton.language as tl

from kernels.tiles import row_block


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
