"""What ranks of tensor parallelism exchange: columns. Every sum is one rank's own, and none crosses (design law 6).

An exchange lets each rank compute its columns of a [M, N] and gives the whole back. Reduction order: none; a copy.
Schedule: how the columns travel. `SymmetricMemory` has every op write them straight into the buffers of all ranks;
`Group` gathers them by torch.distributed, where GPUs do not reach each other's memory, and on CPU."""

import secrets
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

ODD, EVEN, LOGITS = range(3)  # a rank's buffers: exchanges inside layers alternate between the first two


class Group:
    """Exchanges through `group`, a process group of torch.distributed, of which this process is `rank`."""

    name = "torch.distributed"

    def __init__(self, rank: int, group):
        self.rank, self.group = rank, group

    def __call__(self, compute: Callable, M: int, cut: list[range], dtype: torch.dtype, buffer: int,
                 out: torch.Tensor | None = None) -> torch.Tensor:
        """The whole [M, cut[-1].stop] of `dtype`: `out` if given, else a tensor that stays until the next exchange but
        one. cut: the columns of each rank; buffer: where they travel. compute(out=places) writes this rank's to each of
        several places, [M, len(cut[rank])] of one row stride; compute() returns them."""
        x = compute().view(M, -1)
        width = max(map(len, cut))
        mine = x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1]))
        parts = x.new_empty((len(cut) * M, width))
        self.group._allgather_base(parts.view(torch.uint8), mine.view(torch.uint8)).wait()  # any backend knows bytes
        return torch.cat([part[:, : len(own)] for part, own in zip(parts.split(M), cut, strict=True)], 1, out=out)


class SymmetricMemory:
    """Exchanges through buffers of `num_bytes` that the GPUs of one host write to (multicast is never used). A barrier
    on the GPUs ends each: who has passed the next one's barrier knows that all have read what this one brought."""

    name = "symmetric memory"

    def __init__(self, rank: int, size: int, device: torch.device, store, num_bytes: list[int]):
        from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory

        ends = list(accumulate(-(-n // 256) * 256 for n in num_bytes))
        name = store.compare_set("exchange", "", secrets.token_hex(8)).decode()
        self.group = ProcessGroup(store, rank, size)  # the registry, which `rendezvous` asks, does not keep it alive
        _register_process_group(name, self.group)
        memory = _SymmetricMemory.empty_strided_p2p((ends[-1],), (1,), torch.uint8, device, name)
        self.handle = _SymmetricMemory.rendezvous(memory, name)
        wholes = [self.handle.get_buffer(i, (ends[-1],), torch.uint8) for i in range(size)]
        self.rank, self.buffers = rank, [[whole[start:end] for whole in wholes] for start, end in pairwise([0, *ends])]

    def __call__(self, compute, M, cut, dtype, buffer, out=None):
        if buffer == LOGITS:  # they may follow each other
            self.handle.barrier()
        size = M * cut[-1].stop * dtype.itemsize
        wholes = [memory[:size].view(dtype).view(M, -1) for memory in self.buffers[buffer]]
        own = cut[self.rank]
        compute(out=[whole[:, own.start : own.stop] for whole in wholes])
        self.handle.barrier()
        return wholes[self.rank] if out is None else out.copy_(wholes[self.rank])
