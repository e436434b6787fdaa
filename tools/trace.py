"""A digest of every op's output, layer by layer: what a receipt holds with --trace.

Where two machines disagree, it names the first layer and op that differ. (receipts.py runs this file by its path, so
that it is found wherever the engine was imported from.)
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

TRACED = ("embedding", "rms_norm", "linear", "gated_linear", "rotary_and_cache", "paged_attention", "combine")


@contextmanager
def traced(llm) -> Iterator[dict]:
    """Within it, every op adds the bytes of its output rows to a sha256. Yields a dict that will hold them at the end:
    the name of the op's weight (of merged ones the first) or, if it has none, of the last weight before it, and the
    op's own -> 16 hex digits, in the order of computation. ValueError if the engine is at work.

    Rows are hashed in the order of positions, and all are computed in all layers, so that how a prefill is cut cannot
    be seen. (The final norm is left out: its error would be the head's.)"""
    if llm.has_unfinished_requests:
        raise ValueError("a trace takes an engine that has nothing else to do")
    if llm.ranks.size > 1:
        raise ValueError("a trace takes tensor_parallel_size 1: a rank of several computes but a part of most ops")
    model, ops, place, hashes = llm.model, llm.model.ops, "", {}
    weights = {weight.data_ptr(): name.removeprefix("model.").removesuffix(".weight")
               for name, weight in reversed(model.weights.items())}

    def recorded(name: str, op):
        def run(*args, **kwargs):
            nonlocal place
            result = shown = op(*args, **kwargs)
            weight = args[1] if len(args) > 1 else None
            place = weights.get(weight.data_ptr(), place) if isinstance(weight, torch.Tensor) else place
            if routing := kwargs.get("routing"):
                shown = result[routing.places]  # rows of experts, in the order of tokens
            if place != "norm":
                words = shown.contiguous().view(torch.uint8).cpu().numpy()
                hashes.setdefault(f"{place} {name}", hashlib.sha256()).update(words)
            return result

        return run

    model.ops = replace(ops, **{name: recorded(name, getattr(ops, name)) for name in TRACED})
    forward = model.forward
    model.forward = lambda batch, kv_cache: forward(replace(batch, logits_rows=None), kv_cache)
    try:
        yield (digests := {})
    finally:
        model.ops = ops
        del model.forward
    digests.update({where: digest.hexdigest()[:16] for where, digest in hashes.items()})
