"""The self-check agrees with an engine that keeps its bits, and with none that does not."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernels
from benchmarks.twins import batch_dependent
from engine import LLM
from kernels import make_ops
from kernels.tiles import HOPPER, PLAIN, WALK
from tools.selfcheck import without
from tools.selfcheck_serving import Serving, selfcheck

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Five tokens each: 40 words of four needles."""
    monkeypatch.setattr("tools.selfcheck_serving.OUTPUT", 5)


def engine(folder, ops=None) -> LLM:
    return LLM(folder, load_format="dummy", device="cpu", ops=ops, progress=False, num_gpu_blocks_override=256)


def test_same_bits(tiny_folder, capsys):
    """At least a dozen ways, none differs, the tiny cache preempts; and the engine is left as it was."""
    llm = engine(tiny_folder)
    limits = llm.scheduler.max_num_batched_tokens, llm.scheduler.blocks, llm.async_scheduling
    assert selfcheck(llm) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if re.search(r" 40 +0( |$)", line)]
    assert len(rows) >= 12 and "same bits" in out and "a CPU has one" in out
    assert any(" preempted" in row and " 0 preempted" not in row for row in rows)
    assert limits == (llm.scheduler.max_num_batched_tokens, llm.scheduler.blocks, llm.async_scheduling)
    assert not llm.has_unfinished_requests


def test_bits_that_follow_the_batch(tiny_folder, capsys):
    assert selfcheck(engine(tiny_folder, batch_dependent(make_ops(CPU)))) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("flaw, seen_by", [("rows", "all at once"), ("cache", "again, from the prefix cache")])
def test_a_single_flaw_is_seen_where_it_is(tiny_folder, flaw, seen_by):
    """One word in the last place, of steps with many rows; of keys that came from the cache."""
    ops, llm = make_ops(CPU), engine(tiny_folder)

    def linear(x, weight, bias, leaves, out_dtype, out=None):
        result = ops.linear(x, weight, bias, leaves, out_dtype, out)
        cached = flaw == "cache" and any(seq.num_cached_tokens for seq in llm.scheduler.running)
        return torch.nextafter(result, result + 1) if cached or (flaw == "rows" and len(x) == 4) else result

    llm.model.ops = replace(ops, linear=linear)
    assert seen_by in {cell.how for cell in Serving(llm).cells() if cell.differing}


def test_a_schedule_that_fails_is_replaced():
    """By the reference's, wherever the table has it; the others stay."""
    one, prefill = HOPPER.linear[1][1][0], HOPPER.prefill
    table = without(HOPPER, {one, prefill})
    assert table.linear[1][1] == (PLAIN,) and table.prefill == WALK
    assert table.linear[0] == HOPPER.linear[0] and table.decode == HOPPER.decode and without(HOPPER, set()) == HOPPER


def test_what_failed_is_not_used_by_later_runs(monkeypatch, tmp_path, capsys):
    """A failed check leaves a file, for which engines on such a GPU run the reference's schedules, and say so."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test 1")
    monkeypatch.setattr(kernels, "triton_ops", lambda device, schedule: schedule)
    gpu = torch.device("cuda", 0)
    assert kernels.make_ops(gpu) == "auto" and not capsys.readouterr().err
    file = Path(kernels.refusal(gpu))
    file.parent.mkdir(parents=True)
    file.write_text("a schedule")
    assert kernels.make_ops(gpu) == kernels.make_ops(gpu, "reference") == "reference"
    assert str(file) in capsys.readouterr().err and file.is_relative_to(tmp_path)
