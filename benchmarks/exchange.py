"""What ranks of tensor parallelism take for a layer's products and their exchanges, by columns and by rows.

    torchrun --nproc-per-node 2 benchmarks/exchange.py --json FILE         Qwen3-32B's layer; --model qwen3-8b

Times in microseconds, of a CUDA graph: o_proj, gate_up_proj and down_proj of one layer, with a copy in attention's
place, and the head. `apart`: each rank's columns of them, and no exchange. `columns`: every kernel writes its columns
to all ranks; `columns_nccl`: torch.distributed gathers them. `rows`: the row style's two sums a layer, of fp32 and in
the ranks' order; `rows_nccl`: the same by NCCL's all-reduce of bf16, in an order of its own.
"""

import argparse
import json
import os
import statistics
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.workloads import FIELDS, MORE, QWEN3, SHAPES
from kernels import make_ops, same_bits
from kernels.collectives import EVEN, ODD, Group, SymmetricMemory
from model import Model, ModelConfig

ROWS = (1, 8, 64, 256, 8192)
HEAD_ROWS = 256
BF16 = torch.bfloat16


class Nccl(Group):
    """The row style with NCCL's own sum of rounded parts."""

    def all_reduce(self, compute, M, cut, dtype, bias):
        part = compute().to(dtype)
        dist.all_reduce(part)
        return part


def time_us(run) -> float:
    """Median microseconds of `run` in a CUDA graph of 20, of 5 replays."""
    run()
    torch.cuda.synchronize()
    dist.barrier()
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    for _ in range(6):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 20 * 1e3)
    return statistics.median(found[1:])


def layer(model: Model, M: int, keep: bool = False):
    """(o_proj's result if `keep`, down_proj's), whole; without an exchange, this rank's columns of them."""
    c, cuts, ops, weights = model.config, model.cuts, model.ops, model.layers[0]
    generator = torch.Generator("cuda").manual_seed(0)
    make = [torch.randn(M, n, device="cuda", generator=generator).to(BF16) for n in (
        c.num_heads * c.head_dim, c.hidden_size, c.intermediate_size)]
    mine = make[0][:, cuts.q[model.rank].start : cuts.q[model.rank].stop].contiguous()

    def attention(x, out=None):
        return [place.copy_(x) for place in out] if out else x

    def run():
        attn = model._whole(attention, cuts.q, ODD, mine) if model.exchange else make[0]
        o = model._whole(ops.linear, cuts.hidden_size, EVEN, attn, *weights.o_proj, BF16)
        kept = o.clone() if keep else None
        gated = model._whole(ops.gated_linear, cuts.intermediate_size, ODD, make[1], *weights.gate_up_proj, BF16)
        gated = gated if model.exchange else make[2]
        return kept, model._whole(ops.linear, cuts.hidden_size, EVEN, gated, *weights.down_proj, BF16)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[name for name in SHAPES if name not in MORE], default="qwen3-32b")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=device)
    size, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    shape = dict(zip(FIELDS, SHAPES[args.model], strict=True))
    config = ModelConfig.from_dict(QWEN3 | shape | {"num_hidden_layers": 1, "tie_word_embeddings": True})
    models = [Model(config, make_ops(device), device, BF16, 64, rank, size, by_rows) for by_rows in (False, True)]
    for model in models:
        model.load_dummy(progress=False)
    num_bytes = list(map(max, *(model.exchanged_bytes(ROWS[-1], HEAD_ROWS) for model in models)))
    symmetric = SymmetricMemory(rank, size, device, dist.PrefixStore("symmetric", store), num_bytes)
    group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size)
    ways = {"apart": (models[0], None), "columns": (models[0], symmetric), "rows": (models[1], symmetric),
            "columns_nccl": (models[0], Group(rank, size, group)), "rows_nccl": (models[1], Nccl(rank, size, group))}
    found = {"layer": {}, "head": {}}

    def show(part: str, M: int) -> None:
        if not rank:
            print(f"{part:>6} {M:6}" + "".join(f"{value:14.1f}" for value in found[part][M].values()), flush=True)

    if not rank:
        print(f"{args.model}, {size} x {torch.cuda.get_device_name()}: microseconds")
        print(f"{'':>6} {'rows':>6}" + "".join(f"{name:>14}" for name in ways))
    for M in ROWS:
        found["layer"][M], results = {}, {}
        for name, (model, exchange) in ways.items():
            model.exchange = exchange
            results[name] = layer(model, M, keep=True)() if exchange else None
            results[name] = results[name] and [t.clone() for t in results[name]]
            found["layer"][M][name] = time_us(layer(model, M))
        if not all(map(same_bits, results["columns"], results["columns_nccl"])):
            raise SystemExit(f"{M} rows: the two ways to gather disagree")
        show("layer", M)
    for M in (1, 64, HEAD_ROWS):
        x, found["head"][M] = torch.randn(M, config.hidden_size, device="cuda").to(BF16), {}
        for name in ("apart", "columns", "columns_nccl"):
            ways[name][0].exchange = ways[name][1]
            found["head"][M][name] = time_us(lambda x=x, name=name: ways[name][0].logits(x))
        show("head", M)
    if args.json and not rank:
        env = {"GPU": torch.cuda.get_device_name(), "ranks": size, "torch": torch.__version__,
               "triton": triton.__version__,
               "command": f"torchrun --nproc-per-node {size} benchmarks/exchange.py --model {args.model}"}
        Path(args.json).write_text(json.dumps({"env": env, "unit": "microseconds", **found}, indent=1) + "\n")
    torch.cuda.synchronize()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the buffers of others are mapped here: no order of their ends is the right one


if __name__ == "__main__":
    main()
