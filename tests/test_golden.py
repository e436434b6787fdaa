"""What the embedded model says, written down: a change of numerics or noise that nobody meant fails here.

Token ids must be those of the record on every machine (fp32 on CPU; their margins are far above its differences between
processors). Digests of logprob bits are compared where the record has this machine's fingerprint. To record anew, on
purpose: `python tests/test_golden.py`.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine import LLM
from sampler import SamplingParams

RECORD = Path(__file__).parent / "fixtures" / "golden.json"
LONG = "Once upon a time, there was a little fox named Pip who lived near the old mill. " * 16  # over one KV split
CASES = {
    "greedy": ("Once upon a time", {"temperature": 0.0}),
    "greedy, long prompt": (LONG, {"temperature": 0.0}),
    "the model's own defaults": ("Once upon a time", {"seed": 1}),
    "top-k": ("One day, a little bear", {"temperature": 1.0, "top_k": 20, "top_p": 1.0, "seed": 2}),
    "min-p, long prompt": (LONG, {"temperature": 1.0, "min_p": 0.1, "top_p": 1.0, "seed": 3}),
    "the whole distribution": ("Mia found", {"temperature": 1.0, "top_p": 1.0, "seed": 2**63 - 1}),
    "penalties": ("In the end,", {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2}),
    "two of one seed": ("At last, the king", {"temperature": 0.8, "seed": 4, "n": 2}),
}


def speak(device: str) -> tuple[str, dict[str, list[list[int]]], str]:
    """(fingerprint, name -> token ids of each completion, digest of all logprob words)."""
    llm = LLM(device=device, progress=False, num_gpu_blocks_override=64)
    outputs = llm.generate([prompt for prompt, _ in CASES.values()], [
        SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0, **params) for _, params in CASES.values()])
    tokens = {name: [out.token_ids for out in output.outputs] for name, output in zip(CASES, outputs, strict=True)}
    words = np.array([out.logprobs for output in outputs for out in output.outputs], np.float32)
    return llm.fingerprint, tokens, hashlib.sha256(words.tobytes()).hexdigest()[:16]


@pytest.fixture(scope="module")
def spoken():
    return speak("cpu")


def test_tokens(spoken):
    assert spoken[1] == json.loads(RECORD.read_text())["tokens"]


def compare_bits(fingerprint: str, digest: str) -> None:
    known = json.loads(RECORD.read_text())["bits"]
    if fingerprint not in known:
        pytest.skip(f"no digest is recorded for {fingerprint}: another kind of machine, or other versions")
    assert digest == known[fingerprint]


def test_bits(spoken):
    compare_bits(spoken[0], spoken[2])


@pytest.mark.gpu
def test_bits_gpu():
    fingerprint, _, digest = speak("cuda")
    compare_bits(fingerprint, digest)


def main() -> None:
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {"tokens": {}, "bits": {}}
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        fingerprint, tokens, record["bits"][fingerprint] = speak(device)
        if device == "cpu":
            record["tokens"] = tokens
    RECORD.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
