"""How the next token is chosen: the parameters of a request, and the choice itself for a batch of rows.

A row's token is a function of its logits, its parameters, its seed and its position in its own sequence; this file
never sees where in the batch a row stands, and the order of rows cannot enter.
"""

import hashlib
import math
import numbers
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kernels import Ops, upload

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, named as vLLM names them. None means: the checkpoint's generation_config, else the
    default in brackets.

    max_tokens [room left]: most tokens to generate; min_tokens: end ids and stop strings do not count before it.
    temperature [1]: 0 is greedy. top_k [0, off], top_p [1], min_p [0]: cuts, in that order, at temperature.
    seed: None draws one, reported with the result. n: completions; number 0 is what n = 1 gives.
    logprobs, prompt_logprobs: None, or how many alternatives to report beside the token itself (0 to 20).
        Log-probabilities are of the model's own distribution: before temperature, penalties and cuts.
    repetition_penalty: over prompt and output; presence_penalty, frequency_penalty: over the output.
    logit_bias: token id -> value added to its logit.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True

    def resolve(self, defaults: dict) -> "SamplingParams":
        """Fill what is None from `defaults` (a generation_config.json), then from the defaults above, and validate."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        greedy = {"temperature": 0.0} if defaults.get("do_sample") is False else {}
        for source in (defaults, greedy, vars(self)):
            values |= {name: source[name] for name in values if source.get(name) is not None}
        filled = replace(self, stop=stop, stop_token_ids=tuple(self.stop_token_ids or ()), **values)
        filled.validate()
        return filled

    def validate(self) -> None:
        """Raise ValueError, naming the parameter, its value and its range."""
        ranges = {"max_tokens": (1, None), "min_tokens": (0, None), "temperature": (0, 1e6), "top_k": (-1, None),
                  "top_p": (0, 1), "min_p": (0, 1), "seed": (-(2**63), 2**63 - 1), "n": (1, 16384),
                  "logprobs": (0, MAX_LOGPROBS), "prompt_logprobs": (0, MAX_LOGPROBS),
                  "repetition_penalty": (1e-6, 1e6), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
        whole = {"max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs"}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is None:
                continue
            kind = numbers.Integral if name in whole else numbers.Real
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"{name} must be {'an integer' if name in whole else 'a number'}, got {value!r}")
            if not math.isfinite(value) or value < low or (high is not None and value > high):
                span = f"at least {low}" if high is None else f"between {low} and {high}"
                raise ValueError(f"{name} must be {span}, got {value}")
        if self.top_p == 0:
            raise ValueError("top_p must be above 0, got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be non-empty strings, got {self.stop!r}")
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            if not all(isinstance(i, numbers.Integral) and i >= 0 for i in ids):
                raise ValueError(f"{name} must be token ids, got {ids!r}")
        if not all(isinstance(bias, numbers.Real) and abs(bias) <= 1e6 for bias in self.logit_bias.values()):
            raise ValueError(f"logit_bias must be numbers between -1e6 and 1e6, got {self.logit_bias!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts_logits(self) -> bool:
        return self.has_penalties or self.min_tokens > 0 or bool(self.logit_bias)


def completion_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request: the request's own for 0, else hashed from both (53 bits, so that it
    survives JSON)."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"samebits completion {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def adjustments(seq) -> dict[int, tuple[float, float]]:
    """token id -> (repetition factor, amount added): what a sequence's penalties and biases do to its logits."""
    p, output = seq.params, seq.token_ids[seq.num_prompt_tokens :]
    repeated = set(seq.token_ids) if p.repetition_penalty != 1 else set()
    counts = Counter(output) if p.presence_penalty or p.frequency_penalty else {}
    banned = seq.stop_token_ids if len(output) < p.min_tokens else frozenset()
    changes = {}
    for token in repeated | set(counts) | set(p.logit_bias) | banned:
        add = p.logit_bias.get(token, 0.0)
        if token in counts:
            add -= p.presence_penalty + p.frequency_penalty * counts[token]
        changes[token] = (p.repetition_penalty if token in repeated else 1.0, -math.inf if token in banned else add)
    return changes


def adjust(logits: torch.Tensor, seqs: list) -> torch.Tensor:
    """A copy of `logits` with penalties, biases and bans applied; `logits` itself where no row asks for any. First
    repetition (divide a positive logit, multiply a negative one), then everything that is added."""
    entries = [(i, token, factor, add) for i, seq in enumerate(seqs) if seq.params.adjusts_logits
               for token, (factor, add) in adjustments(seq).items() if token < logits.shape[1]]
    if not entries:
        return logits
    columns = upload(np.array(entries, np.float64).T.copy(), logits.device)  # exact for ids; factors round once
    index, (factor, add) = tuple(columns[:2].long()), columns[2:].float()
    x, adjusted = logits[index], logits.clone()
    adjusted[index] = torch.where(x > 0, x / factor, x * factor) + add
    return adjusted


def choose(logits: torch.Tensor, seqs: list, ops: Ops) -> torch.Tensor:
    """The next token of each sequence: [num_seqs, vocab_size] fp32 logits -> [num_seqs] int64, without waiting for it.

    Of a sequence it reads `params`, `seed`, `token_ids` (their number is the new token's position),
    `num_prompt_tokens` and `stop_token_ids`. Greedy rows take the exact argmax and never touch noise; the others race.
    A row with a NaN or without a finite logit gets an id outside the vocabulary, which becomes its request's error.
    """
    adjusted = adjust(logits, seqs)
    tokens = ops.argmax(adjusted)
    racing = [(i, seq) for i, seq in enumerate(seqs) if not seq.params.is_greedy]
    if not racing:
        return tokens
    V, device = logits.shape[1], logits.device
    whole = upload(np.array([(i, min(seq.params.top_k, V) if seq.params.top_k > 0 else V,
                              round(seq.params.top_p * (1 << 30)), seq.seed, len(seq.token_ids))
                             for i, seq in racing], np.int64).T.copy(), device)
    real = upload(np.array([(max(p.temperature, 1e-6), math.log(p.min_p) if p.min_p > 0 else -math.inf)
                            for p in (seq.params for _, seq in racing)], np.float32).T.copy(), device)
    index, top_k, top_p, seed, position = whole
    drawn = ops.sample(adjusted if len(racing) == len(seqs) else adjusted[index], real[0], top_k, top_p, real[1], seed,
                       position.to(torch.int32))
    tokens[index] = torch.where(tokens[index] < V, drawn, tokens[index])  # broken rows stay broken
    return tokens
