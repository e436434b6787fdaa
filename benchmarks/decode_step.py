"""Milliseconds a decode step and a prefill, over batch sizes; the last line is one JSON object.

    python benchmarks/decode_step.py [--model FOLDER | --model qwen3-8b] [--batch 1 8 64 256] [--json FILE]

`qwen3-8b` makes that shape with random weights. Prompts have 128 tokens and share nothing. A step is the difference
between generating 65 tokens and 1, over 64. Refuses to print a speed if the first prompt's bits follow the batch.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine import DEFAULT_MODEL, LLM
from sampler import SamplingParams

QWEN3_8B = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "max_position_embeddings": 40960,
            "torch_dtype": "bfloat16"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--json", help="also write the last line to this file")
    args = parser.parse_args()
    start, options = time.perf_counter(), {}
    if args.model == "qwen3-8b":
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(QWEN3_8B))
        options = {"model": folder, "load_format": "dummy"}
    llm = LLM(**({"model": args.model} | options), progress=sys.stderr.isatty())
    result = {"model": args.model, "device": torch.cuda.get_device_name() if llm.device.type == "cuda" else "cpu",
              "torch": torch.__version__, "fingerprint": llm.fingerprint, "dtype": str(llm.dtype),
              "command": " ".join(["python", *sys.argv]), "start_s": round(time.perf_counter() - start, 1)}
    rng = random.Random(2)
    prompts = [[rng.randrange(1, llm.config.vocab_size) for _ in range(128)] for _ in range(max(args.batch))]

    def run(batch: int, tokens: int):
        llm.scheduler.blocks.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=None)
        begin = time.perf_counter()
        outputs = llm.generate(prompts[:batch], params)
        return time.perf_counter() - begin, outputs

    first = None
    for batch in args.batch:
        run(batch, 4)  # compiles and captures
        prefill = min(run(batch, 1)[0] for _ in range(2))
        whole, outputs = min((run(batch, 65) for _ in range(2)), key=lambda r: r[0])
        first = first or outputs[0].outputs[0].token_ids
        if outputs[0].outputs[0].token_ids != first:
            print(f"error: the first prompt's tokens differ at batch {batch}: no speed is worth printing")
            return 1
        result[f"step_ms_{batch}"] = round((whole - prefill) / 64 * 1e3, 2)
        result[f"prefill_ms_{batch}"] = round(prefill * 1e3, 1)
        print(f"batch {batch}: {(whole - prefill) / 64e-3:.2f} ms a step, prefill {prefill * 1e3:.1f} ms", flush=True)
    print(json.dumps(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
