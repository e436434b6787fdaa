"""What ranks of tensor parallelism exchange: `gather`, which rounds nothing."""

import torch
import torch.nn.functional as F


def gather(x: torch.Tensor, cut: list[range], group, out: torch.Tensor | None = None) -> torch.Tensor:
    """All ranks' columns side by side: no sum ever crosses a rank (design law 6).

    x: [M, len(cut[rank])] of any dtype, contiguous
    cut: the columns of each rank, one range after the other
    group: a process group of torch.distributed; None for a rank alone, whose `x` is returned as it is
    returns [M, cut[-1].stop], dtype of x: `out` if given, else a new tensor

    Reduction order: none; a copy.
    Schedule: who copies, and when. Narrow shards travel padded to the widest."""
    if group is None:
        return x
    ranks, M, width = len(cut), len(x), max(map(len, cut))
    mine = x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1]))
    all_ranks = x.new_empty((ranks * M, width))
    group._allgather_base(all_ranks.view(torch.uint8), mine.view(torch.uint8)).wait()  # bytes: any backend knows them
    parts = all_ranks.view(ranks, M, width)
    return torch.cat([part[:, : len(own)] for part, own in zip(parts, cut, strict=True)], 1, out=out)
