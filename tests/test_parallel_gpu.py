"""Tensor parallelism on GPUs: the bits of one, whatever graphs, exchange and batch, and the end of all ranks."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, TINY_MOE
from test_parallel import LLAMA, QWEN3_8B, SERVE, assert_gone, cells, engine, hard, ordered, serve, write_config

from kernels import same_bits
from kernels.collectives import FIRST, LOGITS, SECOND
from parallel import EXIT_LOST

SIZES = [size for size in (2, 3, 4, 8) if size <= torch.cuda.device_count()]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
BIG = QWEN3_8B | {"num_hidden_layers": 4, "tie_word_embeddings": False}


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("exchange", ["1", "0"], ids=["symmetric", "nccl"])
@pytest.mark.parametrize("name", ["tiny", "llama", "moe", "qwen3-8b", "embedded"])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_change_no_bit(size, name, exchange, eager, tiny_folder, tmp_path, monkeypatch):
    folder = {"tiny": tiny_folder, "embedded": "models/embedded"}.get(name)
    folder = folder or write_config(tmp_path / name, {"llama": LLAMA, "moe": TINY_MOE, "qwen3-8b": BIG}[name])
    alone = engine(folder, 1, device="cuda")
    expected = {seeded: serve(alone, batched=False, seeded=seeded) for seeded in (False, True)}
    fingerprint = alone.fingerprint
    del alone
    torch.cuda.empty_cache()
    monkeypatch.setenv("SAMEBITS_SYMMETRIC_MEMORY", exchange)
    with engine(folder, size, device="cuda", enforce_eager=eager) as llm:
        assert llm.hardware.endswith("symmetric memory" if exchange == "1" else "torch.distributed")
        for cell in cells():
            assert serve(llm, **cell) == expected[cell["seeded"]], cell
        assert llm.fingerprint == fingerprint


@pytest.mark.parametrize("size", SIZES)
def test_row_style_does_not_follow_the_batch_nor_the_exchange(size, tmp_path, monkeypatch):
    folder, found = write_config(tmp_path / "big", BIG), []
    for exchange in ("1", "0"):
        monkeypatch.setenv("SAMEBITS_SYMMETRIC_MEMORY", exchange)
        with engine(folder, size, device="cuda", tp_style="row") as llm:
            found += [serve(llm, **cell) for cell in cells() if cell["seeded"]]
    assert all(one == found[0] for one in found)


EXCHANGE = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import torch
import test_parallel_gpu
test_parallel_gpu.exchange()
"""


def exchange() -> None:
    """A rank under torchrun: every message size and offset against the sum in rank order, eagerly and in graphs."""
    import torch.distributed as dist

    from kernels.collectives import TOTALS, make_collectives

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    num_bytes = dict.fromkeys((FIRST, SECOND, LOGITS, TOTALS + FIRST, TOTALS + SECOND), 1 << 23)
    ours = make_collectives(rank, size, device, num_bytes, True)
    assert ours.name == "symmetric memory"
    for shape in ((1, 16), (1, 48), (3, 80), (7, 4096), (64, 4096), (129, 4096), (333, 576), (500, 4096)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            parts = [hard(shape, seed).to(device) for seed in range(size)]
            expected = ordered(parts, dtype)
            for two_shot in (1, 1 << 60):
                for region in (FIRST, SECOND):

                    def reduce(region=region, two_shot=two_shot, parts=parts, dtype=dtype, shape=shape):
                        partial = ours.partial(*shape, region)
                        partial.copy_(parts[rank])
                        return ours.all_reduce(partial, dtype, region, two_shot)

                    assert same_bits(reduce(), expected), (shape, dtype, two_shot)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        reduce(FIRST)  # two in a row, as in a layer
                        total = reduce(SECOND)
                    for _ in range(3):
                        graph.replay()
                    assert same_bits(total, expected), (shape, dtype, two_shot, "graph")
    for M in (1, 8, 77, 500):
        each = [2048, 1024, 128, 512, 16, 48, 0, 320][:size]
        for dtype, region in ((torch.bfloat16, FIRST), (torch.bfloat16, SECOND), (torch.float32, LOGITS)):
            whole = hard((M, sum(each)), M).to(dtype).to(device)
            mine = whole.split(each, 1)[rank].contiguous()
            assert same_bits(ours.gather(mine, each, region), whole)
    print("all right", flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", SIZES)
def test_collectives_are_the_rank_ordered_sum_and_the_columns(size, tmp_path):
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE.format(root=str(ROOT)))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
                           str(script)], text=True, capture_output=True, timeout=600)
    assert done.returncode == 0 and done.stdout.count("all right") == size, done.stderr[-3000:]


@pytest.mark.parametrize("how, said", [(signal.SIGKILL, "killed by signal 9"), (signal.SIGSTOP, "a rank stalls")])
def test_a_rank_that_dies_or_stalls_ends_all(how, said):
    """The others spin on their GPUs in a barrier that nobody will reach."""
    code = SERVE.replace('device="cpu"', 'device="cuda"').replace("step_seconds = 3", "step_seconds = 20")
    process = subprocess.Popen([sys.executable, "-c", code, "busy"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    child = int(process.stdout.readline())
    time.sleep(2)
    os.kill(child, how)
    assert process.wait(timeout=60) == EXIT_LOST
    assert said in process.stderr.read()
    assert_gone(child)


def test_more_ranks_than_gpus(tiny_folder):
    with pytest.raises(ValueError, match=f"torch sees {torch.cuda.device_count()}"):
        engine(tiny_folder, torch.cuda.device_count() + 1, device="cuda", hf_overrides=BIG)


def test_ctrl_c_in_the_middle_of_a_step():
    process = subprocess.Popen([sys.executable, "engine.py", "--tensor-parallel-size", "2", "--prompt", "Once",
                                "--ignore-eos"], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130 and process.stderr.read().endswith("interrupted\n")
