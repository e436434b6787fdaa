"""A decode step with and without asynchronous scheduling, and what of it the device spends on which kernel.

    python benchmarks/step_profile.py [--model qwen3-8b] [--batch 1 8 64 256] [--tokens 65]

Prompts of 128 tokens, greedy; a step is the difference between generating all tokens and 1. Needs a GPU.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.workloads import model_options
from engine import LLM
from sampler import SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=65, help="of an answer (default: %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU here, and nothing runs ahead on a CPU", file=sys.stderr)
        return 2
    if (steps := args.tokens - 1) < 1:
        parser.error("--tokens must be at least 2: the first takes no step")
    llm = LLM(**model_options(args.model, True)[1], progress=False)
    rng = random.Random(2)
    prompts = [[rng.randrange(1, llm.config.vocab_size) for _ in range(128)] for _ in range(max(args.batch))]

    def run(batch: int, tokens: int) -> tuple[float, list]:
        llm.scheduler.blocks.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        begin = time.perf_counter()
        outputs = llm.generate(prompts[:batch], params)
        return time.perf_counter() - begin, [outputs[0].outputs[0].token_ids, outputs[0].outputs[0].logprobs]

    first = None
    for batch in args.batch:
        run(batch, 6)  # compiles and captures
        for ahead in (False, True):
            llm.async_scheduling = ahead
            one = min(run(batch, 1)[0] for _ in range(2))
            whole, found = min((run(batch, args.tokens) for _ in range(2)), key=lambda result: result[0])
            first = first or found
            if found != first:
                print(f"error: the first prompt's bits differ at batch {batch}: no speed is worth printing")
                return 1
            step = (whole - one) * 1e3 / steps
            print(f"batch {batch}, {'ahead' if ahead else 'waiting'}: {step:.2f} ms a step, prefill {one * 1e3:.1f} ms",
                  flush=True)
    for batch in args.batch:
        spent = {}  # by kernel: microseconds and launches of all tokens, without those of the first
        for tokens, sign in ((args.tokens, 1), (1, -1)):
            with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                run(batch, tokens)
            for event in recorded.key_averages():
                time_before, count_before = spent.get(event.key, (0, 0))
                spent[event.key] = time_before + sign * event.self_device_time_total, count_before + sign * event.count
        print(f"\nbatch {batch}: a step")
        for name, (total, count) in sorted(spent.items(), key=lambda pair: -pair[1][0])[:14]:
            print(f"{total / 1e3 / steps:9.3f} ms {count / steps:7.1f} x {total / max(1, count):8.1f} us  {name[:70]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
