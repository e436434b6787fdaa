"""What ranks of tensor parallelism spend on exchanging, a layer: columns gathered, or partial sums reduced.

    torchrun --nproc-per-node 2 benchmarks/exchange.py --json FILE         Qwen3-32B's layer; --model qwen3-8b

The products of a layer are timed in a CUDA graph: each rank's columns of them without any exchange, with every product
writing its columns to all ranks (SymmetricMemory), and with the columns gathered by NCCL (Group). Beside them what the
classic sharding by rows would take, two all-reduces a layer: by NCCL in an order of its own, and in the ranks' order
from fp32 partial sums, every rank adding all of them (one shot) or its share (two shots).
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
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.workloads import FIELDS, QWEN3, SHAPES
from kernels import make_ops, same_bits
from kernels.collectives import EVEN, LOGITS, ODD, Group, SymmetricMemory
from model import Model, ModelConfig

ROWS = (1, 8, 64, 256, 8192)
BF16 = torch.bfloat16


@triton.jit
def ordered_sum_kernel(parts, outs, first, last, BLOCK: tl.constexpr):
    offs = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts[0] + offs, mask=offs < last)
    for i in tl.static_range(1, len(parts)):
        total = total + tl.load(parts[i] + offs, mask=offs < last)
    for i in tl.static_range(len(outs)):
        tl.store(outs[i] + offs, total.to(tl.bfloat16), mask=offs < last)


def ordered_sum(parts, outs, first: int, last: int) -> None:
    """outs[i][j] = parts[0][j] + parts[1][j] + ... for first <= j < last, in fp32 and that order, rounded once."""
    grid = (triton.cdiv(last - first, 2048),)
    ordered_sum_kernel[grid](tuple(parts), tuple(outs), first, last, 2048, num_warps=4, enable_fp_fusion=False)


class Bench:
    """One layer's products on this rank, and ways to put them together."""

    def __init__(self, config: ModelConfig, rank: int, size: int, store):
        self.rank, self.size, self.ops = rank, size, make_ops(torch.device("cuda", rank))
        device = torch.device("cuda", rank)
        self.model = Model(config, self.ops, device, BF16, 64, rank, size)
        self.model.load_dummy(progress=False)
        self.config, self.layer, self.cuts = config, self.model.layers[0], self.model.cuts
        num_bytes = self.model.exchanged_bytes(ROWS[-1], 256)
        num_bytes[LOGITS] = 2 * ROWS[-1] * config.hidden_size * 4  # here: partial sums, twice
        self.symmetric = SymmetricMemory(rank, size, device, dist.PrefixStore("exchange", store), num_bytes)
        self.group = Group(rank, dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size))
        self.calls = 0

    def time(self, run) -> float:
        """Median microseconds of `run` in a CUDA graph of 20, of 5 replays."""
        run()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                run()
        found = []
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

    def columns(self, M: int):
        """(run(exchange or None), whole results of the last run): attention's output, then o, gate_up and down."""
        c, cuts = self.config, self.cuts
        width = len(cuts.q[self.rank])
        torch.manual_seed(self.rank)
        attn, normed = (torch.randn(M, n, device="cuda", dtype=BF16) for n in (width, c.hidden_size))
        full = [torch.randn(M, n, device="cuda", dtype=BF16) for n in (c.num_heads * c.head_dim, c.intermediate_size)]

        def copy(out=None):  # attention, whose time does not matter here, writes its output as products do
            return [place.copy_(attn) for place in out] if out else attn

        def run(exchange=None):
            def whole(cut, buffer, compute):
                return exchange(compute, M, cut, BF16, buffer) if exchange else compute()

            a = whole(cuts.q, ODD, copy) if exchange else full[0]
            o = whole(cuts.hidden_size, EVEN, lambda out=None: self.ops.linear(a, *self.layer.o_proj, BF16, out))
            g = whole(cuts.intermediate_size, ODD,
                      lambda out=None: self.ops.gated_linear(normed, *self.layer.gate_up_proj, BF16, out))
            g = g if exchange else full[1]
            d = whole(cuts.hidden_size, EVEN, lambda out=None: self.ops.linear(g, *self.layer.down_proj, BF16, out))
            return [t.clone() for t in (o, d)] if exchange and self.calls < 0 else None

        return run

    def rows(self, M: int, how: str):
        """One all-reduce of [M, hidden_size]; two are a layer's."""
        n = M * self.config.hidden_size
        if how == "nccl":
            x = torch.randn(n, device="cuda", dtype=BF16)
            return lambda: dist.all_reduce(x)
        half = ROWS[-1] * self.config.hidden_size * 4
        halves = [[memory[i * half : i * half + n * 4].view(torch.float32) for memory in self.symmetric.buffers[LOGITS]]
                  for i in range(2)]
        totals = [memory[: n * 2].view(BF16) for memory in self.symmetric.buffers[EVEN]]
        out = torch.empty(n, device="cuda", dtype=BF16)
        share = -(-n // (16 * self.size)) * 16
        self.turn = 0

        def one_shot():
            self.turn ^= 1
            self.symmetric.handle.barrier()
            ordered_sum(halves[self.turn], [out], 0, n)

        def two_shots():
            self.symmetric.handle.barrier()
            ordered_sum(halves[0], totals, self.rank * share, min(n, (self.rank + 1) * share))
            self.symmetric.handle.barrier()

        return one_shot if how == "one shot" else two_shots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[name for name in SHAPES], default="qwen3-32b")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=torch.device("cuda", rank))
    size, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    shape = dict(zip(FIELDS, SHAPES[args.model], strict=True))
    config = ModelConfig.from_dict(QWEN3 | shape | {"num_hidden_layers": 1, "tie_word_embeddings": True})
    bench, found = Bench(config, rank, size, store), {}
    if not rank:
        print(f"{args.model}, {size} x {torch.cuda.get_device_name()}: microseconds a layer beyond the products' own")
        print(f"{'rows':>6}{'products':>10}{'columns':>10}{'NCCL gather':>13}{'NCCL reduce':>13}{'one shot':>10}"
              f"{'two shots':>11}")
    for M in ROWS:
        run = bench.columns(M)
        bench.calls = -1
        if not all(same_bits(a, b) for a, b in zip(run(bench.symmetric), run(bench.group), strict=True)):
            raise SystemExit(f"{M} rows: the two ways to gather disagree")
        bench.calls = 0
        row = {"products": bench.time(run)}
        row["columns"] = bench.time(lambda run=run: run(bench.symmetric)) - row["products"]
        row["nccl_gather"] = bench.time(lambda run=run: run(bench.group)) - row["products"]
        for how in ("nccl", "one shot", "two shots"):
            row[f"row_{how.replace(' ', '_')}"] = 2 * bench.time(bench.rows(M, how))
        found[M] = row
        if not rank:
            print("{:6}{:10.1f}{:10.1f}{:13.1f}{:13.1f}{:10.1f}{:11.1f}".format(M, *row.values()), flush=True)
    if args.json and not rank:
        env = {"GPU": torch.cuda.get_device_name(), "ranks": size, "torch": torch.__version__,
               "triton": triton.__version__, "command": "torchrun --nproc-per-node "
               f"{size} benchmarks/exchange.py --model {args.model}"}
        Path(args.json).write_text(json.dumps({"env": env, "unit": "us a layer", "rows": found}, indent=1) + "\n")
    dist.destroy_process_group()
    os._exit(0)  # the buffers of others are mapped here: no order of their ends is the right one


if __name__ == "__main__":
    main()
