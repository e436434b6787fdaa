"""Tensor parallelism on GPUs: the bits of one, with and without graphs, and the end of all ranks."""

import os
import signal
import time

import pytest
import torch
from conftest import ROOT
from test_experts import SHARED
from test_invariance import QWEN3_30B_A3B
from test_parallel import (
    LLAMA,
    QWEN3,
    QWEN3_8B,
    SERVE,
    TORCHRUN,
    assert_gone,
    cells,
    engine,
    needs_proc,
    of_session,
    serve,
    start,
    write_config,
)

pytestmark = pytest.mark.gpu
COUNT = torch.cuda.device_count()
SIZES = [size for size in (2, 3, 4, 8) if size <= COUNT]
BIG = QWEN3_8B | {"num_hidden_layers": 4, "tie_word_embeddings": False}
several = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")


def compare(folder, size: int, chosen: list[dict], through: str = "symmetric memory", **options) -> None:
    alone = engine(folder, device="cuda")
    expected = {seeded: serve(alone, batched=False, seeded=seeded) for seeded in (False, True)}
    fingerprint = alone.fingerprint
    del alone
    torch.cuda.empty_cache()
    llm = engine(folder, size, device="cuda", **options)
    assert llm.fingerprint == fingerprint and llm.model.exchange.name == through
    for cell in chosen:
        assert serve(llm, **cell) == expected[cell["seeded"]], cell
    del llm  # in the middle of a step that outlived its requests, perhaps
    assert torch.ones(8, device="cuda").sum().item() == 8  # the GPU is as good as before


@several
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["tiny", "llama", "qwen3-8b", "embedded"])
@pytest.mark.parametrize("size", SIZES or [2])
def test_ranks_change_no_bit(size, name, eager, tmp_path):
    if size not in {"tiny": (2, 4), "llama": (2, 3), "qwen3-8b": (2, 3, 4, 8), "embedded": (2, 3, 4)}[name]:
        pytest.skip(f"{name} cannot be dealt to {size}")
    folder = "models/embedded" if name == "embedded" else write_config(
        tmp_path / name, {"tiny": QWEN3, "llama": LLAMA, "qwen3-8b": BIG}[name])
    compare(folder, size, cells(), enforce_eager=eager)


@several
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["columns", "experts"])
@pytest.mark.parametrize("name", ["tiny", "qwen3-30b-a3b"])
def test_ranks_change_no_bit_of_experts(name, expert_parallel, tmp_path):
    config = {"tiny": SHARED | {"mlp_only_layers": [1]}, "qwen3-30b-a3b": QWEN3_30B_A3B}[name]
    compare(write_config(tmp_path / name, config), 2, cells(), expert_parallel=expert_parallel)


@several
@pytest.mark.parametrize("name", ["whole-qwen3-8b", "SmolLM2"])
def test_whole_models(name, tmp_path):
    folder = ROOT / "models/SmolLM2-135M-Instruct"
    if name == "SmolLM2" and not folder.exists():
        pytest.skip("python tools/smollm2.py makes it")
    whole = BIG | {"num_hidden_layers": 36}
    compare(folder if name == "SmolLM2" else write_config(tmp_path / name, whole), 2, cells())


@several
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("config, by_experts", [(BIG, False), (SHARED, True)], ids=["dense", "experts"])
def test_where_gpus_do_not_reach_each_other(config, by_experts, eager, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_SYMMETRIC_MEMORY", "0")
    compare(write_config(tmp_path / "model", config), 2, cells()[:3], "torch.distributed", enforce_eager=eager,
            expert_parallel=by_experts)


@several
def test_row_style_is_equal_to_itself(tmp_path, monkeypatch):
    folder = write_config(tmp_path / "model", BIG)
    llm = engine(folder, 2, device="cuda", tp_style="row")
    expected = {seeded: serve(llm, batched=False, seeded=seeded) for seeded in (False, True)}
    for cell in cells():
        assert serve(llm, **cell) == expected[cell["seeded"]], cell
    del llm
    monkeypatch.setenv("SAMEBITS_SYMMETRIC_MEMORY", "0")  # everything in one shot, by torch.distributed
    llm = engine(folder, 2, device="cuda", tp_style="row", enforce_eager=True)
    assert serve(llm, **cells()[0]) == expected[cells()[0]["seeded"]]


@several
@needs_proc
def test_ranks_of_torchrun():
    prompt = ["engine.py", "--prompt", "Once", "--max-tokens", "50", "--temperature", "0"]
    alone, launched = start(prompt), start([*TORCHRUN, *prompt, "--tensor-parallel-size", "2"])
    assert launched.wait(timeout=120) == 0 == alone.wait(timeout=120)
    assert launched.stdout.read() == alone.stdout.read() != ""
    assert "x 2 by symmetric memory" in launched.stderr.read()


@several
def test_a_rank_that_dies_ends_all():
    """The others spin on their GPUs, waiting for what will never come."""
    process = start(["-c", SERVE.replace('"cpu"', '"cuda"').replace("size=3", "size=2"), "busy"])
    pids = [int(pid) for pid in process.stdout.readline().split()]
    everyone = of_session(process.pid)
    time.sleep(2)
    os.kill(pids[0], signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    assert "error: rank 1 died (exit code -9)" in process.stderr.read()
    assert_gone(everyone)


@several
def test_the_command_line_ends_silently():
    process = start(["engine.py", "--tensor-parallel-size", "2", "--prompt", "Once", "--max-tokens", "50"])
    everyone = of_session(process.pid)
    assert process.wait(timeout=120) == 0
    assert process.stderr.read().count("\n") == 1
    assert_gone(everyone)


def test_more_ranks_than_gpus(tmp_path):
    with pytest.raises(ValueError, match="takes as many GPUs"):
        engine(write_config(tmp_path, BIG), COUNT + 1 if COUNT < 8 else 16, device="cuda")


def test_weights_that_do_not_fit(tmp_path):
    """Qwen3-235B-A22B, before anything is allocated: 470 GB, as its checkpoint has."""
    config = QWEN3_30B_A3B | {"hidden_size": 4096, "num_hidden_layers": 94, "moe_intermediate_size": 1536,
                              "num_attention_heads": 64}
    with pytest.raises(ValueError, match="the weights take 470.2 GB of a GPU, where .* are free: with a larger"):
        engine(write_config(tmp_path / "model", config), device="cuda")
