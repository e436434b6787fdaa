"""Training beside the engine: the sampler's bits with gradients, weights replaced in place, memory lent and given back.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import HAS_GPU, ROOT, TINY
from safetensors.torch import load_file, save_file
from test_engine import write_text_folder
from test_parity import CONFIGS, ask_transformers, write_checkpoint

sys.path.insert(0, str(ROOT / "examples"))
import on_policy_rl
from autograd import Policy, deterministic, differentiable, whole_sequences

import kernels
from engine import LLM
from kernels import reference_ops, same_bits
from model import Model, ModelConfig
from sampler import SamplingParams

PARAMS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=3, max_tokens=12, logprobs=0, ignore_eos=True)
NAMES = ["qwen3_tied", "qwen3_untied_biased", "llama3_rope_biased"]  # of CONFIGS; the last has biases in its MLP
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def answers(llm: LLM, prompts: list[list[int]]) -> tuple[list, torch.Tensor]:
    """(pairs of prompt and completion ids, the logprobs that sampling reported)."""
    outputs = llm.generate(prompts, PARAMS)
    pairs = [(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs]
    return pairs, torch.tensor([x for o in outputs for x in o.outputs[0].logprobs], device=llm.device)


def prompts(vocab_size: int = TINY["vocab_size"], lengths=(1, 2, 63, 64, 65, 90)) -> list[list[int]]:
    return [[(7 * i + 13 * n) % vocab_size for i in range(n)] for n in lengths]


# Each op's gradient against autograd of a float64 formula that is written here in other words.

def check(run, exact, inputs: dict[str, torch.Tensor]) -> None:
    """run: fp32 tensors by name -> outputs, through the table; exact: the same in float64."""
    found, expected = ({name: x.clone().to(dtype).requires_grad_() for name, x in inputs.items()}
                       for dtype in (torch.float32, torch.float64))
    outputs, wanted = run(**found), exact(**expected)
    for i, (out, want) in enumerate(zip(outputs, wanted, strict=True)):
        assert (out - want).abs().max() < 1e-4
        out.backward(random(*out.shape, seed=i), retain_graph=True)
        want.backward(random(*out.shape, seed=i).double(), retain_graph=True)
    for name, x in found.items():
        error = (x.grad - expected[name].grad).norm() / expected[name].grad.norm()
        assert error < 1e-5, f"gradient of {name}: relative error {error:.1e}"


@pytest.fixture
def ops():
    """The reference table with gradients, every tensor its own master."""
    return differentiable(reference_ops(), lambda weight: weight)


def test_embedding(ops):
    ids = torch.tensor([5, 2, 5, 5, 0], dtype=torch.int32)
    check(lambda w: [ops.embedding(ids, w, torch.float32, torch.zeros(1, dtype=torch.int64))],
          lambda w: [F.embedding(ids.long(), w)], {"w": random(9, 16)})


def test_rms_norm(ops):
    """With a residual, twice in a row: what is overwritten in place must not reach back."""
    inputs = {"x": random(5, 32), "y": random(5, 32, seed=1), "r": random(5, 32, seed=2), "w": random(32, seed=3)}

    def run(x, y, r, w):
        r = r * 1.0  # a leaf may not be overwritten
        a = ops.rms_norm(r, w, 1e-6)
        b = ops.rms_norm(x * a, w, 1e-6, r)
        return [ops.rms_norm(y * b, w, 1e-6, r), r]

    def exact(x, y, r, w):
        a = F.rms_norm(r, (32,), w, 1e-6)
        b = F.rms_norm(r + x * a, (32,), w, 1e-6)
        return [F.rms_norm(r + x * a + y * b, (32,), w, 1e-6), r + x * a + y * b]

    check(run, exact, inputs)


@pytest.mark.parametrize("leaves", [1, 2])
def test_linear(ops, leaves):
    inputs = {"x": random(7, 256), "w": random(40, 256, seed=1), "b": random(40, seed=2)}
    check(lambda x, w, b: [ops.linear(x, w, b, leaves, torch.float32), ops.linear(x, w, None, leaves, torch.float32)],
          lambda x, w, b: [x @ w.T + b, x @ w.T], inputs)


@pytest.mark.parametrize("leaves", [1, 2])
def test_gated_linear(ops, leaves):
    """Rows of the weight belong to gate and up in turn."""
    inputs = {"x": random(5, 256), "w": 0.1 * random(48, 256, seed=1), "b": random(48, seed=2)}

    def exact(x, w, b):
        sums = [(x @ w[::2].T + b[::2], x @ w[1::2].T + b[1::2]), (x @ w[::2].T, x @ w[1::2].T)]
        return [gate * gate.sigmoid() * up for gate, up in sums]

    check(lambda x, w, b: [ops.gated_linear(x, w, bias, leaves, torch.float32) for bias in (b, None)], exact, inputs)


def test_logprobs(ops):
    ids = torch.tensor([4, 0, 30, 4])
    check(lambda x: [ops.logprobs(x, ids, 0)], lambda x: [-F.cross_entropy(x, ids, reduction="none")],
          {"x": 4 * random(4, 31)})


@pytest.mark.parametrize("normed", [True, False], ids=["qk_norm", "plain"])
@pytest.mark.parametrize("max_scores", [1 << 28, 1], ids=["at once", "one by one"])
def test_rotary_and_attention(ops, monkeypatch, normed, max_scores):
    """Whole sequences of different lengths, one of them a single token; two query heads a KV head."""
    monkeypatch.setattr("autograd.MAX_SCORES", max_scores)
    model = Model(ModelConfig.from_dict(TINY), ops, CPU, torch.float32, 256)
    lengths, D = (5, 1, 130, 17), 32
    batch, (cache, _) = whole_sequences(model, [[1] * n for n in lengths])
    inputs = {"qkv": random(sum(lengths), 8 * D)} | ({"a": random(D, seed=1), "b": random(D, seed=2)} if normed else {})

    def run(qkv, a=None, b=None):
        q = ops.rotary_and_cache(qkv, a, b, 1e-6, model.cos_sin, batch.attention, *cache, 4)
        return [ops.paged_attention(q, *cache, batch.attention, 0.2).flatten(1)]

    def exact(qkv, a=None, b=None):
        out = []
        for rows in qkv.split(lengths):
            q, k, v = rows.view(len(rows), 8, D).transpose(0, 1).split([4, 2, 2])
            turn = torch.polar(torch.ones(()).double(), torch.arange(len(rows)).double()[:, None]
                               * 10000.0 ** -(torch.arange(0, D, 2).double() / D))
            q, k = (x if w is None else F.rms_norm(x, (D,), w, 1e-6) for x, w in ((q, a), (k, b)))
            q, k = (torch.complex(*x.chunk(2, -1)) * turn for x in (q, k))
            q, k = (torch.cat([x.real, x.imag], -1) for x in (q, k))
            out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
                       .transpose(0, 1).flatten(1))
        return [torch.cat(out)]

    check(run, exact, inputs)


def test_an_op_without_a_gradient_is_refused(ops):
    """Run as it is, it would cut the graph in silence: the weights before it would stop to learn."""
    with pytest.raises(NotImplementedError, match="argmax"):
        ops.argmax(random(2, 5))


# The whole model.

@pytest.fixture(scope="module")
def against_transformers(tmp_path_factory) -> tuple[dict[str, Path], dict, dict]:
    """Checkpoint folders, a job for each, and the gradients that transformers computes."""
    root = tmp_path_factory.mktemp("gradients")
    folders = {name: write_checkpoint(root / name, CONFIGS[name]) for name in NAMES}
    ids = prompts(lengths=(9, 40, 100))
    pairs = [(some[:n], some[n:]) for some, n in zip(ids, (1, 30, 64), strict=True)]
    weights = [math.cos(i) for i in range(sum(len(completion) for _, completion in pairs))]
    jobs = {name: {"folder": str(folder), "pairs": pairs, "weights": weights} for name, folder in folders.items()}
    return folders, jobs, ask_transformers({"gradients": jobs}, root)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_transformers(against_transformers, name):
    folders, jobs, expected = against_transformers
    policy = Policy(LLM(folders[name], device="cpu", dtype="float32", num_gpu_blocks_override=4, progress=False))
    with deterministic():
        (policy.logprobs(jobs[name]["pairs"]) * torch.tensor(jobs[name]["weights"])).sum().backward()
    assert policy.masters.keys() == expected[name].keys()
    errors = {key: float((policy.masters[key].grad - exact).norm() / exact.norm())
              for key, exact in expected[name].items()}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_what_sampling_reported(tiny_folder, dtype):
    """Decoding, the trainer's pack of sequences, packs of one, and `score`: the same bits."""
    llm = LLM(tiny_folder, load_format="dummy", dtype=dtype, device="cpu", num_gpu_blocks_override=64, progress=False)
    pairs, sampled = answers(llm, prompts())
    policy = Policy(llm)
    assert same_bits(policy.logprobs(pairs).detach(), sampled)
    assert same_bits(torch.cat([policy.logprobs([pair]) for pair in pairs[::-1]][::-1]).detach(), sampled)
    assert [x for pair in pairs for x in llm.score(*pair)] == sampled.tolist()


def test_backward_after_new_weights_is_refused(tiny_folder):
    """The weights of the forward pass are gone: gradients at others would be quietly wrong."""
    llm = LLM(tiny_folder, load_format="dummy", device="cpu", num_gpu_blocks_override=8, progress=False)
    policy = Policy(llm)
    values = policy.logprobs([([1, 2], [3, 4])])
    llm.update_weights(policy.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


@pytest.mark.skipif(HAS_GPU, reason="Triton compiles where there is a GPU: the tests below")
def test_triton_table_has_the_same_gradients(tiny_folder):
    """The table that a GPU gets, in Triton's interpreter: what is saved, overwritten and read back is the same."""
    llm = LLM(tiny_folder, load_format="dummy", dtype="float32", device="cpu", num_gpu_blocks_override=8,
              progress=False)
    ids = prompts(lengths=(2, 9))
    found = []
    for ops in (llm.ops, kernels.triton_ops(CPU)):
        policy = Policy(llm, ops)
        policy.logprobs([(some[:1], some[1:]) for some in ids]).sum().backward()
        found.append({name: master.grad for name, master in policy.masters.items()})
    errors = {name: float((found[1][name] - grad).norm() / grad.norm()) for name, grad in found[0].items()}
    assert max(errors.values()) < 1e-4, errors


@pytest.fixture
def trial(monkeypatch, tmp_path):
    """Three steps of examples/on_policy_rl.py in a toy size, rewarded for letters: no story ends after 12 tokens."""
    monkeypatch.setattr(on_policy_rl, "grade", lambda text, ended, sentences: len(set(text)) / 40)
    model = ROOT / "models" / "embedded" if HAS_GPU else write_text_folder(tmp_path / "model")
    if not HAS_GPU:
        weights = LLM(model, load_format="dummy", num_gpu_blocks_override=1, progress=False).model.weights
        save_file({name: weight.clone() for name, weight in weights.items()}, model / "model.safetensors")

    def run(name: str, **changes):
        args = {"prompts": 2, "samples": 2, "sentences": 1, "max_tokens": 12, "lr": 1e-3, "train_batch": 3, "seed": 0,
                "max_num_seqs": None, "sleep": False, "model": model}
        trial = on_policy_rl.Trial(name, SimpleNamespace(**args | changes))
        seen = [trial.llm.fingerprint]
        for _ in range(3):
            trial.step()
            seen.append(trial.llm.fingerprint)
        assert len(set(seen)) == 4, "the weights did not change"
        assert all(entry["grad_norm"] > 0 for entry in trial.log)
        return trial, seen

    return run


def test_three_steps_on_policy(trial):
    """Not one logprob of the trainer differs from the sampler's in any bit; the run is a function of its seed, however
    the sampler batches and whether the cache is lent."""
    first, seen = trial("ours")
    assert [(entry["differing"], entry["kl"], entry["max_diff"]) for entry in first.log] == [(0, 0.0, 0.0)] * 3
    assert first.summary()["differing_words"] == 0
    assert trial("ours", max_num_seqs=1, sleep=True)[1] == seen


@pytest.mark.parametrize("name", ["twin", "twin-corrected"])
def test_three_steps_of_the_twin(trial, name):
    """The measurement sees the flaw that it is there to see."""
    log = trial(name)[0].log
    assert all(entry["differing"] > 0 and entry["max_diff"] > 0 for entry in log)


@pytest.mark.parametrize(("text", "ended", "expected"), [
    ("He ran to the sea. \"I can swim!\" he said.", True, 1.0), ("One dog sat down.", True, 0.5),
    ("He ran to the sea. She was very glad.", False, 0.0), ("", True, 1 / 3), ("Yes. No.", True, 0.0),
    ("He ran to the sea. She was", True, 0.0)])
def test_reward(text, ended, expected):
    assert on_policy_rl.grade(text, ended, 2) == pytest.approx(expected)


def test_help_and_plot(tmp_path, capsys, monkeypatch):
    columns = {name: [1.0, 0.5] for name in on_policy_rl.LOGGED}
    (tmp_path / "x.json").write_text(json.dumps({
        "settings": {"sentences": 3}, "device": "CPU", "dtype": "float32", "runs": {
            "ours": {"steps": columns | {"kl": [0.0, 0.0]}}, "twin": {"steps": columns}}}))
    monkeypatch.setattr(sys, "argv", ["on_policy_rl.py", "--plot-only", "--out", str(tmp_path / "x")])
    assert on_policy_rl.main() == 0
    pytest.importorskip("matplotlib")
    assert (tmp_path / "x.png").stat().st_size > 10000
    monkeypatch.setattr(sys, "argv", ["on_policy_rl.py", "--help"])
    with pytest.raises(SystemExit):
        on_policy_rl.main()
    assert "twin-corrected" in capsys.readouterr().out


# New weights in place.

def changed(folder: Path, out: Path, scale: float = 1.25) -> dict[str, torch.Tensor]:
    """Other weights in fp32, no bf16 numbers, and a folder that holds them rounded to bf16."""
    tensors = {name: t.float() * scale + 1e-4 for name, t in load_file(folder / "model.safetensors").items()}
    out.mkdir()
    (out / "config.json").write_text((folder / "config.json").read_text())
    save_file({name: t.bfloat16() for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.fixture(scope="module", params=NAMES)
def two(request, tmp_path_factory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """(a checkpoint folder, one with other weights, those weights in fp32)."""
    root = tmp_path_factory.mktemp("two")
    first = write_checkpoint(root / "first", CONFIGS[request.param])
    return first, root / "second", changed(first, root / "second")


def engine(folder: Path, **options) -> LLM:
    return LLM(folder, **({"dtype": "bfloat16", "device": "cpu", "num_gpu_blocks_override": 32, "progress": False}
                          | options))


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_updated_weights_answer_as_loaded_ones(two, ahead):
    """Bit for bit, from the same addresses, without what the prefix cache held, under another fingerprint."""
    first, second, tensors = two
    llm, fresh = engine(first, async_scheduling=ahead), engine(second)
    addresses = {name: view.data_ptr() for name, view in llm.model.weights.items()}
    ids = prompts(lengths=(90, 65))
    before, old = answers(llm, ids)[1], llm.fingerprint
    assert llm.generate(ids, PARAMS)[0].num_cached_tokens == 64
    llm.update_weights((name, tensor.requires_grad_()) for name, tensor in tensors.items())
    assert {name: view.data_ptr() for name, view in llm.model.weights.items()} == addresses
    assert not any(view.requires_grad for view in llm.model.weights.values())
    outputs = llm.generate(ids, PARAMS)
    assert [o.num_cached_tokens for o in outputs] == [0, 0]
    expected = fresh.generate(ids, PARAMS)
    assert [o.outputs[0] for o in outputs] == [o.outputs[0] for o in expected]
    assert not same_bits(answers(llm, ids)[1], before)
    assert llm.fingerprint != old
    fresh.update_weights(tensors)  # the same weights: the same name, whichever engine took them
    assert fresh.fingerprint == llm.fingerprint
    fresh.update_weights(load_file(first / "model.safetensors"))
    assert fresh.fingerprint != llm.fingerprint and same_bits(answers(fresh, ids)[1], before)


def test_random_weights_are_replaced(two):
    _, second, tensors = two
    llm = engine(second, load_format="dummy")
    llm.update_weights(tensors)
    assert same_bits(answers(llm, prompts())[1], answers(engine(second), prompts())[1])


@pytest.mark.parametrize(("change", "error"), [
    (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    (lambda t: t.update({"model.norm.weight": t["model.norm.weight"][1:]}), "model.norm.weight has shape"),
    (lambda t: t.update({"model.layers.2.input_layernorm.weight": t["model.norm.weight"]}), "layers.2.input_layernorm"),
    (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}), "dtype torch.int8"),
], ids=["missing", "shape", "unknown", "dtype"])
def test_weights_that_do_not_fit_are_refused(two, change, error):
    """The error names the tensor; nothing was overwritten, though others came before it."""
    first, _, tensors = two
    llm = engine(first)
    kept, old = {name: w.clone() for name, w in llm.model.weights.items()}, llm.fingerprint
    tensors = dict(tensors)
    change(tensors)
    with pytest.raises(ValueError, match=error):
        llm.update_weights(tensors)
    assert all(same_bits(w, kept[name]) for name, w in llm.model.weights.items())
    assert llm.fingerprint == old


def test_a_tied_head_may_come_along(two):
    """Trainers list it, though it is the embedding; another head than the embedding is refused."""
    first, second, tensors = two
    embed = tensors["model.embed_tokens.weight"]
    llm = engine(first)
    if not llm.config.tie_word_embeddings:
        pytest.skip("a head of its own")
    llm.update_weights(tensors | {"lm_head.weight": embed})
    assert same_bits(answers(llm, prompts())[1], answers(engine(second), prompts())[1])
    kept = llm.model.embed_tokens.clone()
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        llm.update_weights(tensors | {"model.embed_tokens.weight": 2 * embed, "lm_head.weight": embed})
    assert same_bits(llm.model.embed_tokens, kept)


@pytest.mark.parametrize("call", ["update_weights", "sleep"])
def test_not_while_requests_run(two, call):
    first, _, tensors = two
    llm = engine(first)
    llm.add_request([1, 2, 3], PARAMS)
    llm.step()
    with pytest.raises(RuntimeError, match="1 requests are running"):
        llm.sleep() if call == "sleep" else llm.update_weights(tensors)
    while llm.has_unfinished_requests:
        (output,) = llm.step()
    assert output.outputs[0] == engine(first).generate([[1, 2, 3]], PARAMS)[0].outputs[0]


# Memory lent.

def test_sleep_and_wake(two):
    first, second, tensors = two
    llm = engine(first)
    before = answers(llm, prompts())[1]
    shape = llm.runner.kv_cache.shape
    for _ in range(2):  # a second call finds nothing to do
        llm.sleep()
    assert llm.runner.kv_cache is None
    for call in (lambda: llm.add_request([1, 2]), llm.step, lambda: llm.generate([[1, 2]]),
                 lambda: llm.score([1], [2]), lambda: next(llm.stream([1, 2]))):
        with pytest.raises(RuntimeError, match="wake"):
            call()
    assert not llm.has_unfinished_requests
    llm.wake()
    assert llm.runner.kv_cache.shape == shape
    assert same_bits(answers(llm, prompts())[1], before)
    llm.sleep()
    llm.update_weights(tensors)
    llm.wake()
    cache = llm.runner.kv_cache
    llm.wake()
    assert llm.runner.kv_cache is cache
    assert same_bits(answers(llm, prompts())[1], answers(engine(second), prompts())[1])


# The same on a GPU, where sampling runs from CUDA graphs and in bf16.

def embedded(**options) -> LLM:
    return LLM(ROOT / "models" / "embedded", **({"device": "cuda", "num_gpu_blocks_override": 128, "progress": False,
                                                 "max_num_seqs": 16} | options))


@pytest.mark.gpu
def test_gpu_bits_before_and_after_new_weights():
    """Graphs stay valid: the weights lie where they lay. The trainer's bits are those of sampling each time."""
    llm = embedded()
    policy, ids = Policy(llm), prompts(4096, (1, 2, 40, 63, 64, 65, 130, 250, 256, 257))
    pairs, sampled = answers(llm, ids)
    assert same_bits(policy.logprobs(pairs).detach(), sampled)
    graphs = {shape: id(graph) for shape, (_, graph) in llm.runner.graphs.items()}
    assert graphs
    with torch.no_grad():
        for master in policy.parameters():
            master.mul_(1.03).add_(1e-3)
    llm.update_weights(policy.state_dict())
    pairs, updated = answers(llm, ids)
    assert {shape: id(graph) for shape, (_, graph) in llm.runner.graphs.items()} == graphs
    assert same_bits(policy.logprobs(pairs).detach(), updated) and not same_bits(updated, sampled)
    eager = embedded(enforce_eager=True)
    eager.update_weights(policy.state_dict())
    assert same_bits(answers(eager, ids)[1], updated) and eager.fingerprint == llm.fingerprint


@pytest.mark.gpu
def test_gpu_gradients():
    """bf16 on the GPU against fp32 on the CPU: the same direction, and the same bits when it is done again."""
    ids = prompts(4096, (20, 90, 130))
    pairs = [(some[:5], some[5:]) for some in ids]
    found = []
    for llm in (embedded(), embedded(), embedded(device="cpu", dtype="float32")):
        policy = Policy(llm)
        with deterministic():
            policy.logprobs(pairs).mean().backward()
        found.append({name: master.grad.cpu() for name, master in policy.masters.items()})
    assert all(same_bits(found[0][name], found[1][name]) for name in found[0])
    likeness = {name: float(F.cosine_similarity(found[0][name].flatten(), grad.flatten(), 0))
                for name, grad in found[2].items()}
    assert min(likeness.values()) > 0.98, min(likeness.items(), key=lambda item: item[1])


@pytest.mark.gpu
def test_gpu_sleep_frees_memory():
    llm = embedded(num_gpu_blocks_override=8192)
    size, ids = llm.runner.kv_cache.nbytes, prompts(4096)
    before = answers(llm, ids)[1]
    free = torch.cuda.mem_get_info()[0]
    llm.sleep()
    assert torch.cuda.mem_get_info()[0] - free >= size > 1 << 30
    lent = torch.empty(size // 2, dtype=torch.uint8, device="cuda").fill_(255)  # NaN, should anything read it still
    llm.wake()
    assert same_bits(answers(llm, ids)[1], before) and llm.runner.graphs
    del lent


@pytest.mark.gpu
def test_gpu_three_steps_on_policy(trial):
    """From graphs, past the first 64 keys; and the same weights in the end under another load, the cache lent."""
    first, seen = trial("ours", max_tokens=80)
    assert [(entry["differing"], entry["kl"]) for entry in first.log] == [(0, 0.0)] * 3
    assert trial("ours", max_tokens=80, max_num_seqs=3, sleep=True)[1] == seen
