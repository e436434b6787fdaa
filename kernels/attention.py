"""Paged attention: one numerics for prefill, chunk and decode.

A work item (kernels/work.py) is a run of query tokens of one sequence and the KV splits it must see. A program walks
all of them, or, when decode rows alone would leave the GPU idle, a sequence's splits are dealt out to several items and
`merge_kernel` joins the partial results. Both ways add the same splits in the same order through the same `merge`."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.tiles import KV_SPLIT, KV_TILE, LONG_TABLE, AttentionSchedule


@triton.jit
def merge(total, m, l, acc):
    """Add one split to the running result, in position order. An empty split (m = -inf) is an exact no-op."""
    m_total, l_total, acc_total = total
    m_new = tl.maximum(m_total, m)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2(m_total - m_safe)
    b = tl.exp2(m - m_safe)
    return m_new, l_total * a + l * b, acc_total * a[:, None] + acc * b[:, None]


@triton.jit
def end_split(total, m, l, acc, partial_ml_ptr, partial_acc_ptr, row, mask_m, PARTIAL: tl.constexpr):
    """Hand over a finished split: to the running total, or through memory to `merge_kernel`."""
    l = tl.max(l, 1)  # 8 equal columns
    if PARTIAL:
        tl.store(partial_ml_ptr + row * 2, m, mask=mask_m)
        tl.store(partial_ml_ptr + row * 2 + 1, l, mask=mask_m)
        acc_ptrs = partial_acc_ptr + row[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
        tl.store(acc_ptrs, acc, mask=mask_m[:, None])
    else:
        total = merge(total, m, l, acc)
    return total


@triton.jit(do_not_specialize=["stride_table", "heads_at_once"])
def paged_attention_kernel(q_ptr, k_cache_ptr, v_cache_ptr, k_pages, v_pages, block_tables_ptr, positions_ptr,
                           items_ptr, counts_ptr, out, partial_ml_ptr, partial_acc_ptr, stride_table, heads_at_once,
                           scale_log2e, STRIDE: tl.constexpr, COUNT: tl.constexpr, NUM_HEADS: tl.constexpr,
                           NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
                           PARTIAL: tl.constexpr, BLOCK_M: tl.constexpr, SKIP_MASK: tl.constexpr, TMA: tl.constexpr):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows = tl.arange(0, BLOCK_M)
    offs_n, offs_d = tl.arange(0, TILE), tl.arange(0, HEAD_DIM)
    ones = tl.full((TILE, 8), 1.0, q_ptr.dtype.element_ty)
    count = tl.load(counts_ptr + COUNT)
    for work in range(tl.program_id(0), count * NUM_KV_HEADS, tl.num_programs(0)):
        kv_head = work // (count * heads_at_once) * heads_at_once + work % heads_at_once
        item_ptr = items_ptr + work // heads_at_once % count * 6
        seq = tl.load(item_ptr).to(tl.int64)
        first_token = tl.load(item_ptr + 1)
        num_query = tl.load(item_ptr + 2)
        start = tl.load(item_ptr + 3) * SPLIT
        last_split = tl.load(item_ptr + 4)
        first_row = tl.load(item_ptr + 5).to(tl.int64)  # of partial results, one a split
        first_pos = tl.load(positions_ptr + first_token)
        # Row r is token r // GROUP, head r % GROUP: the heads of a group share each tile of keys.
        mask_m = rows < num_query * GROUP
        token = first_token.to(tl.int64) + rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        row_offs = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + offs_d[None, :]
        pos = first_pos + rows // GROUP
        num_keys = first_pos + num_query  # keys that the last query of the item may see
        end = min(last_split * SPLIT, num_keys)
        # Tiles that every query of the item sees whole need no mask; with no FP fusion leaving it out changes no bit.
        full_end = max(start, min(end, first_pos + 1) // TILE * TILE) if SKIP_MASK else start
        table_ptr = block_tables_ptr + seq * stride_table
        q = tl.load(q_ptr + row_offs, mask=mask_m[:, None], other=0.0)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M, 8), tl.float32)
        acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
        total = (m, tl.zeros((BLOCK_M,), tl.float32), acc)
        block = tl.load(table_ptr + start // TILE)
        for MASKED in tl.static_range(2):
            for n in range(full_end if MASKED else start, end if MASKED else full_end, TILE):
                page = (block.to(tl.int64) * NUM_KV_HEADS + kv_head) * TILE
                block = tl.load(table_ptr + min(n + TILE, end - 1) // TILE)  # ahead: else a stage goes to this load
                offs = (page + offs_n[:, None]) * HEAD_DIM + offs_d[None, :]
                visible = (n + offs_n)[None, :] <= pos[:, None]
                if TMA and not MASKED:
                    k = k_pages.load([page.to(tl.int32), 0])
                    v = v_pages.load([page.to(tl.int32), 0])
                else:  # slots past num_keys were never written: 0 x NaN must not reach the sum
                    written = (n + offs_n < num_keys)[:, None] if MASKED else True
                    k = tl.load(k_cache_ptr + offs, mask=written, other=0.0)
                    v = tl.load(v_cache_ptr + offs, mask=written, other=0.0)
                row = ((first_row + (n - start) // SPLIT - 1) * NUM_KV_HEADS + kv_head) * GROUP + rows
                fresh = (n % SPLIT == 0) & (n > start)  # this tile begins a split; `row` is of the one before
                # One step of the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
                scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, TILE]
                if MASKED:
                    scores = tl.where(visible, scores, float("-inf"))
                m_old = tl.where(fresh, float("-inf"), m)
                m_new = tl.maximum(m_old, tl.max(scores, 1) * scale_log2e)
                m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
                p = tl.exp2(tl.fma(scores, scale_log2e, -m_safe[:, None])).to(v.dtype)
                alpha = tl.exp2(m_old - m_safe)[:, None]
                # The split before is handed over only after q k^T: then its last p v runs beside that on the tensor
                # cores, and the loop over tiles never drains at the end of a split.
                if fresh:
                    # m, for any finite score; but the compiler may not move what waits for p v ahead of q k^T.
                    m_ended = tl.where(m_safe == float("inf"), m_safe, m)
                    total = end_split(total, m_ended, l, acc, partial_ml_ptr, partial_acc_ptr, row, mask_m, PARTIAL)
                    l, acc = tl.zeros_like(l), tl.zeros_like(acc)
                # The row sum is a dot with ones: `tl.sum` would follow the layout, and so the schedule (design law 2).
                l = tl.dot(p, ones, l * alpha, input_precision="ieee")
                acc = tl.dot(p, v, acc * alpha, input_precision="ieee")
                m = m_new
        row = ((first_row + (end - 1 - start) // SPLIT) * NUM_KV_HEADS + kv_head) * GROUP + rows
        _, l_total, acc_total = end_split(total, m, l, acc, partial_ml_ptr, partial_acc_ptr, row, mask_m, PARTIAL)
        if not PARTIAL:
            result = (acc_total / l_total[:, None]).to(q.dtype)
            for i in tl.static_range(len(out)):
                out_ptrs = out[i] + (token * STRIDE + head * HEAD_DIM)[:, None] + offs_d[None, :]
                tl.store(out_ptrs, result, mask=mask_m[:, None])


@triton.jit
def merge_kernel(merges_ptr, counts_ptr, out, partial_ml_ptr, partial_acc_ptr, STRIDE: tl.constexpr,
                 COUNT: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr):
    offs_d = tl.arange(0, HEAD_DIM)
    for work in range(tl.program_id(0), tl.load(counts_ptr + COUNT) * NUM_HEADS, tl.num_programs(0)):
        head = work % NUM_HEADS
        merge_ptr = merges_ptr + work // NUM_HEADS * 3
        token, first = tl.load(merge_ptr).to(tl.int64), tl.load(merge_ptr + 1).to(tl.int64)
        m_total = tl.full((1,), float("-inf"), tl.float32)
        l_total = tl.zeros((1,), tl.float32)
        acc_total = tl.zeros((1, HEAD_DIM), tl.float32)
        for i in tl.range(0, tl.load(merge_ptr + 2), num_stages=STAGES):
            row = (first + i) * NUM_HEADS + head + tl.arange(0, 1)
            m = tl.load(partial_ml_ptr + row * 2)
            l = tl.load(partial_ml_ptr + row * 2 + 1)
            acc = tl.load(partial_acc_ptr + row[:, None] * HEAD_DIM + offs_d[None, :])
            m_total, l_total, acc_total = merge((m_total, l_total, acc_total), m, l, acc)
        result = (acc_total / l_total[:, None]).to(out[0].dtype.element_ty)
        for i in tl.static_range(len(out)):
            tl.store(out[i] + token * STRIDE + head * HEAD_DIM + offs_d[None, :], result)


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work, scale: float,
                    decode: AttentionSchedule, prefill: AttentionSchedule, out: list[torch.Tensor] | None = None,
                    kv_split: int = KV_SPLIT) -> torch.Tensor:
    """Causal attention of every query over its sequence's pages (Dao et al. 2022; Kwon et al. 2023 for the paging).

    q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32
    k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], dtype of q; the keys of this step are in it
    work: kernels.work.AttentionWork: block tables, positions and the lists of work items
    scale: multiplies q k^T; kv_split: keys a split (numerics: only a deliberately different twin passes another)
    out: [num_tokens, num_heads * head_dim], dtype of q, some of one row stride that all get the result
    returns [num_tokens, num_heads, head_dim] or the first `out`; rows of no item are left unwritten

    Reduction order: keys in tiles of KV_TILE from position 0, online softmax in tile order inside splits of KV_SPLIT
        at absolute positions, splits merged in position order; head_dim and tile sums are fp32 `tl.dot` chains.
    Schedule: BLOCK_M, warps, stages, masks on full tiles, who walks which splits and when; all may follow the batch."""
    (_, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[1]
    rows = triton.next_power_of_2(num_heads // num_kv_heads)  # of one query token
    outs = tuple(out or [torch.empty_like(q)])
    stride = outs[0].stride(0)
    ml, acc = (q.new_empty((max(1, work.max_partials), num_heads, n), dtype=torch.float32) for n in (2, head_dim))
    few_heads = num_kv_heads if num_kv_heads % 2 else 1 if work.block_tables.shape[1] > LONG_TABLE else 2
    launches = ((work.prefill_items, prefill, False, few_heads),
                (work.decode_items, decode, work.max_partials > 0, num_kv_heads))
    for count, (items, schedule, partial, heads_at_once) in enumerate(launches):
        if work.grid[count]:
            pages = [TensorDescriptor.from_tensor(c.view(-1, head_dim), [KV_TILE, head_dim]) if schedule.tma else c
                     for c in (k_cache, v_cache)]
            paged_attention_kernel[(work.grid[count] * num_kv_heads,)](
                q, k_cache, v_cache, *pages, work.block_tables, work.positions, items, work.counts, outs, ml, acc,
                work.block_tables.stride(0), heads_at_once, scale * 1.4426950408889634, stride, count, num_heads,
                num_kv_heads, head_dim, KV_TILE, kv_split, partial, max(schedule.BLOCK_M, rows), schedule.skip_mask,
                schedule.tma, num_warps=schedule.num_warps, num_stages=schedule.num_stages, enable_fp_fusion=False)
    if work.max_partials:
        merge_kernel[(work.grid[2] * num_heads,)](work.merges, work.counts, outs, ml, acc, stride, 2, num_heads,
                                                  head_dim, 4, num_warps=1, enable_fp_fusion=False)
    return outs[0]
