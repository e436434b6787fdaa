"""The transformer: its configuration, its rotary table, its weights and its forward pass.

One decoder covers Qwen3, Qwen3-MoE, Qwen2 and Llama shapes; they differ in a few flags of `ModelConfig`. The forward
pass is written in the ops of one `kernels.Ops` table and reads everything else from its arguments. It knows nothing
of requests, scheduling or sampling.
"""

import hashlib
import math
from dataclasses import dataclass, field, replace

import torch
from tqdm import tqdm

from checkpoint import Checkpoint
from kernels import Ops, same_bits
from kernels.collectives import DRAWN, FIRST, LOGITS, SECOND, TOTALS, Collectives, make_collectives
from kernels.tiles import leaf_count
from kernels.work import AttentionWork

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
FLOATS = {"BF16", "F16", "F32"}
ROPE_KEYS = {  # rope type -> settings it understands beside rope_theta; anything else is refused, never ignored
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"},
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
    max_position_embeddings: int
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
    sparse_layers: tuple[int, ...] = ()  # those with experts; the others have an MLP of intermediate_size

    @classmethod
    def from_dict(cls, config: dict) -> "ModelConfig":
        """Read a config.json. Raises ValueError naming whatever of it samebits does not implement."""
        architecture = (config.get("architectures") or ["(none)"])[0]
        if architecture not in ARCHITECTURES:
            raise ValueError(f"unsupported architecture {architecture!r}: samebits runs {', '.join(ARCHITECTURES)}")
        if quantised := config.get("quantization_config"):
            raise ValueError(f"quantised checkpoint ({quantised.get('quant_method', 'unknown method')}): samebits runs "
                             "bfloat16, float16 and float32 weights")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"unsupported activation hidden_act={act!r}: samebits implements 'silu'")
        if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError("sliding-window attention is not implemented: every layer must attend to all positions")
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [key for key in needed if key not in config]:
            raise ValueError(f"config.json lacks {missing[0]!r}")
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        if head_dim not in (32, 64, 128, 256):
            raise ValueError(f"unsupported head_dim {head_dim}: samebits implements 32, 64, 128 and 256")
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        theta, rope_type, rope = read_rope(config)
        bias = bool(config.get("attention_bias", False))
        qwen2 = architecture == "Qwen2ForCausalLM"
        return cls(
            architecture, config["vocab_size"], config["hidden_size"], config["intermediate_size"],
            config["num_hidden_layers"], heads, kv_heads, head_dim, config.get("rms_norm_eps", 1e-6),
            config.get("max_position_embeddings", 2048), bool(config.get("tie_word_embeddings", False)),
            qk_norm=architecture.startswith("Qwen3"), qkv_bias=qwen2 or bias, o_bias=bias and not qwen2,
            mlp_bias=bool(config.get("mlp_bias", False)), rope_theta=theta, rope_type=rope_type, rope=rope,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            **(read_experts(config) if architecture == "Qwen3MoeForCausalLM" else {}))

    @property
    def max_model_len(self) -> int:
        """Longest context the checkpoint is meant for; YaRN stretches its original length by `factor`."""
        if self.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.rope["original"] * self.rope["factor"]))
        return self.max_position_embeddings


def read_experts(config: dict) -> dict:
    """The fields of a mixture of experts. Raises ValueError naming what is absent or out of range."""
    count = config.get("num_experts") or config.get("num_local_experts") or 0
    found = {key: config.get(key) or 0 for key in ("num_experts_per_tok", "moe_intermediate_size")}
    if not count or not all(found.values()):
        raise ValueError("config.json must give num_experts, num_experts_per_tok and moe_intermediate_size")
    if found["num_experts_per_tok"] > count:
        raise ValueError(f"num_experts_per_tok {found['num_experts_per_tok']} is more than num_experts {count}")
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    sparse = tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
    return found | {"num_experts": count, "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
                    "sparse_layers": sparse}


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
    if unknown := sorted(set(raw) - ROPE_KEYS[rope_type]):
        raise ValueError(f"unknown rope setting {unknown[0]!r} for rope type {rope_type!r}")
    if rope_type in ("yarn", "llama3"):
        maximum = config.get("max_position_embeddings", 2048)
        raw["original"] = raw.pop("original_max_position_embeddings", None) or maximum
        raw.setdefault("factor", maximum / raw["original"])
    needed = {"linear": ["factor"], "llama3": ["low_freq_factor", "high_freq_factor"]}.get(rope_type, [])
    if missing := [key for key in needed if key not in raw]:
        raise ValueError(f"rope type {rope_type!r} needs {missing[0]!r}")
    return theta, rope_type, raw


def rotary_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [head_dim / 2] float64, factor on cosines and sines)."""
    D, theta, rope = config.head_dim, config.rope_theta, config.rope
    inverse = theta ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    if config.rope_type == "linear":
        return inverse / rope["factor"], 1.0
    if config.rope_type == "llama3":  # long wavelengths are stretched, short ones kept, blended in between
        turns = rope["original"] * inverse / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return inverse * (keep + (1 - keep) / rope["factor"]), 1.0
    if config.rope_type == "yarn":  # Peng et al. 2023, arXiv:2309.00071
        def dimension(turns: float) -> float:  # index whose wavelength makes `turns` turns in the original length
            return D * math.log(rope["original"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

        def temperature(mscale: float) -> float:
            return 1.0 if rope["factor"] <= 1 else 0.1 * mscale * math.log(rope["factor"]) + 1.0

        low, high = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, D - 1)
        ramp = (torch.arange(D // 2, dtype=torch.float64) - low) / (high - low or 0.001)
        keep = 1 - ramp.clamp(0, 1)
        scaled = rope.get("mscale") and rope.get("mscale_all_dim")
        default = temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"]) if scaled else temperature(1.0)
        return inverse * (keep + (1 - keep) / rope["factor"]), rope.get("attention_factor", default)
    return inverse, 1.0


def rotary_table(config: ModelConfig, length: int) -> torch.Tensor:
    """[length, head_dim] fp32: cosines, then sines. Computed in float64 and rounded once, 64 positions a call, so
    that a row does not depend on how long the table is."""
    inverse, factor = rotary_frequencies(config)
    rows = []
    for start in range(0, length, 64):
        angles = torch.arange(start, start + 64, dtype=torch.float64)[:, None] * inverse
        rows.append((torch.cat([angles.cos(), angles.sin()], 1) * factor).float())
    return torch.cat(rows)[:length].contiguous()


@dataclass(frozen=True)
class Batch:
    """One step's input, built once and passed down. Padding rows of a CUDA graph have slot -1.

    input_ids: [num_tokens] int32
    drawn: [max_num_seqs] int64, the tokens chosen by the step before; an input id of -1 - r stands for drawn[r]
    logits_rows: [num_logits] int32, the rows whose logits are wanted; None means every row
    """

    input_ids: torch.Tensor
    attention: AttentionWork
    drawn: torch.Tensor
    logits_rows: torch.Tensor | None = None


def deal(count: int, ranks: int, unit: int = 1, first: int = 0) -> list[slice]:
    """`count` units from `first` on, dealt out in contiguous ranges that differ by one unit at most."""
    borders = [(first + r * (count // ranks) + min(r, count % ranks)) * unit for r in range(ranks + 1)]
    return [slice(a, b) for a, b in zip(borders, borders[1:])]


def length(part: slice) -> int:
    return part.stop - part.start


@dataclass(frozen=True)
class Shard:
    """Which part of every weight rank `rank` of `size` holds.

    style "column": output columns of every product, so that no sum crosses a rank; o_proj's and down_proj's inputs are
    gathered. "row": of these two the part of K that the rank's own outputs meet; their partial sums are all-reduced.
    """

    rank: int = 0
    size: int = 1
    style: str = "column"

    @property
    def numerics(self) -> str:  # what of this decides bits
        return f"row of {self.size}" if self.style == "row" and self.size > 1 else "column"

    def cuts(self, c: ModelConfig) -> dict[str, list[slice]]:
        """Every rank's part of each axis: columns in units of 128, or of less where these are too few; KV heads with
        their query heads. With more ranks than KV heads, several hold the same one and share its query heads. Raises
        ValueError naming an axis that cannot be dealt."""
        if c.num_experts and self.numerics != "column":
            raise ValueError(f"tp_style 'row' is not implemented for {c.architecture}: use 'column'")
        ranks, H, group = self.size, c.num_kv_heads, c.num_heads // c.num_kv_heads
        keys, queries = deal(H, min(ranks, H)), deal(H, min(ranks, H), group)
        if ranks > H:
            owned = [r * H // ranks for r in range(ranks)]
            keys = [slice(j, j + 1) for j in owned]
            queries = [part for j in range(H) for part in deal(group, owned.count(j), first=j * group)]
            if not all(map(length, queries)):
                raise ValueError(f"num_key_value_heads {H}, each of {group} query heads, are too few for {ranks} ranks")
        cuts = {"heads": queries, "kv_heads": keys}
        for axis in ("hidden_size", "intermediate_size", "vocab_size", *["moe_intermediate_size"][: c.num_experts]):
            columns = getattr(c, axis)
            unit = next((u for u in (128, 64, 32, 16) if -(-columns // u) >= ranks), None)
            if unit is None:
                raise ValueError(f"{axis} {columns} is too small for {ranks} ranks of at least 16 columns each")
            *others, last = deal(-(-columns // unit), ranks, unit)
            cuts[axis] = [*others, slice(last.start, columns)]
        return cuts


@dataclass
class Linear:
    """A weight [N, K], its bias and its leaf count (by the full weight's shape, never a shard's). Of experts: a weight
    [num_experts, N, K] without bias, and the leaf count of one."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    leaves: int


@dataclass
class Layer:
    input_layernorm: torch.Tensor
    qkv_proj: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_proj: Linear
    post_attention_layernorm: torch.Tensor
    router: Linear | None  # where the two that follow are of experts
    gate_up_proj: Linear
    down_proj: Linear


class Model:
    """A decoder-only transformer over `ops`, or rank `shard.rank`'s part of it.

    `weights` maps every Hugging Face tensor name to the view of the (merged) parameter that holds the rank's part of
    it; `parts` to the shape of the whole tensor and the slices that are the rank's. Loading and random weights write
    through them. num_heads, num_kv_heads: the rank's. Raises ValueError if the shapes cannot be dealt to the ranks.
    """

    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device, dtype: torch.dtype, max_model_len: int,
                 shard: Shard | None = None):
        self.config, self.ops, self.device, self.dtype = config, ops, device, dtype
        self.shard = shard = shard or Shard()
        self.collectives: Collectives | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.parts: dict[str, tuple[tuple, tuple]] = {}
        c, D, cuts = config, config.head_dim, shard.cuts(config)
        cuts |= {name: [slice(part.start * D, part.stop * D) for part in cuts[name]] for name in ("heads", "kv_heads")}
        self.widths = {axis: [length(part) for part in parts] for axis, parts in cuts.items()}
        q, kv, hidden, mlp, vocab, *expert = (parts[shard.rank] for parts in cuts.values())
        self.num_heads, self.num_kv_heads = length(q) // D, length(kv) // D
        q_size, kv_size, by_row = c.num_heads * D, c.num_kv_heads * D, shard.size > 1 and shard.style == "row"
        whole = slice(0, c.hidden_size)

        def leave(name: str, K: int, part: slice, has_bias: bool) -> Linear:  # a product whose input is sharded
            rows, columns = (whole, part) if by_row else (hidden, slice(0, K))
            linear = self._linear([(name, c.hidden_size, rows)], K, has_bias, columns)
            return replace(linear, bias=None) if by_row and shard.rank else linear  # one rank's partial holds the bias

        def mlp_of(ffn: str) -> tuple[None, Linear, Linear]:
            gate_up = [(ffn + name, c.intermediate_size, mlp) for name in ("gate_proj", "up_proj")]
            return (None, self._linear(gate_up, c.hidden_size, c.mlp_bias, whole, in_turn=2),
                    leave(ffn + "down_proj", c.intermediate_size, mlp, c.mlp_bias))

        def experts_of(ffn: str) -> tuple[Linear, Linear, Linear]:
            def packed(names: tuple[str, ...], N: int, K: int, part: slice) -> Linear:
                parts = [(f"{ffn}experts.{e}.{name}", N, part) for e in range(c.num_experts) for name in names]
                weight = self._linear(parts, K, False, slice(0, K), in_turn=len(names)).weight
                return Linear(weight.view(c.num_experts, -1, K), None, leaf_count(len(names) * N, K))

            every = slice(0, c.num_experts)  # each rank routes all tokens, to its part of every expert
            return (self._linear([(ffn + "gate", c.num_experts, every)], c.hidden_size, False, whole),
                    packed(("gate_proj", "up_proj"), c.moe_intermediate_size, c.hidden_size, *expert),
                    packed(("down_proj",), c.hidden_size, c.moe_intermediate_size, hidden))

        self.embed_tokens = self._parameter(
            [("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), (slice(0, c.vocab_size), whole))])
        self.layers = []
        for i in range(c.num_layers):
            attn, ffn = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            qkv = [(attn + "q_proj", q_size, q), (attn + "k_proj", kv_size, kv), (attn + "v_proj", kv_size, kv)]
            self.layers.append(Layer(
                self._norm(f"model.layers.{i}.input_layernorm", c.hidden_size),
                self._linear(qkv, c.hidden_size, c.qkv_bias, whole),
                self._norm(attn + "q_norm", D) if c.qk_norm else None,
                self._norm(attn + "k_norm", D) if c.qk_norm else None,
                leave(attn + "o_proj", q_size, q, c.o_bias),
                self._norm(f"model.layers.{i}.post_attention_layernorm", c.hidden_size),
                *(experts_of if i in c.sparse_layers else mlp_of)(ffn)))
        self.norm = self._norm("model.norm", c.hidden_size)
        self.lm_head = (Linear(self.embed_tokens[vocab], None, leaf_count(c.vocab_size, c.hidden_size))
                        if c.tie_word_embeddings else
                        self._linear([("lm_head", c.vocab_size, vocab)], c.hidden_size, False, whole))
        self.head_part = (c.vocab_size, c.hidden_size), (vocab, whole)
        self.cos_sin = rotary_table(c, max_model_len).to(device)

    def _parameter(self, parts: list[tuple[str, tuple[int, ...], tuple[slice, ...]]], in_turn: int = 1) -> torch.Tensor:
        """One tensor of the rank's parts of checkpoint tensors (name, whole shape, slices), row range under row range,
        but of every `in_turn` of them a row each in turn; registered in `weights` and `parts`."""
        rows = [length(slices[0]) for _, _, slices in parts]
        tensor = torch.empty((sum(rows), *map(length, parts[0][2][1:])), dtype=self.ops.weight_dtype(self.dtype),
                             device=self.device)
        groups = tensor.split([sum(rows[i : i + in_turn]) for i in range(0, len(rows), in_turn)])
        views = [view for group in groups for view in group.unflatten(0, (-1, in_turn)).unbind(1)]
        for (name, *part), view in zip(parts, views, strict=True):
            self.weights[name], self.parts[name] = view, tuple(part)
        return tensor

    def _norm(self, name: str, N: int) -> torch.Tensor:
        return self._parameter([(name + ".weight", (N,), (slice(0, N),))])

    def _linear(self, parts: list[tuple[str, int, slice]], K: int, has_bias: bool, columns: slice,
                in_turn: int = 1) -> Linear:
        weight = self._parameter([(name + ".weight", (N, K), (rows, columns)) for name, N, rows in parts], in_turn)
        biases = [(name + ".bias", (N,), (rows,)) for name, N, rows in parts]
        bias = self._parameter(biases, in_turn) if has_bias else None
        return Linear(weight, bias, leaf_count(sum(N for _, N, _ in parts), K))

    def connect(self, max_tokens: int, max_rows: int, max_num_seqs: int, one_host: bool) -> None:
        """Let the ranks exchange activations of up to `max_tokens`, the logits of `max_rows`, and drawn tokens."""
        c, item = self.config, self.dtype.itemsize
        row = max_tokens * c.hidden_size
        num_bytes = {LOGITS: max_rows * c.vocab_size * 4, DRAWN: max_num_seqs * 8}
        if self.shard.style == "row":
            num_bytes |= {FIRST: row * 4, SECOND: row * 4, TOTALS + FIRST: row * item, TOTALS + SECOND: row * item}
        else:
            wide = max(c.num_heads * c.head_dim, c.intermediate_size, c.num_experts_per_tok * c.moe_intermediate_size)
            num_bytes |= {FIRST: max_tokens * wide * item, SECOND: row * item}
        if self.shard.size > 1:
            self.collectives = make_collectives(self.shard.rank, self.shard.size, self.device, num_bytes, one_host)

    def forward(self, batch: Batch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, of `batch.logits_rows`: [num_logits, hidden_size].

        kv_cache: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]; this step's keys are written to it.
        """
        c, ops, eps = self.config, self.ops, self.config.rms_norm_eps
        residual = ops.embedding(batch.input_ids, self.embed_tokens, self.dtype, batch.drawn)
        hidden_states = None
        for layer, (k_cache, v_cache) in zip(self.layers, kv_cache, strict=True):
            if hidden_states is None:
                hidden_states = ops.rms_norm(residual, layer.input_layernorm, eps)
            else:
                hidden_states = ops.rms_norm(hidden_states, layer.input_layernorm, eps, residual)
            qkv = self._apply(layer.qkv_proj, hidden_states)
            q = ops.rotary_and_cache(qkv, layer.q_norm, layer.k_norm, eps, self.cos_sin, batch.attention, k_cache,
                                     v_cache, self.num_heads)
            attn = ops.paged_attention(q, k_cache, v_cache, batch.attention, c.head_dim**-0.5)
            hidden_states = self._join(layer.o_proj, attn.flatten(1), self.widths["heads"], FIRST)
            hidden_states = ops.rms_norm(hidden_states, layer.post_attention_layernorm, eps, residual)
            if layer.router is None:
                up = layer.gate_up_proj
                hidden_states = ops.gated_linear(hidden_states, up.weight, up.bias, up.leaves, self.dtype)
                hidden_states = self._join(layer.down_proj, hidden_states, self.widths["intermediate_size"], SECOND)
            else:
                hidden_states = self._experts(layer, hidden_states, batch.attention.slot_mapping)
        if batch.logits_rows is not None:
            hidden_states, residual = hidden_states[batch.logits_rows], residual[batch.logits_rows]
        return ops.rms_norm(hidden_states, self.norm, eps, residual)

    def logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] fp32, into `out` if given."""
        if self.collectives is None:
            return self._apply(self.lm_head, hidden_states, torch.float32, out)
        logits = self._apply(self.lm_head, hidden_states, torch.float32)
        return self.collectives.gather(logits, self.widths["vocab_size"], LOGITS, out)

    def _apply(self, linear: Linear, x: torch.Tensor, dtype: torch.dtype | None = None,
               out: torch.Tensor | None = None) -> torch.Tensor:
        return self.ops.linear(x, linear.weight, linear.bias, linear.leaves, dtype or self.dtype, out)

    def _experts(self, layer: Layer, x: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        """The mixture of experts: [num_tokens, hidden_size] -> the same. Tokens without a slot may become anything."""
        c, ops, gate_up, down = self.config, self.ops, layer.gate_up_proj, layer.down_proj
        logits = self._apply(layer.router, x, torch.float32)
        routing = ops.route(logits, c.num_experts_per_tok, c.norm_topk_prob, slot_mapping, self.dtype)
        x = ops.silu_and_mul(ops.expert_linear(x, gate_up.weight, gate_up.leaves, routing))
        if self.collectives is None:
            return ops.combine(ops.expert_linear(x, down.weight, down.leaves, routing), routing)
        x = self.collectives.gather(x, self.widths["moe_intermediate_size"], FIRST)
        x = ops.combine(ops.expert_linear(x, down.weight, down.leaves, routing), routing)
        return self.collectives.gather(x, self.widths["hidden_size"], SECOND)

    def _join(self, linear: Linear, x: torch.Tensor, widths: list[int], region: int) -> torch.Tensor:
        """A product whose input is dealt out by `widths`, and whose output every rank needs whole."""
        if self.collectives is None:
            return self._apply(linear, x)
        if self.shard.style == "row":
            partial = self.collectives.partial(len(x), self.config.hidden_size, region)
            return self.collectives.all_reduce(self._apply(linear, x, torch.float32, partial), self.dtype, region)
        x = self.collectives.gather(x, widths, FIRST)
        return self.collectives.gather(self._apply(linear, x), self.widths["hidden_size"], SECOND)

    def load(self, checkpoint: Checkpoint, progress: bool = True) -> None:
        """Stream a checkpoint into the parameters. Raises ValueError naming the tensor that is missing, unexpected,
        of another shape or of a dtype that is no float."""
        head, parts = "lm_head.weight", dict(self.parts)
        if self.config.tie_word_embeddings and head in checkpoint.shapes:
            parts[head] = self.head_part  # a redundant copy is allowed; compared below, not loaded
        check_names(checkpoint.shapes, parts, head)
        for name, dtype in checkpoint.dtypes.items():
            if dtype not in FLOATS:
                raise ValueError(f"tensor {name} has dtype {dtype}: samebits loads {', '.join(sorted(FLOATS))}")
        head_copy = None
        for name, data in checkpoint.tensors(progress):
            if name in self.weights:
                self.weights[name].copy_(data[parts[name][1]].to(self.dtype))
            elif name == head:
                head_copy = data[parts[name][1]].to(self.dtype)
        if head_copy is not None and not same_bits(head_copy, self.lm_head.weight.cpu().to(self.dtype)):
            raise ValueError(f"{head} differs from model.embed_tokens.weight, but tie_word_embeddings is true: "
                             "set it to false in config.json, or remove the tensor")

    def load_dummy(self, progress: bool = True) -> None:
        """Random weights, made on the device, from a generator keyed by each tensor's name (no two are alike).

        Scales are chosen so that every block moves the residual by about its own size and logits spread over a few
        units, which makes greedy tokens vary.
        """
        width = self.config.hidden_size**0.5
        for name, view in tqdm(self.weights.items(), "random weights", disable=not progress, leave=False):
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
            generator = torch.Generator(self.device).manual_seed(seed)
            shape, part = self.parts[name]
            if name.endswith("norm.weight"):
                mean, std = 1.0, 0.1
            elif "embed_tokens" in name or "lm_head" in name:
                mean, std = 0.0, 2.5 / width
            else:
                gain = 3.0 if "o_proj" in name or "down_proj" in name else 1.0
                mean, std = 0.0, gain / (shape[-1] ** 0.5 if len(shape) == 2 else 10.0)
            whole = torch.empty(shape, dtype=torch.float32, device=self.device)
            view.copy_(whole.normal_(mean, std, generator=generator)[part].to(self.dtype))


def check_names(shapes: dict[str, tuple], expected: dict[str, tuple], head: str) -> None:
    """The checkpoint's tensors must be the model's, name for name and shape for shape."""
    for name, (shape, _) in expected.items():
        if name not in shapes:
            hint = " (tie_word_embeddings is false: an untied head must be in the checkpoint)" if name == head else ""
            raise ValueError(f"tensor {name} is missing from the checkpoint{hint}")
        if shapes[name] != shape:
            raise ValueError(f"tensor {name} has shape {shapes[name]}, the config says {shape}")
    for name in shapes:
        if name not in expected and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"unexpected tensor {name} in the checkpoint: the config has no place for it")
