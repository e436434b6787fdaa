"""Prefill attention on Hopper: the arithmetic of kernels/attention.py, so its bits, by warps that do not walk in step.

Of a program's 128 rows of queries two warpgroups have 64 each; one more warp fetches the pages that both read. While
the tensor cores multiply for one, the other computes its softmax, and each runs p v of a tile beside q k^T and softmax
of the next (as FlashAttention-3 does: Shah et al. 2024, arXiv:2407.08608). In Gluon, where a program says which warp
does what; Triton's own compiler does not on Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels import attention

STAGES = gl.constexpr(4)  # pages of keys, and as many of values, that shared memory holds
merge = gluon.jit(attention.merge.fn)


@gluon.jit
def at(ring, kind: gl.constexpr, tile):
    """Kinds of pages: keys, values. Of barriers: keys are there, values are, keys were read by both, values were."""
    return ring.index(kind * STAGES + tile % STAGES)


@gluon.jit
def wait(barriers, kind: gl.constexpr, tile):
    hopper.mbarrier.wait(at(barriers, kind, tile), tile // STAGES & 1 ^ kind // 2)


@gluon.jit
def fetch(k_pages, v_pages, pages, barriers, table_ptr, kv_head, keys, NUM_KV_HEADS: gl.constexpr, TILE: gl.constexpr):
    for tile in range(gl.cdiv(keys, TILE)):
        page = (gl.load(table_ptr + tile) * NUM_KV_HEADS + kv_head) * TILE
        for i in gl.static_range(2):
            wait(barriers, 2 + i, tile)
            there = at(barriers, i, tile)
            hopper.mbarrier.expect(there, k_pages.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(v_pages if i else k_pages, [page, 0], there, at(pages, i, tile))


@gluon.jit
def softmax(scores, m_old, n, pos, full_end, scale_log2e):
    """(m, p, alpha) of one step; keys from `full_end` on are not seen by every row."""
    if n + scores.shape[1] > full_end:
        offs_n = n + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(offs_n[None, :] <= pos[:, None], scores, float("-inf"))
    m = gl.maximum(m_old, gl.max(scores, 1) * scale_log2e)
    m_safe = gl.where(m == float("-inf"), 0.0, m)
    return m, gl.exp2(gl.fma(scores, scale_log2e, -m_safe[:, None])), gl.exp2(m_old - m_safe)


@gluon.jit
def weigh(p, ones, v, l, acc, add):
    """Begin p 1 and p v, on top of l and acc, or alone: the first tile of a split has nothing to add to."""
    p_l = gl.convert_layout(p, gl.DotOperandLayout(0, l.type.layout, 2))
    p_acc = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2))
    l = hopper.warpgroup_mma(p_l, ones, l, use_acc=add, is_async=True)
    return l, hopper.warpgroup_mma(p_acc, v, acc, use_acc=add, is_async=True)


@gluon.jit
def end_split(total, m, l, acc):
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    l = gl.convert_layout(gl.max(l, 1), ROWS, assert_trivial=True)  # 8 equal columns
    return merge(total, gl.convert_layout(m, ROWS, assert_trivial=True), l, acc)


@gluon.jit
def scaled(x, alpha):
    return x * gl.convert_layout(alpha, gl.SliceLayout(1, x.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def compute(shared, HALF: gl.constexpr, STRIDE: gl.constexpr, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr,
            SPLIT: gl.constexpr):
    """A warpgroup's rows: row r of the program is token r // GROUP, head r % GROUP."""
    q_ptr, out, queries, pages, ones, barriers, first_token, num_query, first_pos, head, keys, scale_log2e = shared
    TILE: gl.constexpr = pages.shape[1]
    HEAD_DIM: gl.constexpr = pages.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    rows = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, MEMORY))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, MEMORY))[None, :]
    token, columns = (first_token + rows // GROUP)[:, None], (head + rows % GROUP)[:, None] * HEAD_DIM + offs_d
    mask_m = (rows < num_query * GROUP)[:, None]
    full_end = first_pos + HALF * 64 // GROUP + 1
    pos = first_pos + (HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))) // GROUP
    q = queries.index(HALF)
    q.store(gl.load(q_ptr + token * (NUM_HEADS * HEAD_DIM) + columns, mask=mask_m, other=0.0))
    hopper.fence_async_shared()
    no_scores = gl.zeros((64, TILE), gl.float32, SCORES)
    no_m = gl.full((64,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    no_l = gl.zeros((64,), gl.float32, gl.SliceLayout(1, ACC))
    l, acc = gl.zeros((64, 8), gl.float32, SUM), gl.zeros((64, HEAD_DIM), gl.float32, ACC)
    total = gl.convert_layout(no_m, gl.SliceLayout(1, ACC)), no_l, acc
    wait(barriers, 0, 0)
    scores = hopper.warpgroup_mma(q, at(pages, 0, 0).permute((1, 0)), no_scores, use_acc=False)
    hopper.mbarrier.arrive(at(barriers, 2, 0))
    m, p, alpha = softmax(scores, no_m, 0, pos, full_end, scale_log2e)
    p = p.to(q.dtype)
    for n in range(TILE, keys, TILE):
        # q k^T of this tile and p v of the one before are under way together, the latter beside this one's softmax.
        tile = n // TILE
        wait(barriers, 0, tile)
        wait(barriers, 1, tile - 1)
        k = at(pages, 0, tile).permute((1, 0))
        scores = hopper.warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
        l_new, acc_new = weigh(p, ones, at(pages, 1, tile - 1), l, acc, n % SPLIT != TILE)
        scores = hopper.warpgroup_mma_wait(2, (scores,))
        hopper.mbarrier.arrive(at(barriers, 2, tile))
        m_ended = m
        m, p, alpha = softmax(scores, gl.where(n % SPLIT == 0, no_m, m), n, pos, full_end, scale_log2e)
        # What the softmax gave goes through the wait, behind a branch: else the compiler would wait before it.
        if n % SPLIT == 0:
            l, acc, p, alpha = hopper.warpgroup_mma_wait(0, (l_new, acc_new, p, alpha))
            total = end_split(total, m_ended, l, acc)
        else:
            acc, l, p, alpha = hopper.warpgroup_mma_wait(0, (acc_new, l_new, p, alpha))
            l, acc = scaled(l, alpha), scaled(acc, alpha)
        p = p.to(q.dtype)
        hopper.mbarrier.arrive(at(barriers, 3, tile - 1))
    last = (keys - 1) // TILE
    wait(barriers, 1, last)
    v = at(pages, 1, last)
    if keys % TILE:  # slots past `keys` were never written: 0 x NaN must not reach the sum
        for i in gl.static_range(4):
            part = v.slice(TILE // 4 * i, TILE // 4)
            written = TILE // 4 * i + gl.arange(0, TILE // 4, gl.SliceLayout(1, MEMORY)) < keys % TILE
            part.store(gl.where(written[:, None], part.load(MEMORY), 0.0))
        hopper.fence_async_shared()
    l, acc = weigh(p, ones, v, l, acc, (keys - 1) % SPLIT >= TILE)
    l, acc = hopper.warpgroup_mma_wait(0, (l, acc))
    _, l_total, acc_total = end_split(total, m, l, acc)
    q.store((acc_total / l_total[:, None]).to(q.dtype))  # one store a row of memory, not one a fragment
    result = q.load(MEMORY)
    for i in gl.static_range(len(out)):
        gl.store(out[i] + token * STRIDE + columns, result, mask=mask_m)


@gluon.jit(do_not_specialize=["stride_table"])
def prefill_kernel(q_ptr, k_pages, v_pages, block_tables_ptr, positions_ptr, items_ptr, out, stride_table, scale_log2e,
                   STRIDE: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, SPLIT: gl.constexpr):
    TILE: gl.constexpr = k_pages.block_type.shape[0]
    HEAD_DIM: gl.constexpr = k_pages.block_type.shape[1]
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    queries = gl.allocate_shared_memory(k_pages.dtype, [2, 64, HEAD_DIM], k_pages.layout)
    pages = gl.allocate_shared_memory(k_pages.dtype, [2 * STAGES, TILE, HEAD_DIM], k_pages.layout)
    one = gl.full((8, TILE), 1.0, k_pages.dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    ones = gl.allocate_shared_memory(k_pages.dtype, [8, TILE], k_pages.layout, one).permute((1, 0))
    hopper.fence_async_shared()
    barriers = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(4 * STAGES):
        hopper.mbarrier.init(barriers.index(i), count=1 + i // (2 * STAGES))
    item_ptr, kv_head = items_ptr + gl.program_id(0) // NUM_KV_HEADS * 6, gl.program_id(0) % NUM_KV_HEADS
    first_token, num_query = gl.load(item_ptr + 1), gl.load(item_ptr + 2)
    first_pos = gl.load(positions_ptr + first_token)
    table_ptr, keys = block_tables_ptr + gl.load(item_ptr).to(gl.int64) * stride_table, first_pos + num_query
    shared = (q_ptr, out, queries, pages, ones, barriers, first_token.to(gl.int64), num_query, first_pos,
              kv_head * GROUP, keys, scale_log2e)
    gl.warp_specialize([
        (compute, (shared, 0, STRIDE, NUM_HEADS, GROUP, SPLIT)),
        (compute, (shared, 1, STRIDE, NUM_HEADS, GROUP, SPLIT)),
        (fetch, (k_pages, v_pages, pages, barriers, table_ptr, kv_head, keys, NUM_KV_HEADS, TILE))], [4, 1], [240, 24])


def pages_of(cache):
    """A cache of 16-bit heads of 64 or 128 as the copy engine sees it: page by page, swizzled for the tensor cores."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    return TensorDescriptor.from_tensor(cache.view(-1, cache.shape[3]), list(cache.shape[2:]), layout)
