"""Gated activation: `silu_and_mul`, and `swiglu` for the epilogue of a product."""

import torch
import triton
import triton.language as tl


@triton.jit
def swiglu(gate_up):
    """[.., 2 * N] in its rounded dtype, gate and up in turn -> [.., N] fp32, silu(gate) * up."""
    gate, up = tl.split(tl.reshape(gate_up, gate_up.shape[:-1] + (gate_up.shape[-1] // 2, 2)))
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = swiglu(tl.load(gate_up_ptr + row * 2 * N + pairs, mask=pairs < 2 * N, other=0.0))
    tl.store(out_ptr + row * N + offs, out.to(out_ptr.dtype.element_ty), mask=offs < N)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """out = silu(gate) * up (Shazeer 2020, arXiv:2002.05202), where gate_up = gate[0], up[0], gate[1], up[1] ...

    gate_up: [num_tokens, 2 * N], contiguous
    returns [num_tokens, N], dtype of gate_up

    Reduction order: none; fp32 inside, rounded once.
    Schedule: block and warps; in the epilogue of the product that makes gate_up (linear.py) the same bits.
    """
    M, N = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty((M, N), dtype=gate_up.dtype, device=gate_up.device)
    BLOCK = min(2048, triton.next_power_of_2(N))
    silu_and_mul_kernel[(M, triton.cdiv(N, BLOCK))](gate_up, out, N, BLOCK, num_warps=4, enable_fp_fusion=False)
    return out
