"""The LLM API: what a caller may ask, what comes back, and that nothing is left behind whatever goes wrong."""

import contextlib
import gc
import json
import math
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, check_integrity
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import kernels
from engine import LLM
from sampler import SamplingParams, adjust
from scheduler import Sequence

SPECIAL = ["<s>", "</s>", "<pad>", "<end>"]  # ids 0 to 3; TINY's eos_token_id is 3
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '<s>' if calm else '' }}"


def write_text_folder(folder: Path, **changes) -> Path:
    """A tiny random model of 260 tokens, each a byte or special, with a tokenizer and a chat template."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | {"vocab_size": 260} | changes))
    names = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def make(request, text_folder):
    """Builds engines; when the test is over, none may hold a block, a sequence or a request."""
    made: list[LLM] = []

    def build(folder=text_folder, **options) -> LLM:
        defaults = dict(load_format="dummy", progress=False, num_gpu_blocks_override=64, max_model_len=512,
                        async_scheduling=request.param)
        made.append(LLM(folder, **(defaults | options)))
        return made[-1]

    yield build
    for llm in made:
        assert_empty(llm)


@pytest.fixture
def llm(make) -> LLM:
    return make()


def assert_empty(llm: LLM) -> None:
    check_integrity(llm.scheduler)
    assert len(llm.scheduler.blocks.free) == llm.scheduler.blocks.num_blocks
    assert not llm.requests and not llm._live and not llm.has_unfinished_requests and llm.step() == []


def letters(**changes) -> SamplingParams:
    """Seeded sampling of the letters a to z, so that the text is readable whatever the random model thinks."""
    ids = [len(SPECIAL) + sorted(pre_tokenizers.ByteLevel.alphabet()).index(c) for c in string.ascii_lowercase]
    return SamplingParams(**({"temperature": 1.0, "seed": 3, "max_tokens": 24, "logprobs": 0,
                              "logit_bias": dict.fromkeys(ids, 40.0)} | changes))


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0} | changes))


def words(out) -> tuple:  # a completion's token ids and the integer words of its logprobs
    assert len(out.logprobs) == len(out.token_ids)
    return out.token_ids, np.array(out.logprobs, np.float32).view(np.int32).tolist()


def one(llm: LLM, prompt, params: SamplingParams):
    output = llm.generate(prompt, params)[0]
    assert output.error is None and output.finished
    return output.outputs[0]


# Requests that cannot run.


def test_bad_prompts_among_good_ones(llm):
    """One caller's mistake would end the others' requests, or leave them in the engine."""
    good = ["hello", [5, 6, 7]]
    alone = [words(one(llm, prompt, greedy())) for prompt in good]
    bad = [[], "", [260], [-1], [True], ["a"], [5] * 512]
    outputs = llm.generate([good[0], *bad, good[1]], greedy())
    assert [output.error is None for output in outputs] == [True] + [False] * len(bad) + [True]
    assert all(not output.outputs and output.finished for output in outputs[1:-1])
    assert [words(outputs[i].outputs[0]) for i in (0, -1)] == alone
    assert [output.prompt for output in outputs] == ["hello", None, "", *[None] * 6]


@pytest.mark.parametrize("prompts", [[[]], "", ["", []], [[5] * 512]])
def test_if_no_prompt_can_run_it_raises(llm, prompts):
    """A lone mistake is the caller's to see, not a result to look into."""
    assert llm.generate([], greedy()) == []
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts, greedy())


@pytest.mark.parametrize("bad, params", [(None, greedy()), (3.5, greedy()), ([5], {"temperature": 0})])
def test_a_prompt_or_params_of_a_wrong_type_leaves_no_request_behind(llm, bad, params):
    """The prompts before the wrong one were queued already: they must not stay and run with the next call."""
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        outputs = llm.generate([[5, 6], bad], [greedy(), params])
        assert outputs[0].error is None and outputs[1].error
    assert_empty(llm)


def test_the_longest_prompt(make):
    """One token more than the limit leaves room for none to generate."""
    llm = make(max_model_len=70)
    assert len(one(llm, [5] * 69, greedy(max_tokens=None)).token_ids) == 1
    with pytest.raises(ValueError, match=r"prompt has 70 tokens.*70 \(max_model_len\)"):
        llm.add_request([5] * 70)
    assert len(llm.score([5] * 30, [6] * 40)) == 40, "scoring generates nothing, so the whole length may be prompt"
    with pytest.raises(ValueError, match="max_model_len"):
        llm.score([5] * 30, [6] * 41)


BAD = [("max_tokens", 0), ("max_tokens", 1.5), ("min_tokens", -1), ("temperature", -0.1), ("temperature", math.nan),
       ("temperature", math.inf), ("temperature", "hot"), ("top_k", -2), ("top_k", 2.0), ("top_p", 0), ("top_p", 1.01),
       ("min_p", -0.1), ("min_p", 1.5), ("seed", 2**63), ("seed", 1.0), ("n", 0), ("n", True), ("logprobs", -1),
       ("logprobs", 21), ("prompt_logprobs", 21), ("repetition_penalty", 0), ("repetition_penalty", -1),
       ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("stop", ("",)), ("stop", (5,)),
       ("stop", ""), ("stop", ("a", "")), ("stop_token_ids", (-1,)), ("stop_token_ids", ("a",)),
       ("logit_bias", {-1: 1.0}), ("logit_bias", {5: math.inf}),
       ("n", None), ("min_tokens", None), ("presence_penalty", None),  # None would end everybody's step
       ("logit_bias", {5: 1e300}), ("repetition_penalty", 5e-324), ("temperature", 1e300)]  # fp32 cannot hold them


@pytest.mark.parametrize("name, value", BAD, ids=[f"{name}={value}" for name, value in BAD])
def test_parameters_out_of_range_are_refused_by_name(llm, name, value):
    """What is not refused here becomes NaN, an endless request or a crash of everybody's step."""
    with pytest.raises(ValueError, match=name):
        llm.add_request([5], SamplingParams(**{name: value}))
    assert_empty(llm)


def test_more_that_is_refused(llm, tiny_folder, make, tmp_path):
    """Each of these must be an answer in words, before anything is queued."""
    with pytest.raises(ValueError, match=r"min_tokens 9 .* max_tokens 8"):
        llm.add_request([5], SamplingParams(min_tokens=9, max_tokens=8))
    for params in (greedy(stop_token_ids=(260,)), greedy(logit_bias={260: 1.0})):
        with pytest.raises(ValueError, match="260"):
            llm.add_request([5], params)
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams"):
        llm.generate([[5], [6]], [greedy()])
    silent = make(tiny_folder)
    for call, prompt in ((silent.generate, "x"), (silent.chat, [{"role": "user"}]), (silent.generate, [5])):
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            call(prompt, greedy(stop="x"))
    with pytest.raises(ValueError, match="nowhere"):
        LLM(tmp_path / "nowhere")


@pytest.mark.parametrize("name, value", [("max_model_len", 2049), ("max_model_len", 0), ("max_num_seqs", 0),
                                         ("max_num_batched_tokens", -1), ("max_num_batched_tokens", 0),
                                         ("load_format", "gguf"), ("device", "tpu"), ("dtype", "int8"),
                                         ("schedule", "fast"), ("num_gpu_blocks_override", 0),
                                         ("num_gpu_blocks_override", -1)])
def test_engine_options_out_of_range_are_refused_by_name(make, name, value):
    """A zero that passes for "not given" starts an engine that nobody asked for."""
    with pytest.raises(ValueError, match=name):
        make(**{name: value})


def test_a_cache_smaller_than_the_length_asked_for_is_refused(make):
    """A request of that length would wait for ever."""
    with pytest.raises(ValueError, match="room for 448 tokens, less than max_model_len 512"):
        make(num_gpu_blocks_override=7)
    assert make(num_gpu_blocks_override=7, max_model_len=None).max_model_len == 448


# What may be asked.


def test_prompts_and_params_in_every_form(llm):
    """Text and its ids are the same request; one SamplingParams or one each."""
    ids = llm.tokenizer.encode("hello")
    first, second = greedy(), letters()
    expected = [words(one(llm, "hello", params)) for params in (first, second)]
    for prompts in ("hello", ids, ["hello"], [ids]):
        assert words(one(llm, prompts, first)) == expected[0]
    outputs = llm.generate(["hello", ids], [first, second])
    assert [words(output.outputs[0]) for output in outputs] == expected
    assert [output.prompt for output in outputs] == ["hello", None]
    assert all(output.prompt_token_ids == ids for output in outputs)


def test_completions(llm):
    """n completions differ, number 0 is that of n = 1, and each can be had again by its own seed."""
    several = llm.generate([5, 6, 7], letters(n=5))[0].outputs
    assert [out.index for out in several] == list(range(5))
    assert len({tuple(out.token_ids) for out in several}) == 5
    assert words(several[0]) == words(one(llm, [5, 6, 7], letters()))
    for out in several:
        assert words(one(llm, [5, 6, 7], letters(seed=out.seed))) == words(out)
        assert 0 <= out.seed < 2**53


def test_an_unseeded_request_reports_the_seed_it_drew(llm):
    """Without it, an answer that somebody wants again is lost."""
    first, second = (one(llm, "hello", letters(seed=None)) for _ in range(2))
    assert first.seed != second.seed and first.token_ids != second.token_ids
    assert words(one(llm, "hello", letters(seed=first.seed))) == words(first)


def test_stream(llm):
    """Deltas, joined, are the text; the last output is the finished one; bits are those of generate."""
    whole = one(llm, "hello", letters(stop=("zzzz",)))
    text, seen = "", 0
    for output in llm.stream("hello", letters(stop=("zzzz",))):
        out = output.outputs[0]
        text, seen = text + out.delta, seen + 1
        assert len(out.token_ids) == seen and out.text == text and output.finished == (seen == 24)
    assert text == whole.text and words(out) == words(whole)
    stream = llm.stream("hello", letters())
    next(stream)
    stream.close()  # the reader went away, and `make` finds the engine empty


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_token_borders(llm, include):
    """Each token is one letter: a stop string of three spans three, and no part of it may show."""
    text = one(llm, "hello", letters()).text
    stop = text[6:9]
    end = text.index(stop) + (3 if include else 0)
    for params in (letters(stop=stop, include_stop_str_in_output=include),
                   letters(stop=("never", stop), include_stop_str_in_output=include)):
        out = one(llm, "hello", params)
        assert (out.text, out.finish_reason, out.stop_reason) == (text[:end], "stop", stop)
        assert "".join(o.outputs[0].delta for o in llm.stream("hello", params)) == text[:end]
    assert one(llm, "hello", letters(stop=(text[-2:] + "no",))).text == text, "what only began as a stop is released"


def test_end_tokens(llm):
    """stop_token_ids, the end id, ignore_eos and min_tokens."""
    whole = one(llm, "hello", letters())
    token = whole.token_ids[7]
    length = whole.token_ids.index(token) + 1
    out = one(llm, "hello", letters(stop_token_ids=(token,)))
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (whole.token_ids[:length], "stop", token)
    assert out.text == whole.text[: length - 1], "the stop token's text is not shown"
    out = one(llm, "hello", letters(stop_token_ids=(token,), include_stop_str_in_output=True))
    assert out.text == whole.text[:length]
    eos = {3: 90.0}  # the model says nothing else
    out = one(llm, "hello", greedy(logit_bias=eos, ignore_eos=False))
    assert (out.token_ids, out.text, out.finish_reason, out.stop_reason) == ([3], "", "stop", None)
    out = one(llm, "hello", greedy(logit_bias=eos))
    assert (out.token_ids, out.finish_reason) == ([3] * 8, "length")
    out = one(llm, "hello", greedy(logit_bias=eos, ignore_eos=False, min_tokens=4))
    assert 3 not in out.token_ids[:4] and out.token_ids[4:] == [3]


def test_chat(llm):
    """One conversation or several; the template's text gets no further special tokens; arguments reach the template."""
    messages = [{"role": "user", "content": "<s>hi"}]
    output = llm.chat(messages, greedy(), calm=True)[0]
    assert output.prompt == "[user]<s>hi<s>"
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)
    assert [words(o.outputs[0]) for o in llm.chat([messages, messages], greedy(), calm=True)] == [
        words(output.outputs[0])] * 2


def test_score(llm):
    """Text or ids; one number a token of the completion, the same bits as prompt_logprobs of the joined prompt."""
    scores = llm.score("hello", " world")
    joined = llm.generate("hello world", greedy(prompt_logprobs=0))[0].prompt_logprobs
    assert len(scores) == 6 and scores == [logprob for logprob, _ in joined[5:]]
    assert llm.score(llm.tokenizer.encode("hello"), llm.tokenizer.encode(" world")) == scores


def test_a_tokenizer_of_another_model_is_refused(llm, monkeypatch):
    """Text of which a token is outside the embedding; on a GPU that would end everybody's step."""
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, special=True: [5, llm.config.vocab_size])
    with pytest.raises(ValueError, match="does not belong to these weights"):
        llm.generate("hello", greedy())
    assert not llm.has_unfinished_requests


def test_logprobs(llm):
    """Alternatives are the k likeliest, in order; the prompt's first token has no logprob; n asks for them once."""
    output = llm.generate([5, 6, 7, 8], greedy(logprobs=3, prompt_logprobs=2, n=2))[0]
    for out in output.outputs:
        for token, logprob, tops in zip(out.token_ids, out.logprobs, out.top_logprobs, strict=True):
            assert len(tops) == 3 and list(tops.values()) == sorted(tops.values(), reverse=True)
            assert next(iter(tops.items())) == (token, logprob), "greedy takes the likeliest"
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 4
    for logprob, tops in output.prompt_logprobs[1:]:
        assert len(tops) == 2 and logprob <= next(iter(tops.values())) < 0
    nothing = llm.generate([5, 6, 7, 8], greedy(logprobs=None))[0]
    assert nothing.outputs[0].logprobs is None and nothing.prompt_logprobs is None
    assert nothing.outputs[0].token_ids == output.outputs[0].token_ids


def test_adjustments_by_hand():
    """Repetition divides what is positive and multiplies what is not, over prompt and output; presence and frequency
    count the output alone; a bias is added; end ids are banned until min_tokens are out. All numbers are exact."""
    logits = torch.tensor([[4.0, -4.0, 8.0, -8.0, 2.0, 1.0, 0.0]] * 3)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, min_tokens=4,
                            logit_bias={4: 1.5, 5: -1.0}).resolve({})

    def sequence(params, prompt, output):
        seq = Sequence(prompt, len(prompt), params, 0, 9, frozenset({6, 99}))  # one beyond the logits
        seq.token_ids += output
        return seq

    plain, row = sequence(SamplingParams().resolve({}), [0, 1], [2]), sequence(params, [0, 1, 4], [2, 3, 3])
    adjusted = adjust(logits, [plain, row, plain])
    assert adjusted[1].tolist() == [2.0, -8.0, 4 - 0.75, -16 - 1.0, 1 + 1.5, 0.0, -math.inf]
    assert kernels.same_bits(adjusted[::2], logits[::2]), "a neighbour's penalties are its own"
    assert logits[1].tolist() == logits[0].tolist(), "the logits themselves stay as they are, for logprobs"
    assert adjust(logits, [sequence(params, [0, 1, 4], [2, 3, 3, 0])] * 3)[0, 6] == 0.0


def test_penalties_and_bias_reach_the_sampler(llm):
    """Each changes what an engine says, not only what a formula gives."""
    plain = one(llm, [5, 6, 7], greedy(max_tokens=32))
    assert len(set(plain.token_ids)) < 32, "the model repeats itself, or this test shows nothing"
    varied = one(llm, [5, 6, 7], greedy(max_tokens=32, repetition_penalty=1e6))
    assert len({5, 6, 7, *varied.token_ids}) == 35
    assert one(llm, [5, 6, 7], greedy(logit_bias={9: 90.0})).token_ids == [9] * 8
    counted = one(llm, [5], greedy(logit_bias={9: 90.0, 8: 89.0}, presence_penalty=2.0, frequency_penalty=2.0))
    assert set(counted.token_ids) == {8, 9}


# What goes wrong.


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_every_stage(make, steps):
    """Waiting, between the chunks of the prompt (64 of 150 tokens a step) or decoding: all of it is gone at once, and
    the requests beside it do not notice."""
    llm = make(max_num_batched_tokens=64)
    neighbour = words(one(llm, [9] * 70, greedy()))
    llm.scheduler.blocks.reset_prefix_cache()
    llm.add_request([5] * 150, letters(n=3, max_tokens=200), request_id="doomed")
    llm.add_request([9] * 70, greedy(), request_id="neighbour")
    for _ in range(steps):
        llm.step()
    doomed = llm.requests["doomed"]
    llm.abort("doomed"), llm.abort("doomed"), llm.abort("nobody")
    assert doomed.finished and [out.finish_reason for out in doomed.outputs] == ["abort"] * 3
    while llm.has_unfinished_requests:
        changed = llm.step()
        assert {output.request_id for output in changed} <= {"neighbour"}
        check_integrity(llm.scheduler)
    assert words(changed[0].outputs[0]) == neighbour


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_generate_leaves_nothing_behind(llm, error):
    """Whatever ends a step, the next call must not find its requests, nor fewer blocks."""
    expected = words(one(llm, "hello", letters()))
    calls, launch = [], llm.runner.launch

    def failing(seqs):
        calls.append(seqs)
        if len(calls) == 3:
            raise error("out of memory")
        return launch(seqs)

    llm.runner.launch = failing
    with pytest.raises(error, match="out of memory"):
        llm.generate(["hello", "you", [7] * 100], letters())
    assert_empty(llm)
    assert gc.isenabled() and words(one(llm, "hello", letters())) == expected


def test_generate_leaves_no_garbage_to_collect(llm, monkeypatch):
    """Meanwhile Python does not look for cycles: it took 0.2 s at a time. Afterwards it does, if it did before."""
    seen, step = [], llm.step
    monkeypatch.setattr(llm, "step", lambda: seen.append(gc.isenabled()) or step())
    params = SamplingParams(n=2, seed=1, max_tokens=30, stop=["ab"], logprobs=2, prompt_logprobs=1)
    llm.generate(["Once", "twice"], params)
    assert gc.isenabled()
    gc.collect()
    gc.disable()
    llm.generate(["Once", "twice"], params)
    found = gc.isenabled(), gc.collect()
    gc.enable()
    assert found == (False, 0) and seen and not any(seen)


def test_a_step_that_fails_behind_a_last_token(make):
    """A request whose last token is under way when the next launch fails ends too; nothing waits for it."""
    llm = make(async_scheduling=True)
    llm.add_request("a", SamplingParams(max_tokens=1, ignore_eos=True))
    llm.add_request("b", SamplingParams(max_tokens=9, ignore_eos=True))
    llm.step()

    def failing(seqs):
        raise RuntimeError("out of memory")

    llm.runner.launch = failing
    with pytest.raises(RuntimeError):
        llm.step()
    assert not llm.has_unfinished_requests and not llm.requests


def test_an_answer_is_a_cached_prefix_of_what_follows_it(make):
    """Blocks that generated tokens fill are found again, even one that the answer's last computed token fills."""
    for length, new, cached in ((10, 80, 64), (40, 25, 64), (40, 24, 0)):
        llm = make()
        first = llm.generate([5] * length, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))[0]
        again = llm.generate([5] * length + first.outputs[0].token_ids + [7], SamplingParams(max_tokens=1))[0]
        assert again.num_cached_tokens == cached


@pytest.mark.parametrize("name", ["", "./no/such", "no/such/", "https://huggingface.co/a/b"])
def test_a_mistyped_folder_is_no_hub_id(tmp_path, monkeypatch, name):
    """It would be fetched from whoever has that id; and an empty name is not the folder at hand."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no folder .* and not a hub id"):
        LLM(name, load_format="dummy")


def test_generate_outlives_an_abort_from_elsewhere(llm, monkeypatch):
    """It would step for ever, waiting for a request that is gone."""
    step = llm.step

    def aborting():
        llm.abort(next(iter(llm.requests)))
        return step()

    monkeypatch.setattr(llm, "step", aborting)
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort", "abort"] and all(o.finished for o in outputs)


def test_a_request_id_in_use_is_refused(llm):
    """The first request would be lost, its blocks with it."""
    llm.add_request([5], request_id="a")
    with pytest.raises(ValueError, match="'a' is in use"):
        llm.add_request([6], request_id="a")
    llm.abort("a"), llm.abort(llm.add_request([6], request_id="a"))


def test_preemption_keeps_text_stops_and_bits(make):
    """Eight completions in a pool for three: each is thrown out and recomputed, and says the same."""
    large, small, params = make(), make(num_gpu_blocks_override=8), letters(max_tokens=70, n=8, stop="qzq")
    expected, found = ([(words(out), out.text) for out in llm.generate([5] * 60, params)[0].outputs]
                       for llm in (large, small))
    assert small.scheduler.num_preemptions > 0 == large.scheduler.num_preemptions
    assert found == expected


@pytest.mark.parametrize("params", [greedy(), letters(), greedy(prompt_logprobs=0)])
def test_nan_is_the_error_of_the_request_that_met_it(make, params):
    """A prompt that leads to NaN logits ends with an error; its neighbours keep every bit of their logprobs, also
    where they reuse its blocks."""
    llm = make(hf_overrides={"tie_word_embeddings": False}, num_gpu_blocks_override=8)  # tied, NaN is everybody's
    good = [[5, 6, 7], [8] * 65]
    expected = [words(one(llm, prompt, params)) for prompt in good]
    llm.model.embed_tokens[200] = math.nan
    for _ in range(3):
        outputs = llm.generate([good[0], [200] * 70, good[1]], params)
        assert "finite" in outputs[1].error and outputs[1].outputs[0].finish_reason == "error"
        assert [output.error for output in outputs[::2]] == [None, None]
        assert None not in outputs[0].outputs[0].logprobs + outputs[2].outputs[0].logprobs
        assert [words(output.outputs[0]) for output in outputs[::2]] == expected
        with pytest.raises(ValueError, match="NaN"):
            llm.score([200], [5, 6])
        assert_empty(llm)


def test_a_token_that_never_comes_is_in_no_cached_block(make):
    """The step that chose a block's last token fails when the next has computed that token's keys: no name for it."""
    llm = make(async_scheduling=True)
    llm.add_request(list(range(5, 67)), SamplingParams(max_tokens=9, ignore_eos=True))
    llm.step()
    launch = llm.runner.launch

    def failing(seqs):
        launch(seqs)
        return lambda: 1 // 0

    llm.runner.launch = failing
    llm.step()
    llm.runner.launch = launch
    with pytest.raises(ZeroDivisionError):
        llm.step()
    assert not llm.requests and not llm.scheduler.blocks.index
