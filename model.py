"""The transformer: its configuration, its rotary table, its weights and its forward pass.

One decoder covers Qwen3, Qwen3-MoE, Qwen2 and Llama shapes; they differ in a few flags of `ModelConfig`. The forward
pass is written in the ops of one `kernels.Ops` table, and knows nothing of requests, scheduling or sampling."""

import hashlib
import math
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from tqdm import tqdm

from checkpoint import Checkpoint
from kernels import Ops, same_bits
from kernels.collectives import EVEN, LOGITS, ODD, ROWS
from kernels.tiles import leaf_count
from kernels.work import AttentionWork

LOGITS_SLAB = 512  # rows of prompt logits computed at a time: 512 x 152k x 4 bytes = 311 MB
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROPE_KEYS = {  # rope type -> settings it needs and others it takes beside rope_theta; the rest is refused, not ignored
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("low_freq_factor", "high_freq_factor"), ("factor", "original_max_position_embeddings")),
    "yarn": ((), ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
                  "mscale_all_dim", "truncate")),
}


@dataclass(frozen=True)
class ModelConfig:
    """What of a Hugging Face config.json decides the shape and the arithmetic of the model."""
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # as YaRN stretches it
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope_theta: float
    rope_type: str
    rope: dict = field(hash=False)
    dtype: str = "bfloat16"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse_layers: tuple[int, ...] = ()  # those with experts

    @classmethod
    def from_dict(cls, config: dict) -> "ModelConfig":
        """Read a config.json. Raises ValueError naming whatever of it samebits does not implement."""
        architecture = (config.get("architectures") or ["(none)"])[0]
        moe = architecture == "Qwen3MoeForCausalLM"
        if architecture not in ARCHITECTURES:
            raise ValueError(f"unsupported architecture {architecture!r}: samebits runs {', '.join(ARCHITECTURES)}")
        if quantised := config.get("quantization_config"):
            raise ValueError(f"quantised checkpoint ({quantised.get('quant_method', 'unknown method')}): samebits runs "
                             "bfloat16, float16 and float32 weights")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"unsupported activation hidden_act={act!r}: samebits implements 'silu'")
        if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError("sliding-window attention is not implemented: every layer must attend to all positions")
        config = {"num_experts": config["num_local_experts"]} | config if "num_local_experts" in config else config
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        of_experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size") if moe else ()
        if missing := [key for key in (*sizes, *of_experts) if key not in config]:
            raise ValueError(f"config.json lacks {missing[0]!r}")
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        if head_dim not in (32, 64, 128, 256):
            raise ValueError(f"unsupported head_dim {head_dim}: samebits implements 32, 64, 128 and 256")
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        theta, rope_type, rope = read_rope(config)
        stretched = int(rope["original"] * rope["factor"]) if rope_type == "yarn" else 0
        bias, qwen2 = bool(config.get("attention_bias", False)), architecture == "Qwen2ForCausalLM"
        dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
        sparse = [i for i in range(config["num_hidden_layers"]) if moe and i not in dense and (i + 1) % every == 0]
        experts = {name: config[name] for name in of_experts} if sparse else {}
        if sparse and not 0 < experts["num_experts_per_tok"] <= experts["num_experts"]:
            raise ValueError(f"num_experts_per_tok {experts['num_experts_per_tok']} is not in 1 to num_experts")
        return cls(
            architecture, *(config[name] for name in sizes), kv_heads, head_dim, config.get("rms_norm_eps", 1e-6),
            max(config.get("max_position_embeddings", 2048), stretched), bool(config.get("tie_word_embeddings")),
            qk_norm=architecture.startswith("Qwen3"), qkv_bias=qwen2 or bias, o_bias=bias and not qwen2,
            mlp_bias=bool(config.get("mlp_bias", False)) and not moe, rope_theta=theta, rope_type=rope_type, rope=rope,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            **experts, norm_topk_prob=bool(config.get("norm_topk_prob")), sparse_layers=tuple(sparse))


def read_rope(config: dict) -> tuple[float, str, dict]:
    """(theta, type, settings) from either spelling: `rope_scaling` beside rope_theta, or `rope_parameters`."""
    raw = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(raw.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    old, new = raw.pop("type", None), raw.pop("rope_type", None)
    rope_type = new or old or "default"
    if rope_type not in ROPE_KEYS:
        raise ValueError(f"unsupported rope type {rope_type!r}: samebits implements {', '.join(ROPE_KEYS)}")
    if {config.get("partial_rotary_factor"), raw.pop("partial_rotary_factor", None)} - {None, 1}:
        raise ValueError("partial_rotary_factor other than 1 is not implemented")
    raw = {key: value for key, value in sorted(raw.items()) if value is not None}
    needed, others = ROPE_KEYS[rope_type]
    if unknown := sorted(raw.keys() - {*needed, *others}):
        raise ValueError(f"unknown rope setting {unknown[0]!r} for rope type {rope_type!r}")
    if missing := [key for key in needed if key not in raw]:
        raise ValueError(f"rope type {rope_type!r} needs {missing[0]!r}")
    if rope_type in ("yarn", "llama3"):
        maximum = config.get("max_position_embeddings", 2048)
        raw["original"] = raw.pop("original_max_position_embeddings", None) or maximum
        raw.setdefault("factor", maximum / raw["original"])
    return theta, rope_type, raw


def rotary_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [head_dim / 2] float64, factor on cosines and sines)."""
    D, theta, rope, scale = config.head_dim, config.rope_theta, config.rope, 1.0
    inverse = theta ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    if config.rope_type in ("default", "linear"):
        return inverse / rope.get("factor", 1.0), scale
    # Long wavelengths are stretched, short ones kept, blended in between: by turns in the original length, or by index.
    if config.rope_type == "llama3":
        turns = rope["original"] * inverse / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    else:  # yarn (Peng et al. 2023, arXiv:2309.00071), between the indices that make so many turns
        low, high = (D * math.log(rope["original"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
                     for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1)))
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, D - 1)
        keep = 1 - ((torch.arange(D // 2, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
        scaled = rope.get("mscale") and rope.get("mscale_all_dim")
        above, below = (rope["mscale"], rope["mscale_all_dim"]) if scaled else (1.0, 0.0)
        stretch = math.log(max(rope["factor"], 1.0))
        scale = rope.get("attention_factor", (0.1 * above * stretch + 1.0) / (0.1 * below * stretch + 1.0))
    return inverse * (keep + (1 - keep) / rope["factor"]), scale


def rotary_table(config: ModelConfig, length: int) -> torch.Tensor:
    """[length, head_dim] fp32: cosines, then sines. Computed in float64 and rounded once, 64 positions a call, so
    that a row does not depend on how long the table is."""
    inverse, factor = rotary_frequencies(config)
    angles = (torch.arange(i, i + 64, dtype=torch.float64)[:, None] * inverse for i in range(0, length, 64))
    return torch.cat([(torch.cat([a.cos(), a.sin()], 1) * factor).float() for a in angles])[:length].contiguous()


@dataclass(frozen=True)
class Batch:
    """One step's input, built once and passed down. Padding rows of a CUDA graph have slot -1."""
    input_ids: torch.Tensor  # [num_tokens] int32; -1 - r stands for drawn[r]
    attention: AttentionWork
    drawn: torch.Tensor  # [max_num_seqs] int64, the tokens chosen by the step before
    logits_rows: torch.Tensor | None = None  # [num_logits] int64, the rows whose logits are wanted; None: every row


def deal(count: int, ranks: int, unit: int = 0) -> list[range]:
    """[0, count) as one range a rank, as even as can be: whole units, though the last may be cut short. A unit is 128,
    if it is not given, or 64 (the tile of the CPU's products) where those are too few."""
    unit = unit or (128 if count > 128 * (ranks - 1) else 64)
    borders = [min(count, rank * -(-count // unit) // ranks * unit) for rank in range(ranks + 1)]
    return [range(a, b) for a, b in zip(borders, borders[1:])]


def shard(c: ModelConfig, size: int, by_experts: bool = False) -> SimpleNamespace:
    """The rows of weights, so the columns of products, that each of `size` ranks owns; ValueError names what cannot be
    dealt to so many. q, kv: KV heads with the query heads that read them; of more ranks, a multiple, several hold the
    same KV head and deal out its query heads. The others by their names in the config."""
    H, group = c.num_kv_heads, c.num_heads // c.num_kv_heads * c.head_dim  # rows of the query heads of a KV head
    if size > H and size % H:
        raise ValueError(f"tensor_parallel_size {size} is above num_kv_heads {H}, but no multiple of it")
    q = deal(H * group, size, group if size <= H else c.head_dim)
    kv = [range(rows.start // group * c.head_dim, -(-rows.stop // group) * c.head_dim) for rows in q]
    names = ["hidden_size", "intermediate_size", "vocab_size"]
    names += ["moe_intermediate_size", "num_experts"] if c.num_experts else []
    cuts = {"num_heads": q} | {name: deal(getattr(c, name), size, name == "num_experts") for name in names}
    unused = "moe_intermediate_size" if by_experts else "num_experts"
    if small := [name for name, cut in cuts.items() if not all(cut) and name != unused]:
        raise ValueError(f"{small[0]} {getattr(c, small[0])} is too small for tensor_parallel_size {size}")
    return SimpleNamespace(q=q, kv=kv, **cuts)


class Linear(NamedTuple):
    """A weight [N, K], its bias and its leaf count (by the full weight's shape, never a shard's)."""
    weight: torch.Tensor
    bias: torch.Tensor | None
    leaves: int


class Model:
    """A decoder-only transformer over `ops`, or the part of it that rank `rank` of `size` owns. `whole` maps every
    Hugging Face tensor name to its whole shape and the index of the rank's part of it; `weights`, where there is one,
    to the view of the (merged) parameter that holds it: loading and random weights write through them. `num_heads` and
    `num_kv_heads` are the rank's, `most_kv_heads` the most that one has; `exchange`: how to get what others compute."""

    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device, dtype: torch.dtype, max_model_len: int,
                 rank: int = 0, size: int = 1, by_rows: bool = False, by_experts: bool = False):
        self.config, self.ops, self.device, self.dtype = config, ops, device, dtype
        self.rank, self.size, self.by_rows, self.by_experts = rank, size, by_rows, by_experts
        self.exchange, self.cuts, self.weights, self.whole = None, shard(config, size, by_experts), {}, {}
        c, D, cuts = config, config.head_dim, self.cuts
        self.num_heads, self.num_kv_heads = len(cuts.q[rank]) // D, len(cuts.kv[rank]) // D
        self.most_kv_heads = max(map(len, cuts.kv)) // D
        hidden, heads = map(self._uncut, (c.hidden_size, c.num_heads * D))
        # Of the products that join what ranks have apart, each has its columns or, in the row style, its part of all.
        joined = (hidden, cuts.q) if by_rows else (cuts.hidden_size, heads)
        if by_rows and c.num_experts:
            raise ValueError("tp_style 'row' is not implemented for experts: use 'column'")
        self.embed_tokens = self._parameter([("model.embed_tokens.weight", self._uncut(c.vocab_size))], hidden)
        self.layers = []
        for i in range(c.num_layers):
            attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            qkv = [(attn + "q_proj", cuts.q), (attn + "k_proj", cuts.kv), (attn + "v_proj", cuts.kv)]
            sparse = i in c.sparse_layers
            width = "moe_intermediate_size" if sparse else "intermediate_size"
            inner = getattr(cuts, width) if by_rows else self._uncut(getattr(c, width))
            ffns = [f"{mlp}experts.{e}." for e in range(c.num_experts)] if sparse else [mlp]
            rows, out = [getattr(cuts, width)] * len(ffns), [joined[0]] * len(ffns)
            if sparse and by_experts:  # all of an expert on its rank, nothing on the others
                rows, out = ([[range(0 if e in here else N, N) for here in cuts.num_experts]
                              for e in range(c.num_experts)] for N in (c.moe_intermediate_size, c.hidden_size))
            gate_up = [(ffn + name, cut) for ffn, cut in zip(ffns, rows) for name in ("gate_proj", "up_proj")]
            self.layers.append(SimpleNamespace(
                input_layernorm=self._norm(f"model.layers.{i}.input_layernorm", c.hidden_size),
                qkv_proj=self._linear(qkv, hidden, c.qkv_bias),
                q_norm=self._norm(attn + "q_norm", D) if c.qk_norm else None,
                k_norm=self._norm(attn + "k_norm", D) if c.qk_norm else None,
                o_proj=self._linear([(attn + "o_proj", joined[0])], joined[1], c.o_bias),
                post_attention_layernorm=self._norm(f"model.layers.{i}.post_attention_layernorm", c.hidden_size),
                gate=self._linear([(mlp + "gate", self._uncut(c.num_experts))], hidden) if sparse else None,
                gate_up_proj=self._linear(gate_up, hidden, c.mlp_bias, in_turn=True),
                down_proj=self._linear([(ffn + "down_proj", cut) for ffn, cut in zip(ffns, out)], inner, c.mlp_bias)))
        self.norm = self._norm("model.norm", c.hidden_size)
        own = cuts.vocab_size[rank]
        self.lm_head = (Linear(self.embed_tokens[own.start : own.stop], None, leaf_count(c.vocab_size, c.hidden_size))
                        if c.tie_word_embeddings else self._linear([("lm_head", cuts.vocab_size)], hidden))
        self.cos_sin = rotary_table(c, max_model_len).to(device)

    def _parameter(self, parts: list[tuple[str, list[range]]], *inputs: list[range], in_turn=False) -> torch.Tensor:
        """One tensor [N, K], or [N] without `inputs`, of the rank's rows of each (checkpoint name, cut), one below the
        other or in turn, and its columns, by the cut `inputs`; see `weights` and `whole`."""
        rows = [cut[self.rank] for _, cut in parts if cut[self.rank]]  # of another rank's expert there are none
        shape = sum(map(len, rows)), *(len(cut[self.rank]) for cut in inputs)
        tensor = torch.empty(shape, dtype=self.ops.weight_dtype(self.dtype), device=self.device)
        views = iter(tensor.split(list(map(len, rows))))
        if in_turn:  # by twos
            views = (view for pair in tensor.unflatten(0, (-1, len(rows[0]), 2)) for view in pair.unbind(1))
        for name, cut in parts:
            shape, own = zip(*[(c[-1].stop, slice(c[self.rank].start, c[self.rank].stop)) for c in (cut, *inputs)])
            self.whole[name] = shape, own
            self.weights |= {name: next(views)} if cut[self.rank] else {}
        return tensor

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    def _norm(self, name: str, N: int) -> torch.Tensor:
        return self._parameter([(name + ".weight", self._uncut(N))])

    def _uncut(self, N: int) -> list[range]:
        return [range(N)] * self.size

    def _linear(self, parts: list[tuple[str, list[range]]], inputs: list[range], biased=False, in_turn=False) -> Linear:
        weight = self._parameter([(name + ".weight", cut) for name, cut in parts], inputs, in_turn=in_turn)
        bias = self._parameter([(name + ".bias", cut) for name, cut in parts], in_turn=in_turn) if biased else None
        return Linear(weight, bias, leaf_count(sum(cut[-1].stop for _, cut in parts), inputs[-1].stop))

    def forward(self, batch: Batch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, of `batch.logits_rows`: [num_logits, hidden_size].

        kv_cache: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]; this step's keys are written to it"""
        c, ops, eps, cuts, dtype = self.config, self.ops, self.config.rms_norm_eps, self.cuts, self.dtype
        hidden_states, residual = ops.embedding(batch.input_ids, self.embed_tokens, dtype, batch.drawn), None
        for layer, (k_cache, v_cache) in zip(self.layers, kv_cache, strict=True):
            normed = ops.rms_norm(hidden_states, layer.input_layernorm, eps, residual)
            residual = hidden_states if residual is None else residual  # the embedding; each norm adds to it, in place
            qkv = ops.linear(normed, *layer.qkv_proj, dtype)
            q = ops.rotary_and_cache(qkv, layer.q_norm, layer.k_norm, eps, self.cos_sin, batch.attention, k_cache,
                                     v_cache, self.num_heads)
            wanted = batch.logits_rows if layer is self.layers[-1] else None  # elsewhere all: the next keys need them
            if wanted is not None and not len(wanted):
                return residual[:0]
            attn = self._whole(ops.paged_attention, cuts.q, ODD, q, k_cache, v_cache, batch.attention, c.head_dim**-0.5)
            if wanted is not None:
                attn, residual = attn[wanted], residual[wanted]
            hidden_states = self._whole(ops.linear, cuts.hidden_size, EVEN, attn.flatten(1), *layer.o_proj, dtype)
            normed = ops.rms_norm(hidden_states, layer.post_attention_layernorm, eps, residual)
            if layer.gate is None:
                gated = self._whole(ops.gated_linear, cuts.intermediate_size, ODD, normed, *layer.gate_up_proj, dtype)
                hidden_states = self._whole(ops.linear, cuts.hidden_size, EVEN, gated, *layer.down_proj, dtype)
                continue
            routing = ops.route(normed, ops.linear(normed, *layer.gate, torch.float32), c.num_experts_per_tok,
                                c.norm_topk_prob, cuts.num_experts[self.rank] if self.by_experts else None)
            gated_linear, linear = (partial(op, routing=routing) for op in (ops.gated_linear, ops.linear))
            # What is exchanged: the experts' results, or columns, before and after.
            first, second, third = ((None, self._uncut(c.hidden_size), None) if self.by_experts else
                                    (cuts.moe_intermediate_size, None, cuts.hidden_size))
            gated = self._whole(gated_linear, first, ODD, routing.x, *layer.gate_up_proj, dtype)
            down = self._whole(linear, second, ROWS, gated, *layer.down_proj, dtype)
            hidden_states = self._whole(ops.combine, third, EVEN, routing.weights, routing.places, down)
        return ops.rms_norm(hidden_states, self.norm, eps, residual)

    def exchanged_bytes(self, num_tokens: int, num_seqs: int) -> list[int]:
        """The most that exchanges of a step carry, by buffer: ODD, EVEN, LOGITS, ROWS."""
        c, rows, size = self.config, max(num_tokens, num_seqs), self.dtype.itemsize
        slots = rows * c.num_experts_per_tok + 128 * c.num_experts  # tiles are filled up to 128 rows at most
        wide = max(rows * max(c.num_heads * c.head_dim, c.intermediate_size),
                   slots * c.moe_intermediate_size * (not self.by_experts))
        sums, logits = rows * c.hidden_size * 4, max(num_seqs, LOGITS_SLAB) * c.vocab_size * 4
        return [max(sums, wide * size), sums, max(sums, logits), slots * c.hidden_size * size * self.by_experts]

    def logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] fp32, into `out` if given."""
        linear, cut = self.ops.linear, self.cuts.vocab_size
        return self._whole(linear, cut, LOGITS, hidden_states, *self.lm_head, torch.float32, out=out)

    def _whole(self, op, cut: list[range] | None, buffer: int, x: torch.Tensor, *args, out=None) -> torch.Tensor:
        """op(x, ...), of which every rank computes its columns, with those of all (without a `cut`, alone). In the row
        style what the next product joins stays apart, and that product's partial sums are added."""
        if self.exchange is None or cut is None or (self.by_rows and buffer == ODD):
            return op(x, *args) if out is None else op(x, *args, out)
        if self.by_rows and buffer == EVEN:
            weight, bias, leaves, dtype = args
            compute = partial(op, x, weight, None, leaves, torch.float32)
            return self.exchange.all_reduce(compute, len(x), cut, dtype, bias)
        dtype = torch.float32 if buffer == LOGITS else self.dtype
        return self.exchange.gather(partial(op, x, *args), len(x), cut, dtype, buffer, out)

    def load(self, checkpoint: Checkpoint, progress: bool = True) -> None:
        """Stream a checkpoint into the parameters, in place. Raises ValueError, before anything is overwritten, naming
        the tensor that is missing, unexpected, of another shape or of a dtype that is no float."""
        tied = head, _ = "lm_head.weight", "model.embed_tokens.weight"
        copied = self.config.tie_word_embeddings and head in checkpoint.shapes  # allowed; compared, not loaded
        expected = self.whole | ({head: self.whole[tied[1]]} if copied else {})
        for name, (shape, _) in expected.items():
            if name not in checkpoint.shapes:
                hint = " (tie_word_embeddings is false: an untied head must be in the checkpoint)" * (name == head)
                raise ValueError(f"tensor {name} is missing from the checkpoint{hint}")
            if tuple(checkpoint.shapes[name]) != shape:
                raise ValueError(f"tensor {name} has shape {tuple(checkpoint.shapes[name])}, the config says {shape}")
        for name, dtype in checkpoint.dtypes.items():
            if name not in expected and not name.endswith("rotary_emb.inv_freq"):
                raise ValueError(f"unexpected tensor {name} in the checkpoint: the config has no place for it")
            if dtype not in ("BF16", "F16", "F32", *DTYPES.values()):
                raise ValueError(f"tensor {name} has dtype {dtype}: samebits loads BF16, F16 and F32")
        if copied and not same_bits(*(x[:].to(self.dtype) for name, x in checkpoint.tensors(False) if name in tied)):
            raise ValueError(f"{head} differs from {tied[1]}, but tie_word_embeddings is true: set it to false in "
                             "config.json, or remove the tensor")
        for name, data in checkpoint.tensors(progress):
            if name in self.weights:
                self.weights[name].copy_(data[self.whole[name][1]].to(self.dtype))

    def load_dummy(self, progress: bool = True) -> None:
        """Random weights, made on the device, from a generator keyed by each tensor's name (no two are alike). By their
        scales every block moves the residual by about its own size, and logits spread: greedy tokens vary."""
        gains = {"o_proj": 3.0, "down_proj": 3.0, "embed_tokens": 2.5, "lm_head": 2.5}
        for name, view in tqdm(self.weights.items(), "random weights", disable=not progress, leave=False):
            shape, index = self.whole[name]
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
            generator = torch.Generator(self.device).manual_seed(seed)
            gain = next((gain for part, gain in gains.items() if part in name), 1.0)
            mean, std = float(name.endswith("norm.weight")), gain / (shape[-1] ** 0.5 if len(shape) == 2 else 10.0)
            whole = torch.empty(shape, dtype=torch.float32, device=self.device)
            view.copy_(whole.normal_(mean, std, generator=generator)[index].to(self.dtype))
