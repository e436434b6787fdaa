"""Our result and a peer's, measured on one GPU in one hour, in one file and one plot.

    python bench.py --json ours.json
    VLLM_BATCH_INVARIANT=0 BENCH_ONLY=A,C,D,B,E,G python bench_vllm.py > default.jsonl
    VLLM_BATCH_INVARIANT=1 BENCH_ONLY=A,C,D,B,E,G python bench_vllm.py > invariant.jsonl
    python benchmarks/beside.py ours.json default.jsonl [invariant.jsonl] --json FILE --plot FILE.png

Without the third, its figures are those of another run (peers.json), and the file says so; of another model than that
run's there are none.

A peer's file has one JSON object a line: {"ev": "ready", "t": seconds since its start} and {"ev": "result", "w": the
workload, "wall_s": ..., "step_ms": ...}. Prints the table that the README shows, and the ratios.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import report

FIGURES = ("C_step_ms", "D8_step_ms", "D64_step_ms", "D256_step_ms", "A_wall_s", "B_wall_s", "E8k_ttft_s",
           "E32k_ttft_s", "G_step_ms", "start_warm_s", "start_cold_s")
PEERS = {"vllm_default": "vLLM default (batch-dependent)", "vllm_batch_invariant": "vLLM VLLM_BATCH_INVARIANT=1"}


def peer_figures(file: str) -> dict[str, float]:
    """Figure -> value of a peer's file; figures that it lacks are left out."""
    found = {}
    for line in Path(file).read_text().splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("ev") == "ready":
            found["start_cold_s"] = event["t"]  # its caches were empty, and it is ready before its first token
        elif event.get("ev") == "result":
            values = {"step_ms": event.get("step_ms"), "ttft_s": event["wall_s"], "wall_s": event["wall_s"]}
            found |= {name: values[name.split("_", 1)[1]] for name in FIGURES if name.split("_")[0] == event["w"]}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours")
    parser.add_argument("default")
    parser.add_argument("invariant", nargs="?")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png")
    args = parser.parse_args()
    ours = json.loads(Path(args.ours).read_text())
    found = {"vllm_default": peer_figures(args.default)}
    if args.invariant:
        found["vllm_batch_invariant"] = peer_figures(args.invariant)
    elif ours["model"] == (known := report.load_peers())["shape"]:
        measured = known["peers"]["vLLM BI"] | {"start_cold_s": known["peers"]["vLLM BI"]["start_s"]}
        found["vllm_batch_invariant"] = {name: min(measured[name]) for name in FIGURES if name in measured}
    result = {"env": ours["env"], "samebits": {name: ours.get(name) for name in FIGURES},
              **{peer: {name: values.get(name) for name in FIGURES} for peer, values in found.items()}}
    if not args.invariant and "vllm_batch_invariant" in found:
        result["vllm_batch_invariant"]["source"] = "another run: " + known["source"]
    peer = found["vllm_default"]
    report.table("on one GPU, in one hour", ["", "samebits", *found, "default/samebits"], [
        [name, ours.get(name), *[values.get(name) for values in found.values()],
         f"{peer[name] / ours[name]:.2f}" if ours.get(name) and name in peer else None] for name in FIGURES])
    if args.json:
        Path(args.json).write_text(json.dumps(result | {"details": ours}, indent=1) + "\n")
    if args.plot:
        report.plot(ours, {peer: {"what": what} | {name: [value] for name, value in found[peer].items()}
                           for peer, what in PEERS.items() if peer in found}, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
