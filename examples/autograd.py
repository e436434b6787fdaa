"""Gradients through the engine's own forward pass: a trainer whose log-probabilities are the sampler's, bit for bit.

A training framework has kernels of its own; its logprobs of the tokens that an engine sampled are then a little off,
and "on-policy" learning is quietly off-policy. Here the forward pass of training *is* that of inference: `Policy` runs
`Model.forward` over an op table in which each launcher is wrapped as an autograd function. Forward, the launcher runs
as it is. Backward, a plain torch formula is differentiated in fp32 at the inputs that the launcher saw; what the
launcher rounds on the way is passed straight through. Nothing here is on the way of an answer: inference pays nothing.

    policy = Policy(llm)                                    # fp32 masters of the engine's weights
    values = policy.logprobs([(prompt_ids, completion_ids)])  # == what sampling reported, as integers
    with deterministic():
        loss_of(values).backward()
    optimizer.step()                                        # over policy.parameters()
    llm.update_weights(policy.state_dict())                 # rounded to the engine's dtype, in place
"""

import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch calls cuBLAS not deterministic

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import scheduler
from kernels import Ops, upload
from kernels.tiles import KV_TILE
from model import Batch, Model
from runner import Runner
from sampler import SamplingParams

MAX_SCORES = 1 << 28  # attention scores held at a time by a backward pass: 1 GiB in fp32


@contextmanager
def deterministic() -> Iterator[None]:
    """Only deterministic algorithms inside: for a backward pass, whose sums are the library's."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# Plain formulas, to be differentiated in fp32; their values are not used. F.linear is one more of them.

def norm(x, weight, eps: float):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def swiglu(x, weight, bias):
    gate, up = F.linear(x, weight, bias).unflatten(-1, (-1, 2)).unbind(-1)  # rows of the weight are in turn theirs
    return F.silu(gate) * up


def rotate(qkv, q_norm, k_norm, cos_sin, num_heads: int, num_kv_heads: int, eps: float):
    """q, k and v of each row of qkv, normed (unless the norms are None) and rotated: [num_tokens, all heads, head_dim].

    cos_sin: [num_tokens, head_dim]"""
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    x, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if q_norm is not None:
        x = norm(x, torch.cat([q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)]), eps)
    (a, b), (cos, sin) = x.chunk(2, -1), cos_sin[:, None].to(x.dtype).chunk(2, -1)
    return torch.cat([torch.cat([a * cos - b * sin, b * cos + a * sin], -1), v], 1)


def attend(q, k, v, scale: float):
    """Causal attention of whole sequences. q: [B, T, Hkv, group, D]; k, v: [B, T, Hkv, D]."""
    scores = torch.einsum("bikgd,bjkd->bkgij", q, k) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bkgij,bjkd->bikgd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def chosen(logits, token_ids):
    return logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]


def pull_back(formula: Callable, inputs: Sequence[torch.Tensor | None], grad: torch.Tensor) -> list:
    """Gradients of `formula` at `inputs`, in fp32; None for an input that is None."""
    with torch.enable_grad():
        leaves = [x if x is None else x.detach().float().requires_grad_() for x in inputs]
        found = iter(torch.autograd.grad(formula(*leaves), [x for x in leaves if x is not None], grad.float()))
    return [x if x is None else next(found) for x in leaves]


class Op(torch.autograd.Function):
    """`launch()` forward, `formula` backward. `values` is where the formula is differentiated; `inputs`, one for each,
    are where its gradients go: for an activation itself, for a weight the fp32 master it was rounded from."""

    @staticmethod
    def forward(ctx, launch, formula, values, *inputs):
        ctx.formula = formula
        ctx.save_for_backward(*values)
        return launch()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, None, None, *pull_back(ctx.formula, ctx.saved_tensors, grad)


class AddNorm(torch.autograd.Function):
    """The norm that first adds x to the residual stream, in place: both then have the gradient of their sum."""

    @staticmethod
    def forward(ctx, rms_norm, eps, weight, x, master, residual):
        out = rms_norm(x, weight, eps, residual)
        ctx.mark_dirty(residual)
        ctx.eps = eps
        ctx.save_for_backward(residual.clone(), weight)  # the next norm overwrites it
        return out, residual

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_residual):
        total, grad_weight = pull_back(lambda x, w: norm(x, w, ctx.eps), ctx.saved_tensors, grad)
        total = total + grad_residual
        return None, None, None, total, grad_weight, total


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, launch, input_ids, master):
        ctx.save_for_backward(input_ids.long())
        ctx.shape = master.shape
        return launch()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, device=grad.device)
        return None, None, total.index_put_((ids,), grad.float(), accumulate=True)


class RotaryAndCache(torch.autograd.Function):
    """q as the launcher returns it, k and v as it writes them to the cache."""

    @staticmethod
    def forward(ctx, launch, formula, values, k_cache, v_cache, slots, *inputs):
        ctx.formula = formula
        ctx.save_for_backward(*values)
        q, at = launch(), (slots // KV_TILE, slice(None), slots % KV_TILE)
        return q, k_cache[at], v_cache[at]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return (None,) * 6 + tuple(pull_back(ctx.formula, ctx.saved_tensors, torch.cat(grads, 1)))


class Attention(torch.autograd.Function):
    """`rows`: of each token, its place among sequences laid out side by side, each padded to `length`."""

    @staticmethod
    def forward(ctx, launch, scale, rows, shape, q, k, v):
        ctx.scale, ctx.shape = scale, shape
        ctx.save_for_backward(rows, q, k, v)
        return launch()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, q, k, v = ctx.saved_tensors
        (B, T), (H, D), Hkv = ctx.shape, q.shape[1:], k.shape[1]

        def lay_out(x, *heads):  # each row is written once, so nothing is summed; padding is 0, and behind the mask
            out = torch.zeros((B * T, x.shape[1], D), device=x.device)
            return out.index_copy_(0, rows, x.float()).view(B, T, *heads, D)

        step = max(1, MAX_SCORES // (H * T * T))
        parts = zip(*(lay_out(x, *heads).split(step) for x, heads in (
            (q, (Hkv, H // Hkv)), (k, (Hkv,)), (v, (Hkv,)), (grad, (Hkv, H // Hkv)))), strict=True)
        found = [pull_back(lambda q, k, v: attend(q, k, v, ctx.scale), some, g) for *some, g in parts]
        grads = [torch.cat(part).reshape(B * T, -1, D)[rows] for part in zip(*found, strict=True)]
        return None, None, None, None, *grads


def differentiable(ops: Ops, master: Callable[[torch.Tensor], torch.Tensor]) -> Ops:
    """`ops` with gradients, for batches of whole sequences. `master(weight)`: the tensor that gets a weight's."""
    written = []  # k and v of the layer under way, on their way from the cache's writer to its reader

    def embedding(input_ids, weight, dtype, drawn):
        return Embedding.apply(lambda: ops.embedding(input_ids, weight, dtype, drawn), input_ids, master(weight))

    def rms_norm(x, weight, eps, residual=None):
        if residual is not None:
            return AddNorm.apply(ops.rms_norm, eps, weight, x, master(weight), residual)[0]
        values = x.detach().clone(), weight  # x is the residual stream, which the next norm overwrites
        return Op.apply(lambda: ops.rms_norm(x, weight, eps), lambda x, w: norm(x, w, eps), values, x, master(weight))

    def product(launch, formula, x, weight, bias):
        return Op.apply(launch, formula, (x, weight, bias), x, master(weight), bias if bias is None else master(bias))

    def linear(x, weight, bias, leaves, out_dtype, out=None):
        return product(lambda: ops.linear(x, weight, bias, leaves, out_dtype, out), F.linear, x, weight, bias)

    def gated_linear(x, weight, bias, leaves, out_dtype):
        return product(lambda: ops.gated_linear(x, weight, bias, leaves, out_dtype), swiglu, x, weight, bias)

    def rotary_and_cache(qkv, q_norm, k_norm, eps, cos_sin, work, k_cache, v_cache, num_heads):
        def formula(qkv, q_norm, k_norm):
            return rotate(qkv, q_norm, k_norm, cos_sin[work.positions.long()], num_heads, k_cache.shape[1], eps)

        norms = q_norm, k_norm
        q, *written[:] = RotaryAndCache.apply(
            lambda: ops.rotary_and_cache(qkv, q_norm, k_norm, eps, cos_sin, work, k_cache, v_cache, num_heads),
            formula, (qkv, *norms), k_cache, v_cache, work.slot_mapping.long(), qkv,
            *(w if w is None else master(w) for w in norms))
        return q

    def paged_attention(q, k_cache, v_cache, work, scale):
        if "sequences" not in work.host_plans:  # the same for every layer
            positions = work.positions.long()
            sequence, length = (positions == 0).cumsum(0) - 1, int(positions.max()) + 1
            work.host_plans["sequences"] = sequence * length + positions, (len(work.block_tables), length)
        return Attention.apply(lambda: ops.paged_attention(q, k_cache, v_cache, work, scale), scale,
                               *work.host_plans["sequences"], q, *written)

    def logprobs(logits, token_ids, top):
        return Op.apply(lambda: ops.logprobs(logits, token_ids, top)[0], lambda x: chosen(x, token_ids), (logits,),
                        logits)

    wrapped = {f.__name__: f for f in (embedding, rms_norm, linear, gated_linear, rotary_and_cache, paged_attention,
                                       logprobs)}
    rest = [field.name for field in fields(ops) if callable(getattr(ops, field.name))]
    refused = {name: no_gradient(name) for name in rest if name not in (*wrapped, "weight_dtype", "query_tile")}
    return replace(ops, **wrapped, **refused)


def no_gradient(name: str) -> Callable:
    """What stands in for an op without a gradient: run as it is, it would cut the graph, and nobody would notice."""
    def refuse(*args, **options):
        raise NotImplementedError(f"the op {name} has no gradient in examples/autograd.py")

    return refuse


class Policy:
    """The model of an engine as a trainer sees it: fp32 masters, and the engine's forward pass over its own weights.

    The weights are the engine's tensors, not a copy: after an optimizer's step, hand it `state_dict()`. `ops`: another
    table than the engine's (a batch-dependent twin)."""

    def __init__(self, llm, ops: Ops | None = None):
        self.masters = {name: w.detach().float().clone().requires_grad_() for name, w in llm.model.weights.items()}
        self.names: dict[int, list[str]] = {}  # storage of a (merged) parameter -> the checkpoint names in it, in order
        for name, view in llm.model.weights.items():
            self.names.setdefault(view.untyped_storage().data_ptr(), []).append(name)
        self.model = copy.copy(llm.model)
        self.model.ops = differentiable(ops or llm.ops, self._master)
        self._merged: dict[int, torch.Tensor] = {}

    def parameters(self) -> list[torch.Tensor]:
        return list(self.masters.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The masters by checkpoint name, as `LLM.update_weights` takes them."""
        return {name: master.detach() for name, master in self.masters.items()}

    def _master(self, weight: torch.Tensor) -> torch.Tensor:
        """The masters of a parameter, merged as it is; once a forward pass."""
        key = weight.untyped_storage().data_ptr()
        if key not in self._merged:
            parts = [self.masters[name] for name in self.names[key]]
            if len(parts) > 1:  # rows of each in turn, where the parameter has them so, or one below the other
                in_turn = not self.model.weights[self.names[key][0]].is_contiguous()
                parts = [torch.stack(parts, 1).flatten(0, 1) if in_turn else torch.cat(parts)]
            self._merged[key] = parts[0]
        return self._merged[key]

    def logprobs(self, pairs: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
        """Log-probability of every completion token of (prompt ids, completion ids) pairs, one after the other, with
        gradients: [number of completion tokens] fp32. All run as one prefill into a cache of their own."""
        inputs = [[*prompt, *completion[:-1]] for prompt, completion in pairs]
        ends = np.cumsum([len(ids) for ids in inputs])
        rows = [np.arange(end - len(completion), end) for end, (_, completion) in zip(ends, pairs, strict=True)]
        targets = np.array([token for _, completion in pairs for token in completion], np.int64)
        batch, kv_cache = whole_sequences(self.model, inputs)
        self._merged.clear()
        hidden_states = self.model.forward(
            replace(batch, logits_rows=upload(np.concatenate(rows), self.model.device)), kv_cache)
        return self.model.ops.logprobs(self.model.logits(hidden_states), upload(targets, self.model.device), 0)


def whole_sequences(model: Model, inputs: list[list[int]]) -> tuple[Batch, torch.Tensor]:
    """A step that computes these token ids, each list from its first token on, and an empty cache for it."""
    seqs, num_blocks = [], 0
    for token_ids in inputs:
        seq = scheduler.Sequence(token_ids, len(token_ids), SamplingParams(), 0, 0, num_scheduled_tokens=len(token_ids))
        seq.block_table = list(range(num_blocks, num_blocks := num_blocks + -(-len(token_ids) // KV_TILE)))
        seqs.append(seq)
    runner = Runner(model, num_blocks, 1, model.cos_sin.shape[0], True)
    return runner._batch(runner._plan(seqs))[0], runner.kv_cache
