"""How the next token is chosen: the parameters of a request, and the choice itself for a batch of rows.

A row's token is a function of its logits, its parameters, its seed and its position in its own sequence; this file
never sees where in the batch a row stands, and the order of rows cannot enter."""

import hashlib
import math
import numbers
from collections import Counter
from dataclasses import Field, dataclass, field, fields, replace
from typing import get_args

import numpy as np
import torch

from kernels import Ops, upload

MAX_LOGPROBS = 20


def option(default, help: str, low: float | None = None, high: float = math.inf):
    """A field of `SamplingParams` that is an option of the command line, too; with `low`, a number in that range."""
    return field(default=default, metadata={"help": help, "low": low, "high": high})


def kind(parameter: Field) -> type:
    """The type of an option's values: int of `int | None`, str of `tuple[str, ...]`."""
    return (get_args(parameter.type) or (parameter.type,))[0]


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, named as vLLM names them. None means: the checkpoint's generation_config, else off;
    of max_tokens, the room left; of seed, one is drawn, and reported with the result. Cuts come in the order top_k,
    top_p, min_p, at temperature. Log-probabilities are of the model's own distribution: before temperature, penalties
    and cuts. logit_bias: token id -> value added to its logit."""
    max_tokens: int | None = option(None, "most tokens to generate (default: %(default)s)", 1)
    min_tokens: int = option(0, "end tokens and stop strings do not count before N", 0)
    temperature: float | None = option(None, "0 is greedy (default: generation_config.json's, else 1)", 0, 1e6)
    top_k: int | None = option(None, "keep the N most likely tokens; 0 keeps all", -1)
    top_p: float | None = option(None, "keep the most likely tokens that make up X", 0, 1)
    min_p: float | None = option(None, "keep tokens at least X times as likely as the likeliest", 0, 1)
    seed: int | None = option(None, "of the draw; without it one is drawn and reported", -(2**63), 2**63 - 1)
    n: int = option(1, "completions a prompt, each with a seed of its own; number 0 is what n = 1 gives", 1, 16384)
    stop: tuple[str, ...] = option((), "stop before this text; may be repeated")
    stop_token_ids: tuple[int, ...] = option((), "stop after these token ids")
    include_stop_str_in_output: bool = False
    ignore_eos: bool = option(False, "go on past the end token")
    logprobs: int | None = option(None, "report the N likeliest alternatives beside each token", 0, MAX_LOGPROBS)
    prompt_logprobs: int | None = option(None, "the same for the prompt's tokens", 0, MAX_LOGPROBS)
    repetition_penalty: float | None = option(None, "above 1 discourages tokens of prompt and output", 1e-6, 1e6)
    presence_penalty: float = option(0.0, "above 0 discourages tokens of the output", -2, 2)
    frequency_penalty: float = option(0.0, "the same, once for each time they came", -2, 2)
    logit_bias: dict[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True

    def resolve(self, defaults: dict) -> "SamplingParams":
        """Fill None from `defaults` (generation_config.json), else with what changes nothing. ValueError if invalid."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        for source in (defaults, {"temperature": 0.0} if defaults.get("do_sample") is False else {}, vars(self)):
            values |= {name: source[name] for name in values if source.get(name) is not None}
        params = replace(self, stop=stop, stop_token_ids=tuple(self.stop_token_ids or ()), **values)
        for parameter in fields(params):
            name, value, low = parameter.name, getattr(params, parameter.name), parameter.metadata.get("low")
            if low is None or (value is None and parameter.default is None):
                continue
            whole, high = kind(parameter) is int, parameter.metadata["high"]
            if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
                raise ValueError(f"{name} must be {'an integer' if whole else 'a number'}, got {value!r}")
            if not low <= value <= high:
                span = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise ValueError(f"{name} must be {span}, got {value}")
        if params.top_p == 0:
            raise ValueError("top_p must be above 0, got 0")
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise ValueError(f"min_tokens {params.min_tokens} is larger than max_tokens {params.max_tokens}")
        if not all(isinstance(s, str) and s for s in params.stop):
            raise ValueError(f"stop must be non-empty strings, got {params.stop!r}")
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if not all(isinstance(i, numbers.Integral) and i >= 0 for i in ids):
                raise ValueError(f"{name} must be token ids, got {ids!r}")
        if not all(isinstance(bias, numbers.Real) and abs(bias) <= 1e6 for bias in params.logit_bias.values()):
            raise ValueError(f"logit_bias must be numbers between -1e6 and 1e6, got {params.logit_bias!r}")
        return params

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def completion_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request: its own for 0, else hashed from both (53 bits survive JSON)."""
    digest = hashlib.sha256(f"samebits completion {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11 if index else seed


def adjust(logits: torch.Tensor, seqs: list) -> torch.Tensor:
    """A copy of `logits` with penalties, biases and bans applied; `logits` itself where no row asks for any. First
    repetition (divide a positive logit, multiply a negative one), then everything that is added."""
    entries = []  # (row, token id, repetition factor, amount added)
    for i, (seq, p) in enumerate((seq, seq.params) for seq in seqs):
        if p.has_penalties or p.min_tokens or p.logit_bias:
            output = seq.token_ids[seq.num_prompt_tokens :]
            repeated = set(seq.token_ids) if p.repetition_penalty != 1 else set()
            counts = Counter(output) if p.presence_penalty or p.frequency_penalty else {}
            banned = {end for end in seq.stop_token_ids if len(output) < p.min_tokens and end < logits.shape[1]}
            for token in repeated.union(counts, p.logit_bias, banned):
                add = -math.inf if token in banned else p.logit_bias.get(token, 0.0)
                add -= p.presence_penalty * (token in counts) + p.frequency_penalty * counts.get(token, 0)
                entries.append((i, token, p.repetition_penalty if token in repeated else 1.0, add))
    if not entries:
        return logits
    columns = upload(np.array(entries, np.float64).T.copy(), logits.device)  # exact for ids; factors round once
    index, (factor, add) = tuple(columns[:2].long()), columns[2:].float()
    x = logits[index]
    return logits.index_put(index, torch.where(x > 0, x / factor, x * factor) + add)


def choose(logits: torch.Tensor, seqs: list, ops: Ops) -> torch.Tensor:
    """The next token of each sequence: [num_seqs, vocab_size] fp32 logits -> [num_seqs] int64, without waiting for it.
    Of a sequence it reads `params`, `seed`, `token_ids` (their number is the new token's position),
    `num_prompt_tokens` and `stop_token_ids`. Greedy rows take the exact argmax and never touch noise; the others race.
    A row with a NaN or without a finite logit gets an id outside the vocabulary, which becomes its request's error."""
    adjusted = adjust(logits, seqs)
    tokens = ops.argmax(adjusted)
    racing = [(i, seq, seq.params) for i, seq in enumerate(seqs) if seq.params.temperature > 0]
    if not racing:
        return tokens
    V = logits.shape[1]
    whole = [(i, min(p.top_k, V) if p.top_k > 0 else V, round(p.top_p * (1 << 30)), seq.seed, len(seq.token_ids))
             for i, seq, p in racing]
    real = [(max(p.temperature, 1e-6), math.log(p.min_p) if p.min_p > 0 else -math.inf) for _, _, p in racing]
    index, top_k, top_p, seed, position = upload(np.array(whole, np.int64).T.copy(), logits.device)
    temperature, min_p = upload(np.array(real, np.float32).T.copy(), logits.device)
    rows = adjusted if len(racing) == len(seqs) else adjusted[index]
    drawn = ops.sample(rows, temperature, top_k, top_p, min_p, seed, position.to(torch.int32))
    return tokens.index_put((index,), torch.where(tokens[index] < V, drawn, tokens[index]))  # broken rows stay broken
