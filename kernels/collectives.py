"""What ranks of tensor parallelism exchange: `gather`, which rounds nothing."""

import torch
import torch.nn.functional as F


def gather(x: torch.Tensor, cut: list[range], group, out: torch.Tensor | None = None) -> torch.Tensor:
    """All ranks' columns side by side: with them every sum is one rank's own, and none crosses (design law 6).

    x: [M, len(cut[rank])] of any dtype, contiguous; cut: the columns of each rank
    group: a process group of torch.distributed; None for a rank that is alone, which gets `x` back
    returns [M, cut[-1].stop], dtype of x: `out` if given, else a new tensor

    Reduction order: none; a copy.
    Schedule: who copies, and when; narrow shards are padded to the widest."""
    if group is None:
        return x
    M, width = len(x), max(map(len, cut))
    mine = x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1]))
    parts = x.new_empty((len(cut) * M, width))
    group._allgather_base(parts.view(torch.uint8), mine.view(torch.uint8)).wait()  # as bytes: any backend knows them
    return torch.cat([part[:, : len(own)] for part, own in zip(parts.split(M), cut, strict=True)], 1, out=out)
