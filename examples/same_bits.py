"""One prompt served in many ways: a digest of its tokens and logprob bits each time, beside a batch-dependent twin.

    python examples/same_bits.py [--model FOLDER]
"""

import argparse
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np

from benchmarks.twins import batch_dependent
from engine import DEFAULT_MODEL, LLM
from kernels import make_ops
from sampler import SamplingParams

PROMPT = "Tell me about Richard Feynman. He was born in New York, and as a boy he repaired radios. " * 4
NEIGHBOURS = [f"A short story about {thing}, a teacher and {n} friends." for n, thing in
              enumerate(("a dog", "the sea", "a key", "snow", "an old clock", "bread", "a bridge", "the moon") * 2)]
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=0, ignore_eos=True)


def digest(output) -> str:
    out = output.outputs[0]
    words = np.array(out.token_ids, np.int64).tobytes() + np.array(out.logprobs, np.float32).tobytes()
    return hashlib.sha256(words).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    args = parser.parse_args()
    rows = {"alone": ([], {}), "among 16 others": (NEIGHBOURS, {}),
            "in chunks of 50 tokens": ([], {"max_num_batched_tokens": 50}),
            "preempted, in a tiny cache": (NEIGHBOURS, {"num_gpu_blocks_override": 7}),
            "again, from the prefix cache": (NEIGHBOURS, {})}
    engines: dict[tuple, LLM] = {}
    print(f"{'how the prompt is served':32s}{'samebits':16s}{'batch-dependent twin'}")
    for name, (others, options) in rows.items():
        found = []
        for twin in (False, True):
            key = twin, *options.items()
            if key not in engines:
                device = next(iter(engines.values())).device if engines else None
                ops = batch_dependent(make_ops(device)) if twin else None
                engines[key] = LLM(args.model, ops=ops, progress=False, **options)
            others_params = SamplingParams(temperature=0.0, max_tokens=16)
            outputs = engines[key].generate([PROMPT, *others], [PARAMS] + [others_params] * len(others))
            found.append(digest(outputs[0]))
        print(f"{name:32s}{found[0]:16s}{found[1]}", flush=True)


if __name__ == "__main__":
    main()
