"""Tables on stdout, and the plot. Shows what is in the result and computes nothing but ratios."""

import json
from pathlib import Path


def load_peers() -> dict:
    """What others measured (peers.json): its "source", and per peer the same keys as ours, each a list of values."""
    return json.loads((Path(__file__).parent / "peers.json").read_text())


def number(value, digits: int = 3) -> str:
    """A number with `digits` significant digits; "-" for None; text as it is."""
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:#.{digits}g}"


def spread(values: list[float] | None) -> str:
    return "-".join(map(str, values)) if values else "-"


def table(title: str, header: list[str], rows: list[list]) -> None:
    """Print rows under a header; the first column is text, the others stand to the right."""
    cells = [header, *[[number(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        first, *rest = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        print("  ".join([first, *rest]).rstrip(), flush=True)


def serving_table(title: str, records: dict[str, dict], peers: dict) -> None:
    """Workloads: ours beside the floor and the peers, in the figure's unit. Other times are in milliseconds."""
    rows = []
    for name, r in records.items():
        figure = next(key for key in ("wall_s", "step_ms", "ttft_s") if key in r)
        times = [r[f"{key}_s"] * 1e3 if f"{key}_s" in r else None
                 for key in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")]
        rows.append([name, r["load"], r["in_tokens"], r["out_tokens"], r["out_tokens_per_s"], *times, figure, r[figure],
                     r["floor"], f"{r[figure] / r['floor']:.2f}x",
                     *[spread(peer.get(f"{name}_{figure}")) for peer in peers.values()]])
    table(title, ["workload", "requests", "in", "out", "out tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "figure",
                  "samebits", "floor", "of floor", *peers], rows)


def ops_table(rows: list[dict]) -> None:
    table("kernels: microseconds", ["op", "shape", "samebits", "floor", "floor/us", "peer", "us", "peer/us"],
          [[r["op"], r["shape"], r["us"], r["floor_us"], f"{r['floor_us'] / r['us']:.2f}", r["peer"] or "-",
            r.get("peer_us"), f"{r['peer_us'] / r['us']:.2f}" if "peer_us" in r else None] for r in rows])


def memory_table(m: dict) -> None:
    names = {"weights": "weights", "cache": f"KV cache: {m['cache_tokens']:,} tokens of {m['bytes_per_token']:,} bytes",
             "workspace": f"workspace of a step of {m['step_tokens']:,} tokens, {m['step_sequences']} sequences",
             "reserved": "all that torch reserved", "device": "the device"}
    table("memory", ["use", "GiB"], [[text, None if m[key] is None else m[key] / (1 << 30)]
                                     for key, text in names.items()])
    table("largest batch", ["tokens a sequence", "in the cache", "in a step"],
          [[f"{int(n):,}", count, min(count, m["step_sequences"])] for n, count in m["largest_batch"].items()])


def price_table(records: dict[str, dict], claims: bool) -> None:
    table("price of the promise: the same engine with a twin that may follow the batch",
          ["workload", "figure", "samebits", "twin", "price %", "target %", ""],
          [[name, r["figure"], r["samebits"], r["twin"], f"{r['price_percent']:+.1f}", r["target_percent"],
            "-" if r["target_percent"] is None or not claims else
            "met" if r["price_percent"] <= r["target_percent"] else "missed"] for name, r in records.items()])


def efficiency(axes, rows: list[dict]) -> None:
    """Products: the share of their floor that they reach, against rows; dashed the library's."""
    products: dict[str, list] = {}
    for r in rows:
        if r["op"] == "linear":
            name, M = r["shape"].split()[0], int(r["shape"].split("M=")[1])
            products.setdefault(name, []).append((M, r["floor_us"] / r["us"], r["floor_us"] / r["peer_us"]))
    for i, (name, points) in enumerate(products.items()):
        M, ours, library = zip(*points, strict=True)
        axes.plot(M, ours, "o-", color=f"C{i}", label=name)
        axes.plot(M, library, "--", color=f"C{i}", alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set(title="products: share of the floor (dashed: library)", xlabel="rows", ylim=(0, None))


def plot(result: dict, peers: dict, file: str) -> None:
    """A decode step against batch, throughput, and kernel efficiency, as far as they were measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = 2 + bool(result["kernels"])
    figure, (steps, through, *rest) = plt.subplots(1, panels, figsize=(5.3 * panels, 4.8))
    details, price = result["details"], result["price"]
    decode = sorted((int(r["load"].split()[0]), name) for name, r in details.items() if name == "C" or name[0] == "D")
    lines = {"samebits": {b: details[n]["step_ms"] for b, n in decode},
             "twin (follows the batch)": {b: price[n]["twin"] for b, n in decode if n in price},
             "floor": {b: details[n]["floor"] for b, n in decode}}
    lines |= {peer["what"]: {b: min(peer[f"{n}_step_ms"]) for b, n in decode if f"{n}_step_ms" in peer}
              for peer in peers.values()}
    for i, (label, points) in enumerate(lines.items()):
        if points:
            style = {"color": "k", "linestyle": ":"} if label == "floor" else {"color": f"C{i}", "marker": "o"}
            steps.plot(list(points), list(points.values()), label=label, **style)
    steps.set_xscale("log", base=2)
    steps.set(title="decode step", xlabel="sequences", ylabel="ms", ylim=(0, None))
    steps.set_xticks([batch for batch, _ in decode], [str(batch) for batch, _ in decode])
    walls = {name: r for name, r in details.items() if "wall_s" in r}
    bars = {"samebits": {n: r["out_tokens_per_s"] for n, r in walls.items()},
            "twin (follows the batch)": {n: r["out_tokens"] / price[n]["twin"] for n, r in walls.items() if n in price},
            "floor": {n: r["out_tokens"] / r["floor"] for n, r in walls.items()}}
    bars |= {peer["what"]: {n: r["out_tokens"] / min(peer[f"{n}_wall_s"]) for n, r in walls.items()
                            if f"{n}_wall_s" in peer} for peer in peers.values()}
    bars = {label: points for label, points in bars.items() if points}
    for i, (label, points) in enumerate(bars.items()):
        places = [list(walls).index(n) + (i - (len(bars) - 1) / 2) * 0.16 for n in points]
        color = "lightgrey" if label == "floor" else f"C{list(lines).index(label)}"
        through.bar(places, list(points.values()), 0.16, label=label, color=color)
    through.set(title="throughput", ylabel="output tokens/s", xticks=range(len(walls)), xticklabels=list(walls))
    through.set_ylim(top=through.get_ylim()[1] * 1.25)  # room for the legend
    if rest:
        efficiency(rest[0], result["kernels"])
    for axes in (steps, through, *rest):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    env = result["env"]
    figure.suptitle(f"{result['model']} on {env['device']}" + (f": {result['claim']}" if result["claim"] else ""))
    figure.tight_layout()
    figure.savefig(file, dpi=130)
