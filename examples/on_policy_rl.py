"""On-policy reinforcement learning that is on policy: the trainer's logprobs are the sampler's, bit for bit.

models/embedded tells stories of about eight sentences. Here it learns to tell them in exactly N [4]: given a story's
opening, N sentences and the end. A story earns 1 / (1 + |sentences - N|), or nothing if it does not end within
--max-tokens or has a sentence of fewer than three words. The method is GRPO's: several stories a prompt, each token of
a story weighted by how much better than its siblings it did; one optimizer step a batch, so every token that is
learned from was sampled by the weights that learn from it.

Is it? Sampler and trainer compute the same logprobs by different kernels, in different batch shapes, and where those
round differently the sampler is another policy than the one that learns. Three runs tell what comes of it:

    ours            sampling by the engine, training through examples/autograd.py: the same kernels, the same bits
    twin            the same with kernels whose splits follow the batch (benchmarks/twins.py), as engines choose them
    twin-corrected  the twin, each token weighted by trainer's over sampler's probability (at most 2)

    python examples/on_policy_rl.py                            all three, and the plot
    python examples/on_policy_rl.py --run ours --steps 5       a first look

Every step logs the mean reward; KL, the mean over tokens of r - 1 - log r, r being trainer's over sampler's
probability; the largest difference of two logprobs; how many logprobs differ in any bit; and the gradient's norm.
The exit code is 1 if a single bit differs in `ours`. Without a GPU the defaults are of toy size, and a run takes some
minutes. How to attach a trainer of your own: examples/ON_POLICY.md.
"""

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import numpy as np
import torch
from autograd import Policy, deterministic
from embedded_corpus import story
from tqdm import tqdm

from benchmarks.twins import batch_dependent
from engine import DEFAULT_MODEL, LLM
from kernels import make_ops
from kernels.tiles import KV_TILE
from sampler import SamplingParams

RUNS = ("ours", "twin", "twin-corrected")
MAX_WEIGHT = 2.0  # of a token in the corrected twin
LOGGED = ("reward", "exact", "tokens", "kl", "max_diff", "differing", "grad_norm", "seconds")


def grade(text: str, ended: bool, sentences: int) -> float:
    """Between 0 and 1: 1 for a story that ends after exactly `sentences` sentences."""
    found = re.findall(r".+?[.!?][\"”]?(?=\s+[\"“A-Z]|$)", text.strip(), re.DOTALL)
    whole = "".join(found) == text.strip() and all(len(s.split()) >= 3 for s in found)
    return 1 / (1 + abs(len(found) - sentences)) if ended and whole else 0.0


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[prompts, samples]: how much better than its siblings each is, in their standard deviations."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-4)


class Trial:
    """One run: an engine that samples, a policy that learns, and what each step came to."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.args = name, args
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        num_seqs = args.prompts * args.samples
        self.llm = LLM(args.model, ops=None if name == "ours" else batch_dependent(make_ops(device)), progress=False,
                       max_num_seqs=args.max_num_seqs or num_seqs,
                       num_gpu_blocks_override=num_seqs * (2 + args.max_tokens // KV_TILE))  # most of a GPU otherwise
        self.policy = Policy(self.llm)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self.log: list[dict] = []
        self.first_fingerprint = self.llm.fingerprint

    def sample(self, step: int) -> tuple[list[tuple[list[int], list[int]]], torch.Tensor, torch.Tensor]:
        """(prompt and completion ids, the logprobs that sampling reported, rewards [prompts, samples])."""
        args = self.args
        prompts = [story(random.Random(f"{args.seed} {step} {i}"))["opening"] for i in range(args.prompts)]
        # The distribution that is sampled must be the one that is learned: the model's own, without any cut.
        params = [SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, logprobs=0,
                                 n=args.samples, max_tokens=args.max_tokens, seed=args.seed << 32 | step << 12 | i)
                  for i in range(args.prompts)]
        outputs = self.llm.generate(prompts, params)
        pairs = [(o.prompt_token_ids, c.token_ids) for o in outputs for c in o.outputs]
        sampled = torch.tensor([x for o in outputs for c in o.outputs for x in c.logprobs], dtype=torch.float32)
        rewards = torch.tensor([[grade(c.text, c.finish_reason == "stop", args.sentences) for c in o.outputs]
                                for o in outputs])
        return pairs, sampled.to(self.llm.device), rewards

    def learn(self, pairs, sampled: torch.Tensor, rewards: torch.Tensor) -> dict:
        """Gradients of one batch, and how far the trainer's logprobs are from those that sampling reported."""
        lengths = [len(completion) for _, completion in pairs]
        weights = torch.repeat_interleave(advantages(rewards).flatten(), torch.tensor(lengths)).to(sampled.device)
        trained, at = [], 0
        self.optimizer.zero_grad()
        for first in range(0, len(pairs), self.args.train_batch):
            part = slice(at, at := at + sum(lengths[first : first + self.args.train_batch]))
            values = self.policy.logprobs(pairs[first : first + self.args.train_batch])
            trained.append(values.detach())
            weight = weights[part]
            if self.name == "twin-corrected":
                weight = weight * (trained[-1] - sampled[part]).exp().clamp(max=MAX_WEIGHT)
            with deterministic():
                (-(weight * values).sum() / len(sampled)).backward()
        trained = torch.cat(trained)
        difference = trained.double() - sampled.double()
        return {"kl": (difference.expm1() - difference).mean().item(), "max_diff": difference.abs().max().item(),
                "differing": int((trained.view(torch.int32) != sampled.view(torch.int32)).sum())}

    def step(self) -> dict:
        start = time.perf_counter()
        pairs, sampled, rewards = self.sample(len(self.log))
        if self.args.sleep:
            self.llm.sleep()
        found = self.learn(pairs, sampled, rewards)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0).item()
        self.optimizer.step()
        self.llm.update_weights(self.policy.state_dict())
        if self.args.sleep:
            self.llm.wake()
        self.log.append({"reward": rewards.mean().item(), "exact": (rewards == 1).float().mean().item(),
                         "tokens": len(sampled), **found, "grad_norm": norm, "seconds": time.perf_counter() - start})
        return self.log[-1]

    def summary(self) -> dict:
        """The log as columns, and what it comes to."""
        columns = {name: [entry[name] for entry in self.log] for name in LOGGED}
        total = sum(columns["tokens"])
        return {"differing_words": sum(columns["differing"]), "words": total,
                "differing_share": sum(columns["differing"]) / total, "largest_kl": max(columns["kl"]),
                "largest_diff": max(columns["max_diff"]), "seconds": round(sum(columns["seconds"]), 1),
                "reward_first_10": float(np.mean(columns["reward"][:10])),
                "reward_last_10": float(np.mean(columns["reward"][-10:])),
                "exact_last_10": float(np.mean(columns["exact"][-10:])),
                "fingerprint_before": self.first_fingerprint, "fingerprint_after": self.llm.fingerprint,
                "steps": {name: [float(f"{x:.6g}") for x in column] for name, column in columns.items()}}


def train(name: str, args: argparse.Namespace) -> dict:
    trial = Trial(name, args)
    with tqdm(total=args.steps, desc=name, disable=not sys.stderr.isatty()) as bar:
        for step in range(args.steps):
            e = trial.step()
            share = f"{e['differing']} of {e['tokens']} ({e['differing'] / e['tokens']:.1%})"
            bar.write(f"{name}  step {step}  reward {e['reward']:.3f}  exact {e['exact']:.2f}  KL {e['kl']:.2e}  "
                      f"max|diff| {e['max_diff']:.2e}  differing words {share}  grad {e['grad_norm']:.3f}  "
                      f"{e['seconds']:.2f} s", file=sys.stdout)
            sys.stdout.flush()
            bar.update(1)
    summary = trial.summary()
    print(f"{name}: {summary['differing_words']} of {summary['words']} logprobs differ in any bit, largest KL "
          f"{summary['largest_kl']:.2e}; reward {summary['reward_first_10']:.3f} -> {summary['reward_last_10']:.3f}, "
          f"{summary['exact_last_10']:.0%} exact; {summary['seconds']} s", flush=True)
    return summary


def smooth(values: list[float], width: int = 10) -> np.ndarray:
    """Running mean over the last `width` steps."""
    return np.array([np.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))])


def plot(results: dict, path: Path) -> None:
    """Reward, KL, differing share and gradient norm of every run, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        return print("no matplotlib here, so no plot: --plot-only draws it from the JSON where there is one")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True)
    for color, (name, run) in zip(("tab:blue", "tab:red", "tab:orange"), results["runs"].items(), strict=False):
        steps = run["steps"]
        share = [100 * d / t for d, t in zip(steps["differing"], steps["tokens"], strict=True)]
        axes[0, 0].plot(steps["reward"], color=color, alpha=0.2)
        axes[0, 0].plot(smooth(steps["reward"]), color=color, label=name)
        axes[0, 1].plot(steps["kl"], color=color, label=name)
        axes[1, 0].plot(share, color=color, label=name)
        axes[1, 1].plot(smooth(steps["grad_norm"]), color=color, label=name)
    smallest = min((x for run in results["runs"].values() for x in run["steps"]["kl"] if x > 0), default=1e-12)
    axes[0, 0].set(title="reward (thick: mean of 10 steps)", ylim=(0, 1))
    axes[0, 1].set_yscale("symlog", linthresh=smallest)  # a logarithmic axis that has a 0
    axes[0, 1].set(title="KL a token between sampler and trainer", ylim=(-0.2 * smallest, None))
    axes[1, 0].set(title="logprobs that differ in any bit, %", ylim=(-3, 103), xlabel="step")
    axes[1, 1].set(title="gradient norm (mean of 10 steps)", xlabel="step")
    axes[0, 0].legend()
    figure.suptitle(f"models/embedded learns to end after {results['settings']['sentences']} sentences, "
                    f"{results['device']}, {results['dtype']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main() -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=[*RUNS, "all"], default="all", help="[all]")
    parser.add_argument("--steps", type=int, default=200 if gpu else 12, help="optimizer steps [%(default)s]")
    parser.add_argument("--prompts", type=int, default=16 if gpu else 4, help="prompts a step [%(default)s]")
    parser.add_argument("--samples", type=int, default=8, help="stories a prompt [%(default)s]")
    parser.add_argument("--sentences", type=int, default=4, help="how many a story must have [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=128 if gpu else 112, help="of a story [%(default)s]")
    parser.add_argument("--lr", type=float, default=1e-4, help="Adam's step size [%(default)s]")
    parser.add_argument("--train-batch", type=int, default=64, metavar="N",
                        help="stories in one pass of the trainer: memory; changes no logprob of ours [%(default)s]")
    parser.add_argument("--max-num-seqs", type=int, metavar="N",
                        help="stories that the sampler runs at once: speed; changes nothing of ours [all]")
    parser.add_argument("--sleep", action="store_true", help="lend the cache's memory to the trainer in every step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / ("on-policy" if gpu else "on-policy-cpu"),
                        metavar="PATH", help="write PATH.json and PATH.png [results/on-policy, or -cpu]")
    parser.add_argument("--plot-only", action="store_true", help="draw PATH.png from PATH.json, and run nothing")
    args = parser.parse_args()
    file = args.out.with_suffix(".json")
    if args.plot_only:
        plot(json.loads(file.read_text()), args.out.with_suffix(".png"))
        return 0
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs a launch an allocation
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "plot_only", "run", "model")}
    results = {"command": "python " + " ".join(sys.argv), "settings": settings, "model": str(args.model),
               "device": torch.cuda.get_device_name() if gpu else "CPU", "dtype": "bfloat16" if gpu else "float32",
               "torch": torch.__version__, "runs": {}}
    for name in RUNS if args.run == "all" else [args.run]:
        results["runs"][name] = train(name, args)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results) + "\n")
    plot(results, args.out.with_suffix(".png"))
    ours = results["runs"].get("ours", {"differing_words": 0, "largest_kl": 0})
    return 1 if ours["differing_words"] or ours["largest_kl"] else 0


if __name__ == "__main__":
    sys.exit(main())
