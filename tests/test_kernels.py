"""Each op against a float64 formula, on odd sizes and poisoned outputs: Triton (interpreted if need be) and torch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import DEVICE, HAS_GPU

import kernels
from kernels import reference, same_bits, tiles
from kernels.tiles import KV_TILE, leaf_count
from kernels.work import AttentionWork, plan_decode, plan_prefill

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
pytestmark = pytest.mark.usefixtures("poisoned")


def place(ops, tensor):
    return tensor.to(DEVICE if ops.name == "triton" else "cpu")


def random(ops, *shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return place(ops, (torch.randn(*shape, generator=generator) * scale).to(dtype))


def close(actual, expected, dtype):
    error = (actual.double().cpu() - expected.cpu()).norm() / expected.cpu().norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"  # NaN fails too


@pytest.mark.parametrize("M, N, K, bias", [(1, 70, 96, True), (17, 130, 200, False), (65, 64, 2304, False)])
def test_linear(ops, dtype, M, N, K, bias):
    x, w = random(ops, M, K, dtype=dtype), random(ops, N, K, dtype=dtype, seed=1, scale=K**-0.5)
    b = random(ops, N, dtype=dtype, seed=2) if bias else None
    leaves = leaf_count(N, K)
    expected = x.double() @ w.double().T + (b.double() if bias else 0)
    close(ops.linear(x, w, b, leaves, dtype), expected, dtype)
    out = ops.linear(x, w, b, leaves, torch.float32)
    assert out.dtype == torch.float32
    close(out, expected, torch.float32 if dtype == torch.float32 else torch.float16)


@pytest.mark.parametrize("tma", [False, True])
def test_leaves_in_programs_of_their_own_add_up_the_same(dtype, tma):
    """The last program to arrive adds the leaves in order, and leaves the counters at zero for the next sum."""
    from kernels.linear import linear

    x, w, b = (torch.randn(*shape, generator=torch.Generator().manual_seed(i)).to(dtype).to(DEVICE)
               for i, shape in enumerate(((5, 512), (160, 512), (160,))))
    split = tiles.LinearSchedule(16, 64, 64, 4, 3, split=True, tma=tma)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    found = [linear(x, w, b, 2, torch.float32, one, arrived) for one in (split, split, replace(split, split=False))]
    close(found[0], x.double() @ w.double().T + b.double(), torch.float16)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2]) and not arrived.any()


def test_linear_fp32_is_not_tf32(ops):
    """Field bug 3: 1 x 2049 must be exact."""
    x = place(ops, torch.ones(1, 1))
    w = place(ops, torch.arange(8192, dtype=torch.float32)[:, None].contiguous())
    assert ops.linear(x, w, None, 1, torch.float32)[0].tolist() == list(range(8192))


@pytest.mark.parametrize("N", [64, 576])
def test_rms_norm(ops, dtype, N):
    x, w = random(ops, 5, N, dtype=dtype, scale=3.0), random(ops, N, dtype=dtype, seed=1)
    residual = random(ops, 5, N, dtype=dtype, seed=2)

    def formula(x):
        return x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()

    close(ops.rms_norm(x, w, 1e-6), formula(x), dtype)
    summed = (residual.float() + x.float()).to(dtype)
    close(ops.rms_norm(x, w, 1e-6, residual), formula(summed), dtype)
    assert same_bits(residual, summed), "the residual is updated in place, rounded once"


def test_rms_norm_fused_is_unfused(ops, dtype):
    x, w = random(ops, 9, 576, dtype=dtype, scale=2.0), random(ops, 576, dtype=dtype, seed=1)
    residual = random(ops, 9, 576, dtype=dtype, seed=2)
    unfused = ops.rms_norm((residual.float() + x.float()).to(dtype), w, 1e-6)
    assert same_bits(ops.rms_norm(x, w, 1e-6, residual), unfused)


@pytest.mark.parametrize("M, N, K, bias", [(1, 70, 96, True), (17, 202, 200, False), (65, 64, 2304, True)])
def test_gated_linear(ops, dtype, M, N, K, bias):
    """Rows of the weight are gate's and up's in turn; both are rounded, and SwiGLU of them once more."""
    x, w = random(ops, M, K, dtype=dtype), random(ops, N, K, dtype=dtype, seed=1, scale=3 * K**-0.5)
    b = random(ops, N, dtype=dtype, seed=2) if bias else None
    rounded = ops.linear(x, w, b, leaf_count(N, K), dtype).double()
    found = ops.gated_linear(x, w, b, leaf_count(N, K), dtype)
    assert found.dtype == dtype and found.shape == (M, N // 2)
    gate, up = rounded[:, ::2], rounded[:, 1::2]
    close(found, gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_reference_gated_linear_is_the_formula_over_halves(dtype):
    """The bits of gate's and up's rows one below the other, multiplied, cut in halves and put through SwiGLU."""
    ops = kernels.reference_ops()
    for M, N, K, leaves in ((1, 128, 64, 1), (5, 176, 96, 1), (33, 64, 2304, 2)):
        x, gate, up = (random(ops, *shape, dtype=dtype, seed=i, scale=3 * K**-0.25).cpu()
                       for i, shape in enumerate(((M, K), (N // 2, K), (N // 2, K))))
        gate, up = gate.float(), up.float()  # as the CPU backend keeps them
        bias = torch.linspace(-1, 1, N)
        for b in (bias, None):
            halves = ops.linear(x, torch.cat([gate, up]), b, leaves, dtype).float()
            a, c = halves.chunk(2, dim=1)
            expected = (a / reference.by_lanes(torch.exp, -a).add_(1.0)).mul_(c).to(dtype)
            in_turn = b if b is None else torch.stack(b.chunk(2), 1).flatten()
            found = ops.gated_linear(x, torch.stack([gate, up], 1).flatten(0, 1), in_turn, leaves, dtype)
            assert same_bits(found, expected)


@pytest.mark.parametrize("M, N, K, leaves, options", [
    (5, 160, 512, 1, {}), (5, 160, 512, 1, {"tma": True}), (70, 176, 512, 1, {"tma": True, "BLOCK_M": 64}),
    (5, 160, 512, 2, {}), (5, 160, 512, 2, {"split": True}), (5, 160, 512, 2, {"split": True, "tma": True}),
    (3, 70, 128, 1, {"tma": True}),  # 35 columns: rows of the result start where the copy engine cannot
    (9, 130, 200, 1, {"BLOCK_N": 32})], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_product_is_the_product_then_swiglu(dtype, bias, M, N, K, leaves, options):
    """Bit for bit SwiGLU as a kernel of its own, through pointers and the copy engine, leaves together and apart."""
    from benchmarks.silu import silu_and_mul
    from kernels.linear import linear

    x, w, b = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype).to(DEVICE)
               for i, shape in enumerate(((M, K), (N, K), (N,))))
    x *= 3 * K**-0.5
    schedule = replace(tiles.FP32 if dtype == torch.float32 else tiles.LinearSchedule(16, 64, 64, 4, 3), **options)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    args = x, w, b if bias else None, leaves, dtype, schedule, arrived
    found = linear(*args, gated=True)
    assert not arrived.any() and same_bits(found, silu_and_mul(linear(*args)))
    out = torch.empty_like(found)
    assert linear(*args, out, gated=True) is out and same_bits(out, found)
    if not HAS_GPU:  # an interpreted exp is NumPy's
        gate, up = linear(*args).float().view(M, -1, 2).unbind(2)
        exp = torch.from_numpy(np.exp(-gate.numpy()))
        assert same_bits(found, (gate / (1.0 + exp) * up).to(dtype))


def test_embedding(ops, dtype):
    weight = random(ops, 11, 96, dtype=dtype)
    ids, drawn = torch.tensor([10, 0, 3, -2, -1, -3], dtype=torch.int32), torch.tensor([7, 1, 2**31 - 1])
    expected = weight[place(ops, torch.tensor([10, 0, 3, 1, 7, 10]))]  # a broken row's token reads the last row
    assert same_bits(ops.embedding(place(ops, ids), weight, dtype, place(ops, drawn)), expected)


def tokens_only(positions, slots):
    """A step's work without attention: where tokens stand and where their keys go."""
    none = torch.zeros((0, 1), dtype=torch.int32)
    return AttentionWork(positions, slots, none, none, none, none, none, (0, 0, 0), max_partials=0)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads, kv_heads, D", [(6, 2, 32), (9, 3, 64)])
def test_rotary_and_cache(ops, dtype, norm, heads, kv_heads, D):
    tokens, total = 4, heads + 2 * kv_heads
    qkv = random(ops, tokens, total * D, dtype=dtype)
    weights = [random(ops, D, dtype=dtype, seed=s) for s in (1, 2)] if norm else [None, None]
    table = random(ops, 300, D, seed=3)
    positions = place(ops, torch.tensor([0, 5, 299, 7], dtype=torch.int32))
    slots = place(ops, torch.tensor([0, 70, -1, 191], dtype=torch.int32))
    k_cache, v_cache = (place(ops, torch.full((3, kv_heads, KV_TILE, D), float("nan"), dtype=dtype)) for _ in range(2))
    q = ops.rotary_and_cache(qkv, *weights, 1e-6, table, tokens_only(positions, slots), k_cache, v_cache, heads)

    x = qkv.double().view(tokens, total, D).cpu()
    parts = list(x.split([heads, kv_heads, kv_heads], 1))
    for i in range(2):
        if norm:
            parts[i] = parts[i] / (parts[i].square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[i].double().cpu()
        cos, sin = table[positions.long()].double().cpu()[:, None].chunk(2, -1)
        a, b = parts[i].chunk(2, -1)
        parts[i] = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    close(q, parts[0], dtype)
    for cache, part in ((k_cache, parts[1]), (v_cache, parts[2])):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                close(cache[slot // KV_TILE, :, slot % KV_TILE], part[token], dtype)
        written = sum(slot >= 0 for slot in slots.tolist()) * kv_heads * D
        assert int(cache.isfinite().sum()) == written, "nothing else is written; slot -1 writes nothing"
    assert same_bits(v_cache[1, :, 6], qkv.view(tokens, total, D)[1, heads + kv_heads :]), "values are copied"


def attention_case(ops, dtype, query_lens, seq_lens, heads, kv_heads, D, split, seed=0):
    """Random q and a scattered cache, NaN where no key was written; returns the op's arguments and the dense K, V."""
    pages = [-(-n // KV_TILE) for n in seq_lens]
    order = np.random.default_rng(seed).permutation(sum(pages) + 2)
    tables = np.zeros((len(seq_lens), max(pages)), np.int32)
    k_cache = torch.full((len(order), kv_heads, KV_TILE, D), float("nan"), dtype=dtype)
    v_cache = k_cache.clone()
    dense, used = [], 0
    for i, n in enumerate(seq_lens):
        tables[i, : pages[i]] = order[used : used + pages[i]]
        used += pages[i]
        k, v = (torch.randn(n, kv_heads, D, generator=torch.Generator().manual_seed(seed + 2 * i + j)).to(dtype)
                for j in range(2))
        slots = tables[i, np.arange(n) // KV_TILE].astype(np.int64), np.arange(n) % KV_TILE
        k_cache[torch.from_numpy(slots[0]), :, torch.from_numpy(slots[1])] = k
        v_cache[torch.from_numpy(slots[0]), :, torch.from_numpy(slots[1])] = v
        dense.append((k.double(), v.double()))
    starts = np.cumsum(query_lens) - np.array(query_lens)
    positions = np.concatenate([np.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
    prefill = plan_prefill(starts, query_lens, seq_lens, ops.query_tile(heads // kv_heads, D * dtype.itemsize))
    decode, merges = plan_decode(starts, query_lens, seq_lens, 3 if split else 0)
    counts = len(prefill), len(decode), len(merges)
    tensors = [place(ops, torch.from_numpy(np.ascontiguousarray(a, dtype=np.int32)))
               for a in (positions, positions, tables, prefill, decode, merges, counts)]
    grid = len(prefill), min(3, len(decode)) if split else len(decode), len(merges)
    work = AttentionWork(*tensors, grid, max_partials=sum(pages) if split else 0)
    q = random(ops, sum(query_lens), heads, D, dtype=dtype, seed=99)
    return (q, place(ops, k_cache), place(ops, v_cache), work, D**-0.5), dense


def attention_formula(q, dense, query_lens, scale):
    rows, start = [], 0
    for (k, v), count in zip(dense, query_lens, strict=True):
        n, group = len(k), q.shape[1] // k.shape[1]
        for i in range(count):
            seen = n - count + i + 1
            keys, values = (t[:seen].repeat_interleave(group, 1) for t in (k, v))
            p = torch.einsum("hd,nhd->hn", q[start + i].double().cpu(), keys).mul(scale).softmax(-1)
            rows.append(torch.einsum("hn,nhd->hd", p, values))
        start += count
    return torch.stack(rows)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("heads, kv_heads, D", [(4, 2, 32), (3, 1, 64)])
def test_paged_attention(ops, dtype, heads, kv_heads, D, split):
    query_lens, seq_lens = [1, 70, 1, 3], [300, 70, 1, 131]
    args, dense = attention_case(ops, dtype, query_lens, seq_lens, heads, kv_heads, D, split)
    close(ops.paged_attention(*args), attention_formula(args[0], dense, query_lens, D**-0.5), dtype)


@pytest.mark.parametrize("D", [128, 256])
def test_paged_attention_head_dims(ops, D):
    args, dense = attention_case(ops, torch.float16, [2, 1], [66, 257], 2, 1, D, True)
    close(ops.paged_attention(*args), attention_formula(args[0], dense, [2, 1], D**-0.5), torch.float16)


@pytest.mark.parametrize("split", [False, True])
def test_pages_through_the_copy_engine_are_the_same_pages(split):
    """Tiles fetched by descriptor, splits ended inside the loop over tiles: the same bits as by pointers."""
    tables = [replace(tiles.CONSERVATIVE, decode=(tiles.AttentionSchedule(16, 4, 2, tma=tma),) * 2,
                      prefill=tiles.AttentionSchedule(64, 4, 2, tma=tma)) for tma in (False, True)]
    query_lens, seq_lens = [1, 40, 1], [1300, 331, 256]
    found = []
    for ops in (kernels.triton_ops(DEVICE, table=table) for table in tables):
        args, dense = attention_case(ops, torch.float16, query_lens, seq_lens, 4, 2, 32, split)
        found.append(ops.paged_attention(*args))
    close(found[0], attention_formula(args[0], dense, query_lens, 32**-0.5), torch.float16)
    assert same_bits(*found)


def test_prefill_walks_heads_in_any_order(monkeypatch):
    """By twos and, where a table is long, one by one: every item meets every head, with the same bits."""
    from kernels import attention

    class Seen:
        def __getitem__(self, grid):
            return lambda *args, **options: orders.append(args[13]) or kernel[grid](*args, **options)

    kernel, orders, ops = attention.paged_attention_kernel, [], kernels.triton_ops(DEVICE)
    assert kernel.arg_names[13] == "heads_at_once"
    monkeypatch.setattr(attention, "paged_attention_kernel", Seen())
    args, dense = attention_case(ops, torch.float16, [70, 70, 1], [70, 131, 9], 4, 4, 32, False)  # items, too, are even
    long = replace(args[3], block_tables=torch.nn.functional.pad(args[3].block_tables, (0, tiles.LONG_TABLE)))
    found = [ops.paged_attention(*args[:3], work, args[4]) for work in (args[3], long)]
    close(found[0], attention_formula(args[0], dense, [70, 70, 1], 32**-0.5), torch.float16)
    assert same_bits(*found) and orders == [2, 4, 1, 4], "decode's are all at once"


def test_decode_walked_and_split_give_the_same_bits():
    """One program over all splits against runs of them and a merge: what a split hands over may not depend on which."""
    ops = kernels.triton_ops(DEVICE)
    found = [ops.paged_attention(*attention_case(ops, torch.float16, [1, 1], [1300, 600], 4, 2, 32, split)[0])
             for split in (False, True)]
    assert same_bits(*found)


@pytest.mark.parametrize("slots", [1, 4, 7, 15, 33])
def test_decode_is_dealt_out_in_even_shares(slots):
    lens = [256 * 9, 50, 100, 256 * 4 + 1]  # the second is a prefill
    items, merges = plan_decode([0, 1, 51, 52], [1, 50, 1, 1], lens, slots)
    assert merges.tolist() == [[0, 0, 9], [51, 9, 1], [52, 10, 5]]
    used = min(slots, 15)
    assert len(items) % used == 0
    sizes = items[:, 4] - items[:, 3]
    shares = [int(sizes[slot::used].sum()) for slot in range(used)]
    assert sum(shares) == 15 and max(shares) - min(shares) <= 1
    assert not items[sizes == 0].any(), "an empty item is of no query"
    for seq, token, count, start, end, row in items[sizes > 0].tolist():
        _, first, splits = merges[[0, 2, 3].index(seq)]
        assert count == 1 and token == [0, 1, 51, 52][seq] and 0 <= start < end <= splits and row == first + start
    rows = sorted(row for item in items.tolist() for row in range(item[5], item[5] + item[4] - item[3]))
    assert rows == list(range(15)), "each split once"


def test_decode_that_is_not_dealt_out():
    whole, none = plan_decode([0, 1, 2], [1, 1, 1], [256 * 9, 100, 256 * 4 + 1], 0)
    assert whole[:, [0, 3, 4]].tolist() == [[0, 0, 9], [2, 0, 5], [1, 0, 1]] and none.shape == (0, 3)


def test_logprobs(ops):
    logits = random(ops, 3, 1003, scale=5.0)
    logits[1, 7] = logits[1, 500] = logits[1].max() + 1  # a tie: the lower id comes first
    logits[2, 10:] = float("-inf")
    tokens = place(ops, torch.tensor([0, 500, 3]))
    values, ids, tops = ops.logprobs(logits, tokens, 4)
    expected = logits.double().log_softmax(-1).cpu()
    assert torch.allclose(values.double().cpu(), expected.gather(1, tokens.cpu()[:, None])[:, 0], atol=2e-6, rtol=0)
    assert ids[1, :2].tolist() == [7, 500]
    assert torch.equal(tops.cpu()[0], values.new_tensor(expected[0].topk(4).values.tolist()).cpu()) or torch.allclose(
        tops.double().cpu()[0], expected[0].topk(4).values, atol=2e-6, rtol=0)
    again, _, _ = ops.logprobs(logits, tokens, 0)
    assert same_bits(again, values), "a token's logprob does not depend on how many alternatives are asked for"
    assert same_bits(ops.logprobs(logits[1:2].contiguous(), tokens[1:2], 4)[0], values[1:2])


def test_argmax_takes_the_lowest_id_of_a_tie(ops):
    """Field bug 88."""
    logits = random(ops, 4, 1003)
    logits[0, [5, 900]] = logits[1, [0, 1002]] = 21.375
    logits[2] = -0.0
    logits[2, 30:] = 0.0
    assert ops.argmax(logits[:3].contiguous()).tolist() == [5, 0, 0]


def test_argmax_of_a_broken_row_is_no_token(ops):
    logits = random(ops, 3, 1003)
    logits[0] = float("-inf")
    logits[1, 700] = float("nan")
    assert [t >= 1003 for t in ops.argmax(logits).tolist()] == [True, True, False]


def draw(ops, logits, temperature=1.0, top_k=10**6, top_p=1.0, min_p=0.0, seeds=(0,), position=5):
    """Draws from one row, one a seed."""
    n = len(seeds)
    return ops.sample(
        logits.expand(n, -1).contiguous(), place(ops, torch.full((n,), temperature)),
        place(ops, torch.full((n,), top_k)), place(ops, torch.full((n,), round(top_p * 2**30))),
        place(ops, torch.full((n,), math.log(min_p) if min_p else -math.inf)), place(ops, torch.tensor(list(seeds))),
        place(ops, torch.full((n,), position, dtype=torch.int32)))


def test_sample_cuts(ops):
    logits = place(ops, torch.log(torch.tensor([0.05, 0.4, 0.05, 0.2, 0.2, 0.05, 0.05])))
    seeds = range(40)
    assert set(draw(ops, logits, top_k=1, seeds=seeds).tolist()) == {1}
    assert set(draw(ops, logits, top_k=2, seeds=seeds).tolist()) == {1, 3}, "ties at the cut: the lowest id"
    assert set(draw(ops, logits, top_k=3, seeds=seeds).tolist()) == {1, 3, 4}
    assert set(draw(ops, logits, top_p=0.39, seeds=seeds).tolist()) == {1}
    assert set(draw(ops, logits, top_p=0.55, seeds=seeds).tolist()) == {1, 3}
    assert set(draw(ops, logits, top_k=3, top_p=0.7, seeds=seeds).tolist()) == {1, 3}, "top-p renormalises after top-k"
    assert set(draw(ops, logits, min_p=0.4, seeds=seeds).tolist()) == {1, 3, 4}
    assert set(draw(ops, logits, temperature=1e-6, seeds=seeds).tolist()) == {1}, "field bug 90"


def test_sample_follows_the_distribution(ops):
    """Chi-square over 8 tokens; 24.3 is the 0.1 % point at 7 degrees of freedom (seeds are fixed: no false alarms)."""
    p = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02])
    n = 2000 if HAS_GPU or ops.name == "reference" else 300
    counts = torch.bincount(draw(ops, place(ops, p.log()), seeds=range(n)).cpu(), minlength=8)
    assert float(((counts - n * p) ** 2 / (n * p)).sum()) < 24.3


def test_noise_is_the_same_everywhere():
    """Philox against the published test vectors, and both backends against one another."""
    from kernels import reference

    assert reference.philox(0, 0, 1).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    key = (0x299F31D0 << 32) | 0xA4093822
    words = reference.philox(key, 7, 4)
    assert len(set(words.tolist())) == 16
    triton, torch_ = kernels.triton_ops(DEVICE), kernels.reference_ops()
    logits = torch.zeros(97)
    seeds = [0, 1, key, -5, 2**53]
    assert draw(triton, logits.to(DEVICE), seeds=seeds).tolist() == draw(torch_, logits, seeds=seeds).tolist()


def test_noise_is_finite_at_the_ends():
    from kernels import reference

    ends = reference.log_exponential(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert bool(ends.isfinite().all()) and bool((ends[:-1] > ends[1:]).all())
