"""Row lookup: `embedding`."""

import torch
import triton
import triton.language as tl


@triton.jit
def embedding_kernel(ids_ptr, drawn_ptr, weight_ptr, out_ptr, V, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + row).to(tl.int64)
    if token < 0:
        token = tl.minimum(tl.load(drawn_ptr - 1 - token), V - 1)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + row * N + offs, tl.load(weight_ptr + token * N + offs, mask=offs < N), mask=offs < N)


def embedding(input_ids: torch.Tensor, weight: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """out[i] = weight[input_ids[i]]; an id of -1 - r stands for drawn[r], which the host does not know yet.

    input_ids: [num_tokens] int32, every id below vocab_size
    drawn: [*] int64, the tokens chosen by the step before; one past the vocabulary (a broken row's) reads its last row
    weight: [vocab_size, N]
    returns [num_tokens, N], dtype of weight

    Reduction order: none; a copy.
    Schedule: block.
    """
    N = weight.shape[1]
    out = torch.empty((input_ids.numel(), N), dtype=weight.dtype, device=weight.device)
    embedding_kernel[(input_ids.numel(),)](input_ids, drawn, weight, out, weight.shape[0], N,
                                           min(4096, triton.next_power_of_2(N)))
    return out
