"""Along the vocabulary: an exact `argmax`, `logprobs` with an order-free normaliser, and `sample`, an exponential race
over what top-k, top-p and min-p keep."""

import torch
import triton
import triton.language as tl

from kernels.tiles import LOGPROB_SCALE_BITS

HIGHEST = tl.constexpr(9223372036854775807)  # above every rank


@triton.jit
def rank(x, ids, V):
    """(logit, id) as one positive int64: the larger logit ranks higher, of equals (-0 equals +0) the lower id, which is
    V - 1 - rank % V. Past the end, where the logits are read as -inf, ids rank below all others."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)  # compare as the floats do
    return bits.to(tl.int64) * V + (V - 1 - ids)


@triton.jit
def peak_kernel(logits_ptr, peaks_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
    ranks = tl.where(x != x, HIGHEST, rank(x, ids, V))  # a NaN beats everything
    tl.store(peaks_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(ranks, 0))


@triton.jit
def peak_id_kernel(peaks_ptr, out_ptr, V, PEAKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    peak = tl.max(tl.load(peaks_ptr + row * PEAKS + offs, mask=offs < PEAKS, other=0), 0)
    empty = peak <= rank(tl.full((), float("-inf"), tl.float32), 0, V)
    tl.store(out_ptr + row, tl.where(empty | (peak == HIGHEST), 2147483647, V - 1 - peak % V))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The id of each row's largest logit, the lowest id among equals.

    logits: [num_rows, vocab_size] fp32, contiguous
    returns [num_rows] int64; 2^31 - 1 for a row that holds a NaN or no finite logit

    Reduction order: none; comparisons are exact.
    Schedule: block, warps, and how many programs share a row."""
    M, V = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    BLOCK = min(8192, triton.next_power_of_2(V))
    blocks = triton.cdiv(V, BLOCK)
    peaks, out = (torch.empty(n, dtype=torch.int64, device=logits.device) for n in ((M, blocks), M))
    peak_kernel[(M, blocks)](logits, peaks, V, BLOCK, num_warps=8, enable_fp_fusion=False)
    peak_id_kernel[(M,)](peaks, out, V, blocks, triton.next_power_of_2(blocks), num_warps=1, enable_fp_fusion=False)
    return out


@triton.jit
def mass(x, SCALE_BITS: tl.constexpr):
    """exp(x) in fixed point: [..] fp32 -> int64. Sums of it are integer sums, and have no order."""
    return (tl.exp2(x * 1.4426950408889634) * (1 << SCALE_BITS)).to(tl.int64)


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
        total += mass(tl.load(row_ptr + start + offs, mask=start + offs < V, other=float("-inf")) - peak, SCALE_BITS)
    log_total = tl.log(tl.sum(total, 0).to(tl.float64)) - SCALE_BITS * 0.6931471805599453
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row).to(tl.int64))
    tl.store(token_logprobs_ptr + row, ((chosen - peak).to(tl.float64) - log_total).to(tl.float32))
    last = tl.full((), HIGHEST, tl.int64)
    for i in range(TOP):  # the next of the top has the highest rank below the last
        best = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, V, BLOCK):
            ids = start + offs
            ranks = rank(tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")), ids, V)
            best = tl.maximum(best, tl.where(ranks < last, ranks, 0))
        last = tl.max(best, 0)
        token = V - 1 - last % V
        tl.store(top_ids_ptr + row * TOP + i, token)
        logit = tl.load(row_ptr + token)
        tl.store(top_logprobs_ptr + row * TOP + i, ((logit - peak).to(tl.float64) - log_total).to(tl.float32))


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


@triton.jit
def total_from(row_ptr, V, cut, peak, temperature, COUNT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Weight (1, or the mass at this temperature) of the entries of rank `cut` or higher."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
        weight = tl.full((BLOCK,), 1, tl.int64) if COUNT else mass((x - peak) / temperature, BITS)
        total += tl.where(rank(x, ids, V) >= cut, weight, 0)
    return tl.sum(total, 0)


@triton.jit
def find_cut(row_ptr, V, low, target, peak, temperature, COUNT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest rank from which on the weight reaches `target`, by bisection; from `low` on it does."""
    high = rank(peak, 0, V)
    while low < high:
        middle = (low + high + 1) >> 1
        reached = total_from(row_ptr, V, middle, peak, temperature, COUNT, BITS, BLOCK) >= target
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle - 1)
    return low


@triton.jit
def log_exponential(r):
    """log(E) for E = -log(u), u = (r + 1/2) / 2^32, from a 32-bit word; never infinite. Near u = 1 the distance
    d = 1 - u is exact in fp32 where u is not, and the winner of a race has a small E."""
    d = ((4294967295 - r.to(tl.uint32, bitcast=True).to(tl.int64)).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = (r.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = d * (1.0 + d * (0.5 + d * (0.33333334 + d * 0.25)))
    return tl.log(tl.where(d < 0.0078125, series, -tl.log(u)))


@triton.jit
def sample_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, peak_ids_ptr,
                  out_ptr, V, SCALE_BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    peak = tl.load(row_ptr + min(tl.load(peak_ids_ptr + row), V - 1))  # of a row without one, any will do
    # 1. The cut: the lowest rank kept. It begins at -inf and the last id.
    cut = rank(tl.full((), float("-inf"), tl.float32), V - 1, V)
    if top_k < V:
        cut = find_cut(row_ptr, V, cut, top_k, peak, temperature, True, SCALE_BITS, BLOCK)
    if top_p < (1 << 30):
        kept = total_from(row_ptr, V, cut, peak, temperature, False, SCALE_BITS, BLOCK)
        target = (kept >> 30) * top_p + (((kept & ((1 << 30) - 1)) * top_p) >> 30)
        cut = find_cut(row_ptr, V, cut, tl.maximum(target, 1), peak, temperature, False, SCALE_BITS, BLOCK)
    # 2. The race: the largest (x - peak) / temperature - log(E), noise by token id in quads of one Philox counter.
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    best = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, 4 * BLOCK):
        quad = start // 4 + tl.arange(0, BLOCK)
        words = tl.philox(seed, quad, position, 0, 0)
        for j in tl.static_range(4):
            ids = quad * 4 + j
            x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
            scaled = (x - peak) / temperature
            keep = (rank(x, ids, V) >= cut) & (scaled >= min_p)
            score = tl.where(keep, scaled - log_exponential(words[j]), float("-inf"))
            best = tl.maximum(best, rank(score, ids, V))
    tl.store(out_ptr + row, V - 1 - tl.max(best, 0) % V)


def sample(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
           min_p: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(logits / temperature), after top-k, top-p and min-p in that order.

    An exponential race: argmax of scaled logit - log(E_id) is a draw from the softmax (Gumbel-max). E_id comes from
    Philox4x32-10 (Salmon et al. 2011) with key = seed, counter = (id // 4, position, 0, 0), word id % 4.

    logits: [num_rows, vocab_size] fp32, contiguous, finite or -inf, one finite at least
    temperature: [num_rows] fp32 > 0; top_k: [num_rows] int64 (vocab_size or more: all)
    top_p: [num_rows] int64, p * 2^30 (2^30: all); min_p: [num_rows] fp32, log(min_p) at temperature (-inf: all)
    seed: [num_rows] int64; position: [num_rows] int32, the index of the token being drawn in its sequence
    returns [num_rows] int64

    Reduction order: none; counts and masses are integer sums, the rest comparisons. Ties to the lowest token id.
    Schedule: block and warps."""
    M, V = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    out = torch.empty(M, dtype=torch.int64, device=logits.device)
    sample_kernel[(M,)](logits, temperature, top_k, top_p, min_p, seed, position, argmax(logits), out, V,
                        LOGPROB_SCALE_BITS, min(4096, triton.next_power_of_2(V)), num_warps=16, enable_fp_fusion=False)
    return out
