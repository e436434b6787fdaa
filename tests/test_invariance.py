"""The contract: a request's bits are its own. One prompt set, every way of serving it, logprob bits compared.

Needles are the requests compared; fillers only share the steps with them. The yardstick is each needle served alone,
cold, unchunked, in a large pool. All comparisons are of integers (the words of fp32 logprobs, and token ids).
"""

import itertools
import json
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import HAS_GPU, ROOT, TINY, TINY_MOE, check_integrity

import kernels
from benchmarks.twins import batch_dependent
from engine import LLM
from kernels import same_bits
from runner import MAX_PARTIALS, input_shapes, pack
from sampler import SamplingParams

LENGTHS = (1, 2, 31, 63, 64, 65, 100, 127, 129, 190, 191, 250, 256, 257, 300, 321)  # block, tile, split, chunk borders
AXES = {"batch": (1, 16, 64, 257), "shuffled": (False, True), "chunk": (64, 256, None), "warm": (False, True),
        "tiny": (False, True), "graph": (False, True) if HAS_GPU else (False,), "seeded": (False, True),
        "ahead": (False, True)}  # asynchronous scheduling
OUTPUT = 8
SMOLLM2, EMBEDDED = ROOT / "models" / "SmolLM2-135M-Instruct", ROOT / "models" / "embedded"
QWEN3_8B = TINY | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
QWEN3_30B_A3B = TINY_MOE | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                            "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
                            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                            "moe_intermediate_size": 768, "tie_word_embeddings": False}


@cache
def prompts(vocab_size: int, number: int, lengths=LENGTHS, longest_filler: int = 40) -> list[list[int]]:
    """Needles of these lengths, every other long one behind a shared prefix, then short fillers."""
    rng = random.Random(7)
    shared = [rng.randrange(4, vocab_size) for _ in range(128)]
    made = [[rng.randrange(4, vocab_size) for _ in range(n)] for n in lengths]
    for needle in [needle for needle in made if len(needle) > len(shared)][::2]:
        needle[: len(shared)] = shared
    return made + [[rng.randrange(4, vocab_size) for _ in range(rng.randint(1, longest_filler))]
                   for _ in range(number - len(made))]


def params(i: int, is_needle: bool, seeded: bool) -> SamplingParams:
    """Needles are greedy or seeded; fillers mix what neighbours might ask for."""
    if is_needle:
        chosen = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1000 + i} if seeded else {"temperature": 0.0}
        return SamplingParams(max_tokens=OUTPUT, ignore_eos=True, logprobs=0, **chosen)
    extra = [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 3}, {"temperature": 0.0, "repetition_penalty": 1.2},
             {"temperature": 1.0, "seed": i, "min_p": 0.05}][3 if i % 16 == 0 else i % 3]
    return SamplingParams(max_tokens=1 + i % 4, ignore_eos=True, **extra)


class Served:
    """Engines over one model, made once a (chunk, pool, graph) and used for the cells that share them."""

    def __init__(self, folder, ops=None, lengths=LENGTHS, longest_filler=40, **options):
        self.folder, self.ops, self.options = folder, ops, options
        self.lengths, self.longest_filler = lengths, longest_filler
        self.llm, self.key, self.preemptions = None, None, 0

    def engine(self, chunk, tiny, graph) -> LLM:
        if self.key != (chunk, tiny, graph):
            self.llm = None  # free the old cache first
            if HAS_GPU:
                torch.cuda.empty_cache()
            self.llm = LLM(self.folder, progress=False, ops=self.ops, max_num_seqs=257, max_model_len=512,
                           max_num_batched_tokens=chunk or 32768, enforce_eager=not graph,
                           num_gpu_blocks_override=9 if tiny else 2048, **self.options)
            self.key = chunk, tiny, graph
            step = self.llm.step

            def checked_step():
                outputs = step()
                check_integrity(self.llm.scheduler)
                return outputs

            self.llm.step = checked_step
        return self.llm

    def run(self, batch, shuffled, chunk, warm, tiny, graph, seeded, ahead=False) -> list[tuple]:
        """(token ids, logprob words) of every needle in one cell."""
        llm = self.engine(chunk, tiny, graph)
        llm.async_scheduling = ahead
        needles = range(len(self.lengths))
        everything = prompts(llm.config.vocab_size, batch, self.lengths, self.longest_filler)
        order = list(range(len(everything)))
        if shuffled:
            random.Random(batch).shuffle(order)
        groups = [[i] for i in order] if batch == 1 else [order]
        before = llm.scheduler.num_preemptions
        for fresh in (True, False) if warm else (True,):
            if fresh:
                llm.scheduler.blocks.reset_prefix_cache()
            outputs = {}
            for group in groups:
                done = llm.generate([everything[i] for i in group], [params(i, i in needles, seeded) for i in group])
                outputs |= dict(zip(group, done, strict=True))
        self.preemptions += llm.scheduler.num_preemptions - before
        if warm and not tiny:
            assert sum(outputs[i].num_cached_tokens for i in needles) > 0, "the warm cell hit no cache"
        return [words(outputs[i]) for i in needles]


def words(output) -> tuple:
    out = output.outputs[0]
    assert output.error is None and len(out.logprobs) == len(out.token_ids)
    return out.token_ids, np.array(out.logprobs, np.float32).view(np.int32).tolist()


def yardstick(served, seeded):
    return served.run(1, False, None, False, False, False, seeded)


def cells():
    """The full product, ordered so that cells which share an engine are neighbours. Half of them schedule ahead: each
    value of every other axis meets both."""
    for chunk, tiny, graph in itertools.product(AXES["chunk"], AXES["tiny"], AXES["graph"]):
        for rest in itertools.product(AXES["batch"], AXES["shuffled"], AXES["warm"], AXES["seeded"]):
            batch, shuffled, warm, seeded = rest
            yield dict(batch=batch, shuffled=shuffled, chunk=chunk, warm=warm, tiny=tiny, graph=graph, seeded=seeded,
                       ahead=shuffled != warm)


def pairwise() -> list[dict]:
    """12 cells that together hold every pair of values of any two axes: each (batch, chunk) once, and the two-valued
    axes drawn until no pair is missing."""
    rng = random.Random(0)
    binary = [name for name, values in AXES.items() if len(values) == 2]
    fixed = {name: values[0] for name, values in AXES.items() if len(values) == 1}
    grid = [{"batch": b, "chunk": c} for b, c in itertools.product(AXES["batch"], AXES["chunk"])]
    wanted = {(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    while True:
        drawn = [fixed | cell | {name: rng.random() < 0.5 for name in binary} for cell in grid]
        if {(a, c[a], b, c[b]) for c in drawn for a, b in itertools.combinations(AXES, 2)} >= wanted:
            return sorted(drawn, key=lambda c: (str(c["chunk"]), c["tiny"], c["graph"]))


def compare(served, chosen) -> None:
    expected = {seeded: yardstick(served, seeded) for seeded in AXES["seeded"]}
    assert expected[True] != expected[False]
    for cell in chosen:
        for i, (found, wanted) in enumerate(zip(served.run(**cell), expected[cell["seeded"]], strict=True)):
            assert found == wanted, f"needle {i} ({served.lengths[i]} tokens) differs in {cell}"
    if any(cell["tiny"] for cell in chosen):
        assert served.preemptions > 0, "no cell preempted: the tiny pool is too large to test anything"


def part(chunk, tiny) -> list[dict]:
    return [cell for cell in cells() if (cell["chunk"], cell["tiny"]) == (chunk, tiny)]


every_part = pytest.mark.parametrize("chunk, tiny", list(itertools.product(AXES["chunk"], AXES["tiny"])))


@every_part
def test_full_product_on_a_random_model(tiny_folder, chunk, tiny):
    compare(Served(tiny_folder, load_format="dummy"), part(chunk, tiny))


def test_pairwise_on_the_embedded_model():
    compare(Served(EMBEDDED, lengths=(1, 62, 127, 190, 254), longest_filler=2), pairwise())


def test_pairwise_on_experts(tmp_path_factory):
    compare(Served(write_config(tmp_path_factory, TINY_MOE), load_format="dummy"), pairwise())


@pytest.mark.gpu
@pytest.mark.parametrize("folder", [EMBEDDED, SMOLLM2], ids=["embedded", "smollm2"])
def test_pairwise_on_a_real_model(folder):
    if not folder.is_dir():
        pytest.skip("python tools/smollm2.py makes this model")
    compare(Served(folder), pairwise())


@pytest.mark.gpu
@every_part
def test_qwen3_8b_shape(tmp_path_factory, chunk, tiny):
    compare(Served(write_config(tmp_path_factory, QWEN3_8B), load_format="dummy"), part(chunk, tiny))


@pytest.mark.gpu
def test_qwen3_30b_a3b_shape(tmp_path_factory):
    compare(Served(write_config(tmp_path_factory, QWEN3_30B_A3B), load_format="dummy"), pairwise())


def write_config(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed_share(served) -> float:
    """Share of the needles' logprob words that differ between batch 1 and batch 64."""
    alone, together = yardstick(served, False), served.run(64, False, None, False, False, False, False)
    pairs = [(a, b) for one, many in zip(alone, together, strict=True) for a, b in zip(one[1], many[1], strict=True)]
    return sum(a != b for a, b in pairs) / len(pairs)


def test_the_inverse(tiny_folder):
    """The matrix would notice: a twin whose split counts follow the batch changes at least half of the words."""
    twin = batch_dependent(kernels.make_ops(torch.device("cuda" if HAS_GPU else "cpu")))
    assert changed_share(Served(tiny_folder, ops=twin, load_format="dummy")) >= 0.5


@pytest.mark.gpu
def test_the_inverse_at_scale(tmp_path_factory):
    twin = batch_dependent(kernels.make_ops(torch.device("cuda")))
    folder = write_config(tmp_path_factory, QWEN3_8B)
    assert changed_share(Served(folder, ops=twin, load_format="dummy")) >= 0.5


def test_score_is_what_decode_reported(tiny_folder):
    """Field bug 1: scoring a text in one prefill gives the logprobs that decoding it gave; chunked scoring too."""
    for chunk in (64, None):
        llm = Served(tiny_folder, load_format="dummy").engine(chunk, False, HAS_GPU)
        for n in (1, 64, 200):
            prompt = prompts(llm.config.vocab_size, 1)[LENGTHS.index(300)][:n]
            out = llm.generate(prompt, SamplingParams(temperature=1.0, seed=n, max_tokens=150, logprobs=0,
                                                      ignore_eos=True))[0].outputs[0]
            assert same_bits(torch.tensor(llm.score(prompt, out.token_ids)), torch.tensor(out.logprobs))


def test_a_cache_block_has_the_same_bytes_whoever_wrote_it(tiny_folder):
    """Field bug 66: prefill, chunked prefill, decode and recompute after preemption write identical keys."""
    token_ids = prompts(TINY["vocab_size"], 1)[LENGTHS.index(250)]
    written = []
    for chunk, prompt_len, disturb in ((None, 250, False), (64, 250, False), (None, 5, False), (None, 5, True)):
        llm = Served(tiny_folder, load_format="dummy").engine(chunk, False, HAS_GPU)
        llm.add_request(token_ids[:prompt_len], SamplingParams(temperature=0.0, max_tokens=260, ignore_eos=True))
        seq = llm.scheduler.waiting[0]
        while seq.num_computed_tokens < 250:
            llm.step()
            if len(seq.token_ids) > prompt_len:  # put the prompt's tokens into its mouth
                position = len(seq.token_ids) - 1
                seq.token_ids[-1] = token_ids[position] if position < 250 else seq.token_ids[-1]
            if disturb and len(seq.token_ids) == 140 and not llm.scheduler.num_preemptions:
                llm.scheduler.preempt(seq)
                llm.scheduler.blocks.reset_prefix_cache()
        assert llm.scheduler.num_preemptions == disturb
        blocks = llm.runner.kv_cache[:, :, seq.block_table[:4]].transpose(3, 4).flatten(2, 3)
        written.append(blocks[:, :, :250].cpu().clone())
    assert written[0].isfinite().all()
    for other in written[1:]:
        assert same_bits(written[0], other)


def test_what_a_graph_is_fed(tiny_folder, monkeypatch):
    """Three sequences in a graph of four: the live rows are theirs; padding has no slot and writes no key."""
    llm = LLM(tiny_folder, load_format="dummy", device="cpu", num_gpu_blocks_override=16, progress=False)
    runner = llm.runner
    for prompt in ([5, 6, 7], [8] * 70, [9]):
        llm.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    llm.step()
    live = runner._plan(llm.scheduler.schedule())
    buffer, places = pack({}, input_shapes(4, 4, runner.max_blocks, 4))
    fed = torch.full(buffer.shape, 77, dtype=torch.int32)
    runner.graphs[4, False] = fed, SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    runner._run_graph(live)
    found = {name: fed[place].numpy() for name, place in places.items()}
    assert found["slot_mapping"].tolist() == [*live["slot_mapping"].tolist(), -1]
    assert found["positions"].tolist() == [3, 70, 1, 0]
    tables = found["block_tables"].reshape(4, -1)
    assert (tables[:3, :2] == live["block_tables"]).all() and not tables[3].any() and not tables[:, 2:].any()
    items = found["decode_items"]
    assert items[: live["decode_items"].size].tolist() == live["decode_items"].reshape(-1).tolist()
    assert (items[live["decode_items"].size :] == 77).all(), "the dead tail of the work list stays behind"
    assert found["counts"].tolist() == [0, 3, 0]


@pytest.mark.parametrize("config", [TINY, TINY_MOE], ids=["", "experts"])
def test_the_last_layer_computes_the_rows_whose_logits_are_wanted(tmp_path_factory, config):
    """Behind its keys nothing needs the others; scoring wants all. TINY has two layers."""
    ops, rows = kernels.make_ops(torch.device("cuda" if HAS_GPU else "cpu")), []

    def rms_norm(x, weight, *options):
        rows.append((weight is llm.model.layers[1].post_attention_layernorm, len(x)))
        return ops.rms_norm(x, weight, *options)

    llm = LLM(write_config(tmp_path_factory, config), load_format="dummy", ops=replace(ops, rms_norm=rms_norm),
              max_num_batched_tokens=128, num_gpu_blocks_override=16, enable_prefix_caching=False, progress=False)
    prompt = prompts(TINY["vocab_size"], 1)[LENGTHS.index(300)]
    for wants, expected in (({}, [1]), ({"prompt_logprobs": 0}, [128, 128, 44])):
        rows.clear()
        llm.generate(prompt, SamplingParams(max_tokens=1, seed=1, **wants))
        assert [count for is_last, count in rows if is_last] == expected
        assert sum(count == 128 for _, count in rows) == 2 * (5 if wants else 3), "norms up to the last keys"


def test_splits_dealt_out_to_slots(tiny_folder, monkeypatch):
    """What plans a decode step of few long sequences on a GPU, here on the CPU; and the largest plan fits a graph."""
    found, ops = [], kernels.make_ops(torch.device("cpu"))
    for programs in (0, 12):
        llm = LLM(tiny_folder, load_format="dummy", device="cpu", ops=replace(ops, decode_programs=programs),
                  num_gpu_blocks_override=60, progress=False)
        merges, plan = [], llm.runner._plan
        llm.runner._plan = lambda seqs, plan=plan, merges=merges: merges.append(plan(seqs)) or merges[-1]
        asked = [[5 + i] * n for i, n in enumerate((900, 3, 700, 600, 257))]
        outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0))
        found.append([(out.token_ids, out.logprobs) for (out,) in (output.outputs for output in outputs)])
        assert any(len(fields["merges"]) for fields in merges) == (programs > 0)
    assert found[0] == found[1]
    lens = [1] * 1400 + [256 * (MAX_PARTIALS - 1400)]
    runner, fed = llm.runner, torch.zeros(1 << 24, dtype=torch.int32)
    live = runner._plan([SimpleNamespace(num_computed_tokens=n - 1, num_scheduled_tokens=1, token_ids=[0] * n,
                                         block_table=[0] * -(-n // 64)) for n in lens])
    assert len(live["decode_items"]) > MAX_PARTIALS == live["merges"][:, 2].sum()
    runner.graph_sizes, runner.max_blocks = [len(lens)], live["block_tables"].shape[1]
    runner.graphs[len(lens), True] = fed, SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    runner._run_graph(live)
