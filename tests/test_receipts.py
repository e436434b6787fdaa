"""Receipts: what is true verifies, whatever was asked for; what was changed is caught, and the change is named.

A forger here is thorough: unless a test says otherwise, a changed receipt gets the digest of what it now says.
"""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT
from test_engine import write_text_folder

import cli
import receipts
from benchmarks.twins import batch_dependent
from engine import LLM
from kernels import make_ops
from receipts import file_digest
from sampler import SamplingParams
from tools.proof import load_receipts
from tools.verify import hex_words, receipt_digest

PROMPT = "Once upon a time"
ASKED = {
    "greedy": {"temperature": 0.0},
    "the model's defaults": {"seed": 5},
    "cuts": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": -7},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3,
                  "seed": 2},
    "bias": {"temperature": 1.0, "logit_bias": {14: 4.0, 259: -100.0}, "seed": 3},
    "an end that may not come yet": {"temperature": 0.0, "min_tokens": 12, "logit_bias": {0: 100.0},
                                     "ignore_eos": False},
    "a stop string": {"temperature": 0.0, "stop": ("there",), "ignore_eos": False, "max_tokens": 60},
    "a stop token, shown": {"temperature": 0.0, "stop_token_ids": (259,), "include_stop_str_in_output": True},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", progress=False, num_gpu_blocks_override=64, max_num_batched_tokens=512)


def ask(llm: LLM, prompt=PROMPT, trace=False, **params) -> dict:
    options = {"max_tokens": 20, "ignore_eos": True, "logprobs": 0} | params
    return llm.receipt(llm.generate(prompt, SamplingParams(**options))[0], trace=trace)


@pytest.fixture(scope="module")
def receipt(llm) -> dict:
    return ask(llm, temperature=0.9, seed=11)


def forged(receipt: dict, **changes) -> dict:
    changed = json.loads(json.dumps(receipt)) | changes
    return changed | {"digest": receipt_digest(changed)}


def changed_at(values: list, i: int, value) -> list:
    return values[:i] + [value] + values[i + 1 :]


def only_problem(llm: LLM, receipt: dict) -> str:
    verdict = llm.verify(receipt)
    assert len(verdict.problems) == 1 and not verdict.verified, verdict.problems
    return verdict.problems[0]


@pytest.mark.parametrize("name", ASKED)
def test_what_is_true_verifies(llm, name):
    """Whatever was asked for, however the replay is cut, and after a journey through JSON."""
    made = ask(llm, **ASKED[name])
    assert made["digest"] == receipt_digest(made) and len(made["logprobs"]) == len(made["token_ids"])
    for budget in (512, 7):
        llm.scheduler.max_num_batched_tokens = budget
        verdict = llm.verify(json.loads(json.dumps(made)))
        llm.scheduler.max_num_batched_tokens = 512
        assert verdict.verified and verdict.num_tokens == len(made["token_ids"]), verdict.problems
    assert not llm.has_unfinished_requests and llm.verify(forged(made)).verified


def test_the_cases_reach_their_ends(llm):
    """Of the cases above, each end is there once: the limit, an end token, a stop string, a stop token."""
    ends = {name: (made["finish_reason"], made["stop_reason"])
            for name, made in ((name, ask(llm, **params)) for name, params in ASKED.items())}
    assert ends["greedy"] == ("length", None) and ends["an end that may not come yet"] == ("stop", None)
    assert ends["a stop string"] == ("stop", "there") and ends["a stop token, shown"] == ("stop", 259)


def test_each_of_several_completions():
    """Completion k of n verifies as the only completion of its own seed; without max_tokens, up to the limit too."""
    llm = LLM(device="cpu", progress=False, num_gpu_blocks_override=16, max_model_len=64)
    output = llm.generate([5] * 40, SamplingParams(n=3, seed=4, logprobs=2, ignore_eos=True, prompt_logprobs=1))[0]
    made = [llm.receipt(output, index) for index in range(3)]
    assert len({tuple(one["token_ids"]) for one in made}) == 3 and len(made[0]["token_ids"]) == 24
    assert all(llm.verify(one).verified for one in made)


def test_among_other_requests(llm, receipt):
    """An engine that is serving can verify, and its other requests lose nothing."""
    params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=0)
    alone = llm.generate("Mia found", params)[0].outputs[0]
    request_id = llm.add_request("Mia found", params)
    llm.step()
    output = llm.requests[request_id]
    assert llm.verify(receipt).verified
    with pytest.raises(ValueError, match="nothing else to do"):
        llm.receipt(output_of(llm), trace=True)
    while llm.has_unfinished_requests:
        llm.step()
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == (alone.token_ids, alone.logprobs)


def output_of(llm):
    return llm.generate("x", SamplingParams(max_tokens=1, logprobs=0))[0]


@pytest.mark.parametrize("i", [0, 7, 19])
def test_another_token(llm, receipt, i):
    other = (receipt["token_ids"][i] + 1) % 4096
    problem = only_problem(llm, forged(receipt, token_ids=changed_at(receipt["token_ids"], i, other)))
    assert f"token {i} (position {len(receipt['prompt_token_ids']) + i}) is {other} in the receipt" in problem
    assert f"the draw gives {receipt['token_ids'][i]}" in problem


@pytest.mark.parametrize("i", [0, 19])
def test_one_bit_of_one_logprob(llm, receipt, i):
    """The lowest bit of one word; the message says which, and by how much."""
    word = f"{int(receipt['logprobs'][i], 16) ^ 1:08x}"
    problem = only_problem(llm, forged(receipt, logprobs=changed_at(receipt["logprobs"], i, word)))
    assert f"token {i} " in problem and "its logprob differs" in problem and "1 units in the last place" in problem
    assert f"(bits {word})" in problem and f"({receipt['logprobs'][i]})" in problem


def test_another_seed_parameter_or_prompt(llm, receipt):
    """Tokens that their own seed, parameters or prompt do not give."""
    assert "the draw gives" in only_problem(llm, forged(receipt, seed=12))
    colder = receipt["params"] | {"temperature": 0.0}
    assert "the draw gives" in only_problem(llm, forged(receipt, params=colder))
    assert "token 0" in only_problem(llm, forged(receipt, prompt_token_ids=[5, *receipt["prompt_token_ids"]]))


def test_greedy_tokens_of_no_argmax(llm):
    """Logprobs made to fit do not help: the token itself must be the one drawn."""
    made = ask(llm, temperature=0.0)
    two = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
    second = llm.generate(PROMPT, two)[0].outputs[0].top_logprobs[0]
    token = [token for token in second if token != made["token_ids"][0]][0]
    words = changed_at(made["logprobs"], 0, hex_words([second[token]])[0])
    assert "token 0 " in only_problem(llm, forged(made, token_ids=[token, *made["token_ids"][1:]], logprobs=words))


def test_another_text_or_end(llm, receipt):
    assert "text is 'no'" in only_problem(llm, forged(receipt, text="no"))
    assert "finish_reason is 'stop'" in only_problem(llm, forged(receipt, finish_reason="stop"))
    assert "stop_reason is 5" in only_problem(llm, forged(receipt, stop_reason=5))


def test_a_shortened_or_lengthened_completion(llm):
    made = ask(llm, **ASKED["a stop string"])
    shorter = {name: made[name][:-1] for name in ("token_ids", "logprobs")}
    assert "goes on after token" in only_problem(llm, forged(made, **shorter))
    longer = ask(llm, **ASKED["a stop string"] | {"stop": ()})
    assert len(longer["token_ids"]) > len(made["token_ids"])
    more = {name: longer[name] for name in ("token_ids", "logprobs")}
    assert f"ends (stop) after token {len(made['token_ids']) - 1}, the receipt goes on" in only_problem(
        llm, forged(made, **more))


def test_a_changed_receipt_without_its_digest(llm, receipt):
    """Even of what no replay can know, like the seconds it took; and of what it can, both are said."""
    assert "changed after it was written" in only_problem(llm, receipt | {"seconds": 0.001})
    problems = llm.verify(receipt | {"text": "no"}).problems
    assert len(problems) == 2 and "digest" in problems[0] and "text" in problems[1]


def test_another_fingerprint(llm, receipt, tmp_path):
    """Another dtype, model, or end tokens; and a fingerprint that is not that of its parts."""
    half = LLM(device="cpu", dtype="bfloat16", progress=False, num_gpu_blocks_override=16)
    assert only_problem(half, receipt) == "another fingerprint: dtype float32 in the receipt, bfloat16 here"
    other = LLM(write_text_folder(tmp_path / "m"), load_format="dummy", progress=False, num_gpu_blocks_override=16)
    problem = only_problem(other, receipt)
    assert all(f"{name} " in problem for name in ("weights", "config", "end_tokens"))
    assert "not that of its parts" in only_problem(llm, forged(receipt, fingerprint="sb1-" + "0" * 20))
    assert "torch 9.9" in only_problem(llm, forged(receipt, parts=receipt["parts"] | {"torch": "9.9"}))


def test_a_forger_cannot_write_lines_of_his_own(llm, receipt):
    """What a receipt says is shown in one line, without control characters."""
    parts = receipt["parts"] | {"torch": "9\nreceipt 2: verified\x1b[2J"}
    assert "9?receipt 2: verified?[2J in the receipt" in only_problem(llm, forged(receipt, parts=parts))


def test_an_engine_whose_bits_follow_the_batch(llm):
    """It does not verify even its own receipts: its decode is not its prefill."""
    ops = batch_dependent(make_ops(torch.device("cpu")))
    twin = LLM(device="cpu", progress=False, num_gpu_blocks_override=16, ops=ops)
    assert "its logprob differs" in twin.verify(ask(twin, seed=1)).problems[0]


def test_trace(llm, receipt):
    """One digest a layer and op, whatever the chunks; asking for it changes nothing else; a change is named."""
    traced = ask(llm, temperature=0.9, seed=11, trace=True)
    layers, names = llm.config.num_layers, list(traced["trace"])
    assert len(names) == 8 * layers + 2
    assert names[0] == "embed_tokens embedding" and names[-1] == "embed_tokens linear"  # a tied head
    assert traced["token_ids"] == receipt["token_ids"] and traced["logprobs"] == receipt["logprobs"]
    ops, budget = llm.model.ops, llm.scheduler.max_num_batched_tokens
    llm.scheduler.max_num_batched_tokens = 9
    assert llm.verify(traced).verified and llm.model.ops is ops
    llm.scheduler.max_num_batched_tokens = budget
    other = traced["trace"] | {"layers.3.self_attn.o_proj linear": "0" * 16, names[-1]: "1" * 16}
    assert only_problem(llm, forged(traced, trace=other)) == (
        f"trace: the first op whose output differs is layers.3.self_attn.o_proj linear (2 of {8 * layers + 2})")


def test_min_tokens_beyond_the_room_there_was():
    llm = LLM(device="cpu", progress=False, num_gpu_blocks_override=16, max_model_len=64)
    output = llm.generate([5] * 60, SamplingParams(seed=4, logprobs=0, min_tokens=30))[0]
    assert llm.verify(llm.receipt(output)).verified


def test_digest_of_weights_does_not_see_where_they_lie():
    """Rows and biases of gate and up lie in turn: views with gaps have the digest of their values."""
    merged = {"weight": torch.arange(24.0).view(6, 4), "bias": torch.arange(6.0)}
    for dtype in (torch.float32, torch.bfloat16):
        views = {name: tensor[1::2] for name, tensor in merged.items()}
        copies = {name: view.clone() for name, view in views.items()}
        assert receipts.tensor_digest(views, dtype) == receipts.tensor_digest(copies, dtype)


def test_trace_of_two_arithmetics(llm):
    """A product of one layer that adds in another order: the trace names it, though the fingerprint cannot."""
    ops, calls = make_ops(torch.device("cpu")), []

    def gated_linear(x, *args):
        calls.append(len(x))
        result = ops.gated_linear(x, *args)
        return torch.nextafter(result, result + 1) if len(calls) % llm.config.num_layers == 3 else result

    other = LLM(device="cpu", progress=False, num_gpu_blocks_override=16, ops=replace(ops, gated_linear=gated_linear))
    problems = llm.verify(ask(other, seed=1, trace=True)).problems
    assert "whose output differs is layers.2.mlp.gate_proj gated_linear" in problems[1]
    assert " token 0 " in f" {problems[0]}"
    half = LLM(device="cpu", dtype="bfloat16", progress=False, num_gpu_blocks_override=16)
    problems = llm.verify(ask(half, seed=1, trace=True)).problems
    assert "dtype bfloat16" in problems[0] and "differs is embed_tokens embedding" in problems[-1]


def test_what_gets_no_receipt(llm):
    output = llm.generate(PROMPT, SamplingParams(max_tokens=2))[0]
    with pytest.raises(ValueError, match="logprobs=0"):
        llm.receipt(output)
    for index in (1, -1):
        with pytest.raises(ValueError, match=f"no finished completion {index}"):
            llm.receipt(output, index)


BROKEN = {
    "not json": (lambda r: json.dumps(r)[:-40], "cut short"),
    "a list": (lambda r: "[1]", "JSON object"),
    "a number": (lambda r: "7", "JSON object"),
    "version": (lambda r: forged(r, version=2), "version must be 1, not 2"),
    "no version": (lambda r: {k: v for k, v in r.items() if k != "version"}, "lacks 'version'"),
    "a missing field": (lambda r: {k: v for k, v in r.items() if k != "seed"}, "lacks 'seed'"),
    "an unknown field": (lambda r: forged(r, note="x"), "unknown field 'note'"),
    "a wrong type": (lambda r: forged(r, seed="3"), "seed must be"),
    "a bool for a number": (lambda r: forged(r, seed=True), "seed must be"),
    "a seed too large": (lambda r: forged(r, seed=2**63), "seed must be between"),
    "a word too short": (lambda r: forged(r, logprobs=changed_at(r["logprobs"], 0, "beef")), "logprobs must be"),
    "too few words": (lambda r: forged(r, logprobs=r["logprobs"][1:]), "20 token_ids but 19 logprobs"),
    "no tokens": (lambda r: forged(r, token_ids=[], logprobs=[]), "token_ids must be"),
    "a negative token": (lambda r: forged(r, token_ids=changed_at(r["token_ids"], 2, -1)), "token_ids must be"),
    "a token outside": (lambda r: forged(r, token_ids=changed_at(r["token_ids"], 2, 4096)), "below the vocabulary"),
    "params": (lambda r: forged(r, params=r["params"] | {"top_p": 3.0}), "top_p must be between"),
    "params, missing": (lambda r: forged(r, params={}), "params lacks"),
    "params, unknown": (lambda r: forged(r, params=r["params"] | {"beam": 1}), "unknown field 'beam'"),
    "params, null": (lambda r: forged(r, params=r["params"] | {"temperature": None}), "temperature must be"),
    "params, type": (lambda r: forged(r, params=r["params"] | {"stop": 3}), "params"),
    "params, bias": (lambda r: forged(r, params=r["params"] | {"logit_bias": {"x": 1}}), "params"),
    "params, n": (lambda r: forged(r, params=r["params"] | {"n": 2}), "params: n must be 1, not 2"),
    "params, bool": (lambda r: forged(r, params=r["params"] | {"ignore_eos": 1}), "ignore_eos"),
    "params, cut": (lambda r: forged(r, params=r["params"] | {"prompt_logprobs": 1}), "prompt_logprobs must be null"),
    "seconds": (lambda r: forged(r, seconds=10**400), "seconds must be"),
    "seconds, none": (lambda r: forged(r, seconds=float("nan")), "seconds must be"),
    "trace": (lambda r: forged(r, trace=["x"]), "trace must be"),
    "empty": (lambda r: "\n", "holds no receipt"),
    "too long": (lambda r: forged(r, prompt_token_ids=[5] * 1020), "max_model_len"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(receipt, tmp_path, capsys, name):
    """One line that says what is wrong, and exit code 2; nothing on stdout."""
    make, message = BROKEN[name]
    made = make(receipt)
    line = made if isinstance(made, str) else json.dumps(made)
    (tmp_path / "r.jsonl").write_text(line + "\n")
    code = cli.main(["--device", "cpu", "--num-gpu-blocks-override", "16", "--verify", str(tmp_path / "r.jsonl")])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err, err


def test_on_the_command_line(llm, tmp_path, capsys):
    """Written by one run, verified by another; then a forgery, named, with exit code 1."""
    file, options = tmp_path / "r.jsonl", ["--device", "cpu", "--num-gpu-blocks-override", "32"]
    code = cli.main([*options, "--prompt", "Mia", "--prompt", "The sea", "--n", "2", "--seed", "1", "--max-tokens", "9",
                     "--receipt", str(file), "--trace"])
    assert code == 0 and len(load_receipts(file)) == 4
    capsys.readouterr()
    assert cli.main([*options, "--verify", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(": verified, 9 tokens in " in line and "generated in" in line for line in lines)
    first, *rest = load_receipts(file)
    file.write_text("\n".join(json.dumps(one) for one in [*rest, forged(first, text="no")]))
    assert cli.main([*options, "--verify", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "receipt 4: NOT verified" in lines[3] and "text is 'no'" in lines[4]
    file.write_text(json.dumps(first) + "\n" + json.dumps(first)[:100])
    assert cli.main([*options, "--verify", str(file)]) == 2 and "line 2" in capsys.readouterr().err
    assert cli.main([*options, "--verify", str(tmp_path / "absent")]) == 2
    for wrong in (["--trace", "--prompt", "x"], ["--verify", str(file), "--selfcheck"]):
        with pytest.raises(SystemExit):
            cli.main(wrong)
    for proof in (["--fingerprint"], ["--selfcheck"], ["--verify", str(file)]):
        assert cli.main([*proof, "--prompt", "x"]) == 2 and "one of these at a time" in capsys.readouterr().err


def test_weights_digest_of_a_hub_blob(tmp_path):
    """The Hub's cache names a file by its sha256, so it is not read; any other file is."""
    real = ROOT / "models" / "embedded" / "model.safetensors"
    name, link = file_digest(real), tmp_path / "model.safetensors"
    for blob, trusted in ((tmp_path / "blobs" / name, True), (tmp_path / "blobs" / "x", False),
                          (tmp_path / "elsewhere" / name, False)):
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(b"other bytes")
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
        assert (file_digest(link) == name) == trusted


def test_a_part_of_an_answer_is_not_passed_off_as_aborted(llm):
    """Where an abort fell cannot be replayed: an aborted answer gets no receipt, and one that claims it is refused."""
    made = ask(llm, temperature=0.0)
    part = made["token_ids"][:8]
    text = llm.tokenizer.decode(part)
    assert "goes on after token 7" in only_problem(llm, forged(
        made, token_ids=part, logprobs=made["logprobs"][:8], text=text, finish_reason="abort"))
    output = llm.requests[llm.add_request(PROMPT, SamplingParams(logprobs=0, temperature=0.0, max_tokens=20))]
    while len(output.outputs[0].token_ids) < 3:
        llm.step()
    llm.abort(output.request_id)
    with pytest.raises(ValueError, match="no receipt"):
        llm.receipt(output)


def test_parameters_from_numpy(llm):
    asked = {"temperature": np.float32(0.7), "max_tokens": np.int64(6), "seed": np.int64(3),
             "logit_bias": {np.int64(14): np.float32(0.5)}}
    made = ask(llm, **asked)
    assert llm.verify(json.loads(json.dumps(made))).verified
    assert made["token_ids"] == ask(llm, **{"temperature": float(np.float32(0.7)), "max_tokens": 6, "seed": 3,
                                            "logit_bias": {14: 0.5}})["token_ids"]


def test_what_cannot_be_read_is_a_value_error(llm, receipt):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for changes in ({"parts": {"torch": deep}}, {"seconds": -1.0}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            llm.verify(receipt | changes)


def test_a_broken_digest_cache_is_made_anew(tmp_path):
    folder = shutil.copytree(ROOT / "models" / "embedded", tmp_path / "model")
    whole = receipts.weight_digest(folder)
    for broken in ("[]", "3", "{", '{"stamp": 1}'):
        (folder / ".samebits-digest.json").write_text(broken)
        assert receipts.weight_digest(folder) == whole
