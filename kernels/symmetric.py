"""Exchanges between the GPUs of one host through symmetric memory: each rank stores into the buffers of the others.

Of the buffers' order: a barrier ends every exchange, so a rank that has passed the barrier of exchange i + 1 knows that
all ranks have read what exchange i brought. Exchanges i and i + 2 may then share a region, and neighbours may not.
"""

import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from kernels.collectives import LOGITS, TOTALS, TWO_SHOT, Collectives


@triton.jit
def push_kernel(x_ptr, peers, N: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
                BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + offs, mask=offs < WIDTH)
    for i in tl.static_range(SIZE):
        tl.store(peers[i] + row * N + OFFSET + offs, x, mask=offs < WIDTH)


@triton.jit  # first and last are multiples of 16 whatever the batch: one variant, and it loads 16 bytes at a time
def ordered_sum_kernel(parts, outs, first, last, SIZE: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr):
    offs = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts[0] + offs, mask=offs < last)
    for i in tl.static_range(1, SIZE):
        total = total + tl.load(parts[i] + offs, mask=offs < last)
    for i in tl.static_range(OUTS):
        tl.store(outs[i] + offs, total.to(outs[i].dtype.element_ty), mask=offs < last)


def push(x: torch.Tensor, peers: tuple[torch.Tensor, ...], offset: int, N: int) -> None:
    """Store x into columns offset .. offset + width - 1 of every peer's [M, N].

    x: [M, width], contiguous
    peers: flat tensors of at least M * N elements, dtype of x, 16-byte aligned

    Reduction order: none; a copy.
    Schedule: block and warps.
    """
    M, width = x.shape
    assert x.is_contiguous() and all(len(peer) >= M * N and peer.dtype == x.dtype for peer in peers)
    if M and width:
        BLOCK = min(4096 if M >= 512 else 1024, triton.next_power_of_2(width))
        push_kernel[(M, triton.cdiv(width, BLOCK))](x, peers, N, offset, width, len(peers), BLOCK,
                                                    num_warps=8 if BLOCK > 1024 else 4, enable_fp_fusion=False)


def ordered_sum(parts: tuple[torch.Tensor, ...], outs: tuple[torch.Tensor, ...], first: int, last: int) -> None:
    """out[i] = parts[0][i] + parts[1][i] + ... for first <= i < last, in each of `outs`.

    parts: flat fp32 tensors; outs: flat tensors of one dtype

    Reduction order: a chain in the order of `parts`, fp32, rounded once.
    Schedule: block and warps.
    """
    if first < last:
        ordered_sum_kernel[(triton.cdiv(last - first, 2048),)](parts, outs, first, last, len(parts), len(outs), 2048,
                                                               num_warps=4, enable_fp_fusion=False)


class SymmetricMemory(Collectives):
    """As Collectives, in CUDA graphs too. num_bytes: region -> its length. Multicast is never used."""

    name, in_place = "symmetric memory", True

    def __init__(self, rank: int, size: int, device: torch.device, num_bytes: dict[int, int]):
        import torch.distributed._symmetric_memory as symmetric_memory

        super().__init__(rank, size)
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # torch would set it up, unused, at rendezvous
        starts, end = {}, 0
        for region, length in num_bytes.items():
            starts[region], end = end, end + -(-length // 256) * 256
        self.buffer = symmetric_memory.empty(end, dtype=torch.uint8, device=device)
        self.handle = symmetric_memory.rendezvous(self.buffer, dist.group.WORLD.group_name)
        buffers = [self.handle.get_buffer(peer, (end,), torch.uint8) for peer in range(size)]
        self.regions = {region: [b[start : start + -(-num_bytes[region] // 16) * 16] for b in buffers]
                        for region, start in starts.items()}
        self.typed: dict[tuple, tuple[torch.Tensor, ...]] = {}

    def _peers(self, region: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The region on every rank, in rank order, as flat tensors."""
        if (region, dtype) not in self.typed:
            self.typed[region, dtype] = tuple(b.view(dtype) for b in self.regions[region])
        return self.typed[region, dtype]

    def _own(self, M: int, N: int, region: int, dtype: torch.dtype) -> torch.Tensor:
        return self._peers(region, dtype)[self.rank][: M * N].view(M, N)

    def gather(self, x, widths, region, out=None):
        N = sum(widths)
        if region == LOGITS:  # two of them may follow each other: wait until all have read the last
            self.handle.barrier(channel=0)
        push(x, self._peers(region, x.dtype), sum(widths[: self.rank]), N)
        self.handle.barrier(channel=0)
        return self._own(len(x), N, region, x.dtype)

    def partial(self, M, N, region):
        return self._own(M, N, region, torch.float32)

    def all_reduce(self, partial, dtype, region, two_shot=TWO_SHOT):
        parts, n = self._peers(region, torch.float32), partial.numel()
        assert partial.data_ptr() == parts[self.rank].data_ptr()
        self.handle.barrier(channel=0)
        if n < two_shot:
            total = torch.empty(partial.shape, dtype=dtype, device=partial.device)
            ordered_sum(parts, (total.view(-1),), 0, n)
            return total
        share = -(-n // (16 * self.size)) * 16
        ordered_sum(parts, self._peers(TOTALS + region, dtype), self.rank * share, min(n, (self.rank + 1) * share))
        self.handle.barrier(channel=0)
        return self._own(*partial.shape, TOTALS + region, dtype)
