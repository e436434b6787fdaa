"""Log-probabilities with an order-free normaliser: `logprobs`."""

import torch
import triton
import triton.language as tl

from kernels.tiles import LOGPROB_SCALE_BITS


@triton.jit
def mass(x, peak, SCALE_BITS: tl.constexpr):
    """exp(x - peak) in fixed point: [..] fp32 -> int64. Sums of it are integer sums, and have no order."""
    return (tl.exp2((x - peak) * 1.4426950408889634) * (1 << SCALE_BITS)).to(tl.int64)


@triton.jit
def logprobs_kernel(logits_ptr, token_ids_ptr, token_logprobs_ptr, top_ids_ptr, top_logprobs_ptr, V,
                    TOP: tl.constexpr, SCALE_BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    offs = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        peak = tl.maximum(peak, tl.load(row_ptr + start + offs, mask=start + offs < V, other=float("-inf")))
    peak = tl.max(peak, 0)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        total += mass(tl.load(row_ptr + start + offs, mask=start + offs < V, other=float("-inf")), peak, SCALE_BITS)
    log_total = tl.log(tl.sum(total, 0).to(tl.float64)) - SCALE_BITS * 0.6931471805599453
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row).to(tl.int64))
    tl.store(token_logprobs_ptr + row, ((chosen - peak).to(tl.float64) - log_total).to(tl.float32))
    # The next of the top is the largest logit that comes after the previous one in (value, lowest id first) order.
    last, last_id = float("inf"), -1
    for i in range(TOP):
        best, best_id = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), 2147483647, tl.int32)
        for start in range(0, V, BLOCK):
            ids = start + offs
            x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
            after = (ids < V) & ((x < last) | ((x == last) & (ids > last_id)))
            take = after & ((x > best) | (best_id == 2147483647))
            best, best_id = tl.where(take, x, best), tl.where(take, ids, best_id)
        last = tl.max(best, 0)
        last_id = tl.min(tl.where(best == last, best_id, 2147483647), 0)
        tl.store(top_ids_ptr + row * TOP + i, last_id)
        tl.store(top_logprobs_ptr + row * TOP + i, ((last - peak).to(tl.float64) - log_total).to(tl.float32))


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    """Log-softmax of each row at one token, and at its `top` most likely tokens (ties to the lowest id).

    logits: [num_rows, vocab_size] fp32, contiguous, finite or -inf; token_ids: [num_rows] int64
    returns ([num_rows] fp32, [num_rows, top] int32, [num_rows, top] fp32)

    Reduction order: none; max is exact and the normaliser is an int64 sum of exp(x - max) * 2^44, its log in float64.
    Schedule: block and warps."""
    M, V = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32 and top <= V
    token_logprobs = torch.empty(M, dtype=torch.float32, device=logits.device)
    top_ids, top_logprobs = (token_logprobs.new_empty((M, top), dtype=t) for t in (torch.int32, torch.float32))
    logprobs_kernel[(M,)](logits, token_ids, token_logprobs, top_ids, top_logprobs, V, top, LOGPROB_SCALE_BITS,
                          min(4096, triton.next_power_of_2(V)), num_warps=8, enable_fp_fusion=False)
    return token_logprobs, top_ids, top_logprobs
