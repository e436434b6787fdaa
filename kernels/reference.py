"""The plain-torch twin of every op, and the CPU backend.

Batch invariance by construction, from three rules:
1. A product is a `torch.bmm` whose every entry has one fixed shape, a row [1, K] by a tile [K, COLUMNS]. The number of
   entries follows the batch; what runs inside an entry does not. Sums of a row are products with ones. (Taller entries
   serve many rows up to three times faster, and one row half as fast, in other bits: a CPU mostly serves one.)
2. exp2 and log run on chunks of whole vectors, short enough for one thread: the library's vector loops treat the tail
   of an array, or of a thread's share, with other code.
3. Everything else is +, -, *, /, sqrt, max or a comparison: correctly rounded or exact, whatever the loop around it.

Products are fp32: a product of two bf16 or fp16 numbers is exact in it, so `x.float() @ w.float()` is the GPU's
"16 bits in, fp32 accumulate", and the CPU backend keeps its weights in fp32 (exactly the same values)."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from kernels.tiles import KV_SPLIT, KV_TILE, LOGPROB_SCALE_BITS, leaf_length
from kernels.work import Routing

COLUMNS, LANES = 64, 4096
MAX_ITEMS = 256  # attention items in flight: bounds memory, changes nothing else
ONES = torch.ones((1, 1 << 15, 8))  # its first K rows make a row sum; no hidden size is larger


def tiled_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in fp32 by entries of one fixed shape. x: [M, K] fp32; weight: [N, K] fp32; returns [M, N]."""
    if x.shape[1] % 16:  # the library peels a row by its alignment: start every row of the weight on a 64-byte border
        x, weight = (F.pad(t, (0, -t.shape[1] % 16)) for t in (x, weight))
    (M, K), N = x.shape, weight.shape[0]
    if M == 1 and N % COLUMNS == 0:  # what a single stream does all day
        return torch.bmm(x.expand(N // COLUMNS, 1, K), weight.view(-1, COLUMNS, K).mT).view(1, N)
    tiles = list(weight.split(COLUMNS))
    tiles[-1] = F.pad(tiles[-1], (0, 0, 0, -N % COLUMNS))
    parts = [torch.bmm(x.unsqueeze(1), tile.T.expand(M, K, COLUMNS)).squeeze(1) for tile in tiles]
    return torch.cat(parts, 1)[:, :N].contiguous()


def by_lanes(function, x: torch.Tensor) -> torch.Tensor:
    """`function` (exp2, exp or log) of an fp32 tensor, at most LANES elements a call, always whole vectors."""
    if x.numel() <= LANES and x.numel() % 64 == 0:
        return function(x.contiguous())
    flat = F.pad(x.reshape(-1), (0, -x.numel() % 64))  # a copy, even if it pads by nothing
    for chunk in flat.split(LANES):
        function(chunk, out=chunk)
    return flat[: x.numel()].view(x.shape)


def embedding(input_ids, weight, dtype, drawn):
    """Rows of `weight`; an id of -1 - r stands for drawn[r], not known to the host yet. A copy, also on a GPU."""
    ids = input_ids.long()
    ids = torch.where(ids < 0, drawn[(-1 - ids).clamp(min=0)].clamp(max=len(weight) - 1), ids)
    return weight[ids].to(dtype)


def rms_norm(x, weight, eps, residual=None):
    if residual is not None:
        x = residual.add_(x)  # in fp32 inside, rounded once
    x32, N = x.float(), x.shape[-1]
    squares = (x32 * x32).reshape(-1, 1, N)
    sums = torch.bmm(squares, ONES[:, :N].expand(len(squares), N, 8))[..., :1].view(*x.shape[:-1], 1)
    rstd = sums.div_(N).add_(eps).sqrt_().reciprocal_()
    return ((x32 * rstd).to(x.dtype).float() * weight.float()).to(x.dtype)


def linear(x, weight, bias, leaves, out_dtype, out=None, routing=None):
    if routing:
        own, of = weight.view(routing.num_experts, -1, weight.shape[1]), routing.tiles[2:]  # a tile is a row
        result = x.new_zeros((len(x), own.shape[1]), dtype=out_dtype)
        for e in {*of.tolist()} & {*range(routing.num_experts)}:
            result[of == e] = linear(x[of == e], own[e], None, leaves, out_dtype)
        return result
    length = leaf_length(x.shape[1], leaves)
    total, *rest = map(tiled_matmul, x.float().split(length, 1), weight.float().split(length, 1))
    for term in rest if bias is None else (*rest, bias.float()):
        total = total + term
    return total.to(out_dtype) if out is None else out.copy_(total)


def gated_linear(x, weight, bias, leaves, out_dtype, routing=None):
    gate, up = linear(x, weight, bias, leaves, out_dtype, None, routing).float().unflatten(1, (-1, 2)).unbind(2)
    return (gate / by_lanes(torch.exp, -gate).add_(1.0)).mul_(up).to(out_dtype)


def rotary_and_cache(qkv, q_norm, k_norm, eps, cos_sin, work, k_cache, v_cache, num_heads):
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    if "rotary" not in work.host_plans:  # the same for every layer of a step
        token = torch.nonzero(work.slot_mapping >= 0).flatten()
        slot = work.slot_mapping[token].long()
        page = slot // KV_TILE * num_kv_heads + torch.arange(num_kv_heads)[:, None]
        row = page * KV_TILE + slot % KV_TILE  # [Hkv, tokens with a slot] into a cache viewed as [-1, head_dim]
        cos, sin = cos_sin[work.positions.long()].unsqueeze(1).chunk(2, dim=-1)
        work.host_plans["rotary"] = (token if len(token) < len(qkv) else slice(None), row.T.flatten(),
                                     torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
    token, row, cos, sin = work.host_plans["rotary"]
    x, v = qkv.view(len(qkv), -1, head_dim).tensor_split([-num_kv_heads], 1)
    if q_norm is not None:
        x = rms_norm(x, torch.cat([q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)]), eps)
    x = x.float()  # halves a, b: (a * cos - b * sin, b * cos + a * sin), a difference being a sum with -sin
    x = (x * cos).add_(x.roll(head_dim // 2, -1).mul_(sin)).to(qkv.dtype)
    k_cache.view(-1, head_dim).index_copy_(0, row, x[token, num_heads:].reshape(-1, head_dim))
    v_cache.view(-1, head_dim).index_copy_(0, row, v[token].reshape(-1, head_dim))
    return x[:, :num_heads].contiguous()


def lock_step(work, items: torch.Tensor, num_heads: int, num_kv_heads: int, kv_split: int):
    """Index arithmetic of work items of equally many splits, walked together: the same for every layer. Row r of an
    item is token r // group, head r % group of its KV head, as on the GPU; rows past its last token repeat that.

    Returns the rows [A, Hkv, R] of q and of the result viewed as [-1, head_dim], and of each split: its pages [A, T],
    the rows of v that are not written, and the keys that are hidden."""
    group = num_heads // num_kv_heads
    seqs, tokens, counts = items.T[:3]
    row = torch.arange(max(16, group))
    token = torch.minimum(row // group, counts[:, None] - 1)  # [A, R], in the item
    position = work.positions[tokens].long()[:, None] + token
    num_keys = position[:, :1] + counts[:, None]
    head = torch.arange(num_kv_heads)[:, None] * group + row % group  # [Hkv, R]
    splits = []
    end = -(-int(num_keys.max()) // KV_TILE) * KV_TILE
    for start in range(0, end, kv_split):
        keys = torch.arange(start, min(start + kv_split, end)).view(-1, KV_TILE)
        pages = work.block_tables[seqs, start // KV_TILE :][:, : len(keys)].long()
        unwritten = (keys >= num_keys[..., None]).unsqueeze(2).expand(-1, -1, num_kv_heads, -1).flatten().nonzero()
        splits.append((pages, unwritten.flatten(), keys[:, None, None] > position[:, None, None, :, None]))
    return (tokens[:, None] + token)[:, None] * num_heads + head, splits


def paged_attention(q, k_cache, v_cache, work, scale, kv_split=KV_SPLIT):
    key, D = (q.shape[1], k_cache.shape[1], kv_split), q.shape[2]
    if key not in work.host_plans:
        items = torch.cat([work.prefill_items, work.decode_items]).long()
        items = items[items[:, 2] > 0]  # some of a plan for slots are empty
        last_split = (work.positions[items[:, 1]] + items[:, 2] - 1) // kv_split
        work.host_plans[key] = [lock_step(work, some, *key) for n in last_split.unique()
                                for some in items[last_split == n].split(MAX_ITEMS)]
    out = torch.empty(q.shape, dtype=q.dtype)
    for index, splits in work.host_plans[key]:
        (A, Hkv, R), total = index.shape, None
        rows = q.reshape(-1, D).index_select(0, index.flatten()).view(A, 1, Hkv, R, D).float()
        for pages, unwritten, hidden in splits:
            T = pages.shape[1]
            k, v = (c.index_select(0, pages.flatten()).float().view(-1, KV_TILE, D) for c in (k_cache, v_cache))
            v.view(-1, D).index_fill_(0, unwritten, 0.0)  # 0 x NaN must not reach a sum; scores are masked instead
            scores = torch.bmm(rows.expand(A, T, Hkv, R, D).reshape(-1, R, D), k.mT).view(A, T, Hkv, R, KV_TILE)
            scores.mul_(scale * math.log2(math.e)).masked_fill_(hidden, -torch.inf)
            # Running maxima, tile by tile: max is exact, so the exponentials of all tiles can be taken at once.
            running = scores.amax(-1, keepdim=True).cummax(1).values
            safe = running if total is None else running.masked_fill(running == -torch.inf, 0.0)
            p = by_lanes(torch.exp2, scores.sub_(safe)).to(q.dtype).float().view(-1, R, KV_TILE)
            sums = torch.bmm(p, ONES[:, :KV_TILE].expand(len(p), KV_TILE, 8))[..., :1]  # scaled as the values are
            acc, *rest = torch.cat([torch.bmm(p, v), sums], -1).view(A, T, Hkv, R, D + 1).unbind(1)
            for alpha, term in zip(by_lanes(torch.exp2, running[:, :-1] - safe[:, 1:]).unbind(1), rest, strict=True):
                acc = acc * alpha + term
            last = running[:, -1]
            if total is not None:  # the merge, in position order; every row sees key 0, so the first is never empty
                m_new = torch.maximum(total[0], last)
                a, b = by_lanes(torch.exp2, torch.cat([total[0], last], -1) - m_new).split(1, -1)
                last, acc = m_new, total[1] * a + acc * b
            total = last, acc
        acc = acc.view(-1, D + 1)
        out.view(-1, D).index_copy_(0, index.flatten(), (acc[:, :D] / acc[:, D:]).to(q.dtype))
    return out


def route(x, logits, top_k, normalise, here=None):
    (M, E), scaled = logits.shape, logits - logits.amax(1, keepdim=True)
    ids = torch.stack([row.sort(descending=True, stable=True).indices[:top_k] for row in logits]).sort(1).values
    chosen = scaled.gather(1, ids)
    total = mass(chosen if normalise else scaled).sum(1, keepdim=True).float() / (1 << LOGPROB_SCALE_BITS)
    here, (expert, slot) = here or range(E), ids.flatten().sort(stable=True)  # tiles of one row
    span = torch.tensor([(expert < here.start).sum(), (expert < here.stop).sum()])
    return Routing(x[slot // top_k], by_lanes(torch.exp, chosen) / total, slot.argsort().view(M, top_k),
                   torch.cat([span, expert - here.start]), 1, len(here), len(here) < E, 1)


def combine(weights, places, y):
    return sum((y[places].float() * weights[:, :, None]).unbind(1)).to(y.dtype)


def mass(scaled):
    """exp(x) in fixed point: fp32 -> int64, as kernels.sample.mass."""
    return (by_lanes(torch.exp2, scaled * math.log2(math.e)) * float(1 << LOGPROB_SCALE_BITS)).to(torch.int64)


def logprobs(logits, token_ids, top):
    peak = logits.amax(1, keepdim=True)
    logs = torch.tensor([math.log(t) - LOGPROB_SCALE_BITS * math.log(2) if t > 0 else math.nan  # NaN logits
                         for t in mass(logits - peak).sum(1).tolist()], dtype=torch.float64)[:, None]
    ids = token_ids.new_empty((len(logits), 0))
    if top:  # a stable sort leaves equals in the order of their ids
        ids = torch.stack([row.sort(descending=True, stable=True).indices[:top] for row in logits])
    values = (logits - peak).double() - logs
    return values.gather(1, token_ids[:, None])[:, 0].float(), ids.to(torch.int32), values.gather(1, ids).float()


def argmax(logits):
    """The first of a row's largest; no id, as in kernels.sample, if that is -inf or, of a row that holds one, NaN."""
    return torch.where(logits.amax(1) > -torch.inf, logits.argmax(1), 2**31 - 1)


def philox(seed: int, position: int, num_quads: int) -> torch.Tensor:
    """Philox4x32-10 words (Salmon et al. 2011) for token ids 0 .. 4 * num_quads - 1, as int64 in [0, 2^32)."""
    c0 = np.arange(num_quads, dtype=np.uint64)
    c1, c2, c3 = np.full_like(c0, position), np.zeros_like(c0), np.zeros_like(c0)
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ key0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ key1, a & 0xFFFFFFFF
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return torch.from_numpy(np.stack([c0, c1, c2, c3], 1).astype(np.int64).reshape(-1))


def log_exponential(words):
    """log(E), E = -log(u), u = (word + 1/2) / 2^32; as kernels.sample.log_exponential."""
    d, u = ((integers.float() + 0.5) * 2.0**-32 for integers in (0xFFFFFFFF - words, words))
    series = d * (1.0 + d * (0.5 + d * (0.33333334 + d * 0.25)))
    return by_lanes(torch.log, torch.where(d < 0.0078125, series, -by_lanes(torch.log, u)))


def sample(logits, temperature, top_k, top_p, min_p, seed, position):
    out, V = [], logits.shape[1]
    for row, t, k, p, low, s, at in zip(logits, temperature, top_k.tolist(), top_p.tolist(), min_p, seed.tolist(),
                                        position.tolist(), strict=True):
        scaled = (row - row.amax()) / t
        keep = scaled >= low
        if k < V or p < 1 << 30:
            ranked = row.sort(descending=True, stable=True).indices
            if p < 1 << 30:
                reached = mass(scaled[ranked[:k]]).cumsum(0)
                k = int((reached < max(1, int(reached[-1]) * p >> 30)).sum()) + 1
            keep[ranked[k:]] = False
        out.append(torch.where(keep, scaled - log_exponential(philox(s, at, -(-V // 4))[:V]), -torch.inf))
    return argmax(torch.stack(out))
