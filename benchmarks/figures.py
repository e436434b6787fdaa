"""One figure an experiment, for a reader who has seen nothing else: the title is the question, ours is always blue."""

from pathlib import Path
from statistics import median

OURS, OTHER = "C0", "C3"
BOTH = (("twin", OTHER, "an engine whose sums follow the batch"), ("samebits", OURS, "samebits"))


def product(axes, r: dict) -> None:
    for name, color, label in (("library", OTHER, "the library's product"), ("samebits", OURS, "samebits")):
        axes.plot(r["rows"], r[name]["words"], "o-", color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(r["rows"], [str(rows) for rows in r["rows"]])
    axes.set(title="Does a row of a matrix product change when other rows join it?", xlabel="rows in the product",
             ylabel=f"of the row's {r['N']:,} numbers, how many changed",
             ylim=(-0.05 * max(1, *r["library"]["words"], *r["samebits"]["words"]), None))


def feynman(axes, r: dict) -> None:
    for name, color, label in BOTH:
        axes.step(range(1, r["tokens"] + 1), r[name]["unique_answers_by_position"], color=color, where="mid",
                  label=f"{label}: {r[name]['unique_answers']} of {r[name]['answers']:,}")
    axes.set(title=f'"{r["question"]}", asked {r["asked"]:,} times at temperature 0\nwhile other requests come and go: '
             "how many different answers?", xlabel="tokens of the answer so far", ylabel="different answers",
             ylim=(0, None))


def price(axes, r: dict) -> None:
    bars = {"samebits": median(r["samebits"]["walls_s"]),
            "the same engine,\nbits may follow the batch": median(r["twin"]["walls_s"]),
            **{peer["what"].replace(" (", "\n(").replace(" VLLM", "\nVLLM"): min(peer["wall_s"])
               for peer in r["peers"].values()}}
    colors = [OURS, OTHER] + ["lightgrey"] * len(r["peers"])
    axes.bar(list(bars), [r["out_tokens"] / seconds for seconds in bars.values()], color=colors)
    axes.set(title=f"What does the promise cost? {r['load']} tokens: {r['price_percent']:+.1f} % time",
             ylabel="output tokens a second")


def trainer(axes, r: dict) -> None:
    for name, color, label in BOTH:
        axes.plot(r[name]["kl_by_position"], color=color, label=f"{label}: mean {r[name]['kl']:.2g}")
    axes.set_yscale("symlog", linthresh=1e-16)
    axes.set(title="Does a trainer see the probabilities that its sampler had?\n(exactly 0: it is on-policy)",
             xlabel="token of the sample", ylabel="KL divergence a token, nats", ylim=(-1e-17, None))


def search(axes, r: dict) -> None:
    seconds, compared, differ = zip(*r["tokens_by_second"])
    axes.plot(seconds, compared, color=OURS, label=f"tokens compared, with their logprobs: {r['tokens']:,}")
    axes.plot(seconds, differ, color=OTHER, label=f"that differ: {r['differences']:,}")
    shortest, longest = r["prompts"]
    axes.set(title=f"{r['requests']:,} requests (prompts of {shortest} to {longest:,} tokens) served in random ways.\n"
             "Does any get other bits than alone?", xlabel="seconds", ylabel="tokens, in all")
    axes.yaxis.set_major_formatter("{x:,.0f}")


def receipt(axes, r: dict) -> None:
    bars = {f"generating {r['tokens']:,} tokens, one by one": r["generation_s"],
            "proving all of them, in one prefill": median(r["proofs_s"])}
    for place, (label, seconds) in enumerate(bars.items()):
        axes.barh(place, seconds, color=(OTHER, OURS)[place])
        axes.text(seconds, place, f" {label}: {seconds:.3g} s", va="center")
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set(title=f"How long does it take to prove an answer? {r['speedup']:.0f} times less than to give it",
             xlabel="seconds", xlim=(0, 1.9 * r["generation_s"]))


def draw(name: str, result: dict, env: dict, file: Path) -> bool:
    """Draw an experiment's result; False, and nothing drawn, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8))
    globals()[name](axes, result)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    about = [env["model"], f"on {env['device']}", f"torch {env['torch']}", env["fingerprint"] or ""]
    figure.text(0.99, 0.01, " ".join(about), ha="right", fontsize=7, color="grey")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(file, dpi=130)
    plt.close(figure)
    return True
