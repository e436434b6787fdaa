"""Every op between `input_ids` and the token, behind one table.

The contract: a row of any op's result depends on that row's inputs, the weights and its own sequence's keys, never on
how many rows there are, where it stands among them, or how the work was cut. Each launcher states its `Reduction
order:` (numerics, fixed) and its `Schedule:` (what may follow the batch without changing a bit)."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch


@dataclass(frozen=True)
class Ops:
    """All that a model and a sampler call, so that a test may swap in another; see the launchers for shapes. Schedule:
    `query_tile(group, row_bytes)`, query tokens a prefill work item holds, by heads a KV head and bytes a head;
    `decode_programs`, programs of decode attention that run at once (0 never shares a sequence among them)."""
    name: str
    weight_dtype: Callable[[torch.dtype], torch.dtype]
    embedding: Callable
    rms_norm: Callable
    linear: Callable
    gated_linear: Callable
    rotary_and_cache: Callable
    paged_attention: Callable
    route: Callable
    combine: Callable
    logprobs: Callable
    argmax: Callable
    sample: Callable
    query_tile: Callable[[int, int], int]
    decode_programs: int


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits. Not `torch.equal`, which takes 0.0 for -0.0 and no NaN for itself."""
    words = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*words)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array as a tensor of the device, without waiting for what the device is doing."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def refusal(device: torch.device) -> str:
    """The file that names the schedules which failed --selfcheck on this kind of GPU; there is none if none did."""
    import triton
    return os.path.expanduser(f"~/.cache/samebits/{torch.cuda.get_device_name(device)}, triton {triton.__version__}")


def make_ops(device: torch.device, schedule: str = "auto") -> Ops:
    """The op table for a device: Triton kernels on a GPU, plain torch elsewhere. A schedule changes no bit."""
    if schedule not in ("auto", "reference"):
        raise ValueError(f"unknown schedule {schedule!r}: use 'auto' or 'reference'")
    if device.type == "cuda" and schedule == "auto" and os.path.exists(file := refusal(device)):
        print(f"the reference's schedules run: others failed --selfcheck on this GPU ({file})", file=sys.stderr)
        schedule = "reference"
    return triton_ops(device, schedule) if device.type == "cuda" else reference_ops()


def reference_ops() -> Ops:
    from kernels import reference as ref
    return Ops("reference", lambda dtype: torch.float32, ref.embedding, ref.rms_norm, ref.linear, ref.gated_linear,
               ref.rotary_and_cache, ref.paged_attention, ref.route, ref.combine, ref.logprobs, ref.argmax, ref.sample,
               query_tile=lambda group, row_bytes: max(16, group) // group, decode_programs=0)


def triton_ops(device: torch.device, schedule: str = "auto", table=None) -> Ops:
    """The Triton table. `table` overrides the schedules looked up for this GPU (for tests and tuning)."""
    from kernels import attention, experts, linear, norm, sample, tiles
    from kernels.reference import embedding
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    table = table or tiles.schedules(schedule, capability)
    arrived, tallies = (torch.zeros(n, dtype=torch.int32, device=device) for n in (16384, (1 << 16, 3)))  # counters

    def run_linear(x, weight, bias, leaves, out_dtype, out=None, gated=False, routing=None):
        rows, N = (routing.rows, 0) if routing else (len(x), len(weight))  # N 0: which experts have rows, no host knows
        chosen = table.linear_for(rows, N, leaves, x.element_size(), out_dtype.itemsize)
        return linear.linear(x, weight, bias, leaves, out_dtype, chosen, arrived, out, gated, routing)

    def run_route(x, logits, top_k, normalise, here=None):
        mean = -(-len(logits) * top_k // logits.shape[1])
        rows = mean if mean <= 16 else 2 * mean  # loads differ: then most experts have all in one tile
        tile = table.linear_for(rows, 1, 1, x.element_size()).BLOCK_M
        return experts.route(x, logits, top_k, normalise, tile, rows, tallies, here)

    def run_attention(q, k_cache, v_cache, work, scale, **options):
        decode, prefill = table.attention_for(q.shape[2] * q.element_size())
        many = work.grid[1] * k_cache.shape[1] > table.decode_programs
        return attention.paged_attention(q, k_cache, v_cache, work, scale, decode[many], prefill, **options)

    return Ops("triton", lambda dtype: dtype, embedding, norm.rms_norm, run_linear, partial(run_linear, gated=True),
               norm.rotary_and_cache, run_attention, run_route, experts.combine, sample.logprobs, sample.argmax,
               sample.sample, lambda group, width: max(table.attention_for(width)[1].BLOCK_M, group) // group,
               table.decode_programs)
