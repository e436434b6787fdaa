"""What ranks exchange: columns written to all of them, partial sums in rank order, and the keys they meet by."""

import functools
import itertools
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_parallel import CPU, LLAMA, QWEN3, cells, engine, scores, serve, write_config

import kernels
import parallel
from kernels import collectives, same_bits
from kernels.collectives import SymmetricMemory
from model import deal, shard
from sampler import SamplingParams


class Shared(SymmetricMemory):
    """Host memory for the GPUs', and a barrier of processes or threads for theirs. The last rank is late to read what a
    barrier lets it read: who writes there too early is found out."""

    def __init__(self, rank: int, buffers: list, barrier):
        self.rank, self.size, self.buffers, self.turn = rank, len(buffers[0]), buffers, collectives.ODD
        self.handle, self.wait = SimpleNamespace(barrier=self.late_barrier), barrier.wait

    def late_barrier(self) -> None:
        self.wait()
        time.sleep(0.02 if self.rank == self.size - 1 else 0)


def on_threads(size: int, kind: str, run) -> list:
    """run(exchange) of each of `size` ranks, which are threads."""
    store, barrier = torch.distributed.HashStore(), threading.Barrier(size, timeout=60)
    buffers = [[torch.full((1 << 16,), 255, dtype=torch.uint8) for _ in range(size)] for _ in range(3)]

    def rank(i: int):
        if kind == "shared":
            return run(Shared(i, buffers, barrier))
        return run(collectives.Group(i, size, torch.distributed.ProcessGroupGloo(store, i, size)))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


@pytest.mark.parametrize("kind", ["gloo", "shared"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_adds_in_rank_order(size, kind, monkeypatch):
    generator = torch.Generator().manual_seed(size)
    for M, N, shots, dtype in itertools.product((1, 40), (3, 128), (1, 2), (torch.float32, torch.bfloat16)):
        monkeypatch.setattr(collectives, "TWO_SHOT", 0 if shots == 2 else 1 << 20)
        parts = torch.randn(size, M, N, generator=generator) * 10.0 ** torch.randint(-4, 4, (size, M, N),
                                                                                     generator=generator)
        bias, cut = torch.randn(N, generator=generator), deal(N, size, 1)
        sums = [functools.reduce(torch.add, order) for order in itertools.permutations(parts)]
        assert size == 2 or M * N < 50 or not all(same_bits(sums[0], other) for other in sums)  # an order would show
        for added in (None, bias):
            expected = parts[0]
            for term in parts[1:] if added is None else (*parts[1:], bias):
                expected = expected + term

            def run(exchange, parts=parts, added=added, M=M, cut=cut, dtype=dtype):
                def reduced(factor: float) -> torch.Tensor:  # a power of two: nothing is rounded otherwise
                    part, bias = parts[exchange.rank] * factor, None if added is None else added * factor

                    def compute(out=None):
                        return out[0].copy_(part) if out else part

                    return exchange.all_reduce(compute, M, cut, dtype, bias).clone()

                return [reduced(factor) for factor in (1.0, 2.0, 4.0)]  # one after the other, in buffers' turns

            for found in on_threads(size, kind, run):
                assert all(same_bits(a, (expected * factor).to(dtype)) for a, factor in zip(
                    found, (1.0, 2.0, 4.0), strict=True)), (M, N, shots, dtype)


@pytest.mark.parametrize("kind", ["gloo", "shared"])
@pytest.mark.parametrize("size", [2, 3])
def test_gathers_that_follow_each_other(size, kind):
    """In one buffer, that of the logits; in the two of a layer by turns."""
    M, cut = 5, deal(307, size, 64)

    def run(exchange) -> list[torch.Tensor]:
        def gathered(t: int, buffer: int, out=None) -> torch.Tensor:
            part = torch.full((M, len(cut[exchange.rank])), t * size + exchange.rank, dtype=torch.float32)

            def compute(out=None):
                return [place.copy_(part) for place in out] if out else part

            return exchange.gather(compute, M, cut, torch.float32, buffer, out)

        logits = [gathered(t, collectives.LOGITS).clone() for t in range(4)]
        layer = [gathered(t, (collectives.ODD, collectives.EVEN)[t % 2]).clone() for t in range(4)]
        return [*logits, *layer, gathered(0, collectives.LOGITS, torch.empty(M, 307))]

    for found in on_threads(size, kind, run):
        for t, whole in zip([*range(4), *range(4), 0], found, strict=True):
            expected = torch.cat([torch.full((M, len(own)), float(t * size + i)) for i, own in enumerate(cut)], 1)
            assert same_bits(whole, expected), t


@pytest.mark.parametrize("config, size", [(QWEN3, 2), (LLAMA, 3)], ids=["tied-2", "biases-3"])
def test_row_style_is_equal_to_itself_and_to_its_reference(config, size, tmp_path):
    folder, ops, joined = write_config(tmp_path / "model", config), kernels.reference_ops(), {}

    def linear(x, weight, bias, leaves, out_dtype, out=None):
        if weight.data_ptr() not in joined:
            return ops.linear(x, weight, bias, leaves, out_dtype, out)
        parts = [ops.linear(x[:, c.start : c.stop].contiguous(), weight[:, c.start : c.stop].contiguous(), None, leaves,
                            torch.float32) for c in joined[weight.data_ptr()]]
        total = functools.reduce(torch.add, parts if bias is None else [*parts, bias.float()])
        return total.to(out_dtype)

    alone = engine(folder, ops=replace(ops, linear=linear))
    cuts = shard(alone.config, size)
    for layer in alone.model.layers:
        joined |= {layer.o_proj.weight.data_ptr(): cuts.q, layer.down_proj.weight.data_ptr(): cuts.intermediate_size}
    expected = {seeded: serve(alone, batched=False, seeded=seeded) for seeded in (False, True)}
    llm = engine(folder, size, tp_style="row")
    assert llm.fingerprint_parts == alone.fingerprint_parts | {"tp_style": f"row, {size} ranks"}
    for cell in cells():
        assert serve(llm, **cell) == expected[cell["seeded"]], cell
    assert scores(llm) == scores(alone)
    joined.clear()
    assert serve(alone, batched=False) != expected[True]  # the bits of columns are others


def test_the_row_style_of_one_rank_is_no_other():
    assert engine("models/embedded", tp_style="row").fingerprint == engine("models/embedded").fingerprint
    with pytest.raises(ValueError, match="unknown tp_style 'rows'"):
        engine("models/embedded", tp_style="rows")


def test_keys_count_from_zero_whatever_the_age_of_a_process():
    """As torch's rendezvous asks: from a group's store, by a count that goes on for as long as a process lives."""
    store, seen = torch.distributed.HashStore(), []

    def meet(rank: int, age: int) -> list[bytes]:
        keys, found = collectives.CountedKeys(store), []
        seen.append(keys)  # C++ asks it, and does not keep it alive
        inside = torch.distributed.PrefixStore("", keys)
        for count in range(age, age + 3):
            inside.set(f"memory/{count}/{rank}", f"{rank} {count - age}")
            inside.wait([f"memory/{count}/{1 - rank}"])
            found.append(inside.get(f"memory/{count}/{1 - rank}"))
        return found

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(meet, (0, 1), (12, 0))) == [[b"1 0", b"1 1", b"1 2"], [b"0 0", b"0 1", b"0 2"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_parallel_gpu.py does it for real")
@pytest.mark.parametrize("style", ["column", "row"])
def test_ops_write_to_all_ranks(style, tmp_path, monkeypatch):
    """Triton's interpreter runs the kernels; the exchange is that of GPUs, but for who owns the memory."""
    config = QWEN3 | {"num_hidden_layers": 1}
    folder, fork = write_config(tmp_path / "model", config), multiprocessing.get_context("fork")
    near, far = fork.Pipe()
    buffers = [[torch.zeros(1 << 20, dtype=torch.uint8).share_memory_() for _ in range(2)] for _ in range(3)]
    barrier = fork.Barrier(2, timeout=60)
    monkeypatch.setattr(parallel.Ranks, "connect", lambda self, *args: (
        Shared(self.rank, buffers, barrier) if self.size > 1 else None))
    options = {"ops": kernels.triton_ops(CPU), "dtype": "float32", "num_gpu_blocks_override": 8, "tp_style": style}
    other = fork.Process(target=lambda: engine(folder, 2, _ranks=parallel.Ranks(2, 1, far), **options))
    other.start()
    ranks = parallel.Ranks(2)
    ranks.pipes, ranks.store = [near], "there are others"
    params = SamplingParams(max_tokens=3, seed=1, logprobs=2, prompt_logprobs=0)
    try:
        found, expected = (llm.generate([[5, 6, 7], list(range(70))], params) for llm in (
            engine(folder, 2, _ranks=ranks, **options), engine(folder, **options)))
    finally:
        other.kill()
    for one, two in zip(found, expected, strict=True):  # of other tiles the interpreter makes other bits
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        assert one.outputs[0].logprobs == pytest.approx(two.outputs[0].logprobs, rel=1e-5)
        ones, twos = ([logprob for logprob, _ in output.prompt_logprobs[1:]] for output in (one, two))
        assert ones == pytest.approx(twos, rel=1e-5)


def connect_all(names: list[str], monkeypatch) -> list[str]:
    """What `connect` says on ranks whose GPUs have these names; threads stand for processes."""
    pairs = [multiprocessing.Pipe() for _ in names[1:]]
    ranks = [parallel.Ranks(len(names)), *(parallel.Ranks(len(names), i, far) for i, (_, far) in enumerate(pairs, 1))]
    ranks[0].pipes = [near for near, _ in pairs]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])

    def connect(rank: parallel.Ranks) -> str:
        try:
            return str(rank.connect(torch.device("cuda", rank.rank), [1]))
        except (ValueError, OSError, EOFError) as error:
            with suppress(OSError):  # rank 0 may be gone
                rank.pipe.send(str(error)) if rank.pipe else [pipe.close() for pipe in rank.pipes]
            return str(error)

    with ThreadPoolExecutor() as threads:
        return list(threads.map(connect, ranks))


@pytest.mark.parametrize("names", [["A", "B"], ["B", "A"], ["A", "A", "B"], ["B", "A", "A", "B"]])
def test_gpus_must_be_of_one_kind(names, monkeypatch):
    assert "takes GPUs of one kind" in connect_all(names, monkeypatch)[0]
