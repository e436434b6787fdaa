"""How many experts a decode step reads, a layer: what its speed is to be compared by.

    python benchmarks/experts.py --model qwen3-30b-a3b --batches 1,8,64,256

Random prompts of 128 tokens, greedy, no CUDA graphs (a graph's steps cannot be looked into). The last line is one JSON
object: by batch, the mean over layers and steps, its least and most, and what choosing at random would give."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.ops import experts_read
from benchmarks.workloads import model_options
from engine import LLM
from sampler import SamplingParams

STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a built-in shape or a folder (default: %(default)s)")
    parser.add_argument("--batches", default="1,8,64,256", metavar="N,N", help="sequences (default: %(default)s)")
    args = parser.parse_args()
    name, options = model_options(args.model, torch.cuda.is_available())
    llm = LLM(**options, max_model_len=256, enforce_eager=True, enable_prefix_caching=False)
    if not llm.config.sparse_layers:
        parser.error(f"{name} has no experts")
    counts = []

    def route(x, *rest, ops=llm.ops):
        routing = ops.route(x, *rest)
        if len(x) == batch:  # a decode step
            used = routing.tiles[2 : 2 + int(routing.tiles[1])]
            counts.append(len(used.unique()))
        return routing

    llm.model.ops = replace(llm.ops, route=route)
    generator, result = torch.Generator().manual_seed(0), {"model": name}
    for batch in map(int, args.batches.split(",")):
        counts.clear()
        prompts = torch.randint(1, llm.config.vocab_size, (batch, 128), generator=generator).tolist()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=STEPS + 1, ignore_eos=True))
        at_random = experts_read(llm.config, batch)
        result[str(batch)] = {"mean": sum(counts) / len(counts), "least": min(counts), "most": max(counts),
                              "at_random": at_random, "layers_and_steps": len(counts)}
        print(f"batch {batch}: {sum(counts) / len(counts):.1f} experts a layer ({min(counts)} to {max(counts)}); "
              f"at random {at_random:.1f}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
