"""What ranks exchange: `gather`, which rounds nothing, and `all_reduce` in a fixed order.

Here through torch.distributed (gloo, NCCL); where GPUs reach each other's memory, by the kernels of symmetric.py. Both
give the same bits.
"""

import os

import torch
import torch.distributed as dist

# Regions of a rank's exchange buffer. A layer's exchanges alternate between FIRST and SECOND, so that a rank which is
# one exchange ahead writes where nobody reads any more. TOTALS (+ FIRST or SECOND) holds sums made in two shots.
FIRST, SECOND, LOGITS, DRAWN, TOTALS = range(5)
TWO_SHOT = 1 << 19  # elements from which an all-reduce sums a share a rank, instead of everything on every rank


def in_rank_order(parts) -> torch.Tensor:
    total, *rest = parts
    for part in rest:
        total = total + part
    return total


class Collectives:
    """The exchanges of rank `rank` of `size`, over the default process group. Every rank calls them in one order."""

    name, in_place = "torch.distributed", False  # in_place: what `gather` returns has a place of its own

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:  # [size, *x.shape]; as bytes, which every backend knows
        parts = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(parts.view(self.size, -1).view(torch.uint8)), x.contiguous().view(-1).view(torch.uint8))
        return parts

    def gather(self, x: torch.Tensor, widths: list[int], region: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """All ranks' columns, side by side in rank order.

        x: [M, widths[rank]] of any dtype, contiguous; widths: of all ranks, 0 allowed
        region: where it travels; out: [M, sum(widths)] or None; not used if `in_place`
        returns [M, sum(widths)], dtype of x: `out`, or a tensor that stays whole until the region's next use

        Reduction order: none; a copy.
        Schedule: who copies, and when.
        """
        padded = x.new_zeros((len(x), max(widths)))
        padded[:, : x.shape[1]] = x
        return torch.cat([part[:, :w] for part, w in zip(self._all_gather(padded), widths, strict=True)], 1, out=out)

    def partial(self, M: int, N: int, region: int) -> torch.Tensor | None:
        """[M, N] fp32 in the region, for a product to write its partial sums into; None: anywhere."""
        return None

    def all_reduce(self, partial: torch.Tensor, dtype: torch.dtype, region: int,
                   two_shot: int = TWO_SHOT) -> torch.Tensor:
        """The sum of all ranks' partials, on every rank.

        partial: [M, N] fp32, made in `self.partial(M, N, region)` where that is a tensor
        returns [M, N] in `dtype`

        Reduction order: an element's partials are added in fp32 as a chain in rank order, then rounded once.
        Schedule: from `two_shot` elements on, a rank sums its share of the elements and hands it to all others.
        """
        if partial.numel() < two_shot:
            return in_rank_order(self._all_gather(partial)).to(dtype)
        flat = torch.nn.functional.pad(partial.view(-1), (0, -partial.numel() % self.size))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat)
        shares = self._all_gather(in_rank_order(parts.view(self.size, -1)).to(dtype))
        return shares.view(-1)[: partial.numel()].view(partial.shape)


def make_collectives(rank: int, size: int, device: torch.device, num_bytes: dict[int, int], one_host: bool):
    """By symmetric memory if all ranks' GPUs reach each other (SAMEBITS_SYMMETRIC_MEMORY=0 says no), else through
    torch.distributed. Waits until all ranks are here. num_bytes: region -> the most that travels there at once."""
    usable = device.type == "cuda" and one_host and os.environ.get("SAMEBITS_SYMMETRIC_MEMORY") != "0" and all(
        torch.cuda.can_device_access_peer(device, peer) for peer in range(size) if peer != device.index)
    agreed = torch.tensor([int(usable)])
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    if not agreed:
        return Collectives(rank, size)
    from kernels.symmetric import SymmetricMemory

    return SymmetricMemory(rank, size, device, num_bytes)
