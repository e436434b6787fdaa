"""Receipts: made (`LLM.receipt`), and checked (`LLM.verify`): is one what this engine would say, bit for bit?

Prefill and decode give the same bits, so one prefill over prompt and completion checks it: every token is drawn again
from its own logits. Whatever a receipt says, the worst that comes of it is a ValueError.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import numpy as np
import torch

import sampler
from receipts import tool
from runner import StepOutput
from sampler import SamplingParams

# A receipt's fields and those of its params, each with the pattern of its JSON.
WHOLE, REAL, TEXT, OBJECT, IDS = r"-?\d+", r"-?\d[\d.e+-]*", '".*"', "{.*}", r"\[\d+(, \d+)*]"
FIELDS = {"version": "1", "fingerprint": TEXT, "parts": OBJECT, "prompt_token_ids": IDS, "params": OBJECT,
          "seed": WHOLE, "token_ids": IDS, "logprobs": r'\[("[0-9a-f]{8}"(, |(?=])))+]', "text": TEXT,
          "finish_reason": TEXT, "stop_reason": TEXT + r"|\d+|null", "seconds": r"\d[\d.e-]{0,23}", "digest": TEXT}
PARAMS = {p.name: {int: WHOLE, float: REAL, bool: "true|false"}.get(sampler.kind(p), r"\[.*]")
          for p in fields(SamplingParams) if p.name != "seed"} | {
    "n": "1", "stop_token_ids": IDS + r"|\[]", "logit_bias": rf'{{("\d+": {REAL}(, |(?=}})))*}}',
    "logprobs": r"\d+|null", "prompt_logprobs": "null"}


def hex_words(logprobs: list[float]) -> list[str]:
    """The bits of each fp32 logprob as 8 hex digits."""
    return [f"{word:08x}" for word in torch.tensor(logprobs, dtype=torch.float32).view(torch.uint32).tolist()]


def receipt_digest(receipt: dict) -> str:
    """sha256 of all of a receipt but the digest itself, 32 hex digits."""
    return hashlib.sha256(json.dumps(receipt | {"digest": None}, sort_keys=True).encode()).hexdigest()[:32]


def make_receipt(llm, output, index: int, trace: bool) -> dict:
    """Receipt of a finished completion that was asked for logprobs; `trace`: with a digest of every op's output."""
    out = output.outputs[index] if 0 <= index < len(output.outputs) else None
    if out is None or out.finish_reason in (None, "error", "abort") or not out.token_ids or out.logprobs is None:
        raise ValueError(f"no receipt: there is no finished completion {index} with tokens, asked for with logprobs=0")
    prompt, asked, room = output.prompt_token_ids, output.params, llm.max_model_len - len(output.prompt_token_ids)
    params = replace(asked, n=1, seed=out.seed, prompt_logprobs=None, min_tokens=min(asked.min_tokens, room),
                     max_tokens=min(asked.max_tokens or room, room))
    receipt = {"version": 1, "fingerprint": llm.fingerprint, "parts": llm.fingerprint_parts, "prompt_token_ids": prompt,
               "params": {name: value for name, value in vars(params).items() if name != "seed"},
               **{name: getattr(out, name) for name in ("seed", "token_ids", "text", "finish_reason", "stop_reason")},
               "logprobs": hex_words(out.logprobs), "seconds": output.timings["total_s"]}
    if trace:
        receipt["trace"] = replay(llm, prompt, params, out.token_ids, True)[2]
    receipt["params"]["logit_bias"] = {int(token): value for token, value in params.logit_bias.items()}
    # As it will be when it is read: tuples are lists, keys are text, NumPy's numbers plain ones.
    receipt = json.loads(json.dumps(receipt, default=lambda number: number.item()))
    return receipt | {"digest": receipt_digest(receipt)}


def check_format(receipt) -> SamplingParams:
    """The sampling parameters of a receipt. ValueError naming what of it is missing, unknown or malformed: a receipt
    that says less or more than this version understands is not judged."""
    if type(receipt) is not dict:
        raise ValueError("a receipt is a JSON object, and this is none")
    known = FIELDS | {name: OBJECT for name in receipt if name == "trace"}
    for what, given, patterns in (("the receipt", receipt, known), ("params", receipt.get("params"), PARAMS)):
        for name in sorted(patterns.keys() ^ given.keys()):
            raise ValueError(f"{what} {'has an unknown field' if name in given else 'lacks'} {name!r}")
        for name, pattern in patterns.items():
            try:
                text = json.dumps(given[name])
            except (RecursionError, TypeError) as error:
                raise ValueError(f"{what}: {name} cannot be written as JSON") from error
            if not re.fullmatch(pattern, text):
                raise ValueError(f"{what}: {name} must be {pattern}, not {text:.60}")
    if (count := len(receipt["token_ids"])) != len(receipt["logprobs"]):
        raise ValueError(f"the receipt has {count} token_ids but {len(receipt['logprobs'])} logprobs")
    bias = {int(token): value for token, value in receipt["params"]["logit_bias"].items()}
    return SamplingParams(**receipt["params"] | {"logit_bias": bias, "seed": receipt["seed"]}).resolve({})


def replay(llm, prompt: list[int], params: SamplingParams, token_ids: list[int], trace: bool) -> tuple:
    """One prefill of prompt and completion: the token drawn at each place of the completion, the logprob of the token
    that stands there, and with `trace` a digest of each op's output (tools/trace.py)."""
    drawn: list[int] = []

    def redraw(seq, logits: torch.Tensor) -> None:
        end = len(prompt) + len(drawn)
        rows = [SimpleNamespace(**vars(seq) | {"num_prompt_tokens": len(prompt), "token_ids": seq.token_ids[: end + i]})
                for i in range(len(logits))]
        drawn.extend(sampler.choose(logits, rows, llm.ops).tolist())

    tracing = tool("trace")["traced"](llm) if trace else nullcontext({})
    with tracing as ops:
        output = llm.generate([prompt + token_ids], replace(params, prompt_logprobs=0), score_only=len(prompt),
                              observe=redraw)[0]
    return drawn, [logprob for logprob, _ in output.prompt_logprobs[len(prompt) :]], ops


def find_problems(llm, receipt: dict, params: SamplingParams) -> Iterator[str]:
    """What of a receipt does not hold, in words: of its tokens and logprobs the first."""
    if receipt_digest(receipt) != receipt["digest"]:
        yield "the receipt was changed after it was written: its digest is not that of what it says"
    here, there, trace = llm.fingerprint_parts, receipt["parts"], receipt.get("trace", {})
    odd = [f"{name} {there.get(name)} in the receipt, {here.get(name)} here" for name in here | there
           if here.get(name) != there.get(name)]
    if odd or receipt["fingerprint"] != llm.fingerprint:
        yield "another fingerprint: " + ("; ".join(odd) or f"{receipt['fingerprint']} is not that of its parts")
        if not trace or here["config"] != there.get("config"):
            return  # there is nothing to be learnt
    prompt, token_ids, words = (receipt[name] for name in ("prompt_token_ids", "token_ids", "logprobs"))
    drawn, logprobs, ops = replay(llm, prompt, params, token_ids, bool(trace))
    for i, (token, word, again, ours) in enumerate(zip(token_ids, words, drawn, hex_words(logprobs))):
        if (token, word) != (again, ours):
            what = f"the draw gives {again}" if token != again else "its logprob differs"
            theirs, units = np.uint32(int(word, 16)).view(np.float32), abs(int(word, 16) - int(ours, 16))
            yield (f"token {i} (position {len(prompt) + i}) is {token} in the receipt, but {what}; logprob "
                   f"{theirs:.9g} (bits {word}), {logprobs[i]:.9g} ({ours}) here: {units} units in the last place")
            break
    else:
        request = llm.requests[llm.add_request(prompt, params)]  # it is told the tokens, and makes text and end of them
        seq = llm.scheduler.waiting[-1]
        for token in token_ids:
            if not request.finished:
                llm._absorb(seq, StepOutput(token, 0.0))
        llm.abort(request.request_id)
        out, end = request.outputs[0], receipt["finish_reason"]
        if len(token_ids) > (count := len(out.token_ids)):
            yield f"the completion ends ({out.finish_reason}) after token {count - 1}, the receipt goes on"
        elif out.finish_reason == "abort":
            yield f"the completion goes on after token {count - 1}, where the receipt ends ({end})"
        else:
            yield from (f"{name} is {receipt[name]!r} in the receipt, but the tokens make {getattr(out, name)!r}"
                        for name in ("text", "finish_reason", "stop_reason") if receipt[name] != getattr(out, name))
    if differs := [where for where in ops | trace if ops.get(where) != trace.get(where)]:
        yield f"trace: the first op whose output differs is {differs[0]} ({len(differs)} of {len(ops)})"


@dataclass(frozen=True)
class Verdict:
    """`problems`: what of a receipt did not hold, in words. `seconds`: the replay's; `generation_seconds`: what the
    receipt says generation took, its wait in the queue included."""

    verified: bool
    problems: list[str]
    num_tokens: int
    seconds: float
    generation_seconds: float


def verify(llm, receipt: dict) -> Verdict:
    """Replay a receipt in one prefill. ValueError if it is none, or cannot be run here."""
    params, _, begin = check_format(receipt), llm.fingerprint_parts, time.perf_counter()
    problems = ["".join(c if c.isprintable() else "?" for c in problem)  # a forger's words may be among them
                for problem in find_problems(llm, receipt, params)]
    seconds = time.perf_counter() - begin
    return Verdict(not problems, problems, len(receipt["token_ids"]), seconds, receipt["seconds"])
