"""Batch-dependent twins of the op table: what other engines do, for tests and measurements that need the flaw.

`batch_dependent` is made to be caught: split counts follow the number of rows and sequences, all else is the same.
`library` is made to be fast, and prices the promise: cuBLAS, and our attention with splits that fill the GPU.
"""

import math
from collections import defaultdict
from dataclasses import replace

import torch
import torch.nn.functional as F

import kernels.work as work_module
import runner as runner_module
from kernels import Ops
from kernels.reference import by_lanes
from kernels.tiles import KV_SPLIT, KV_TILE


def k_splits(num_rows: int) -> int:
    """Fewer rows, fewer tiles, more programs that share K."""
    return 8 if num_rows <= 4 else 4 if num_rows <= 32 else 2 if num_rows <= 128 else 1


def kv_split(num_seqs: int) -> int:
    """Keys a split: fewer sequences, shorter splits."""
    return KV_TILE if num_seqs <= 8 else 2 * KV_TILE if num_seqs <= 64 else 4 * KV_TILE


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU of columns of gate and up in turn, as an op of its own: the bits that a gated product gives."""
    if gate_up.is_cuda:
        from benchmarks.silu import silu_and_mul as launch  # Triton is imported only where it runs

        return launch(gate_up)
    gate, up = gate_up.float().unflatten(1, (-1, 2)).unbind(2)
    return (gate / (1.0 + by_lanes(torch.exp, -gate)) * up).to(gate_up.dtype)


def batch_dependent(ops: Ops) -> Ops:
    """`ops` with K and KV split counts that follow the batch."""

    def linear(x, weight, bias, leaves, out_dtype, out=None, routing=None):
        if routing:  # experts stay as they are
            return ops.linear(x, weight, bias, leaves, out_dtype, routing=routing)
        K, splits = x.shape[1], k_splits(x.shape[0])
        if ops.name == "triton" and K % (splits * 128) == 0:
            return ops.linear(x, weight, bias, splits, out_dtype, out)
        step = -(-K // (8 * splits)) * 8
        parts = [ops.linear(x[:, i : i + step].contiguous(), weight[:, i : i + step].contiguous(), None, 1,
                            torch.float32) for i in range(0, K, step)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        total = (total if bias is None else total + bias.float()).to(out_dtype)
        return total if out is None else out.copy_(total)

    def paged_attention(q, k_cache, v_cache, work, scale):
        split = kv_split(work.block_tables.shape[0])
        items = [t.clone() for t in (work.prefill_items, work.decode_items)]
        for item in items:  # splits past the last key are empty, and exact no-ops
            item[:, 4] *= KV_SPLIT // split
        work = replace(work, prefill_items=items[0], decode_items=items[1], host_plans={})
        return ops.paged_attention(q, k_cache, v_cache, work, scale, kv_split=split)

    return replace(ops, linear=linear, gated_linear=lambda *args, **more: silu_and_mul(linear(*args, **more)),
                   paged_attention=paged_attention, decode_programs=0)


WHOLE = 1 << 20  # keys a split that no sequence fills: attention then has one split, and nothing to merge


def library(ops: Ops, programs: int | None = None):
    """(op table, function that fits it to a Runner): products by torch (cuBLAS on a GPU), attention by our kernel with
    as many KV splits as it takes to give the GPU `programs` programs [ops.decode_programs]."""
    programs = ops.decode_programs if programs is None else programs
    chosen = {"split": WHOLE}  # keys a split of the step being launched

    def linear(x, weight, bias, leaves, out_dtype, out=None, routing=None):
        if routing:  # torch has no product of experts that takes our rows
            return ops.linear(x, weight, bias, leaves, out_dtype, routing=routing)
        x = x.to(weight.dtype)  # on CPU the weights are fp32 whatever the model's dtype
        if weight.is_cuda and out_dtype != weight.dtype and bias is None:  # the head: 16 bits in, fp32 out
            options = {} if out is None else {"out": out}
            return torch.mm(x, weight.t(), out_dtype=out_dtype, **options)
        total = F.linear(x, weight, None if bias is None else bias.to(weight.dtype)).to(out_dtype)
        return total if out is None else out.copy_(total)

    def paged_attention(q, k_cache, v_cache, work, scale):
        return ops.paged_attention(q, k_cache, v_cache, work, scale, kv_split=chosen["split"])

    def split_for(seqs, query_tile: int, num_kv_heads: int) -> int:
        items = sum(-(-seq.num_scheduled_tokens // query_tile) for seq in seqs) * num_kv_heads
        longest = max(seq.num_computed_tokens + seq.num_scheduled_tokens for seq in seqs)
        splits = programs // items  # a power of two of keys each, or every length would be compiled anew
        return WHOLE if splits < 2 else max(KV_TILE, 1 << round(math.log2(longest / splits + 1)))

    def fit(runner) -> None:
        """Plan each step of `runner` for the split chosen for it. A CUDA graph holds the split it was captured with,
        so there is a set of graphs for each."""
        plan, graphs, config = runner._plan, defaultdict(dict), runner.model.config
        tile = ops.query_tile(config.num_heads // config.num_kv_heads, config.head_dim * runner.kv_cache.itemsize)

        def planned(seqs):
            split = chosen["split"] = split_for(seqs, tile, config.num_kv_heads)
            runner.graphs = graphs[split]
            work_module.KV_SPLIT = runner_module.KV_SPLIT = split
            try:
                return plan(seqs)
            finally:
                work_module.KV_SPLIT = runner_module.KV_SPLIT = KV_SPLIT

        runner._plan = planned

    return replace(ops, linear=linear, gated_linear=lambda *args, **more: silu_and_mul(linear(*args, **more)),
                   paged_attention=paged_attention), fit
