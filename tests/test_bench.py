"""The bench on the embedded model: what it prints, and that it prints no speed where bits follow the batch."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

import bench
from benchmarks import beside, serving
from benchmarks.ops import BitsDiffer, Roof, layer_weights, measure_ops, step_floor_s
from benchmarks.twins import batch_dependent, library
from benchmarks.workloads import SHAPES, model_options, workloads
from checkpoint import read_json
from engine import LLM, SamplingParams
from kernels import reference_ops
from model import ModelConfig

TINY_LOADS = {"A": (3, (8, 16), (3, 5)), "B": (2, (8, 12)), "C": 6, "D": (8, (2, 3), 4), "E": (32, 48),
              "G": (2, 40, 3), "U": (2, 8, 4)}


@pytest.fixture
def call(capsys, monkeypatch):
    """call(*arguments) -> (exit code, lines of stdout, stderr), over loads smaller than the small ones."""
    monkeypatch.setattr("benchmarks.workloads.SMALL", TINY_LOADS)

    def run(*args: str, ops=None) -> tuple[int, list[str], str]:
        code = bench.main([*args, "--device", "cpu", "--reps", "1"], ops)
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return run


def shape(name: str) -> ModelConfig:
    return ModelConfig.from_dict(read_json(model_options(name, True)[1]["model"], "config.json"))


def test_tables_and_json(call, tmp_path):
    """Each part prints its table; figures, environment and what was skipped are in the last line, and in --json."""
    pytest.importorskip("matplotlib")
    code, lines, _ = call("throughput", "latency", "price", "memory", "--only", "A,U,C,D2,E32", "--user", "2,2000,4",
                          "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png"))
    result = json.loads(lines[-1])
    assert code == 0 and result == json.loads((tmp_path / "b.json").read_text())
    assert all(result[key] > 0 for key in ("A_wall_s", "C_step_ms", "D2_step_ms", "E32_ttft_s"))
    assert result["claim"] == bench.NO_CLAIM and any(line.startswith(bench.NO_CLAIM) for line in lines)
    assert {"GPU", "torch", "triton", "commit", "command"} <= set(result["env"])
    assert result["skipped"].keys() == {"U"} and "2004 tokens" in result["skipped"]["U"]
    assert set(result["price"]) == {"A", "C", "D2"}
    assert result["details"]["A"]["ttft_p99_s"] >= result["details"]["A"]["ttft_p50_s"] > 0
    assert 0 < result["memory"]["weights"] < result["memory"]["cache"]
    for title in ("throughput", "latency", "memory", "price", "largest batch"):
        assert any(line.startswith(title) for line in lines), title
    assert (tmp_path / "b.png").stat().st_size > 10_000


@pytest.mark.parametrize("part", ["latency", "start"])
def test_no_speed_without_the_bits(call, part):
    """An engine whose bits follow the batch: whatever was asked for, all that is printed is that."""
    code, lines, error = call(part, ops=batch_dependent(reference_ops()))
    assert code == 1 and len(lines) == 1 and list(json.loads(lines[0])) == ["error"]
    assert "no speed is worth printing" in error


def test_no_speed_without_the_bits_of_an_op(tiny_folder):
    config = ModelConfig.from_dict(read_json(tiny_folder, "config.json"))
    arguments = bench.pick_dtype("float32", config, bench.torch.device("cpu")), bench.torch.device("cpu")
    roof = Roof(1e9, 1e9, 1e9)
    assert len(measure_ops(config, reference_ops(), *arguments, roof, True)) == 28
    with pytest.raises(BitsDiffer):
        measure_ops(config, batch_dependent(reference_ops()), *arguments, roof, True)


def test_start_and_arguments(call, monkeypatch, capsys):
    code, lines, _ = call("start", "--only", "C")
    result = json.loads(lines[-1])
    assert code == 0 and result["start_warm_s"] > 0 and "CPU" in result["skipped"]["start_cold_s"]
    assert call("latency", "--only", "C,D7")[0] == 2 and call("latency", "--user", "1,2")[0] == 2
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    for arguments, message in ((["speed"], "unknown part"), (["--plot", "x.png"], "pip install")):
        with pytest.raises(SystemExit):
            bench.main(arguments)
        assert message in capsys.readouterr().err


def test_the_full_workloads_are_the_peers():
    """Tokens in and out as peer measurements state them."""
    made = workloads(151936, small=False)
    tokens = {name: (sum(map(len, w.prompts)), sum(w.outputs)) for name, w in made.items()}
    assert tokens["A"] == (162_303, 100_014) and tokens["B"] == (142_827, 133_966)
    assert (tokens["C"], tokens["D64"], tokens["E32k"]) == ((128, 256), (8192, 8192), (32768, 1))
    assert made["C"].prompts[0] == made["D256"].prompts[0]


@pytest.mark.parametrize("name, billions", [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-8b", 8.19),
                                            ("qwen3-32b", 32.76), ("qwen3-30b-a3b", 30.53)])
def test_shapes(name, billions):
    """The built-in shapes have as many parameters as the models they stand for."""
    c = shape(name)
    layer = sum(N * K for N, K in layer_weights(c, bool(c.num_experts)).values()) + 2 * c.hidden_size + 2 * c.head_dim
    layer += c.num_experts * 3 * c.moe_intermediate_size * c.hidden_size
    heads = 1 if c.tie_word_embeddings else 2
    total = c.num_layers * layer + heads * c.vocab_size * c.hidden_size + c.hidden_size
    assert name in SHAPES and math.isclose(total / 1e9, billions, rel_tol=2e-3)


@pytest.mark.parametrize("num_seqs, computed, tokens, milliseconds",
                         [(1, 255, 1, 3.6), (256, 191, 1, 6.6), (1, 0, 8192, 170)])
def test_floor(num_seqs, computed, tokens, milliseconds):
    """An H200's rates give the floors that stand beside the peers' figures."""
    seq = SimpleNamespace(num_computed_tokens=computed, num_scheduled_tokens=tokens, samples_this_step=True)
    floor = step_floor_s(shape("qwen3-8b"), Roof(4.27e12, 4.2e12, 790e12), 2, [seq] * num_seqs)
    assert math.isclose(floor * 1e3, milliseconds, rel_tol=0.02)


@pytest.mark.parametrize("programs", [0, 64, 1000])
def test_the_price_twin_answers_alike(tiny_folder, programs):
    """Other bits, the same model: log-probabilities agree closely, however many splits are chosen."""
    ops, fit = library(reference_ops(), programs)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    found = []
    for table in (None, ops):
        llm = LLM(tiny_folder, load_format="dummy", ops=table or reference_ops(), device="cpu", progress=False,
                  num_gpu_blocks_override=32)
        if table:
            fit(llm.runner)
        outputs = llm.generate([list(range(4, 4 + n)) for n in (5, 130, 270)], params)
        found.append([logprob for output in outputs for logprob in output.outputs[0].logprobs])
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) < 1e-3


def test_long_prompts_alone_take_one_engine(call, monkeypatch):
    """A large model on several GPUs takes a minute to make: none is made for the bit check alone."""
    made = []
    monkeypatch.setattr(serving, "SHORT", 20)
    monkeypatch.setattr(serving, "LLM", lambda **options: made.append(options) or LLM(**options))
    assert call("latency", "--only", "E32")[0] == 0
    assert [options["max_model_len"] for options in made] == [None]
    assert call("latency", "--only", "E32,C")[0] == 0
    assert [options["max_model_len"] for options in made[1:]] == [20, None], "the short one's workloads come first"


@pytest.mark.parametrize("model, has_both", [("qwen3-8b", True), ("qwen3-30b-a3b", False)])
def test_peers_of_another_model_are_not_beside_it(model, has_both, tmp_path, monkeypatch, capsys):
    ours, default, both = (tmp_path / name for name in ("ours.json", "default.jsonl", "both.json"))
    ours.write_text(json.dumps({"env": {}, "model": model, "C_step_ms": 2.0}))
    default.write_text('noise\n{"ev": "ready", "t": 90}\n{"ev": "result", "w": "C", "wall_s": 1.0, "step_ms": 4.0}\n')
    monkeypatch.setattr(sys, "argv", ["beside.py", str(ours), str(default), "--json", str(both)])
    assert beside.main() == 0
    found = json.loads(both.read_text())
    assert found["samebits"]["C_step_ms"] == 2 and found["vllm_default"]["C_step_ms"] == 4
    assert found["vllm_default"]["start_cold_s"] == 90 and found["vllm_default"]["A_wall_s"] is None
    assert ("vllm_batch_invariant" in found) == has_both
    assert not has_both or found["vllm_batch_invariant"]["source"].startswith("another run")
    assert "2.00" in capsys.readouterr().out, "the ratio"
