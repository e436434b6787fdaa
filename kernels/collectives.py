"""What ranks of tensor parallelism exchange: columns, or rows of whole experts, so that every sum is one rank's own and
none crosses (design law 6); in the row style partial sums in fp32, which are added in rank order. Each computes its
part, and all get the whole: the same bits, whatever carries them."""

import re
import secrets
from collections.abc import Callable
from functools import partial, reduce

import torch
import torch.distributed as dist
import torch.nn.functional as F

ODD, EVEN, LOGITS, ROWS = range(4)  # a rank's buffers: exchanges inside layers alternate between the first two
TWO_SHOT = 1 << 20  # elements of a sum from which each rank adds its columns for all, not all columns for itself


class Group:
    """Exchanges through `group` of torch.distributed, on CPU and where GPUs do not reach each other's memory."""
    name = "torch.distributed"

    def __init__(self, rank: int, size: int, group):
        self.rank, self.size, self.group = rank, size, group

    def gather(self, compute: Callable, M: int, cut: list[range], dtype: torch.dtype, buffer: int,
               out: torch.Tensor | None = None) -> torch.Tensor:
        """The whole [M, cut[-1].stop] of `dtype`: `out` if given, else a tensor that stays until its buffer's next use.
        cut: the columns of each rank; buffer: where they travel. compute(out=places) writes this rank's to each of
        several places, [M, len(cut[rank])] of one row stride; compute() returns them. By ROWS a rank has whole
        rows, and zeros in those of others.

        Reduction order: none; a copy.
        Schedule: how the columns travel."""
        if buffer == ROWS:  # as bytes they are added
            return self._parts(compute, M, cut[0].stop).view(torch.uint8).sum(0, dtype=torch.uint8).view(dtype)
        x, width = compute().view(M, -1), max(map(len, cut))
        parts = self._parts(lambda: x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1])), M, width)
        return torch.cat([part[:, : len(own)] for part, own in zip(parts, cut, strict=True)], 1, out=out)

    def all_reduce(self, compute: Callable, M: int, cut: list[range], dtype: torch.dtype, bias: torch.Tensor | None):
        """The sum [M, cut[-1].stop], in `dtype`, of all ranks' partial sums and of `bias`. cut: the columns that each
        rank adds of a large one. compute(out=[place]) writes this rank's in fp32 to a place; compute() returns them.

        Reduction order: partial sums as a chain in rank order, then the bias; fp32, rounded once.
        Schedule: who adds which columns (`TWO_SHOT`)."""
        parts, own = self._parts(compute, M, cut[-1].stop), cut[self.rank]

        def add(columns: slice, out=None):
            terms = [part[:, columns] for part in parts] + ([] if bias is None else [bias[columns].float()])
            total = reduce(torch.add, terms)
            return total.to(dtype) if out is None else [place.copy_(total) for place in out]

        if M * cut[-1].stop < TWO_SHOT:
            return add(slice(None))
        return self.gather(partial(add, slice(own.start, own.stop)), M, cut, dtype, LOGITS)

    def _parts(self, compute: Callable, M: int, N: int):
        """What `compute` gives on each rank, [M, N], in rank order."""
        x = compute()
        parts = x.new_empty((self.size * M, N))
        self.group._allgather_base(parts.view(torch.uint8), x.view(torch.uint8)).wait()  # any backend knows bytes
        return parts.view(self.size, M, N)


class SymmetricMemory(Group):
    """Exchanges through buffers of `num_bytes` that the GPUs of one host write to (multicast is never used). A barrier
    on the GPUs ends each: who has passed the next one's barrier knows that all have read what this one brought."""
    name = "symmetric memory"

    def __init__(self, rank: int, size: int, device: torch.device, store, num_bytes: list[int]):
        from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory
        sizes = [-(-n // 256) * 256 for n in num_bytes]
        name = store.compare_set("exchange", "", secrets.token_hex(8)).decode()
        self.store = CountedKeys(store)  # the registry, which `rendezvous` asks, keeps neither it nor the group alive
        super().__init__(rank, size, ProcessGroup(self.store, rank, size))
        _register_process_group(name, self.group)
        memory = _SymmetricMemory.empty_strided_p2p((sum(sizes),), (1,), torch.uint8, device, name)
        self.handle, self.turn = _SymmetricMemory.rendezvous(memory, name), ODD
        wholes = [self.handle.get_buffer(i, memory.shape, torch.uint8) for i in range(size)]
        self.buffers = list(zip(*(whole.split(sizes) for whole in wholes), strict=True))  # of all ranks, by buffer

    def _places(self, buffer: int, M: int, N: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [memory[: M * N * dtype.itemsize].view(dtype).view(M, N) for memory in self.buffers[buffer]]

    def gather(self, compute, M, cut, dtype, buffer, out=None):
        if buffer == LOGITS:  # they may follow each other
            self.handle.barrier()
        places, own = self._places(buffer, M, cut[-1].stop, dtype), cut[self.rank]
        compute(out=[place[:, own.start : own.stop] for place in places])
        self.handle.barrier()
        return places[self.rank] if out is None else out.copy_(places[self.rank])

    def _parts(self, compute, M, N):
        self.turn = ODD + EVEN - self.turn  # a layer has two sums, so a CUDA graph finds the turn as it was
        places = self._places(self.turn, M, N, torch.float32)
        compute(out=[places[self.rank]])
        self.handle.barrier()
        return places


class CountedKeys(dist.Store):
    """`store` for one rendezvous. torch's keys, "name/count/rank", go on counting as long as a process lives, and the
    processes that meet may be of different age: here all count from 0."""

    def __init__(self, store):
        super().__init__()
        self.store, self.first = store, {}

    def _key(self, key: str) -> str:
        return re.sub(r"(.*)/(\d+)/", lambda m: f"{m[1]}/{int(m[2]) - self.first.setdefault(m[1], int(m[2]))}/", key)

    def set(self, key, value):
        self.store.set(self._key(key), value)

    def get(self, key):
        return self.store.get(self._key(key))

    def wait(self, keys, *timeout):
        self.store.wait([self._key(key) for key in keys], *timeout)
