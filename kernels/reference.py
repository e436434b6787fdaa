"""The plain-torch twin of every op, and the CPU backend.

Batch invariance by construction, from three rules:
1. A product is a `torch.bmm` whose every entry has one fixed shape, [ROWS, K] x [K, COLUMNS], padded where needed. The
   number of entries follows the batch; what runs inside an entry does not. Sums of a row are products with ones.
2. exp2 and log run on chunks of exactly LANES elements: the library's vector loops treat the tail of an array, or of a
   thread's share, with other code.
3. Everything else is +, -, *, /, sqrt, max or a comparison: correctly rounded or exact, whatever the loop around it.

Products are fp32: a product of two bf16 or fp16 numbers is exact in it, so `x.float() @ w.float()` is the GPU's
"16 bits in, fp32 accumulate", and the CPU backend keeps its weights in fp32 (exactly the same values).
"""

import math

import torch
import torch.nn.functional as F

from kernels.tiles import KV_SPLIT, KV_TILE, LOGPROB_SCALE_BITS, leaf_length

ROWS, COLUMNS, LANES = 8, 64, 4096
MAX_ITEMS = 256  # attention items in flight: bounds memory, changes nothing else


def tiled_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in fp32 by entries of one fixed shape. x: [M, K] fp32; weight: [N, K] fp32; returns [M, N]."""
    M, K = x.shape
    N = weight.shape[0]
    x = F.pad(x, (0, 0, 0, -M % ROWS)).contiguous()
    full = N // COLUMNS * COLUMNS
    parts = [weight[:full].unflatten(0, (-1, COLUMNS))] if full else []
    if N % COLUMNS:
        parts.append(F.pad(weight[full:], (0, 0, 0, COLUMNS - N % COLUMNS)).unsqueeze(0))
    out = torch.empty((x.shape[0], sum(p.shape[0] for p in parts) * COLUMNS))
    rows, column = x.view(-1, ROWS, K), 0
    for part in parts:
        span = out[:, column : column + part.shape[0] * COLUMNS]
        if rows.shape[0] <= part.shape[0]:
            for i, tile in enumerate(rows):
                y = torch.bmm(tile.expand(part.shape[0], ROWS, K), part.transpose(1, 2))
                span[i * ROWS : (i + 1) * ROWS].view(ROWS, -1, COLUMNS).copy_(y.transpose(0, 1))
        else:
            for j, tile in enumerate(part):
                y = torch.bmm(rows, tile.T.expand(rows.shape[0], K, COLUMNS))
                span[:, j * COLUMNS : (j + 1) * COLUMNS] = y.view(-1, COLUMNS)
        column += part.shape[0] * COLUMNS
    return out[:M, :N]


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the last axis as a product with ones. x: [M, K] fp32; returns [M, 1]."""
    M, K = x.shape
    rows = F.pad(x, (0, 0, 0, -M % ROWS)).view(-1, ROWS, K)
    return torch.bmm(rows, torch.ones((1, K, ROWS)).expand(rows.shape[0], K, ROWS)).view(-1, ROWS)[:M, :1]


def by_lanes(function, x: torch.Tensor) -> torch.Tensor:
    """`function` (exp2, exp or log) of an fp32 tensor, LANES elements a call."""
    chunks = F.pad(x.reshape(-1), (0, -x.numel() % LANES)).view(-1, LANES)
    for chunk in chunks:
        function(chunk, out=chunk)
    return chunks.view(-1)[: x.numel()].view(x.shape)


def embedding(input_ids, weight, dtype):
    return weight[input_ids.long()].to(dtype)


def rms_norm(x, weight, eps, residual=None):
    if residual is not None:
        residual.copy_(residual.float() + x.float())
        x = residual
    x32 = x.float()
    rstd = 1.0 / torch.sqrt(row_sum(x32 * x32) / x.shape[-1] + eps)
    return ((x32 * rstd).to(x.dtype).float() * weight.float()).to(x.dtype)


def linear(x, weight, bias, leaves, out_dtype, out=None):
    x32, w32 = x.float(), weight.float()
    length = leaf_length(x.shape[1], leaves)
    total = None
    for start in range(0, x.shape[1], length):
        leaf = tiled_matmul(x32[:, start : start + length], w32[:, start : start + length])
        total = leaf if total is None else total + leaf
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype) if out is None else out.copy_(total)


def silu_and_mul(gate_up):
    gate, up = gate_up.float().chunk(2, dim=1)
    return (gate / (1.0 + by_lanes(torch.exp, -gate)) * up).to(gate_up.dtype)


def rotary_and_cache(qkv, q_norm, k_norm, eps, cos_sin, positions, slot_mapping, k_cache, v_cache, num_heads):
    num_tokens, dtype = qkv.shape[0], qkv.dtype
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    q, k, v = qkv.view(num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def rotate(x, weight):
        if weight is not None:
            x = rms_norm(x.reshape(-1, head_dim), weight, eps).view(x.shape)
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(dtype)

    k = rotate(k, k_norm)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    k_cache[slots // KV_TILE, :, slots % KV_TILE] = k[keep]
    v_cache[slots // KV_TILE, :, slots % KV_TILE] = v[keep]
    return rotate(q, q_norm)


def attention_items(q, k_cache, v_cache, work, items, scale, R, kv_split):
    """Run `items` (a list of work items) in lockstep over splits. Returns [(rows, out [rows, heads, D])]."""
    dtype = q.dtype
    num_heads, D = q.shape[1], q.shape[2]
    Hkv = k_cache.shape[1]
    group = num_heads // Hkv
    A = len(items)
    first_pos = work.positions[[item[1] for item in items]].long()
    num_query = torch.tensor([item[2] for item in items])
    seqs = torch.tensor([item[0] for item in items])
    # Row r of an item is token r // group, head r % group, as on the GPU.
    rows = torch.zeros((A, Hkv, R, D))
    for i, (_, token, count, *_) in enumerate(items):
        tile = q[token : token + count].view(count, Hkv, group, D).transpose(0, 1)
        rows[i, :, : count * group] = tile.reshape(Hkv, count * group, D).float()
    pos = first_pos[:, None] + torch.arange(R) // group  # [A, R]
    num_keys = first_pos + num_query
    m = torch.full((A, Hkv, R, 1), -torch.inf)
    l, acc = torch.zeros((A, Hkv, R, 1)), torch.zeros((A, Hkv, R, D))
    ones = torch.ones((1, KV_TILE, ROWS))
    per_split = kv_split // KV_TILE
    for split in range(-(-int(num_keys.max()) // kv_split)):
        live = torch.nonzero(num_keys > split * kv_split).flatten()
        T = min(per_split, -(-int(num_keys[live].max() - split * kv_split) // KV_TILE))
        keys = split * kv_split + torch.arange(T * KV_TILE)
        # Pages past a sequence's end are masked; page 0 stands in for them.
        width = work.block_tables.shape[1]
        tables = work.block_tables[seqs[live]][:, [min(split * per_split + t, width - 1) for t in range(T)]].long()
        tables = torch.where(keys[None, ::KV_TILE] < num_keys[live, None], tables, 0)
        written = (keys < num_keys[live, None]).view(-1, T, 1, KV_TILE, 1)
        k = k_cache[tables].float().masked_fill(~written, 0.0).transpose(1, 2).flatten(0, 1)  # [L * Hkv, T, tile, D]
        v = v_cache[tables].float().masked_fill(~written, 0.0).transpose(1, 2).flatten(0, 1)
        L = len(live)
        x = rows[live].view(L * Hkv, 1, R, D).expand(-1, T, R, D).reshape(-1, R, D)
        scores = torch.bmm(x, k.flatten(0, 1).transpose(1, 2)).view(L, Hkv, T, R, KV_TILE) * (scale * math.log2(math.e))
        visible = keys.view(1, 1, T, 1, KV_TILE) <= pos[live].view(L, 1, 1, R, 1)
        scores = scores.masked_fill(~visible, -torch.inf)
        # Running maxima, tile by tile: max is exact, so the exponentials of all tiles can be taken at once.
        peaks = scores.amax(-1, keepdim=True)
        running = [torch.full_like(peaks[:, :, 0], -torch.inf)]
        for t in range(T):
            running.append(torch.maximum(running[-1], peaks[:, :, t]))
        running = torch.stack(running, 2)  # [L, Hkv, T + 1, R, 1]
        safe = running[:, :, 1:].masked_fill(running[:, :, 1:] == -torch.inf, 0.0)
        exps = by_lanes(torch.exp2, torch.cat([scores - safe, running[:, :, :-1] - safe], -1))
        p, alpha = exps[..., :KV_TILE].to(dtype).float().reshape(-1, R, KV_TILE), exps[..., KV_TILE:]
        sums = torch.bmm(p, ones.expand(p.shape[0], KV_TILE, ROWS))[..., :1].view(L, Hkv, T, R, 1)
        values = torch.bmm(p, v.flatten(0, 1)).view(L, Hkv, T, R, D)
        split_l, split_acc = torch.zeros((L, Hkv, R, 1)), torch.zeros((L, Hkv, R, D))
        for t in range(T):
            split_l = split_l * alpha[:, :, t] + sums[:, :, t]
            split_acc = split_acc * alpha[:, :, t] + values[:, :, t]
        # The merge, in position order. A row that sees nothing of this split is left exactly as it was.
        m_new = torch.maximum(m[live], running[:, :, -1])
        m_safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
        a, b = by_lanes(torch.exp2, torch.cat([m[live] - m_safe, running[:, :, -1] - m_safe], -1)).split(1, -1)
        l[live] = l[live] * a + split_l * b
        acc[live] = acc[live] * a + split_acc * b
        m[live] = m_new
    out = (acc / l).to(dtype)
    for i, (_, _, count, *_) in enumerate(items):
        tile = out[i, :, : count * group].view(Hkv, count, group, D).transpose(0, 1)
        yield items[i][1], tile.reshape(count, num_heads, D)


def paged_attention(q, k_cache, v_cache, work, scale, kv_split=KV_SPLIT):
    group = q.shape[1] // k_cache.shape[1]
    R = max(16, group)
    out = torch.empty_like(q)
    items = work.prefill_items.tolist() + work.decode_items.tolist()
    for start in range(0, len(items), MAX_ITEMS):
        part = items[start : start + MAX_ITEMS]
        for token, rows in attention_items(q, k_cache, v_cache, work, part, scale, R, kv_split):
            out[token : token + len(rows)] = rows
    return out


def mass(scaled):
    """exp(x) in fixed point: fp32 -> int64, as kernels.logprobs.mass."""
    return (by_lanes(torch.exp2, scaled * math.log2(math.e)) * float(1 << LOGPROB_SCALE_BITS)).to(torch.int64)


def by_value(logits):
    """Token ids of one row from the largest logit to the smallest, the lowest id first among equals."""
    return torch.sort(torch.where(logits == 0.0, 0.0, logits), descending=True, stable=True).indices


def logprobs(logits, token_ids, top):
    peak = logits.amax(1, keepdim=True)
    totals = mass(logits - peak).sum(1).tolist()
    logs = torch.tensor([math.log(t) - LOGPROB_SCALE_BITS * math.log(2) for t in totals], dtype=torch.float64)[:, None]
    ids = torch.stack([by_value(row)[:top] for row in logits]) if top else token_ids.new_empty((len(logits), 0))
    values = (logits - peak).double() - logs
    return (values.gather(1, token_ids[:, None])[:, 0].float(), ids.to(torch.int32), values.gather(1, ids).float())


def argmax(logits):
    return torch.stack([torch.nonzero(row == row.amax())[0, 0] for row in logits])


def philox(seed: int, position: int, num_quads: int) -> torch.Tensor:
    """Philox4x32-10 words (Salmon et al. 2011) for token ids 0 .. 4 * num_quads - 1, as int64 in [0, 2^32)."""
    mask = 0xFFFFFFFF
    c0 = torch.arange(num_quads, dtype=torch.int64)
    c1, c2, c3 = torch.full_like(c0, position), torch.zeros_like(c0), torch.zeros_like(c0)
    key0, key1 = seed & mask, (seed >> 32) & mask

    def multiply(a: int, b):  # high and low words of a 32 x 32 bit product, without leaving int64
        low, high = a * (b & 0xFFFF), a * (b >> 16)
        return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & mask

    for _ in range(10):
        high_a, low_a = multiply(0xD2511F53, c0)
        high_b, low_b = multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ key0, low_b, high_a ^ c3 ^ key1, low_a
        key0, key1 = (key0 + 0x9E3779B9) & mask, (key1 + 0xBB67AE85) & mask
    return torch.stack([c0, c1, c2, c3], 1).view(-1)


def log_exponential(words):
    """log(E), E = -log(u), u = (word + 1/2) / 2^32; as kernels.sample.log_exponential."""
    d = ((0xFFFFFFFF - words).float() + 0.5) * 2.0**-32
    u = (words.float() + 0.5) * 2.0**-32
    series = d * (1.0 + d * (0.5 + d * (0.33333334 + d * 0.25)))
    return by_lanes(torch.log, torch.where(d < 0.0078125, series, -by_lanes(torch.log, u)))


def sample(logits, temperature, top_k, top_p, min_p, seed, position):
    out, V = [], logits.shape[1]
    for row, t, k, p, low, s, at in zip(logits, temperature, top_k.tolist(), top_p.tolist(), min_p, seed.tolist(),
                                        position.tolist(), strict=True):
        scaled = (row - row.amax()) / t
        keep = scaled >= low
        if k < V or p < 1 << 30:
            ranked = by_value(row)[: min(k, V)]
            if p < 1 << 30:
                reached = mass(scaled[ranked]).cumsum(0)
                kept = int(reached[-1])
                target = max(1, (kept >> 30) * p + (((kept & ((1 << 30) - 1)) * p) >> 30))
                ranked = ranked[: int((reached < target).sum()) + 1]
            keep &= torch.zeros(V, dtype=torch.bool).index_fill_(0, ranked, True)
        noise = log_exponential(philox(s, at, -(-V // 4))[:V])
        out.append(torch.where(keep, scaled - noise, -torch.inf))
    return argmax(torch.stack(out))
