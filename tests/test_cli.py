"""The command line, in process: what goes to stdout, what to stderr, and the exit code."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from safetensors.torch import save_file
from test_engine import write_text_folder

import cli
from engine import LLM, SamplingParams

GREEDY = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    """The library over the folder that the command line is given: what it prints must be what this says."""
    return LLM(write_text_folder(tmp_path_factory.mktemp("cli") / "model"), load_format="dummy", progress=False,
               num_gpu_blocks_override=16)


@pytest.fixture
def call(llm, capsys):
    """call(*arguments) -> (exit code, stdout, stderr) of one run on the tiny model."""

    def run(*args: str, model=llm.folder, load_format="dummy") -> tuple[int, str, str]:
        code = cli.main(["--model", str(model), "--load-format", load_format, "--num-gpu-blocks-override", "16", *args])
        return code, *capsys.readouterr()

    return run


def text_of(llm: LLM, prompt: str) -> str:
    return llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[0].text


def test_one_prompt_is_streamed_as_text(llm, call):
    """stdout holds the answer and nothing else, so that it can be piped; figures go to stderr."""
    code, out, err = call("--prompt", "hello", *GREEDY)
    assert (code, out) == (0, text_of(llm, "hello") + "\n")
    assert "8 tokens in" in err and "Traceback" not in err


def test_several_prompts_keep_their_order(llm, call, tmp_path):
    """--prompt, repeated, and the lines of a file, in the order given; empty lines are none."""
    (tmp_path / "prompts.txt").write_text("two\r\n\n  \nthrée\n", encoding="utf-8")
    code, out, _ = call("--prompt", "one", "--prompt-file", str(tmp_path / "prompts.txt"), *GREEDY)
    assert code == 0
    assert out == "".join(f"--- {prompt!r}\n{text_of(llm, prompt)}\n" for prompt in ("one", "two", "thrée"))


@pytest.mark.parametrize("option, expected", [("--prompt", ["one\ntwo\n"]), ("--prompt-file", ["one", "two"])])
def test_stdin(llm, call, monkeypatch, option, expected):
    """- is all of stdin as one prompt, or its lines."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    code, out, _ = call(option, "-", "--json", *GREEDY)
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [record["prompt"] for record in records] == expected
    assert [record["text"] for record in records] == [text_of(llm, prompt) for prompt in expected]


def test_json(llm, call):
    """A record is enough to have the same bits again: ids, exact logprobs, seed, parameters, fingerprint."""
    code, out, _ = call("--prompt", "héllo", "--json", "--max-tokens", "6", "--temperature", "0.9", "--n", "2",
                        "--logprobs", "2", "--prompt-logprobs", "1", "--top-p", "0.9", "--stop", "\n\n")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [record["index"] for record in records] == [0, 1]
    for record in records:
        assert record["prompt"] == "héllo" and record["fingerprint"] == llm.fingerprint
        assert set(record["timings"]) == {"total_s", "ttft_s"} and record["finish_reason"] in ("length", "stop")
        assert (record["params"]["n"], record["params"]["top_p"], record["params"]["stop"]) == (2, 0.9, ["\n\n"])
        assert all(len(tops) == 2 for tops in record["top_logprobs"]) and len(record["prompt_logprobs"]) == 6
        again = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=6, seed=record["seed"], logprobs=0, stop="\n\n")
        same = llm.generate("héllo", again)[0].outputs[0]
        assert (same.token_ids, same.text, same.finish_reason) == (
            record["token_ids"], record["text"], record["finish_reason"])
        assert np.array_equal(*(np.array(x, np.float32).view(np.int32) for x in (same.logprobs, record["logprobs"])))
    assert records[0]["seed"] != records[1]["seed"] and "delta" not in records[0]
    code, out, _ = call("--prompt", "x", "--json", *GREEDY)
    assert len(json.loads(out)["logprobs"]) == 8 and "top_logprobs" not in json.loads(out), "logprobs come unasked"


def test_n_as_text(call):
    """Completions are numbered, and a seed gives the same ones again."""
    args = ["--prompt", "hello", "--n", "3", "--seed", "1", "--max-tokens", "4", "--stop-token-ids", "9", "10"]
    code, out, _ = call(*args)
    assert code == 0 and [line for line in out.splitlines() if line.startswith("---")] == [
        f"--- 'hello' [{i}]" for i in range(3)]
    assert call(*args)[1] == out


def test_sampling_options_are_those_of_the_library():
    """What is not given is the library's default, but for the length; lists may be given at once or one by one."""
    parse = cli.build_parser().parse_args
    assert cli.chosen(parse([]), SamplingParams) == {"max_tokens": 512}
    line = "--stop a --stop b c --stop-token-ids 1 2 --top-k 3 --min-p 0.5 --presence-penalty -1 --n 2 --ignore-eos"
    args = parse(line.split())
    assert cli.chosen(args, SamplingParams) == {
        "max_tokens": 512, "stop": ["a", "b", "c"], "stop_token_ids": [1, 2], "top_k": 3, "min_p": 0.5,
        "presence_penalty": -1.0, "n": 2, "ignore_eos": True}


def test_chat(llm, call):
    """The template's text is what the model reads; the user's own text is what the record shows."""
    code, out, _ = call("--chat", "--system", "be brief", "--prompt", "hi", "--json", *GREEDY)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    assert code == 0 and json.loads(out)["prompt"] == "hi" and json.loads(out)["token_ids"] == expected.token_ids


@pytest.mark.parametrize("args, named", [
    (["--prompt", ""], "prompt is empty"), (["--prompt", "x" * 3000], "prompt has 3000 tokens"), ([], "no prompt"),
    (["--prompt", "x", "--top-p", "2"], "top_p must be between 0 and 1, got 2.0"),
    (["--prompt", "x", "--max-tokens", "0"], "max_tokens"), (["--prompt", "x", "--max-num-seqs", "0"], "max_num_seqs"),
    (["--prompt", "x", "--max-model-len", "99999"], "max_model_len"),
    (["--prompt-file", "absent.txt"], "absent.txt"), (["--prompt", "x", "--revision", "main"], "revision 'main'")])
def test_mistakes_are_one_line_and_exit_code_2(call, args, named):
    """A traceback tells a user nothing; stdout stays empty, so that a pipe does not take an error for an answer."""
    code, out, err = call(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err


def test_a_wrong_model(call, tmp_path):
    """A folder that is not there, one that holds no model, and one whose model is not implemented."""
    other = write_text_folder(tmp_path / "other", architectures=["GPT2LMHeadModel"])
    (tmp_path / "empty").mkdir()
    wrong = {tmp_path / "absent": "absent", tmp_path / "empty": "config.json", other: "GPT2LMHeadModel"}
    for model, named in wrong.items():
        code, out, err = call("--prompt", "x", model=model)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and named in err
    code, _, err = call("--prompt", "x", model=write_text_folder(tmp_path / "weightless"), load_format="auto")
    assert code == 2 and "model.safetensors" in err and err.count("\n") == 1


def test_one_bad_prompt_of_several_is_exit_code_1(llm, call):
    """The others are answered all the same, on stdout; the error is on stderr, and with --json in its place."""
    code, out, err = call("--prompt", "good", "--prompt", "x" * 3000, "--json", *GREEDY)
    first, second = map(json.loads, out.splitlines())
    assert code == 1 and first["text"] == text_of(llm, "good") and "3000" in second["error"]
    assert "error: prompt 1: the prompt has 3000 tokens" in err


def test_unknown_options_and_choices(call, capsys):
    """argparse's own errors name the option and use the same exit code."""
    for args in (["--prompts", "x"], ["--dtype", "int4"], ["--max-tokens", "many"]):
        with pytest.raises(SystemExit) as exit:
            call(*args)
        assert exit.value.code == 2 and args[0] in capsys.readouterr().err


def test_interrupted(call, monkeypatch):
    """Ctrl-C is one word and the shell's exit code for it, not a traceback."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "step", interrupt)
    code, out, err = call("--prompt", "x", *GREEDY)
    assert (code, out, err) == (130, "", "interrupted\n")


def test_help(capsys):
    """The groups come in the order a newcomer needs them, and examples that can be copied come last."""
    with pytest.raises(SystemExit) as exit:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    positions = [text.index(part) for part in ("prompts:", "model:", "sampling:", "engine:", "output:", "examples:")]
    assert positions == sorted(positions) and text.count("python engine.py") >= 4


def test_fingerprint(llm, call, tmp_path):
    """The same twice; another for another dtype, other weights or another config; not for another batch size."""
    code, first, _ = call("--fingerprint")
    name, *parts = first.splitlines()
    assert (code, name) == (0, llm.fingerprint) and first.startswith("sb1-")
    assert {part.split()[0]: part.split(maxsplit=1)[1] for part in parts} == {
        name: str(value) for name, value in llm.fingerprint_parts.items()}
    assert call("--fingerprint", "--max-num-seqs", "3", "--no-enable-prefix-caching")[1] == first
    others = [call("--fingerprint", "--dtype", "float16")[1],
              call("--fingerprint", model=write_text_folder(tmp_path / "theta", rope_theta=9.0))[1]]
    for name, scale in (("a", 1.0), ("b", 2.0)):
        folder = write_text_folder(tmp_path / name)
        tensors = {name: tensor.bfloat16().cpu() * scale for name, tensor in llm.model.weights.items()}
        save_file(tensors, folder / "model.safetensors")
        others += [call("--fingerprint", model=folder, load_format="auto")[1] for _ in range(2)]
    assert others[2] == others[3] and others[4] == others[5]
    assert len({first, *others}) == 5


def test_a_cpu_needs_no_triton(llm):
    """There is none for macOS."""
    script = ("import sys; sys.modules['triton'] = None; from engine import LLM; "
              f"LLM({str(llm.folder)!r}, device='cpu', load_format='dummy', progress=False).generate('hello')")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


def test_as_a_program(llm):
    """`python engine.py` itself: exit code, stdout, no bytes lost, and an error without a traceback."""
    command = [sys.executable, str(ROOT / "engine.py"), "--model", str(llm.folder), "--load-format", "dummy"]
    done = subprocess.run([*command, "--prompt", "hello", *GREEDY], capture_output=True, encoding="utf-8",
                          env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert (done.returncode, done.stdout) == (0, text_of(llm, "hello") + "\n"), done.stderr
    done = subprocess.run([*command, "--prompt", ""], capture_output=True, encoding="utf-8")
    assert done.returncode == 2 and done.stderr.startswith("error: the prompt is empty") and not done.stdout
