"""Tensor parallelism on CPU, over gloo: one model's bits on 1, 2, 3 and 4 ranks, and how ranks begin and end."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, check_integrity

import kernels
import parallel
from cache import BlockManager
from engine import LLM
from kernels import reference, same_bits
from model import Linear, Model, ModelConfig, shard
from sampler import SamplingParams
from scheduler import Scheduler

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks to come, which share the cores
CPU = torch.device("cpu")
QWEN3 = TINY | {"hidden_size": 256, "intermediate_size": 320}
LLAMA = QWEN3 | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True,
                 "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": False}
QWEN2 = QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}  # biases in q, k and v alone
QWEN3_8B = TINY | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "head_dim": 128}
BINARY = ("batched", "chunked", "warm", "tiny", "seeded", "ahead")


def write_config(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Shards.


def lengths(cut: list[range]) -> list[int]:
    return list(map(len, cut))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 16, 32])
def test_every_column_has_one_owner(size):
    cuts = shard(ModelConfig.from_dict(QWEN3_8B), size)
    for name, whole in {"q": 4096, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}.items():
        cut = getattr(cuts, name)
        assert [part.start for part in cut] + [whole] == [0] + [part.stop for part in cut]
        assert not any(part.start % 128 for part in cut)
        assert name == "q" or max(lengths(cut)) - min(lengths(cut)) <= 128
    for q, kv in zip(cuts.q, cuts.kv, strict=True):  # a query head's KV head is where it is
        assert kv.start <= q.start // 4 and q.stop <= kv.stop * 4 and not (kv.start % 128 or len(q) % len(kv))


def test_sizes_that_do_not_divide():
    assert lengths(shard(ModelConfig.from_dict(QWEN3_8B), 3).kv) == [2 * 128, 3 * 128, 3 * 128]
    three, four = shard(ModelConfig.from_dict(LLAMA), 3), shard(ModelConfig.from_dict(QWEN3), 4)
    assert lengths(three.vocab_size) == [128, 128, 51] and lengths(three.hidden_size) == [64, 64, 128]
    assert lengths(four.q) == [32, 32, 32, 32] and [part.start for part in four.kv] == [0, 0, 32, 32]
    assert lengths(shard(ModelConfig.from_dict(LLAMA), 2).q) == [64, 128]


@pytest.mark.parametrize("size, overrides, named", [
    (6, {}, "num_heads 4 is too small for tensor_parallel_size 6"), (2, {"hidden_size": 64}, "hidden_size 64"),
    (2, {"intermediate_size": 64}, "intermediate_size 64"), (4, {"vocab_size": 190}, "vocab_size 190"),
    (3, {}, "size 3 is above num_kv_heads 2, but no multiple"), (0, {}, "tensor_parallel_size must be at least 1")])
def test_what_cannot_be_dealt_is_refused_by_name(size, overrides, named, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "get_context", None)  # before anything is started
    with pytest.raises(ValueError, match=named):
        engine(write_config(tmp_path, QWEN3 | overrides), size)


def test_an_op_table_of_ones_own_is_for_one_rank():
    with pytest.raises(ValueError, match="op table of one's own takes tensor_parallel_size 1"):
        engine("models/embedded", 2, ops=kernels.reference_ops())


def test_gpus_must_be_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ValueError, match="tensor_parallel_size 3 takes as many GPUs; here are 2"):
        parallel.Ranks(3).start(SimpleNamespace(device=torch.device("cuda", 1)), {})


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_leaves_are_those_of_the_whole_weight(size):
    config = ModelConfig.from_dict(QWEN3_8B | {"num_hidden_layers": 1})

    def leaves(**place):
        model = Model(config, kernels.reference_ops(), torch.device("meta"), torch.bfloat16, 64, **place)
        linears = [part for part in vars(model.layers[0]).values() if isinstance(part, Linear)] + [model.lm_head]
        return [linear.leaves for linear in linears]

    assert leaves() == [2, 2, 1, 2, 1]
    assert all(leaves(rank=rank, size=size) == leaves() for rank in range(size))


def test_a_column_has_the_same_bits_wherever_a_shard_puts_it():
    """The CPU's products work in tiles of 64 columns; heads of 32 may come to stand in either half of one."""
    generator = torch.Generator().manual_seed(0)
    for K, M in itertools.product((64, 96, 256, 576), (1, 2, 33)):
        x, w = torch.randn(M, K, generator=generator), torch.randn(307, K, generator=generator)
        whole = reference.linear(x, w, None, 1, torch.float32)
        for start, width in itertools.product((0, 32, 64, 96, 192), (32, 51, 64, 96, 115)):
            part = reference.linear(x, w[start : start + width], None, 1, torch.float32)
            assert same_bits(part, whole[:, start : start + width])


@pytest.mark.parametrize("config, size", [(QWEN3, 2), (QWEN3, 4), (LLAMA, 2), (LLAMA, 3), (QWEN2, 4)])
def test_a_rank_reads_its_rows_and_no_more(config, size):
    config, read = ModelConfig.from_dict(config), []

    class Slices:
        def __init__(self, data):
            self.data = data

        def __getitem__(self, index):
            read.append(self.data[index].numel())
            return self.data[index]

    def model(**place):
        return Model(config, kernels.reference_ops(), CPU, torch.float32, 64, **place)

    whole = model()
    whole.load_dummy(progress=False)
    checkpoint = SimpleNamespace(
        shapes={name: tuple(view.shape) for name, view in whole.weights.items()},
        dtypes=dict.fromkeys(whole.weights, "F32"),
        tensors=lambda progress: ((name, Slices(view)) for name, view in whole.weights.items()))
    owned = {name: torch.zeros_like(view, dtype=torch.int32) for name, view in whole.weights.items()}
    for rank in range(size):
        loaded, dummy = model(rank=rank, size=size), model(rank=rank, size=size)
        read.clear()
        loaded.load(checkpoint, progress=False)
        dummy.load_dummy(progress=False)
        assert sum(read) == sum(view.numel() for view in loaded.weights.values())
        for name, view in loaded.weights.items():
            _, rows = loaded.whole[name]
            assert same_bits(view, whole.weights[name][rows]) and same_bits(view, dummy.weights[name])
            owned[name][rows] += 1
    for name, count in owned.items():  # norms, the embedding and shared KV heads are held by several
        several = "norm" in name or "embed" in name or (size > config.num_kv_heads and ("k_" in name or "v_" in name))
        assert bool((count >= 1).all()) and (several or bool((count == 1).all())), name


# The contract.


def cells() -> list[dict]:
    """Settings that together hold every pair of values of any two axes."""
    rng = random.Random(0)
    wanted = {(a, x, b, y) for a, b in itertools.combinations(BINARY, 2) for x in (0, 1) for y in (0, 1)}
    while True:
        drawn = [{name: rng.random() < 0.5 for name in BINARY} for _ in range(6)]
        if {(a, c[a], b, c[b]) for c in drawn for a, b in itertools.combinations(BINARY, 2)} == wanted:
            return drawn


def set_on_all(llm: LLM, name: str, value) -> None:
    llm.ranks.tell("__setattr__", name, value)
    setattr(llm, name, value)


def words(logprobs: list[float]) -> list[int]:
    return np.array(logprobs, np.float32).view(np.int32).tolist()


def serve(llm: LLM, batched=True, chunked=False, warm=False, tiny=False, seeded=True, ahead=False) -> list[tuple]:
    """(token ids, logprob words) of each completion of a few needles, served in this way."""
    rng = random.Random(5)
    shared = [rng.randrange(4, 250) for _ in range(128)]
    needles = [shared + [rng.randrange(4, 250) for _ in range(92)], shared[:-1][:63], [7]]
    chosen = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01} if seeded else {"temperature": 0.0}
    params = [SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0, seed=i, n=1 + (i == 1), **chosen)
              for i in range(len(needles))]
    fillers = [[rng.randrange(4, 250) for _ in range(i)] for i in range(1, 7)] if batched else []
    filling = [SamplingParams(temperature=i % 2, max_tokens=1 + i % 3, repetition_penalty=1.2 if i == 2 else 1.0,
                              prompt_logprobs=1 if i == 5 else None, ignore_eos=True) for i in range(len(fillers))]
    set_on_all(llm, "scheduler", Scheduler(BlockManager(6 if tiny else 64), 16, 48 if chunked else 512))
    set_on_all(llm, "async_scheduling", ahead)
    groups = [needles] if batched else [[needle] for needle in needles]
    for _ in range(1 + warm):
        outputs = []
        for group in groups:
            own = params[len(outputs) : len(outputs) + len(group)]
            outputs += llm.generate(group + fillers, own + filling)[: len(group)]
    check_integrity(llm.scheduler)
    assert not warm or tiny or sum(output.num_cached_tokens for output in outputs) > 0
    assert not (tiny and batched) or llm.scheduler.num_preemptions
    return [(out.token_ids, words(out.logprobs)) for output in outputs for out in output.outputs]


def engine(folder, size=1, **options) -> LLM:
    load = {} if os.path.exists(f"{folder}/model.safetensors") else {"load_format": "dummy"}
    return LLM(folder, **{"device": "cpu", "progress": False, "num_gpu_blocks_override": 64, "max_num_seqs": 16,
                          "tensor_parallel_size": size} | load | options)


def scores(llm: LLM) -> list:
    """What prompt logprobs, a score, a verified receipt and the survivors of an abort say."""
    set_on_all(llm, "scheduler", Scheduler(BlockManager(64), 16, 512))  # `wake` makes a cache of as many blocks
    out = llm.generate([list(range(5, 90))], SamplingParams(max_tokens=2, seed=1, prompt_logprobs=2, logprobs=1))[0]
    found = [words([logprob for logprob, _ in out.prompt_logprobs[1:]]), out.outputs[0].top_logprobs]
    found.append(words(llm.score([5, 6, 7], [8, 9, 10])))
    receipt = llm.receipt(out)
    assert llm.verify(receipt).verified
    assert not llm.verify(receipt | {"token_ids": [9, *receipt["token_ids"][1:]]}).verified
    ids = [llm.add_request([i, 7, 8], SamplingParams(max_tokens=6, seed=i, logprobs=0, n=2)) for i in (5, 6, 7)]
    outputs = [llm.requests[request_id] for request_id in ids]
    for step in itertools.count():
        if step == 2:
            llm.abort(ids[1])
        if not llm.has_unfinished_requests:
            break
        llm.step()
    assert {c.finish_reason for c in outputs[1].outputs} == {"abort"}
    return found + [(c.token_ids, words(c.logprobs)) for output in outputs[::2] for c in output.outputs]


def compare(folder, size: int, chosen: list[dict], updates: int = 1, **options) -> None:
    """All that this file asks of `size` ranks, of one engine."""
    alone, llm = engine(folder, **options), engine(folder, size, **options)
    assert llm.fingerprint == alone.fingerprint
    for left in range(updates, -1, -1):  # with the checkpoint's weights, and with others
        expected = {seeded: serve(alone, batched=False, seeded=seeded) for seeded in (False, True)}
        assert expected[False] != expected[True]
        for cell in chosen:
            found = serve(llm, **cell)
            assert found == expected[cell["seeded"]], f"{cell} on {size} ranks"
        assert scores(llm) == scores(alone)
        assert all(llm.verify(alone.receipt(output)).verified for output in
                   alone.generate([[9, 8, 7]], SamplingParams(max_tokens=5, logprobs=0)))  # its seed drawn by chance
        if not left:
            break
        weights = {name: view * 1.125 for name, view in alone.model.weights.items()}
        with pytest.raises(ValueError, match="unexpected tensor other"):
            llm.update_weights(weights | {"other": torch.zeros(1)})
        for one in (alone, llm):
            one.update_weights(iter(weights.items()))
            one.sleep()
            with pytest.raises(RuntimeError, match="asleep"):
                one.generate([[5]])
            one.wake()
        del one
        assert llm.fingerprint == alone.fingerprint
    pids = [process.pid for process in llm.ranks.processes]
    assert len(pids) == size - 1 and all(map(is_running, pids))
    del llm
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("config, size", [(QWEN3, 2), (LLAMA, 3), (QWEN3, 4)], ids=["tied-2", "untied-3", "tied-4"])
def test_ranks_change_no_bit(config, size, tmp_path):
    compare(write_config(tmp_path / "model", config), size, cells()[: 6 if size < 4 else 2])


@pytest.mark.parametrize("config, size, dtype", [(LLAMA, 2, "bfloat16"), (QWEN2, 4, "float32")], ids=["llama", "qwen2"])
def test_more_biases_and_dtypes(config, size, dtype, tmp_path):
    compare(write_config(tmp_path / "model", config), size, [dict(seeded=True, chunked=True)], dtype=dtype)


def test_ranks_change_no_bit_of_the_embedded_model():
    compare("models/embedded", 2, [dict(seeded=True, ahead=True)], updates=0)


# The life of ranks.

SERVE = """
import sys, time
import torch
torch.set_num_threads(1)
from engine import LLM
from sampler import SamplingParams
llm = LLM(device="cpu", progress=False, tensor_parallel_size=3)
list(llm.stream("Once", SamplingParams(max_tokens=2)))
print(*[process.pid for process in llm.ranks.processes], flush=True)
while sys.argv[1] == "busy":
    for _ in llm.stream("Once", SamplingParams(max_tokens=500, ignore_eos=True)):
        pass
time.sleep(60)
"""


def start(command: list, **options) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True, **options)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "an orphan is left"
        time.sleep(0.05)


def of_session(pid: int) -> list[int]:
    """Every process that one started, and itself."""
    found = subprocess.run(["ps", "-o", "pid=", "-s", str(pid)], text=True, capture_output=True).stdout
    return [int(line) for line in found.split()]


@pytest.fixture
def serving(request):
    """(process of rank 0, pids of the others), in the middle of a step or idle."""
    process = start(["-c", SERVE, request.param])
    pids = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.3)
    yield process, pids
    process.kill()
    process.communicate()


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks for processes in /proc")


@needs_proc
@pytest.mark.parametrize("serving", ["busy", "idle"], indirect=True)
def test_a_rank_that_dies_ends_all(serving):
    process, pids = serving
    everyone = of_session(process.pid)
    assert set(pids) < set(everyone)
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait(timeout=20) == 1
    assert process.stderr.read() == "error: rank 2 died (exit code -9)\n"
    assert_gone(everyone)


IMPATIENT = "import parallel\nparallel.STALL_TICKS = 80\n" + SERVE


@needs_proc
def test_who_waits_for_requests_has_not_stalled():
    process = start(["-c", IMPATIENT, "idle"])
    process.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=12)
    process.kill()
    assert process.communicate()[1] == ""


@needs_proc
def test_a_rank_that_stalls_ends_all():
    process = start(["-c", IMPATIENT, "busy"])
    pids = [int(pid) for pid in process.stdout.readline().split()]
    everyone = of_session(process.pid)
    time.sleep(10)
    assert process.poll() is None  # steps go on: nothing has stalled
    os.kill(pids[0], signal.SIGSTOP)
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == "error: a rank stalled: a step does not end\n"
    assert_gone(everyone)


@needs_proc
@pytest.mark.parametrize("serving", ["busy"], indirect=True)
def test_no_orphan_outlives_rank_0(serving):
    process, _ = serving
    everyone = of_session(process.pid)
    process.kill()
    process.wait()
    assert_gone(everyone)
    assert process.stderr.read() == ""


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@needs_proc
def test_ranks_of_torchrun():
    prompt = ["engine.py", "--device", "cpu", "--prompt", "Once", "--max-tokens", "9", "--temperature", "0", "--json"]
    alone, launched = start(prompt), start([*TORCHRUN, *prompt, "--tensor-parallel-size", "2"])
    everyone = of_session(launched.pid)
    assert launched.wait(timeout=120) == 0 == alone.wait(timeout=60)
    found, expected = (json.loads(process.stdout.read()) for process in (launched, alone))
    assert all(found[name] == expected[name] for name in ("text", "logprobs", "fingerprint"))
    assert "x 2 by torch.distributed" in launched.stderr.read()
    assert_gone(everyone)


@needs_proc
def test_a_second_engine_of_torchrun_is_refused(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom engine import LLM\n"
                      "for i in range(2):\n    LLM(device='cpu', progress=False, tensor_parallel_size=2)\n")
    process = start([*TORCHRUN, str(script)])
    everyone = of_session(process.pid)
    assert process.wait(timeout=100) == 1
    assert "ValueError: torchrun's ranks ended with this program's first engine" in process.stderr.read()
    assert_gone(everyone)


@pytest.mark.parametrize("group", [None, "a group"])
def test_what_lost_its_ranks_has_no_cache_and_is_not_kept(group):
    """Over symmetric memory there is no group; a step without the others would wait on the GPU for ever."""
    ranks, said = parallel.Ranks(2), []
    ranks.pipes = [multiprocessing.Pipe()[0]]
    ranks.group = group and SimpleNamespace(abort=lambda: said.append("abort"))
    ranks.runner = SimpleNamespace(use_cache=said.append)
    ranks.close(broken=True)
    assert said == [None, "abort"][: 1 + bool(group)] and ranks.runner is None and ranks.closed.is_set()


def test_torchrun_has_other_ranks_than_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="torchrun started 3 processes"):
        engine(write_config(tmp_path, QWEN3), 2)
    assert engine(write_config(tmp_path, QWEN3)).ranks.size == 1  # a training script's own engine


def test_piped_prompts_are_refused_under_torchrun():
    """All its processes would read, and each get a part."""
    command = ["engine.py", "--device", "cpu", "--tensor-parallel-size", "2", "--prompt", "-"]
    process = subprocess.run([sys.executable, *command], cwd=ROOT, input="Once", text=True, capture_output=True,
                             env=os.environ | {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, timeout=60)
    assert process.returncode == 2 and "share one stdin" in process.stderr


@needs_proc
@pytest.mark.parametrize("sent", ["interrupt", "nothing"])
def test_the_command_line_ends_silently(sent):
    process = start(["engine.py", "--device", "cpu", "--tensor-parallel-size", "2", "--prompt", "Once", "--ignore-eos",
                     "--max-tokens", "900" if sent == "interrupt" else "5"])
    assert process.stdout.read(1)
    everyone = of_session(process.pid)
    if sent == "interrupt":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=30) == (130 if sent == "interrupt" else 0)
    errors = process.stderr.read()
    assert errors == "interrupted\n" if sent == "interrupt" else errors.startswith("5 tokens in"), errors
    assert errors.count("\n") == 1, errors
    assert_gone(everyone)


@needs_proc
def test_a_bad_checkpoint_is_named_once(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((ROOT / "models/embedded" / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((ROOT / "models/embedded/model.safetensors").read_bytes()[:100000])
    process = start(["engine.py", "--device", "cpu", "--tensor-parallel-size", "2", "--prompt", "Once", "--model",
                     str(tmp_path)])
    everyone = of_session(process.pid)
    assert process.wait(timeout=60) == 2
    errors = process.stderr.read()
    assert errors.startswith("error: ") and "truncated or corrupt" in errors and errors.count("\n") == 1, errors
    assert_gone(everyone)


def test_a_rank_that_cannot_start_says_why(tmp_path, monkeypatch):
    folder, start_as = write_config(tmp_path, QWEN3), parallel.Ranks.start
    for changed, said in (({"dtype": "int3"}, "rank 1 failed: ValueError: unknown dtype 'int3'"),
                          ({"max_model_len": 1e9}, "rank 1 failed: ValueError: max_model_len")):
        monkeypatch.setattr(parallel.Ranks, "start", lambda self, llm, options, changed=changed: start_as(
            self, llm, options | changed))
        with pytest.raises(ChildProcessError, match=said):
            engine(folder, 2)


def test_two_engines_at_once_and_a_step_that_breaks_off(tmp_path, monkeypatch):
    folder = write_config(tmp_path, QWEN3)
    params = SamplingParams(max_tokens=8, seed=1, logprobs=0)
    expected = engine(folder).generate([[5, 6]], params)[0].outputs[0]
    engines = [engine(folder, 2), engine(folder, 2)]
    streams = [list(outputs) for outputs in zip(*(llm.stream([5, 6], params) for llm in engines))]
    for out in (output.outputs[0] for output in streams[-1]):
        assert (out.token_ids, words(out.logprobs)) == (expected.token_ids, words(expected.logprobs))
    broken, whole = engines

    def interrupt(seqs):
        raise KeyboardInterrupt

    monkeypatch.setattr(broken.runner, "launch", interrupt)  # while the other rank waits for this one
    with pytest.raises(KeyboardInterrupt):
        broken.generate([[5, 6], [7]], params)
    assert not broken.has_unfinished_requests
    process, deadline = broken.ranks.processes[0], time.monotonic() + 10
    while process.is_alive() and time.monotonic() < deadline:  # `is_alive` takes back who was reaped meanwhile
        time.sleep(0.05)
    assert not process.is_alive()
    for call in (lambda: broken.generate([[5]]), broken.step):
        with pytest.raises(RuntimeError, match="make a new LLM"):
            call()
    assert whole.generate([[5, 6]], params)[0].outputs[0].token_ids == expected.token_ids
