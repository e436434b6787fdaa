"""Gated activation: `silu_and_mul`."""

import torch
import triton
import triton.language as tl


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    gate = tl.load(gate_up_ptr + row * 2 * N + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * N + N + offs, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * N + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """out = silu(gate) * up (Shazeer 2020, arXiv:2002.05202), where gate_up = [gate | up].

    gate_up: [num_tokens, 2 * N], contiguous
    returns [num_tokens, N], dtype of gate_up

    Reduction order: none; fp32 inside, rounded once.
    Schedule: block and warps.
    """
    M, N = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty((M, N), dtype=gate_up.dtype, device=gate_up.device)
    BLOCK = min(2048, triton.next_power_of_2(N))
    silu_and_mul_kernel[(M, triton.cdiv(N, BLOCK))](gate_up, out, N, BLOCK, num_warps=4, enable_fp_fusion=False)
    return out
