"""Bugs that users of other engines reported, each as the smallest input that would show the same fault here.

Numbers are rows of the field bugs list. Rows not here have their test beside what they concern: grep "Field bug".
Where bits are compared, they are the integer words of fp32 logprobs, of the engine against itself under other load.
"""

import json
import math
import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from conftest import TINY, check_integrity
from test_engine import write_text_folder

import cache
from engine import LLM
from kernels import same_bits
from runner import Runner
from sampler import SamplingParams

SEEDED = {"temperature": 1.0, "seed": 1}
GREEDY = {"temperature": 0.0}
UNTIED = {"tie_word_embeddings": False}


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def make(request, tiny_folder):
    """Builds engines; when the test is over, none may hold a block or a request."""
    made = []

    def build(folder=tiny_folder, **options) -> LLM:
        defaults = dict(load_format="dummy", progress=False, num_gpu_blocks_override=64, max_model_len=1024,
                        async_scheduling=request.param)
        made.append(LLM(folder, **(defaults | options)))
        return made[-1]

    yield build
    for llm in made:
        check_integrity(llm.scheduler)
        assert len(llm.scheduler.blocks.free) == llm.scheduler.blocks.num_blocks
        assert not llm.requests and not llm.has_unfinished_requests


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(4, TINY["vocab_size"]), k=length)


def ask(max_tokens: int = 8, **changes) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0} | changes))


def bits(logprobs: Iterable[float]) -> list[int]:
    return np.array(list(logprobs), np.float32).view(np.int32).tolist()


def words(output) -> list[tuple]:
    """(token ids, logprob words) of each completion, and the words of the prompt's logprobs."""
    assert output.error is None and output.finished
    scores = [bits([logprob for logprob, _ in (output.prompt_logprobs or [None])[1:]])]
    return [(out.token_ids, bits(out.logprobs)) for out in output.outputs] + scores


def run(llm: LLM, prompts: list[list[int]], params) -> list[list[tuple]]:
    return [words(output) for output in llm.generate(prompts, params)]


def drain(llm: LLM) -> dict:  # step to the end, checking blocks at each step; finished outputs by request id
    done = {}
    while llm.has_unfinished_requests:
        done |= {output.request_id: output for output in llm.step() if output.finished}
        check_integrity(llm.scheduler)
    return done


def tie(llm: LLM, prompt_ids: list[int], ids: list[int]) -> int:
    """Make the logits of `ids` exactly those of the likeliest next token, whose id is returned."""
    top = llm.generate(prompt_ids, ask(1, **GREEDY))[0].outputs[0].token_ids[0]
    assert top > max(ids)
    llm.model.lm_head.weight[ids] = llm.model.lm_head.weight[top].clone()
    llm.scheduler.blocks.reset_prefix_cache()
    return top


# C. Prefix cache, chunking, preemption.


@pytest.mark.parametrize("length, cached", [(64, 0), (128, 64), (65, 64), (129, 128), (192, 128)])
def test_46_51_57_a_wholly_cached_prompt(make, length, cached):
    """Field bugs 46, 51, 57: nothing is left to compute, or what is computed behind cached keys is off by one slot."""
    llm = make()
    cold, warm, again = (llm.generate(prompt(length), ask(70, **SEEDED, logprobs=2))[0] for _ in range(3))
    assert (cold.num_cached_tokens, warm.num_cached_tokens, again.num_cached_tokens) == (0, cached, cached)
    assert words(cold) == words(warm) == words(again)


def test_47_preemption_in_a_pool_of_four_blocks(make):
    """Field bug 47: a preempted request meets its own freed blocks in the cache."""
    prompts = [prompt(100), prompt(100, 1)]
    expected = run(make(), prompts, ask(90, **SEEDED))
    small = make(num_gpu_blocks_override=4, max_model_len=256)
    assert run(small, prompts, ask(90, **SEEDED)) == expected
    assert small.scheduler.num_preemptions > 0


@pytest.mark.parametrize("budget", [256, 255, 64, 1])
def test_49_chunks_read_no_key_beyond_themselves(make, budget):
    """Field bug 49: a chunk whose key length is the whole prompt's reads slots nobody wrote yet."""
    length = 600 if budget > 1 else 130
    expected = run(make(), [prompt(length)], ask(3, **GREEDY, prompt_logprobs=0))
    assert run(make(max_num_batched_tokens=budget), [prompt(length)], ask(3, **GREEDY, prompt_logprobs=0)) == expected


@pytest.mark.parametrize("length", [1, 62, 63, 64, 65, 255, 256])
def test_50_a_decode_step_has_the_position_of_its_token(make, length):
    """Field bug 50: one decode step and a prefill of the same ids see different positions."""
    llm = make(enable_prefix_caching=False)
    decoded = llm.generate(prompt(length), ask(2, **GREEDY, logprobs=5))[0].outputs[0]
    prefilled = llm.generate(prompt(length) + decoded.token_ids[:1], ask(1, **GREEDY, logprobs=5))[0].outputs[0]
    assert list(decoded.top_logprobs[1]) == list(prefilled.top_logprobs[0])
    assert bits(decoded.top_logprobs[1].values()) == bits(prefilled.top_logprobs[0].values())


def test_55_91_an_exact_tie_goes_to_the_lowest_id(make):
    """Field bugs 55, 91: cold or cached, alone or beside a sampled row, greedy decides a tie the same way."""
    llm = make(hf_overrides=UNTIED)
    tie(llm, prompt(70), [11, 30])
    beside = [ask(1, **GREEDY), ask(4, **SEEDED), ask(1, **GREEDY, repetition_penalty=1.0)]
    cold, warm = (run(llm, [prompt(70)], ask(1, **GREEDY))[0] for _ in range(2))
    mixed = run(llm, [prompt(70), prompt(70), prompt(70)], beside)
    assert cold[0][0] == [11] and warm == cold and mixed[0] == cold and mixed[2] == cold


def test_56_prefix_caching_changes_no_request(make):
    """Field bug 56: 10 % of serial requests change when the cache is on."""
    prompts = [prompt(130)[: 64 + 7 * (i % 10)] + prompt(1 + 5 * i, 10 + i) for i in range(50)]
    on, off = make(), make(enable_prefix_caching=False)
    found = [run(on, [ids], ask(3, **SEEDED))[0] for ids in prompts]
    assert found == run(off, prompts, ask(3, **SEEDED))
    assert len(on.scheduler.blocks.index) > 0 == len(off.scheduler.blocks.index)


@pytest.mark.parametrize("length", [33, 63, 64, 65, 129])
def test_58_prompt_logprobs_of_a_cached_prompt(make, length):
    """Field bug 58: a cached prefix has no logits, and the list comes back short."""
    llm = make()
    first = llm.generate(prompt(length), ask(1, **GREEDY, prompt_logprobs=2))[0]
    run(llm, [prompt(length)], ask(1, **GREEDY))
    second = llm.generate(prompt(length), ask(1, **GREEDY, prompt_logprobs=2))[0]
    assert len(first.prompt_logprobs) == length and words(first) == words(second)
    assert first.prompt_logprobs == second.prompt_logprobs


class Colliding(tuple):
    """A tuple whose hash is the same for all."""

    compared = 0

    def __hash__(self):
        return 1

    def __eq__(self, other):
        Colliding.compared += 1
        return tuple.__eq__(self, other)


def test_60_a_hash_collision_hands_out_no_other_prompt(make, monkeypatch):
    """Field bug 60: with every block's hash equal, lookups must still tell the tokens apart."""
    prompts = [prompt(70 + i, i) for i in range(8)] + [[*prompt(64)[:63], 5, 6]]
    expected = run(make(enable_prefix_caching=False), prompts, ask(2, **GREEDY))
    monkeypatch.setattr(cache, "tuple", Colliding, raising=False)
    llm = make()
    for _ in range(2):
        assert [run(llm, [ids], ask(2, **GREEDY))[0] for ids in prompts] == expected
    assert Colliding.compared > 50, "no two keys collided: this test shows nothing"
    assert llm.generate(prompts[0], ask(1))[0].num_cached_tokens == 64


def test_61_salts_share_nothing(make):
    """Field bug 61: requests that must not share keys do, through a salt that is lost or looks like another."""
    llm = make()
    seen = [llm.generate(prompt(65), ask(1), cache_salt=salt)[0].num_cached_tokens
            for salt in ("x", None, "", "None", "root", "x", None)]
    assert seen == [0, 0, 0, 0, 0, 64, 64]


@pytest.mark.parametrize("length, total, at", [(30, 20, 5), (30, 24, 8), (3, 40, 20), (64, 70, 64), (1, 4, 1)])
@pytest.mark.parametrize("forget", [False, True])
def test_62_63_64_a_preempted_request_goes_on_as_if_nothing_had_been(make, length, total, at, forget):
    """Field bugs 62, 63, 64: the random stream restarts, generated tokens are forgotten, doubled or cut short."""
    llm = make(max_num_batched_tokens=32)
    params = ask(total, **SEEDED, presence_penalty=0.5, logprobs=1)
    expected = run(llm, [prompt(length)], params)[0]
    llm.scheduler.blocks.reset_prefix_cache()
    request_id = llm.add_request(prompt(length), params)
    output, seq = llm.requests[request_id], llm.scheduler.waiting[0]
    while len(output.outputs[0].token_ids) < at:
        llm.step()
    llm.scheduler.preempt(seq)
    if forget:
        llm.scheduler.blocks.reset_prefix_cache()
    assert words(drain(llm)[request_id]) == expected and len(expected[0][0]) == total
    assert llm.scheduler.num_preemptions == 1
    assert output.num_cached_tokens == 0, "what it found of itself is no prefix hit"


def test_67_arrival_times_change_nothing(make):
    """Field bug 67: who shares a step is a matter of timing; 48 requests, 5 times, arriving at random."""
    llm, requests = make(max_num_seqs=16, max_num_batched_tokens=96), range(48)
    params = [ask(2 + i % 5, **(GREEDY if i % 2 else SEEDED)) for i in requests]
    seen = []
    for repeat in range(5):
        rng, done, todo = random.Random(repeat), {}, list(requests)
        rng.shuffle(todo)
        llm.scheduler.blocks.reset_prefix_cache()
        while todo or llm.has_unfinished_requests:
            for _ in range(min(len(todo), rng.randrange(6))):
                i = todo.pop()
                llm.add_request(prompt(1 + 3 * i, i), params[i], request_id=str(i))
            done |= {output.request_id: words(output) for output in llm.step() if output.finished}
        seen.append(done)
    assert len(seen[0]) == 48 and seen == seen[:1] * 5


@pytest.mark.parametrize("steps", range(4))
def test_70_abort_between_chunks(make, steps):
    """Field bug 70: aborting before scheduling or after chunk 1 of 3 leaks blocks."""
    llm = make(max_num_batched_tokens=64)
    request_id = llm.add_request(prompt(192), ask())
    for _ in range(steps):
        llm.step()
    assert len(llm.scheduler.blocks.free) == 64 - steps
    llm.abort(request_id)
    assert len(llm.scheduler.blocks.free) == 64 and not drain(llm)


def test_71_a_prompt_of_many_chunks_without_a_cache(make):
    """Field bug 71: chunks that are not entered in the cache are lost to the pool."""
    llm = make(max_num_batched_tokens=64, num_gpu_blocks_override=4, max_model_len=256, enable_prefix_caching=False)
    prompts = [prompt(192, i) for i in range(4)]
    assert run(llm, prompts * 2, ask(40, **GREEDY)) == run(make(), prompts, ask(40, **GREEDY)) * 2


def test_72_long_prompts_do_not_starve_a_decode(make):
    """Field bug 72: while prompts of five chunks stream in, the running request gains a token at every step."""
    llm = make(max_num_batched_tokens=64, async_scheduling=False)
    llm.add_request(prompt(10), ask(60, **GREEDY), request_id="decode")
    llm.step()
    for i in range(8):
        llm.add_request(prompt(320, i), ask(2, **GREEDY), request_id=f"long {i}")
    for count in range(2, 31):
        llm.step()
        assert len(llm.requests["decode"].outputs[0].token_ids) == count
    assert len(drain(llm)) > 1


# D. Graphs and memory.


def test_74_75_no_slot_is_read_that_nobody_wrote(make):
    """Field bugs 68, 74, 75: the pool is NaN at the start; unused slots stay so, and free blocks may hold anything."""
    llm = make()
    pool = llm.runner.kv_cache
    assert bool(pool.isnan().all())
    expected = run(llm, [prompt(13)], ask(4, **GREEDY))
    written = pool.isfinite().sum().item() / (2 * TINY["num_hidden_layers"] * TINY["num_key_value_heads"] * 32)
    assert written == 16 and all(math.isfinite(x) for x in np.array(expected[0][0][1], np.int32).view(np.float32))
    prompts = [prompt(13), prompt(200, 1), prompt(1, 2)]
    expected = run(llm, prompts, ask(70, **SEEDED))
    for junk in (math.nan, math.inf, 1e30):
        llm.scheduler.blocks.reset_prefix_cache()
        pool.fill_(junk)
        assert run(llm, prompts, ask(70, **SEEDED)) == expected


def test_79_every_batch_size_has_a_graph(make):
    """Field bug 79: sizes between the last captured one and the limit find none."""
    llm = make(num_gpu_blocks_override=2, max_model_len=128)
    for limit in [*range(1, 70), 127, 200, 256, 257, 1000]:
        sizes = Runner(llm.model, None, limit, 128, True).graph_sizes
        assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == limit


@pytest.mark.parametrize("limit", [100, 128, 129])
def test_80_the_length_limit_is_exact(make, limit):
    """Field bug 80: a limit rounded up to whole blocks writes off the table."""
    llm = make(max_model_len=limit, num_gpu_blocks_override=3)
    expected = run(make(), [prompt(limit - 10)], ask(10, **GREEDY))
    assert run(llm, [prompt(limit - 10)], ask(None, **GREEDY)) == expected
    assert len(run(llm, [prompt(limit - 1)], ask(5))[0][0][0]) == 1
    with pytest.raises(ValueError, match=str(limit)):
        llm.add_request(prompt(limit), ask(1))


# E. Sampling and logprobs.


def test_81_82_83_86_a_seeded_row_is_its_own(make):
    """Field bugs 81, 82, 83, 86: noise indexed by rank under a filter, a seed that a neighbour without one switches
    off, min_p that raises beside a seed, a seed salted by the place in the batch."""
    llm, ids = make(), prompt(20)
    for cuts in ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}):
        mine = ask(6, **SEEDED, **cuts)
        alone = run(llm, [ids], mine)[0]
        assert alone != run(llm, [ids], ask(6, **SEEDED | {"seed": 2}, **cuts))[0]
        for neighbour in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 3, "seed": 42},
                          {"temperature": 1.0, "min_p": 0.2}, {"temperature": 2.0, "top_p": 0.3, "seed": 1}):
            beside = ask(6, **neighbour)
            assert run(llm, [ids] * 4, [beside, mine, beside, mine])[1::2] == [alone, alone]


def test_84_completions_are_distinct_and_repeatable(make):
    """Field bug 84: n = 8 without a seed gives eight copies, or seeds collide."""
    llm = make()
    first, second = (llm.generate(prompt(9), ask(8, temperature=1.0, n=8))[0].outputs for _ in range(2))
    assert len({out.seed for out in first + second}) == len({tuple(out.token_ids) for out in first + second}) == 16
    assert run(llm, [prompt(9)], ask(8, **SEEDED, n=8)) == run(llm, [prompt(9)], ask(8, **SEEDED, n=8))
    several = [llm.generate(prompt(9), ask(1, **SEEDED | {"seed": seed}, n=8))[0].outputs for seed in range(8)]
    assert len({out.seed for outputs in several for out in outputs}) == 64, "neighbouring seeds share completions"


def test_87_88_ties_at_the_cut(make):
    """Field bugs 87, 88: top-k keeps all that tie at rank k, or k, as the batch size has it; top_k = 1 is no argmax."""
    llm = make(hf_overrides=UNTIED)
    ids = next(ids for ids in map(prompt, range(40, 80)) if run(llm, [ids], ask(1, **GREEDY))[0][0][0][0] > 30)
    tie(llm, ids, [7, 11, 30])
    for k, kept in ((1, {7}), (2, {7, 11}), (3, {7, 11, 30})):
        params = [ask(1, temperature=1.0, seed=seed, top_k=k) for seed in range(24)]
        alone = [run(llm, [ids], own)[0] for own in params]
        assert {row[0][0][0] for row in alone} == kept
        for batch in (8, 24):
            assert run(llm, [ids] * batch, params[:batch]) == alone[:batch]
    assert run(llm, [ids], ask(1, **GREEDY))[0][0][0] == [7]


def test_89_90_masked_logits_and_tiny_temperatures(make):
    """Field bugs 89, 90: -inf or a division by almost nothing turns greedy rows into NaN, or text into nothing."""
    llm, ids = make(), prompt(20)
    plain = run(llm, [ids], ask(6, **GREEDY))[0][0][0]
    masked = ask(6, **GREEDY, stop_token_ids=(plain[0], plain[1]), min_tokens=6)
    alone = run(llm, [ids], masked)[0]
    assert not {plain[0], plain[1]} & set(alone[0][0]) and len(alone[0][0]) == 6
    assert run(llm, [ids] * 3, [masked, ask(6, **SEEDED), masked])[::2] == [alone, alone]
    for temperature in (1e-4, 1e-6, 1e-30):
        assert run(llm, [ids], ask(6, **SEEDED | {"temperature": temperature}))[0][0][0] == plain


def test_93_94_logprobs_are_the_models_own(make):
    """Field bugs 93, 94: processed logprobs where raw ones are documented; values that depend on how many are asked."""
    llm, ids = make(), prompt(20)
    base = ask(5, **GREEDY)
    expected = run(llm, [ids], base)[0]
    forced = {"temperature": 0.5, "top_k": 1, "top_p": 0.5, "seed": 3}
    assert run(llm, [ids], ask(5, **forced))[0] == expected
    bias = {token: 5.0 for token in expected[0][0]}
    assert run(llm, [ids], ask(5, **GREEDY, logit_bias=bias))[0][0][1][0] == expected[0][1][0]
    params = [ask(5, **GREEDY, logprobs=k) for k in (0, 1, 4, 10, 20)]
    for outputs in (llm.generate([ids] * 5, params), [llm.generate(ids, own)[0] for own in params]):
        assert [words(output) for output in outputs] == [expected] * 5
        assert [len(output.outputs[0].top_logprobs[0]) for output in outputs[1:]] == [1, 4, 10, 20]
    seen, compute = [], llm.model.logits
    llm.model.logits = lambda *args: seen.append(compute(*args)) or seen[-1]
    found = llm.generate(ids, ask(1, **forced))[0].outputs[0]
    assert abs(found.logprobs[0] - float(seen[0][0].double().log_softmax(-1)[found.token_ids[0]])) < 1e-6


def test_95_log_softmax_of_one_row_and_of_a_thousand(make):
    """Field bug 95: two implementations of log-softmax, chosen by the number of rows."""
    ops, device = make().ops, make().device
    logits = (torch.randn(1000, 307, generator=torch.Generator().manual_seed(0)) * 4).to(device)
    tokens = logits.argmax(1)
    together = ops.logprobs(logits, tokens, 3)
    for i in (0, 1, 499, 999):
        apart = ops.logprobs(logits[i : i + 1].clone(), tokens[i : i + 1].clone(), 3)
        assert all(same_bits(one, many[i : i + 1]) for one, many in zip(apart, together, strict=True))


def test_96_prompt_logprobs_of_a_shared_prefix(make):
    """Field bug 96: two prompts that share ten tokens disagree about them."""
    llm, params = make(), ask(1, **GREEDY, prompt_logprobs=0)
    prompts = [prompt(10) + prompt(n, n) for n in (1, 60, 200)]
    alone, together = [run(llm, [ids], params)[0] for ids in prompts], run(llm, prompts, params)
    assert alone == together and alone[0][-1][:9] == alone[1][-1][:9] == alone[2][-1][:9]


# F. Ends.


def test_103_105_every_end_id_counts(make, tmp_path):
    """Field bugs 103, 105: ends live in three files, as an int or a list; a partial override must not drop them."""
    folder = write_text_folder(tmp_path / "ends", eos_token_id=3)  # and the tokenizer's own end is 1
    defaults = {"eos_token_id": [50, 51], "temperature": 0.6, "top_k": 7, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    for llm in (make(folder), make(folder, hf_overrides={"rope_theta": 5000.0})):
        for end in (1, 3, 50, 51):
            for changes in ({}, {"temperature": 0.0}, {"stop_token_ids": (9,)}):
                output = llm.generate([5, 6], ask(4, logit_bias={end: 90.0}, ignore_eos=False, **changes))[0]
                assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([end], "stop")
                assert (output.params.top_k, output.params.top_p) == (7, 0.9)
                assert output.params.temperature == changes.get("temperature", 0.6)
