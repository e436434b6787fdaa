"""Tensor parallelism on CPU, over gloo: one model's bits on 1, 2, 3 and 4 ranks, and what happens when a rank ends."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY, TINY_MOE

import kernels
from cache import BlockManager
from engine import LLM
from kernels import reference, same_bits
from kernels.collectives import DRAWN, FIRST, LOGITS, SECOND, TOTALS, Collectives
from model import Linear, Model, ModelConfig, Shard
from parallel import EXIT_LOST
from sampler import SamplingParams

LLAMA = TINY | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True,
                "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": False}
QWEN3_8B = TINY | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "head_dim": 128}
NEEDLES = (255, 126, 63, 1)
BINARY = ("batched", "chunked", "warm", "tiny", "seeded", "ahead")


def write_config(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Shards.


def widths(parts: list[slice]) -> list[int]:
    return [part.stop - part.start for part in parts]


@pytest.mark.parametrize("size", range(1, 9))
def test_every_column_has_one_owner(size):
    cuts = Shard(0, size).cuts(ModelConfig.from_dict(QWEN3_8B))
    for name, whole in {"heads": 32, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}.items():
        borders = [part.start for part in cuts[name]] + [whole]
        assert borders[0] == 0 and [part.stop for part in cuts[name]] == borders[1:]
        assert name == "heads" or not any(border % 128 for border in borders)
        assert max(widths(cuts[name])) - min(widths(cuts[name])) <= {"heads": 4}.get(name, 128)
    assert [(part.start * 4, part.stop * 4) for part in cuts["kv_heads"]] == [(p.start, p.stop) for p in cuts["heads"]]


def test_sizes_that_do_not_divide():
    assert widths(Shard(0, 3).cuts(ModelConfig.from_dict(QWEN3_8B))["kv_heads"]) == [3, 3, 2]
    tiny = Shard(0, 3).cuts(ModelConfig.from_dict(TINY))
    assert widths(tiny["vocab_size"]) == [128, 128, 51] and widths(tiny["hidden_size"]) == [32, 16, 16]
    assert widths(tiny["heads"]) == [1, 1, 2] and [part.start for part in tiny["kv_heads"]] == [0, 0, 1]
    nine = TINY | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert widths(Shard(0, 4).cuts(ModelConfig.from_dict(nine))["heads"]) == [2, 1, 3, 3]


def test_what_cannot_be_done_is_refused_by_name(tiny_folder, monkeypatch):
    many = {"num_attention_heads": 16, "num_key_value_heads": 8}
    for size, overrides, named in ((5, {}, "num_key_value_heads 2"), (5, many, "hidden_size 64"), (0, {}, "least 1")):
        with pytest.raises(ValueError, match=named):
            LLM(tiny_folder, load_format="dummy", progress=False, tensor_parallel_size=size, hf_overrides=overrides)
    for options, named in (({"tp_style": "diagonal"}, "tp_style"), ({"ops": kernels.reference_ops()}, "op table")):
        with pytest.raises(ValueError, match=named):
            LLM(tiny_folder, load_format="dummy", progress=False, tensor_parallel_size=2, **options)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun started 3 ranks"):
        LLM(tiny_folder, load_format="dummy", progress=False, tensor_parallel_size=2)


EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 4608}  # an expert's gate and up have one leaf, half of their columns would have two


@pytest.mark.parametrize("extra, expected", [({}, [2, 2, 1, 2, 1]), (EXPERTS, [2, 2, 2, 1, 2, 1])], ids=["mlp", "moe"])
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_leaves_are_those_of_the_whole_weight(size, extra, expected):
    config = ModelConfig.from_dict(QWEN3_8B | {"num_hidden_layers": 1} | extra)

    def leaves(shard=None):
        model = Model(config, kernels.reference_ops(), torch.device("meta"), torch.bfloat16, 64, shard)
        linears = [part for part in vars(model.layers[0]).values() if isinstance(part, Linear)] + [model.lm_head]
        return [linear.leaves for linear in linears]

    assert leaves() == expected
    styles = ("column",) if extra else ("column", "row")
    assert all(leaves(Shard(rank, size, style)) == expected for rank in range(size) for style in styles)


def test_a_column_has_the_same_bits_wherever_a_shard_puts_it():
    """The CPU's products work in tiles of 64 columns; a shard moves columns to other places, and into padded tiles."""
    generator = torch.Generator().manual_seed(0)
    for K, M in itertools.product((64, 96, 256, 576), (1, 2, 33)):
        x, w = torch.randn(M, K, generator=generator), torch.randn(307, K, generator=generator)
        whole = reference.linear(x, w, None, 1, torch.float32)
        for start, width in itertools.product((0, 16, 48, 128, 205), (1, 16, 51, 64, 102)):
            part = reference.linear(x, w[start : start + width], None, 1, torch.float32)
            assert same_bits(part, whole[:, start : start + width])


@pytest.mark.parametrize("style, config", [(style, config) for style in ("column", "row")
                                           for config in (TINY, LLAMA, TINY_MOE)
                                           if (style, config) != ("row", TINY_MOE)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_reads_its_slice_and_no_more(config, size, style):
    config = ModelConfig.from_dict(config)
    read = []

    class Slices:
        def __init__(self, data):
            self.data = data

        def __getitem__(self, index):
            read.append(self.data[index].numel())
            return self.data[index]

    def model(shard=None):
        return Model(config, kernels.reference_ops(), torch.device("cpu"), torch.float32, 64, shard)

    whole = model()
    whole.load_dummy(progress=False)
    checkpoint = SimpleNamespace(
        shapes={name: tuple(view.shape) for name, view in whole.weights.items()},
        dtypes=dict.fromkeys(whole.weights, "F32"),
        tensors=lambda progress: ((name, Slices(view)) for name, view in whole.weights.items()))
    owned = {name: torch.zeros_like(view, dtype=torch.int32) for name, view in whole.weights.items()}
    for rank in range(size):
        loaded, dummy = model(Shard(rank, size, style)), model(Shard(rank, size, style))
        read.clear()
        loaded.load(checkpoint, progress=False)
        dummy.load_dummy(progress=False)
        assert sum(read) == sum(view.numel() for view in loaded.weights.values())
        for name, view in loaded.weights.items():
            part = loaded.parts[name][1]
            assert same_bits(view, whole.weights[name][part]) and same_bits(view, dummy.weights[name])
            owned[name][part] += 1
    for name, count in owned.items():  # norms, the embedding, routers and what a rank shares are held by several
        several = "norm" in name or "embed" in name
        several |= name.endswith(("o_proj.bias", "down_proj.bias", "mlp.gate.weight"))
        several |= size > config.num_kv_heads and ("k_proj" in name or "v_proj" in name)
        assert bool((count >= 1).all()) and (several or bool((count == 1).all())), name


# Collectives.


def hard(shape, seed):
    """Numbers whose sum follows the order, among them signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 5, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, -0.0, x)


def ordered(parts, dtype):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)


SHAPES = [(1, 1), (1, 7), (2, 16), (3, 33), (5, 64), (64, 65), (128, 300), (1, 4099)]


def exchange(rank: int, size: int, port: int) -> None:
    """One rank of the tests of torch.distributed's path; raises where something is not as it should be."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank,
                            world_size=size)
    collectives = Collectives(rank, size)
    order_matters = False
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16, torch.float16)):
        parts = [hard(shape, seed) for seed in range(size)]
        expected = ordered(parts, dtype)
        order_matters |= not same_bits(expected, ordered(parts[::-1], dtype))
        for two_shot in (1, 1 << 60):
            assert same_bits(collectives.all_reduce(parts[rank], dtype, FIRST, two_shot), expected), (shape, dtype)
    assert order_matters
    for M, each in itertools.product((1, 3), ([1] * size, list(range(size)), [51, 128, 0, 16][:size])):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            whole = (hard((M, sum(each)), 9) * 1e3).to(dtype)
            found = collectives.gather(whole.split(each, 1)[rank].contiguous(), each, SECOND)
            assert found.is_contiguous() and same_bits(found, whole)
    dist.destroy_process_group()


def test_gather_and_all_reduce_through_torch_distributed():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(exchange, (3, store.port), nprocs=3)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_gather_and_all_reduce_through_symmetric_memory(size):
    """The kernels, interpreted, over buffers of one process: a rank after the other, with nobody to wait for."""
    pytest.importorskip("triton")
    from kernels.symmetric import SymmetricMemory

    M, N = 128, 300
    lengths = {FIRST: M * N * 4, SECOND: M * N * 4, LOGITS: M * N * 8, DRAWN: 800, TOTALS: M * N * 4}
    buffers = {region: [torch.full((length,), 255, dtype=torch.uint8) for _ in range(size)]
               for region, length in lengths.items()}
    ranks = []
    for rank in range(size):
        ranks.append(SymmetricMemory.__new__(SymmetricMemory))
        vars(ranks[-1]).update(rank=rank, size=size, regions=buffers, typed={},
                               handle=SimpleNamespace(barrier=lambda channel: None))
    for shape, dtype, two_shot in itertools.product([(1, 1), (3, 33), (128, 300)], (torch.float32, torch.float16),
                                                    (1, 1 << 60)):  # the interpreter rounds to bf16 in its own way
        parts = [hard(shape, seed) for seed in range(size)]
        for rank, part in zip(ranks, parts, strict=True):
            rank.partial(*shape, FIRST).copy_(part)
        found = [rank.all_reduce(rank.partial(*shape, FIRST), dtype, FIRST, two_shot) for rank in ranks]
        assert all(same_bits(total, ordered(parts, dtype)) for total in found), (shape, dtype, two_shot)
    each = [51, 128, 0, 16, 1, 2, 3, 99][:size]
    for M, region, dtype in itertools.product((1, 5), (SECOND, LOGITS), (torch.bfloat16, torch.float32, torch.int64)):
        whole = (hard((M, sum(each)), 9) * 1e3).to(dtype)
        parts = [part.contiguous() for part in whole.split(each, 1)]
        found = [rank.gather(part, each, region) for rank, part in zip(ranks, parts, strict=True)]
        assert all(same_bits(out, whole) and out.is_contiguous() for out in found)


# The contract.


def cells() -> list[dict]:
    """Settings that together hold every pair of values of any two axes."""
    rng = random.Random(0)
    wanted = {(a, x, b, y) for a, b in itertools.combinations(BINARY, 2) for x in (0, 1) for y in (0, 1)}
    while True:
        drawn = [{name: rng.random() < 0.5 for name in BINARY} for _ in range(6)]
        if {(a, c[a], b, c[b]) for c in drawn for a, b in itertools.combinations(BINARY, 2)} == wanted:
            return drawn


def serve(llm: LLM, batched=True, chunked=False, warm=False, tiny=False, seeded=True, ahead=False,
          lengths=NEEDLES) -> list[tuple]:
    """(token ids, logprob words) of a needle of each length, served in this way."""
    rng = random.Random(5)
    shared = [rng.randrange(4, 250) for _ in range(128)]
    needles = [(shared + [rng.randrange(4, 250) for _ in range(n)])[-n if n < 128 else None :][:n] for n in lengths]
    chosen = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01} if seeded else {"temperature": 0.0}
    params = [SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0, seed=i, **chosen) for i in range(len(needles))]
    fillers = [[rng.randrange(4, 250) for _ in range(i)] for i in range(1, 9)] if batched else []
    filling = [SamplingParams(temperature=i % 2, max_tokens=1 + i % 3, repetition_penalty=1.2 if i == 2 else 1.0,
                              prompt_logprobs=1 if i == 5 else None, ignore_eos=True) for i in range(len(fillers))]
    llm.scheduler.max_num_batched_tokens = 48 if chunked else 512
    llm.scheduler.blocks = BlockManager(8 if tiny else 64)
    llm.async_scheduling = ahead
    groups = [needles] if batched else [[needle] for needle in needles]
    for _ in range(1 + warm):
        outputs = []
        for group in groups:
            own = params[len(outputs) : len(outputs) + len(group)]
            outputs += llm.generate(group + fillers, own + filling)[: len(group)]
    llm.scheduler.check_integrity()
    assert not warm or tiny or sum(output.num_cached_tokens for output in outputs) > 0
    return [(out.token_ids, np.array(out.logprobs, np.float32).view(np.int32).tolist())
            for out in (output.outputs[0] for output in outputs)]


def engine(folder, size, **options):
    load = {} if folder == "models/embedded" else {"load_format": "dummy"}
    return LLM(folder, **{"device": "cpu", "progress": False, "num_gpu_blocks_override": 64, "max_num_seqs": 16,
                          "tensor_parallel_size": size} | load | options)


def compare(folder, size, chosen, lengths=NEEDLES, **options):
    alone = engine(folder, 1, **options)
    expected = {seeded: serve(alone, batched=False, seeded=seeded, lengths=lengths) for seeded in (False, True)}
    assert expected[False] != expected[True]
    with engine(folder, size, **options) as llm:
        assert llm.fingerprint == alone.fingerprint and "torch.distributed" in llm.hardware
        for cell in chosen:
            assert serve(llm, **cell, lengths=lengths) == expected[cell["seeded"]], f"{cell} on {size} ranks"
        assert llm.scheduler.num_preemptions or not any(cell.get("tiny") for cell in chosen), "nothing was preempted"
    for child in llm.ranks.children:
        assert child.poll() is not None


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_change_no_bit(tiny_folder, size):
    compare(tiny_folder, size, cells())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_change_no_bit_of_the_embedded_model(size):
    compare("models/embedded", size, [dict(chunked=size == 2, seeded=True, ahead=size == 3)], lengths=(190, 63))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_change_no_bit_of_experts(tmp_path, size):
    config = TINY_MOE | {"decoder_sparse_step": 2}  # one layer with experts, one without
    compare(write_config(tmp_path / "moe", config), size, cells())


def test_experts_by_row_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tp_style 'row' is not implemented for Qwen3MoeForCausalLM"):
        Model(ModelConfig.from_dict(TINY_MOE), kernels.reference_ops(), torch.device("meta"), torch.float32, 64,
              Shard(0, 2, "row"))


def test_biases_and_an_untied_head(tmp_path):
    compare(write_config(tmp_path / "llama", LLAMA), 2, [dict(seeded=True, chunked=True)], dtype="bfloat16")


def row_twin(cuts: dict[int, list[int]]) -> kernels.Ops:
    """The op table of one process that sums o_proj and down_proj as ranks would: `cuts` maps K to the ranks' widths."""
    ops = kernels.reference_ops()

    def linear(x, weight, bias, leaves, out_dtype, out=None):
        if len(weight) != TINY["hidden_size"]:
            return ops.linear(x, weight, bias, leaves, out_dtype, out)
        each = cuts[x.shape[1]]
        parts = [ops.linear(a.contiguous(), w.contiguous(), None if i else bias, leaves, torch.float32)
                 for i, (a, w) in enumerate(zip(x.split(each, 1), weight.split(each, 1), strict=True))]
        return ordered(parts, out_dtype)

    return replace(ops, linear=linear, gated_linear=lambda *args: ops.silu_and_mul(linear(*args)))


@pytest.mark.parametrize("size, cuts", [(2, {192: [128, 64], 96: [64, 32]}), (3, {192: [64] * 3, 96: [32] * 3})])
def test_row_style_is_the_rank_ordered_sum(tmp_path, size, cuts):
    """Whatever the batch; and it is another arithmetic, which the fingerprint tells."""
    folder = write_config(tmp_path / "llama", LLAMA)
    column = engine(folder, 1)
    expected = serve(engine(folder, 1, ops=row_twin(cuts)), batched=False)
    assert expected != serve(column, batched=False)
    with engine(folder, size, tp_style="row") as llm:
        for cell in (dict(batched=False), dict(ahead=True), dict(chunked=True, tiny=True)):
            assert serve(llm, **cell) == expected, cell
        assert llm.fingerprint not in (column.fingerprint, engine(folder, 1, tp_style="row").fingerprint)
    assert engine(folder, 1, tp_style="row").fingerprint == column.fingerprint


# The life of ranks.

SERVE = """
import sys, time
import torch
torch.set_num_threads(1)
from engine import LLM
from sampler import SamplingParams
llm = LLM(device="cpu", progress=False, num_gpu_blocks_override=64, tensor_parallel_size=2)
llm.ranks.step_seconds = 3
list(llm.stream("Once", SamplingParams(max_tokens=2)))
print(*[child.pid for child in llm.ranks.children], flush=True)
while sys.argv[1] != "idle":
    for _ in llm.stream("Once", SamplingParams(max_tokens=500, ignore_eos=True)):
        pass
time.sleep(60)
"""


def start(command: list, **options) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **options)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < deadline, "an orphan is left"
        time.sleep(0.05)


@pytest.fixture
def serving(request):
    """(process of rank 0, pid of rank 1), in the middle of a step or idle."""
    process = start(["-c", SERVE, request.param])
    child = int(process.stdout.readline())
    time.sleep(0.3)
    yield process, child
    process.kill()
    process.communicate()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks for processes in /proc")


@needs_proc
@pytest.mark.parametrize("serving, how, said", [
    ("busy", signal.SIGKILL, "rank 1 ended: killed by signal 9"),
    ("busy", signal.SIGSTOP, "has not ended in 3 seconds: a rank stalls")], indirect=["serving"])
def test_a_rank_that_dies_or_stalls_ends_all(serving, how, said):
    process, child = serving
    os.kill(child, how)
    assert process.wait(timeout=15) == EXIT_LOST
    errors = [line for line in process.stderr.read().splitlines() if line]
    assert len(errors) == 1 and said in errors[0] and errors[0].startswith("error: "), errors
    assert_gone(child)


@needs_proc
@pytest.mark.parametrize("serving", ["busy"], indirect=True)
def test_no_orphan_outlives_rank_0(serving):
    process, child = serving
    process.kill()
    assert_gone(child)


@needs_proc
def test_ctrl_c_is_clean():
    process = start(["engine.py", "--device", "cpu", "--tensor-parallel-size", "2", "--prompt", "Once", "--ignore-eos"],
                    start_new_session=True)
    assert process.stdout.read(1)
    children = [int(pid) for pid in open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()]
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=15) == 130 and process.stderr.read() == "interrupted\n"
    assert len(children) == 1
    assert_gone(children[0])


def test_two_engines_and_torchrun_at_once():
    """None meets another's ranks, and torchrun's ranks say what the engine's own do."""
    arguments = ["engine.py", "--device", "cpu", "--prompt", "Once upon", "--seed", "3", "--max-tokens", "5", "--json",
                 "--tensor-parallel-size", "2"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    processes = [start(arguments), start(arguments), start(torchrun + arguments)]
    llm = engine("models/embedded", 1)
    out = llm.generate("Once upon", SamplingParams(seed=3, max_tokens=5, logprobs=0))[0].outputs[0]
    for process in processes:
        said, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        record = json.loads(said)  # one rank alone speaks
        assert record["token_ids"] == out.token_ids and record["logprobs"] == out.logprobs
        assert record["fingerprint"] == llm.fingerprint


def test_a_rank_that_cannot_start_says_why(tiny_folder, monkeypatch):
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda options: dumps(options | {"dtype": "int3"}))
    with pytest.raises(ChildProcessError, match="rank 1 ended: ValueError: unknown dtype 'int3'"):
        engine(tiny_folder, 2)
    monkeypatch.undo()
    with engine(tiny_folder, 2) as llm:  # and the next one can
        with pytest.raises(ValueError, match="a rank already"):
            engine(tiny_folder, 2)
        assert llm.generate([[5]], SamplingParams(max_tokens=1))[0].error is None
        llm.runner.launch = lambda seqs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            llm.generate([[5]])
        with pytest.raises(RuntimeError, match="make a new engine"):
            llm.generate([[5]])
