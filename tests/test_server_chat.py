"""Qwen3's tags: what of an answer is reasoning, content and tool calls, however it comes."""

import json
import random
from dataclasses import replace

import pytest
from test_engine import write_text_folder

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from test_server import serve

from engine import LLM
from server_parts.chat_parsing import ChatParser

CASES = {
    "<think>\nhm\n</think>\n\nYes": [("reasoning", "hm"), ("content", "Yes")],
    "<think>\n\n</think>\n\nYes": [("content", "Yes")],
    "<think>cut off": [("reasoning", "cut off")],
    "a < b <think> c": [("content", "a < b <think> c")],
    'Let me.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>': [("content", "Let me."),
                                                                               ("call", 'f{"x": "é"}')],
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>':
        [("call", "f{}"), ("call", "g{}")],
    "<tool_call>nonsense</tool_call> so": [("content", "<tool_call>nonsense</tool_call> so")],
    '<think>a</think><tool_call>{"name": "f"': [("reasoning", "a"), ("content", '<tool_call>{"name": "f"')],
    "two  lines \n": [("content", "two  lines \n")],
    "<thi": [("content", "<thi")],
    "  \n": [("content", "  \n")],
}


@pytest.mark.parametrize("text", CASES)
def test_tags_are_understood_however_the_text_is_cut(text):
    rng = random.Random(text)
    for trial in range(60):
        cuts = sorted(rng.sample(range(len(text) + 1), min(trial, len(text) + 1)))
        parser, merged = ChatParser(), []
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        for delta in [delta for piece in pieces for delta in parser.push(piece)] + parser.finish():
            if merged and merged[-1][0] == delta.kind != "call":
                merged[-1] = (delta.kind, merged[-1][1] + delta.text)
            else:
                merged.append((delta.kind, delta.name + delta.text))
        assert merged == CASES[text], pieces


def test_reasoning_and_tool_calls_reach_the_client(tmp_path, monkeypatch):
    """The text is dictated: each sampled token is replaced by the next byte of the script."""
    script = ("<think>\nhm\n</think>\n\nI look.\n<tool_call>\n"
              '{"name": "weather", "arguments": {"in": "Oslo"}}\n</tool_call>')
    llm = LLM(write_text_folder(tmp_path / "m"), load_format="dummy", progress=False, num_gpu_blocks_override=16)
    ids, absorb = [*llm.tokenizer.encode(script, False), 3], LLM._absorb
    monkeypatch.setattr(LLM, "_absorb", lambda self, seq, result: absorb(
        self, seq, replace(result, token_id=ids[len(self._live[seq][1].token_ids)])))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    request = dict(model="samebits", messages=[{"role": "user", "content": "Weather?"}], tools=[tool], seed=1)
    with serve(llm) as (url, service), openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
        service.heeds = dict.fromkeys(service.heeds, True)  # this tokenizer knows bytes only
        whole = client.chat.completions.create(**request).choices[0]
        with client.chat.completions.stream(**request) as stream:
            streamed = stream.get_final_completion().choices[0]
        for choice in (whole, streamed):
            message, call = choice.message, choice.message.tool_calls[0]
            assert (message.content, choice.finish_reason) == ("I look.", "tool_calls")
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"in": "Oslo"})
        assert whole.message.reasoning_content == "hm"
        assert streamed.message.tool_calls[0].id == whole.message.tool_calls[0].id
        # The answer goes back as it came, with the tool's result behind it.
        history = [*request["messages"], whole.message.model_dump(), {
            "role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "sunny"}]
        client.chat.completions.create(**request | {"messages": history})
        no_tools = client.chat.completions.create(**request, tool_choice="none").choices[0]
        assert "<tool_call>" in no_tools.message.content
