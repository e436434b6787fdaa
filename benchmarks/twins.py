"""A batch-dependent twin of the op table: what other engines do, for tests and measurements that need the flaw.

Split counts follow the number of rows and sequences, as engines choose them to fill a GPU. Everything else, the
kernels included, is the same.
"""

from dataclasses import replace

import torch

from kernels import Ops
from kernels.tiles import KV_SPLIT, KV_TILE


def k_splits(num_rows: int) -> int:
    """Fewer rows, fewer tiles, more programs that share K."""
    return 8 if num_rows <= 4 else 4 if num_rows <= 32 else 2 if num_rows <= 128 else 1


def kv_split(num_seqs: int) -> int:
    """Keys a split: fewer sequences, shorter splits."""
    return KV_TILE if num_seqs <= 8 else 2 * KV_TILE if num_seqs <= 64 else 4 * KV_TILE


def batch_dependent(ops: Ops) -> Ops:
    """`ops` with K and KV split counts that follow the batch."""

    def linear(x, weight, bias, leaves, out_dtype, out=None):
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

    return replace(ops, linear=linear, paged_attention=paged_attention, split_decode=lambda num_seqs, heads: False)
