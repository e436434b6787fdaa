"""Receipts over HTTP: what a client got, checked by the library."""

import json

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from test_server import STORY, assert_all_given_back, post, serve

from engine import LLM

COMPLETION = ("/v1/completions", {"prompt": [STORY, "The dog"], "n": 2, "temperature": 0.9, "max_tokens": 12})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A story, please."}], "n": 2,
                                 "max_tokens": 10, "stop": ["."]})


@pytest.fixture(scope="module")
def served():
    llm = LLM(progress=False, num_gpu_blocks_override=64, max_num_seqs=8)
    with serve(llm) as (url, service):
        yield url, service
        assert_all_given_back(service)


def streamed(url: str, path: str, body: dict) -> list[dict]:
    """The chunks' choices, and what else was sent."""
    with httpx.stream("POST", url + path, json=body | {"stream": True}, timeout=60) as response:
        sent = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    return [choice for chunk in sent for choice in chunk.get("choices", [chunk])]


def lasting(receipt: dict) -> dict:
    """A receipt without what differs from one run to the next."""
    return {name: value for name, value in receipt.items() if name not in ("seconds", "digest")}


@pytest.mark.parametrize("path, body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_every_choice_has_a_receipt_that_holds(served, path, body):
    url, service = served
    body = body | {"receipt": True, "seed": 4, "return_token_ids": True}
    choices = post(url, path, **body).json()["choices"]
    for choice in choices:
        receipt = choice["receipt"]
        assert "logprobs" not in choice or choice["logprobs"] is None, "nobody asked to see them"
        assert (receipt["token_ids"], receipt["seed"]) == (choice["token_ids"], choice["seed"])
        assert receipt["finish_reason"] == choice["finish_reason"]
    assert len({json.dumps(choice["receipt"]["token_ids"]) for choice in choices}) == len(choices)
    verifier = LLM(progress=False, num_gpu_blocks_override=64)  # the server's engine belongs to its thread
    assert verifier.verify(choices[-1]["receipt"]).verified
    forged = choices[-1]["receipt"] | {"token_ids": [*choices[-1]["token_ids"][:-1], 300]}
    assert not verifier.verify(forged).verified

    pieces = streamed(url, path, body)
    ends = [choice for choice in pieces if choice["finish_reason"]]
    assert len(ends) == len(choices) and all("receipt" not in piece for piece in pieces if not piece["finish_reason"])
    assert {end["index"]: lasting(end["receipt"]) for end in ends} == {
        choice["index"]: lasting(choice["receipt"]) for choice in choices}
    for end in ends:  # nothing of a choice comes after its receipt
        assert [piece for piece in pieces if piece["index"] == end["index"]][-1] is end


def test_receipts_are_for_those_who_ask(served, monkeypatch):
    url, service = served
    body = {"prompt": STORY, "max_tokens": 3, "temperature": 0}
    plain, shown = post(url, **body), post(url, **body, receipt=True, logprobs=1)
    assert "receipt" not in plain.text
    choice = shown.json()["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["receipt"]["logprobs"]) == 3

    def none(*args):
        raise ValueError("there is none today")

    monkeypatch.setattr(service.llm, "receipt", none)
    refused = post(url, **body, receipt=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "receipt")
    *pieces, error = streamed(url, "/v1/completions", body | {"receipt": True})
    assert "there is none today" in error["error"]["message"] and not any(piece["finish_reason"] for piece in pieces)
