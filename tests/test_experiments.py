"""The experiments, tiny: ours never differ, the twin does, and a flaw in ours is found, named and found again."""

import json
from dataclasses import replace

import pytest
import torch

import bench
from benchmarks import experiments
from benchmarks.experiments import Experiments
from benchmarks.twins import batch_dependent
from checkpoint import read_json
from kernels import make_ops
from model import ModelConfig

CPU = torch.device("cpu")
TINY_SIZE = {"rows": (1, 2, 5, 64), "questions": 8, "answer": 12, "every": 1.0, "limit": 60, "sampled": (4, 8),
             "search": (140, 6), "needles": (1, 2, 3), "ways": 2, "steps": 60, "minutes": 0.05, "receipt": 6}
TINY_LOADS = {"A": (3, (8, 16), (3, 5)), "B": (2, (8, 12)), "C": 6, "D": (8, (2, 3), 4), "E": (32, 48),
              "G": (2, 40, 3), "U": (2, 8, 4)}
ENV = {"model": "tiny", "device": "a test", "torch": torch.__version__}


@pytest.fixture
def tiny(tiny_folder, monkeypatch):
    """tiny(ops, ...) -> the experiments over a two-layer random model."""
    monkeypatch.setattr("benchmarks.workloads.SMALL", TINY_LOADS)
    options = {"model": tiny_folder, "load_format": "dummy", "device": "cpu", "num_gpu_blocks_override": 64,
               "dtype": "bfloat16"}
    config = ModelConfig.from_dict(read_json(tiny_folder, "config.json"))

    def make(ops=None, **changes) -> Experiments:
        return Experiments(options, config, CPU, torch.bfloat16, TINY_SIZE, True, ops, **changes)

    return make


def test_ours_and_the_twin(tiny, tmp_path, capsys):
    """Every number that should be zero is, every number that should not be is not; one JSON file and figure each."""
    pytest.importorskip("matplotlib")
    results = tiny(peers={"a peer": {"what": "a peer", "A_wall_s": [1.0, 2.0]}}).run(list("123456"), ENV, tmp_path)
    assert all(result["differences"] == 0 for result in results.values())
    product, feynman, price, trainer, search, receipt = (results[name] for name in experiments.NAMES.values())
    assert product["samebits"] == {"words": [0] * 4, "largest": [0.0] * 4} and product["library"]["words"][0] == 0
    assert (feynman["samebits"]["unique_answers"], feynman["samebits"]["unique_bits"]) == (1, 1)
    assert feynman["samebits"]["first_logprob_that_differs"] is None and feynman["samebits"]["others"] > 0
    assert feynman["twin"]["unique_bits"] > 1 and feynman["twin"]["first_logprob_that_differs"] is not None
    assert (trainer["samebits"]["kl"], trainer["samebits"]["differing_words"]) == (0.0, 0)
    assert trainer["twin"]["kl"] > 0 and trainer["twin"]["differing_words"] > 0 and trainer["twin"]["tokens"] == 32
    assert len(price["samebits"]["walls_s"]) == len(price["twin"]["walls_s"]) > 0 and "price_percent" in price
    assert search["cases"] > 1 and search["tokens"] > 0 and not search["failing_seeds"]
    assert receipt["problems"] == [] and len(receipt["proofs_s"]) == 3 and receipt["speedup"] > 0
    for number, name in experiments.NAMES.items():
        written = json.loads((tmp_path / f"{number}-{name}.json").read_text())
        assert written["model"] == "tiny" and written["differences"] == 0
        assert (tmp_path / f"{number}-{name}.png").stat().st_size > 8_000
    out = capsys.readouterr().out
    assert all(f"\n{number}. " in out for number in experiments.NAMES) and "price of the promise" in out


def test_an_engine_that_follows_the_batch_is_found_out(tiny, capsys):
    """Called ours, the twin fails each experiment that counts bits; and the seed that failed fails again, alone."""
    twin = batch_dependent(make_ops(CPU))
    results = tiny(twin).run(["1", "2", "4", "5", "6"], ENV, None)
    assert all(result["differences"] > 0 for result in results.values())
    seed, out = results["search"]["failing_seeds"][0], capsys.readouterr().out
    assert f"(again: --only 5 --minutes 0 --seed {seed})" in out and f"seed {seed}: " in out
    again = tiny(twin, seed=seed, minutes=0).run(["5"], ENV, None)["search"]
    assert again["cases"] == 1 and again["failing_seeds"] == [seed]


def test_the_search_finds_a_rare_flaw(tiny):
    """One layer's product, in the last place, in steps of more than 90 rows."""
    ops = make_ops(CPU)

    def linear(x, weight, bias, leaves, out_dtype, out=None):
        result = ops.linear(x, weight, bias, leaves, out_dtype, out)
        return torch.nextafter(result, result + 1) if len(x) > 90 and weight.shape[0] == 256 else result

    assert tiny(replace(ops, linear=linear), minutes=0.1).run(["5"], ENV, None)["search"]["differences"] > 0


def test_on_the_command_line(monkeypatch, capsys, tmp_path):
    """On the embedded model: the last line is JSON, and the exit code says whether ours differ."""
    monkeypatch.setattr(experiments, "SMALL", TINY_SIZE | {"questions": 3, "answer": 4})
    arguments = ["receipts", "--only", "2,product", "--device", "cpu", "--out", str(tmp_path)]
    assert bench.main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["receipts"]) == {"product", "feynman"} and result["fingerprint"].startswith("sb1-")
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert bench.main(arguments, batch_dependent(make_ops(CPU))) == 1
    assert "bits differ in product" in capsys.readouterr().out
    assert bench.main(["receipts", "--only", "7"]) == 2 and "unknown experiment '7'" in capsys.readouterr().err
