"""Which arithmetic an answer came from (the fingerprint), and proof that it did (receipts).

`output bits = f(weights, prompt ids, sampling params, seed, fingerprint)`. Whatever may change bits is a part of the
fingerprint; nothing that may not (batch, ports, cache, restarts) is.

A receipt states both sides of that equation for one completion, one JSON object a line. Since prefill and decode give
the same bits, it is checked in one prefill over prompt and completion: every token is drawn again from its own logits.
A receipt's digest is a checksum and no signature; what cannot be forged is the replay.
"""

import hashlib
import json
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

import sampler
from checkpoint import Checkpoint
from kernels import Ops
from kernels.tiles import numerics_hash
from kernels.work import Routing
from model import Model, ModelConfig
from runner import StepOutput
from sampler import SamplingParams

DIGEST_FILE = ".samebits-digest.json"
VERSION = 1
FIELDS = {"version": int, "fingerprint": str, "parts": dict, "prompt_token_ids": list, "params": dict, "seed": int,
          "token_ids": list, "logprobs": list, "text": str, "finish_reason": str, "stop_reason": (str, int, type(None)),
          "seconds": float, "digest": str}
TRACED = ("embedding", "rms_norm", "linear", "gated_linear", "rotary_and_cache", "paged_attention", "route",
          "expert_linear", "silu_and_mul", "combine")


def file_digest(file: Path) -> str:
    """sha256 of a file, in hex. The Hub's cache names a large file by it: nothing is read then."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
        return blob.name
    digest, shown = hashlib.sha256(), {"total": file.stat().st_size, "desc": f"digest of {file.name}", "leave": False}
    with open(file, "rb") as raw, tqdm.wrapattr(raw, "read", **shown) as stream:
        while chunk := stream.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def weight_digest(folder: Path) -> str:
    """sha256 over names and sha256s of the safetensors files, 16 hex digits; cached beside the model by each file's
    size and time."""
    files = Checkpoint(folder).files
    stamp = {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in files}
    cached = folder / DIGEST_FILE
    with suppress(OSError, ValueError, KeyError):  # there is none yet, or it is broken
        known = json.loads(cached.read_text())
        if known["stamp"] == stamp:
            return known["digest"]
    digest = hashlib.sha256(json.dumps([[f.name, file_digest(f)] for f in files]).encode()).hexdigest()[:16]
    with suppress(OSError):  # a read-only folder: computed again next time
        cached.write_text(json.dumps({"stamp": stamp, "digest": digest}))
    return digest


def processor_kind() -> str:
    """The processor's model name: on CPU it takes part in the bits."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def fingerprint_parts(config: ModelConfig, ops: Ops, device: torch.device, dtype: torch.dtype, weights: str,
                      tp_style: str = "column", end_token_ids: frozenset[int] = frozenset()) -> dict:
    """Everything that may change bits, by name. (min_tokens bans the end tokens, so they are among it.)"""
    parts = {"numerics": numerics_hash(), "dtype": str(dtype).removeprefix("torch."), "tp_style": tp_style,
             "backend": ops.name, "torch": torch.__version__.split("+")[0], "weights": weights,
             "config": hashlib.sha256(repr(config).encode()).hexdigest()[:16], "end_tokens": sorted(end_token_ids)}
    if device.type == "cuda":
        import triton

        return parts | {"device": torch.cuda.get_device_name(device), "triton": triton.__version__}
    return parts | {"device": processor_kind(), "isa": torch.backends.cpu.get_cpu_capability()}


def fingerprint(parts: dict) -> str:
    """"sb1-" and 20 hex digits of the sha256 of the parts."""
    return "sb1-" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def hex_words(logprobs: list[float]) -> list[str]:
    """The bits of each fp32 logprob as 8 hex digits."""
    return [f"{word:08x}" for word in np.array(logprobs, np.float32).view(np.uint32).tolist()]


def receipt_digest(receipt: dict) -> str:
    """sha256 of all of a receipt but the digest itself, 32 hex digits."""
    rest = {name: value for name, value in receipt.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:32]


def make_receipt(llm, output, index: int = 0, trace: bool = False) -> dict:
    """See `LLM.receipt`."""
    out = output.outputs[index] if index < len(output.outputs) else None
    if out is None or out.finish_reason in (None, "error") or not out.token_ids:
        raise ValueError(f"request {output.request_id!r} has no finished completion {index} with tokens: no receipt")
    if out.logprobs is None:
        raise ValueError("a receipt holds logprob bits: ask for them with SamplingParams(logprobs=0)")
    room = llm.max_model_len - len(output.prompt_token_ids)
    asked = output.params
    own = replace(asked, n=1, prompt_logprobs=None, max_tokens=min(asked.max_tokens or room, room),
                  min_tokens=min(asked.min_tokens, room))
    params = asdict(own)
    del params["seed"]
    receipt = {"version": VERSION, "fingerprint": llm.fingerprint, "parts": llm.fingerprint_parts,
               "prompt_token_ids": output.prompt_token_ids, "params": params, "seed": out.seed,
               "token_ids": list(out.token_ids), "logprobs": hex_words(out.logprobs), "text": out.text,
               "finish_reason": out.finish_reason, "stop_reason": out.stop_reason,
               "seconds": output.timings["total_s"]}
    if trace:
        receipt["trace"] = replay(llm, output.prompt_token_ids, own, out.seed, out.token_ids, True)[2]
    receipt = json.loads(json.dumps(receipt))  # tuples are lists, and keys text, as they will be when it is read
    return receipt | {"digest": receipt_digest(receipt)}


def load_receipts(file: str | Path) -> list[dict]:
    """The receipts of a file of JSON lines. Raises ValueError naming the line that is none, OSError if unreadable."""
    receipts = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        try:
            if line.strip():
                receipts.append(json.loads(line))
                check_format(receipts[-1])
        except (ValueError, RecursionError) as error:
            what = "" if type(error) is ValueError else "no whole JSON object (is it cut short?): "
            raise ValueError(f"{file}, line {number}: {what}{error}") from error
    if not receipts:
        raise ValueError(f"{file} holds no receipt: write one with --receipt")
    return receipts


def check_format(receipt) -> SamplingParams:
    """The sampling parameters of a receipt. Raises ValueError naming what of it is missing, unknown or of a wrong type:
    a receipt that says less or more than this version understands is not judged."""

    def need(holds: object, otherwise: str) -> None:
        if not holds:
            raise ValueError(otherwise)

    def need_fields(what: str, given: dict, known: dict) -> None:
        for name in sorted(known.keys() ^ given.keys()):
            raise ValueError(f"{what} {'lacks' if name in known else 'has an unknown field'} {name!r}")

    need(isinstance(receipt, dict), "a receipt is a JSON object, and this is none")
    version, known = receipt.get("version", VERSION), FIELDS | ({"trace": dict} if "trace" in receipt else {})
    need(version == VERSION, f"receipt version {version!r} is unknown: this samebits reads {VERSION}, take its own")
    need_fields("the receipt", receipt, known)
    for name, kind in known.items():
        need(isinstance(receipt[name], kind) and type(receipt[name]) is not bool, f"{name} is of the wrong type")
    for name in ("prompt_token_ids", "token_ids"):
        need(receipt[name] and all(type(token) is int and token >= 0 for token in receipt[name]),
             f"{name} must be a list of token ids, not empty, each a whole number of 0 or more")
    need(all(isinstance(word, str) and re.fullmatch("[0-9a-f]{8}", word) for word in receipt["logprobs"]),
         "logprobs must be words of 8 lower-case hex digits, the bits of an fp32 number each")
    counts = len(receipt["token_ids"]), len(receipt["logprobs"])
    need(counts[0] == counts[1], f"{counts[0]} token_ids but {counts[1]} logprobs")
    values, expected = receipt["params"], asdict(SamplingParams())
    need_fields("params", values | {"seed": receipt["seed"]}, expected)
    for name, value in values.items():
        resolved = value is not None or name in ("logprobs", "prompt_logprobs")
        need(resolved and (type(value) is bool) == (type(expected[name]) is bool), f"params.{name} cannot be {value!r}")
    try:
        values = values | {name: tuple(values[name]) for name in ("stop", "stop_token_ids")}
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        params = SamplingParams(**values, seed=receipt["seed"])
        params.validate()
        need(params.n == 1, "n must be 1: a receipt is of one completion, with a seed of its own")
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"params: {error}") from error
    return params


@contextmanager
def traced(model: Model, hashes: dict) -> Iterator[None]:
    """Within it, every op of `model` adds the bytes of its output rows to its sha256 in `hashes`, under the name of its
    weight (of merged ones the first) or, if it has none, of the last weight before it, and its own.

    Rows are hashed in the order of positions, so that how a prefill is cut cannot be seen. (The final norm is left out:
    which of its rows are computed follows the cut. Its error would be the head's.)
    """
    ops, place = model.ops, ""
    weights = {weight.data_ptr(): name.removeprefix("model.").removesuffix(".weight")
               for name, weight in reversed(model.weights.items())}

    def recorded(name: str, op):
        def run(*args, **kwargs):
            nonlocal place
            result = op(*args, **kwargs)
            weight = args[1] if len(args) > 1 else None
            place = weights.get(weight.data_ptr(), place) if isinstance(weight, torch.Tensor) else place
            if place != "norm":
                routed = isinstance(result, Routing)
                for part, rows in {" ids": result.ids, "": result.weights}.items() if routed else [("", result)]:
                    words = rows.contiguous().view(torch.uint8).cpu().numpy()
                    hashes.setdefault(f"{place} {name}{part}", hashlib.sha256()).update(words)
            return result

        return run

    model.ops = replace(ops, **{name: recorded(name, getattr(ops, name)) for name in TRACED})
    try:
        yield
    finally:
        model.ops = ops


def replay(llm, prompt: list[int], params: SamplingParams, seed: int, token_ids: list[int],
           trace: bool = False) -> tuple[list[int], list[float], dict[str, str]]:
    """One prefill of prompt and completion: the token drawn at each place of the completion, the logprob of the token
    that stands there, and the trace: op -> sha256 of its output, 16 hex digits, in the order of computation."""
    if trace and (llm.has_unfinished_requests or llm.ranks.size > 1):
        raise ValueError("a trace takes an engine on one rank that has nothing else to do")
    whole = prompt + token_ids
    if len(whole) > llm.max_model_len:
        raise ValueError(f"{len(whole)} tokens are more than this engine's max_model_len of {llm.max_model_len}")
    drawn, hashes, ends = [], {}, llm.end_tokens(params)

    def redraw(logits: torch.Tensor) -> None:
        rows = [SimpleNamespace(params=params, seed=seed, num_prompt_tokens=len(prompt), stop_token_ids=ends,
                                token_ids=whole[: len(prompt) + len(drawn) + i]) for i in range(len(logits))]
        drawn.extend(sampler.choose(logits, rows, llm.ops).tolist())

    scoring = SamplingParams(temperature=0.0, prompt_logprobs=0)
    request_id = llm.add_request(whole, scoring, score_only=True)
    request = llm.requests[request_id]
    seq = request.seqs[0]
    seq.prompt_logprobs = [None] * len(prompt)  # the prompt's are not asked for
    seq.observe = redraw
    try:
        with traced(llm.model, hashes) if trace else nullcontext():
            while not request.output.finished:
                llm.step()
    finally:
        llm.abort(request_id)
    logprobs = [logprob for logprob, _ in seq.prompt_logprobs[len(prompt) :]]
    return drawn, logprobs, {where: digest.hexdigest()[:16] for where, digest in hashes.items()}


@dataclass
class Verdict:
    """What became of a receipt. `problems`: what did not hold, in words; none means verified. `seconds`: the replay's;
    `generation_seconds`: what the receipt says generation took, its wait in the queue included."""

    problems: list[str]
    num_tokens: int
    seconds: float
    generation_seconds: float

    @property
    def verified(self) -> bool:
        return not self.problems


def verify(llm, receipt: dict) -> Verdict:
    """See `LLM.verify`."""
    params, begin, problems = check_format(receipt), time.perf_counter(), []
    prompt, token_ids, words = (receipt[name] for name in ("prompt_token_ids", "token_ids", "logprobs"))
    if (digest := receipt_digest(receipt)) != receipt["digest"]:
        problems.append(f"the receipt was changed after it was written: its digest is {receipt['digest']}, but that of "
                        f"what it says {digest}")
    here, there = llm.fingerprint_parts, receipt["parts"]
    same_engine = receipt["fingerprint"] == llm.fingerprint and here == there
    if not same_engine:
        odd = [f"{name} {there.get(name)} in the receipt, {here.get(name)} here" for name in here | there
               if here.get(name) != there.get(name)] or [f"{receipt['fingerprint']} is not that of its parts"]
        problems.append("another fingerprint: " + "; ".join(odd))
    trace = receipt.get("trace")
    if same_engine or trace and here["config"] == there.get("config"):
        drawn, logprobs, ours = replay(llm, prompt, params, receipt["seed"], token_ids, trace is not None)
        differs = [where for where in ours | (trace or {}) if ours.get(where) != (trace or {}).get(where)]
        problems += compare_tokens(len(prompt), token_ids, words, drawn, logprobs) or (
            compare_end(llm, receipt, params, logprobs) if same_engine else [])
        if trace is not None and differs:
            problems.append(f"trace: the first op whose output differs is {differs[0]} ({len(differs)} of {len(ours)})")
    return Verdict(problems, len(token_ids), time.perf_counter() - begin, receipt["seconds"])


def compare_tokens(start: int, token_ids: list[int], words: list[str], drawn: list[int], logprobs: list[float]) -> list:
    """The first place where tokens or logprob bits differ, in words; `start`: the position of token 0."""
    for i, (token, word, again, ours) in enumerate(zip(token_ids, words, drawn, hex_words(logprobs), strict=True)):
        if (token, word) != (again, ours):
            what = f"the draw gives {again}" if token != again else "its logprob differs"
            theirs, units = np.array(int(word, 16), np.uint32).view(np.float32), abs(int(word, 16) - int(ours, 16))
            return [f"token {i} (position {start + i}) is {token} in the receipt, but {what}; its logprob there is "
                    f"{theirs:.9g} (bits {word}), here {logprobs[i]:.9g} ({ours}): {units} units in the last place"]
    return []


def compare_end(llm, receipt: dict, params: SamplingParams, logprobs: list[float]) -> list[str]:
    """Whether the tokens, all of them right, make the receipt's text and end where and why it says."""
    request_id = llm.add_request(receipt["prompt_token_ids"], params)
    request = llm.requests[request_id]
    out = request.output.outputs[0]
    for token, logprob in zip(receipt["token_ids"], logprobs, strict=True):
        if not request.output.finished:
            llm._absorb(request, 0, StepOutput(token, logprob, None, []))
    llm.abort(request_id)
    if (count := len(receipt["token_ids"])) > len(out.token_ids):
        return [f"the completion ends ({out.finish_reason}) after token {len(out.token_ids) - 1}, the receipt goes on"]
    if out.finish_reason == "abort" and receipt["finish_reason"] != "abort":
        return [f"the completion goes on after token {count - 1}, where the receipt ends ({receipt['finish_reason']})"]
    return [f"{name} is {receipt[name]!r} in the receipt, but the tokens make {getattr(out, name)!r}"
            for name in ("text", "finish_reason", "stop_reason") if receipt[name] != getattr(out, name)]
