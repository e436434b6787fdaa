"""SwiGLU as a kernel of its own: what an engine runs whose product is the library's, and the fused one's yardstick."""

import torch
import triton
import triton.language as tl

from kernels.linear import swiglu


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)[None, :]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    out = swiglu(tl.load(gate_up_ptr + row * 2 * N + pairs, mask=pairs < 2 * N, other=0.0))
    tl.store(out_ptr + row * N + columns, out.to(out_ptr.dtype.element_ty), mask=columns < N)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. gate_up: [M, 2 * N], contiguous, gate and up in turn; returns [M, N] of its dtype."""
    M, N = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty((M, N), dtype=gate_up.dtype, device=gate_up.device)
    BLOCK = min(2048, triton.next_power_of_2(N))
    silu_and_mul_kernel[(M, triton.cdiv(N, BLOCK))](gate_up, out, N, BLOCK, num_warps=4, enable_fp_fusion=False)
    return out
