"""Single ops against their floor and against a library, and the floor itself.

A floor is what the hardware takes if nothing is lost: bytes / bandwidth or operations / rate, whichever is longer, op
by op, both measured on the machine at hand. On a GPU an op runs in a CUDA graph over inputs that rotate past the L2.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.twins import silu_and_mul
from kernels import Ops, same_bits
from kernels.tiles import KV_TILE, leaf_count
from model import ModelConfig, rotary_table
from runner import Runner

ROTATE = 200_000_000  # bytes of inputs that a timing walks through: four times the L2 of an H200


class BitsDiffer(Exception):
    """A result followed the batch: no speed is worth printing."""


@dataclass(frozen=True)
class Roof:
    """What the machine gives, a second: bytes `read`, bytes `copy` (read + written), operations of a product `rate`."""

    read: float
    copy: float
    rate: float

    def floor_s(self, num_bytes: float, operations: float) -> float:
        """Seconds that moving and computing this much takes at least."""
        return max(num_bytes / max(self.read, self.copy), operations / self.rate)


def time_s(calls: list[Callable], device: torch.device) -> float:
    """Median seconds of one of `calls`, which do the same work on different inputs."""

    def run():
        for call in calls:
            call()

    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        run()
        torch.cuda.synchronize()  # the timing uses a stream of its own
        return do_bench_cudagraph(run, rep=20, return_mode="median") / 1e3 / len(calls)
    run()
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < 0.05 and len(seconds) < 20):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) / len(calls)


def measure_roof(device: torch.device, dtype: torch.dtype) -> Roof:
    """Bandwidth over 1 GiB (64 MiB on CPU), and the library's rate on a square product of 8192 (512)."""
    gpu = device.type == "cuda"
    x = torch.ones((1 << 28) if gpu else (1 << 24), device=device)
    y = torch.empty_like(x)
    read = x.nbytes / time_s([lambda: x.sum()], device)
    copy = 2 * x.nbytes / time_s([lambda: y.copy_(x)], device)
    n = 8192 if gpu else 512
    a, b = (torch.randn((n, n), device=device).to(dtype) for _ in range(2))
    return Roof(read, copy, 2 * n**3 / time_s([lambda: torch.mm(a, b.t())], device))


def layer_weights(config: ModelConfig, sparse: bool = False) -> dict[str, tuple[int, int]]:
    """name -> (N, K) of the products of a layer; of one with experts without theirs."""
    c, D = config, config.head_dim
    shared = {"qkv_proj": ((c.num_heads + 2 * c.num_kv_heads) * D, c.hidden_size),
              "o_proj": (c.hidden_size, c.num_heads * D)}
    if sparse:
        return shared | {"gate": (c.num_experts, c.hidden_size)}
    return shared | {"gate_up_proj": (2 * c.intermediate_size, c.hidden_size),
                     "down_proj": (c.hidden_size, c.intermediate_size)}


def experts_read(config: ModelConfig, M: int) -> float:
    """Experts that M tokens choose between them, if each chooses at random."""
    return config.num_experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** M)


def step_floor_s(config: ModelConfig, roof: Roof, itemsize: int, seqs: list) -> float:
    """Floor of one engine step over scheduled sequences: every weight and every key is read once, every product and
    every score computed, layer after layer. Activations, norms and sampling are taken as free."""
    M = sum(seq.num_scheduled_tokens for seq in seqs)
    keys = sum(seq.num_computed_tokens + seq.num_scheduled_tokens for seq in seqs)
    pairs = sum(seq.num_scheduled_tokens * (seq.num_computed_tokens + (seq.num_scheduled_tokens + 1) / 2)
                for seq in seqs)
    c, sparse = config, len(config.sparse_layers)
    layers = [sum(roof.floor_s(N * K * itemsize, 2 * M * N * K) for N, K in layer_weights(c, has_experts).values())
              for has_experts in (False, True)]
    if sparse:
        expert = 3 * c.moe_intermediate_size * c.hidden_size
        layers[1] += roof.floor_s(experts_read(c, M) * expert * itemsize, 2 * M * c.num_experts_per_tok * expert)
    attention = roof.floor_s(2 * keys * c.num_kv_heads * c.head_dim * itemsize, 4 * pairs * c.num_heads * c.head_dim)
    products = (c.num_layers - sparse) * layers[0] + sparse * layers[1]
    rows, head = sum(seq.samples_this_step for seq in seqs), config.vocab_size * config.hidden_size
    return products + c.num_layers * attention + (roof.floor_s(head * itemsize, 2 * rows * head) if rows else 0.0)


@dataclass
class Case:
    """An op at one shape. `calls` and `peers` do the same work on rotating inputs; `parts` are pairs (rows of the whole
    result, the same rows computed alone) whose bits must agree."""

    op: str
    shape: str
    calls: list[Callable]
    num_bytes: float
    operations: float
    parts: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]
    peer: str = ""
    peers: list[Callable] | None = None


def linear_cases(config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device, rows) -> Iterator[Case]:
    weights = layer_weights(config, bool(config.sparse_layers)) | {"lm_head": (config.vocab_size, config.hidden_size)}
    weight_dtype = ops.weight_dtype(dtype)
    for name, (N, K) in weights.items():
        size = N * K * weight_dtype.itemsize
        copies = min(16, 1 + ROTATE // size) if device.type == "cuda" else 1
        made = [torch.randn((N, K), dtype=weight_dtype, device=device) for _ in range(copies)]
        leaves, out_dtype = leaf_count(N, K), torch.float32 if name in ("lm_head", "gate") else dtype
        for M in rows:
            if name == "lm_head" and M > 256:  # the engine's steps sample no more rows
                continue
            x = torch.randn((M, K), device=device).to(dtype)
            y = x.to(weight_dtype)

            gated = name == "gate_up_proj"  # ends in SwiGLU, which the library leaves to a kernel of its own

            def call(x=x, w=made[0], leaves=leaves, out_dtype=out_dtype, op=ops.gated_linear if gated else ops.linear):
                return op(x, w, None, leaves, out_dtype)

            def peer(w, y=y, gated=gated):
                return silu_and_mul(torch.mm(y, w.t())) if gated else torch.mm(y, w.t())

            def parts(call=call, x=x, M=M):
                whole = call()
                for row in {0, M - 1}:
                    yield whole[row : row + 1], call(x[row : row + 1].contiguous())

            used = made if M <= 256 else made[:1]
            yield Case("linear", f"{name} {N}x{K} M={M}", [lambda w=w, call=call: call(w=w) for w in used],
                       size + M * (K * dtype.itemsize + N // (1 + gated) * out_dtype.itemsize), 2 * M * N * K, parts,
                       "cuBLAS" if device.type == "cuda" else "torch.mm",
                       [lambda w=w, peer=peer: peer(w) for w in used])


def planned_work(config: ModelConfig, ops: Ops, cache: torch.Tensor, num_seqs: int, computed: int, scheduled: int):
    """The AttentionWork that the engine plans for a step of `num_seqs` alike sequences over the pages of `cache`."""
    model = SimpleNamespace(config=config, device=cache.device, ops=ops, num_heads=config.num_heads,
                            num_kv_heads=config.num_kv_heads, most_kv_heads=config.num_kv_heads, dtype=cache.dtype)
    runner = Runner(model, None, 1, KV_TILE, True)
    pages = -(-(computed + scheduled) // KV_TILE)
    seqs = [SimpleNamespace(num_computed_tokens=computed, num_scheduled_tokens=scheduled,
                            token_ids=[0] * (computed + scheduled),
                            block_table=list(range(i * pages, (i + 1) * pages))) for i in range(num_seqs)]
    return runner._batch(runner._plan(seqs))[0].attention


def attention_cases(config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device, sizes) -> Iterator[Case]:
    """Decode steps (one query a sequence) and whole prefills. The peer reads keys that lie dense, without pages."""
    H, Hkv, D = config.num_heads, config.num_kv_heads, config.head_dim
    for num_seqs, length, is_decode in sizes:
        pages, scheduled = -(-length // KV_TILE), 1 if is_decode else length
        kv_bytes = 2 * num_seqs * length * Hkv * D * dtype.itemsize
        copies = min(16, 1 + ROTATE // kv_bytes) if device.type == "cuda" and is_decode else 1
        caches = [torch.randn((2, num_seqs * pages, Hkv, KV_TILE, D), device=device).to(dtype) for _ in range(copies)]
        q = torch.randn((num_seqs * scheduled, H, D), device=device).to(dtype)
        works = {n: planned_work(config, ops, caches[0], n, length - scheduled, scheduled) for n in {1, num_seqs}}
        dense = [cache.view(2, num_seqs, pages, Hkv, KV_TILE, D).transpose(2, 3).reshape(2, num_seqs, Hkv, -1, D)
                 [..., :length, :].contiguous() for cache in caches]
        queries = q.view(num_seqs, scheduled, H, D).transpose(1, 2).contiguous()

        def call(cache=caches[0], q=q, work=works[num_seqs]):
            return ops.paged_attention(q, cache[0], cache[1], work, D**-0.5)

        def parts(call=call, q=q, works=works, scheduled=scheduled):
            yield call()[:scheduled], call(q=q[:scheduled], work=works[1])

        def peer(kv, queries=queries, causal=not is_decode):
            return F.scaled_dot_product_attention(queries, kv[0], kv[1], is_causal=causal, enable_gqa=True)

        pairs = num_seqs * (length if is_decode else length * (length + 1) / 2)
        yield Case("attention", f"{'decode' if is_decode else 'prefill'} {num_seqs} x {length}",
                   [lambda cache=cache, call=call: call(cache) for cache in caches],
                   kv_bytes + 2 * q.nbytes, 4 * pairs * H * D, parts, "torch SDPA",
                   [lambda kv=kv, peer=peer: peer(kv) for kv in dense])


def row_cases(config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device, rows) -> Iterator[Case]:
    """What works on rows alone: norm, rotary; over the vocabulary argmax, logprobs and a draw."""
    c, V, D = config, config.vocab_size, config.head_dim
    heads = c.num_heads + 2 * c.num_kv_heads

    def case(op, function, arguments, num_bytes):
        """`arguments`: tensors of M rows each; the first and the last row are computed alone too."""
        M = len(arguments[0])

        def parts():
            whole = function(*[t.clone() for t in arguments])
            for row in {0, M - 1}:
                yield whole[row : row + 1], function(*[t[row : row + 1].clone() for t in arguments])

        return Case(op, f"{' x '.join(map(str, arguments[0].shape))}", [lambda: function(*arguments)], num_bytes, 0,
                    parts)

    for M in rows:
        x, residual = (torch.randn((M, c.hidden_size), device=device).to(dtype) for _ in range(2))
        weight = torch.ones(c.hidden_size, dtype=dtype, device=device)
        yield case("rms_norm", lambda x, r, w=weight: ops.rms_norm(x, w, 1e-6, r), [x, residual], 4 * x.nbytes)
        qkv = torch.randn((M, heads * D), device=device).to(dtype)
        norm = torch.ones(D, dtype=dtype, device=device) if c.qk_norm else None
        cache = torch.zeros((2, -(-M // KV_TILE), c.num_kv_heads, KV_TILE, D), dtype=dtype, device=device)
        table = rotary_table(c, M).to(device)
        works = {n: planned_work(c, ops, cache, 1, 0, n) for n in {1, M}}

        def rotate(qkv, norm=norm, cache=cache, table=table, works=works):
            return ops.rotary_and_cache(qkv, norm, norm, 1e-6, table, works[len(qkv)], *cache, c.num_heads)

        def first(rotate=rotate, qkv=qkv):  # a row alone stands at position 0
            yield rotate(qkv)[:1], rotate(qkv[:1].clone())

        yield Case("rotary_and_cache", f"{M} x {heads * D}", [lambda rotate=rotate, qkv=qkv: rotate(qkv)],
                   2 * qkv.nbytes, 0, first)
        if M > 256:
            continue
        logits = torch.randn((M, V), device=device) * 4
        yield case("argmax", ops.argmax, [logits], logits.nbytes)
        ids = torch.arange(M, device=device)
        yield case("logprobs", lambda x, ids: ops.logprobs(x, ids, 0)[0], [logits, ids], logits.nbytes)
        columns = [torch.full((M,), value, dtype=kind, device=device) for value, kind in (
            (0.8, torch.float32), (V, torch.int64), (1 << 30, torch.int64), (-torch.inf, torch.float32),
            (7, torch.int64), (100, torch.int32))]
        yield case("sample", ops.sample, [logits, *columns], logits.nbytes)


def measure_ops(config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device, roof: Roof,
                small: bool) -> list[dict]:
    """One row a case, times in microseconds. Raises BitsDiffer before a case is timed whose rows follow the batch."""
    rows = (1, 8, 32) if small else (1, 8, 64, 256, 1024, 8192)
    attention = [(1, 256, True), (8, 64, True), (1, 128, False)] if small else [
        (1, 1024, True), (1, 8192, True), (8, 1024, True), (64, 256, True), (256, 256, True), (32, 8192, True),
        (64, 128, False), (1, 8192, False)]
    found = []
    cases = chain(linear_cases(config, ops, dtype, device, rows),
                  attention_cases(config, ops, dtype, device, attention),
                  row_cases(config, ops, dtype, device, (rows[0], rows[-1]) if small else (1, 256, 8192)))
    for case in tqdm(cases, "kernels", leave=False, disable=not sys.stderr.isatty()):
        if not all(same_bits(whole, alone) for whole, alone in case.parts()):
            raise BitsDiffer(f"rows of {case.op} {case.shape} computed alone have other bits")
        row = {"op": case.op, "shape": case.shape, "us": time_s(case.calls, device) * 1e6,
               "floor_us": roof.floor_s(case.num_bytes, case.operations) * 1e6, "peer": case.peer}
        found.append(row | ({"peer_us": time_s(case.peers, device) * 1e6} if case.peers else {}))
    return found
