"""The server as clients meet it: uvicorn on a free port, the embedded model on CPU, the official openai client."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import ROOT, check_integrity

pytest.importorskip("fastapi")
httpx, openai, uvicorn = (pytest.importorskip(name) for name in ("httpx", "openai", "uvicorn"))

import cli
import server as program
from engine import LLM
from server_parts.api import Settings, build_app
from server_parts.connection import uvicorn_config
from server_parts.replies import CompletionReply

GREEDY = {"model": "samebits", "temperature": 0, "max_tokens": 8}
STORY = "Once upon a time"


@contextlib.contextmanager
def serve(llm: LLM, on_lost=lambda: None, sockets=None, **settings):
    """A server in a thread, on sockets of its own or these; yields (its URL, its Service)."""
    app = build_app(llm, settings := Settings(**settings), on_lost)
    server = uvicorn.Server(uvicorn_config(app, settings.header_timeout, settings.send_timeout, port=0))
    thread = threading.Thread(target=server.run, args=[sockets], daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app.state.service
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served():
    llm = LLM(progress=False, num_gpu_blocks_override=64, max_num_seqs=32)
    with serve(llm) as (url, service):
        yield url, service
        assert_all_given_back(service)
        check_integrity(llm.scheduler)


@pytest.fixture
def url(served):
    yield served[0]
    assert_all_given_back(served[1])


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def assert_all_given_back(service, seconds: float = 10) -> None:
    """Soon after the last client has gone, no request, no block and no place in the queue is held."""
    blocks, deadline = service.llm.scheduler.blocks, time.monotonic() + seconds
    while service.engine.num_pending or service.llm.requests or len(blocks.free) != blocks.num_blocks:
        assert time.monotonic() < deadline, (service.engine.num_pending, service.llm.requests, len(blocks.free))
        time.sleep(0.02)


def post(url: str, path: str = "/v1/completions", **body) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


# Completions and chats.


def test_prompt_forms_give_one_answer(client, served):
    ids = served[1].llm.tokenizer.encode(STORY)
    texts = [[choice.text for choice in client.completions.create(prompt=prompt, **GREEDY).choices]
             for prompt in (STORY, [STORY, "The"], ids, [ids, ids])]
    assert texts[0] == texts[2] == texts[1][:1] == texts[3][:1] == texts[3][1:]
    assert texts[0] != texts[1][1:]


def test_answers_say_seed_and_fingerprint_and_repeat(client, served):
    request = {"model": "samebits", "prompt": STORY, "max_tokens": 12, "temperature": 1.0}
    drawn = client.completions.create(n=3, **request)
    assert drawn.system_fingerprint == served[1].llm.fingerprint
    assert drawn.seed == drawn.choices[0].seed and len({choice.text for choice in drawn.choices}) == 3
    for choice in drawn.choices:
        again = client.completions.create(seed=choice.seed, **request)
        assert again.choices[0].text == choice.text and again.seed == choice.seed
    assert drawn.usage.completion_tokens == 36 and drawn.usage.prompt_tokens == 4


def test_stop_and_its_reason(client):
    whole = client.completions.create(prompt=STORY, **GREEDY).choices[0]
    assert whole.finish_reason == "length"
    cut = client.completions.create(prompt=STORY, stop=[" little"], **GREEDY).choices[0]
    assert cut.text == whole.text[: whole.text.index(" little")]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", " little")
    ids = client.completions.create(prompt=STORY, extra_body={"return_token_ids": True}, **GREEDY).choices[0]
    assert len(ids.token_ids) == 8 and len(ids.prompt_token_ids) == 4
    by_id = client.completions.create(prompt=STORY, extra_body={"stop_token_ids": [ids.token_ids[3]]}, **GREEDY)
    assert by_id.choices[0].stop_reason == ids.token_ids[3]


def test_logprobs_echo_and_scoring_agree(client):
    answer = client.completions.create(prompt=STORY, logprobs=3, **GREEDY).choices[0]
    lists = answer.logprobs
    assert "".join(lists.tokens) == answer.text and len(lists.token_logprobs) == 8
    assert all(len(top) == 3 and max(top.values()) == value
               for top, value in zip(lists.top_logprobs, lists.token_logprobs))
    scored = client.completions.create(prompt=STORY + answer.text, logprobs=3, echo=True,
                                       **GREEDY | {"max_tokens": 0}).choices[0]
    assert scored.text == STORY + answer.text
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[-8:] == lists.token_logprobs  # prefill and decode, as exact floats
    echoed = client.completions.create(prompt=STORY, logprobs=3, echo=True, **GREEDY).choices[0]
    assert echoed.text == scored.text and echoed.logprobs == scored.logprobs
    ranked = client.completions.create(prompt=STORY, extra_body={"prompt_logprobs": 2}, **GREEDY).choices[0]
    assert ranked.prompt_logprobs[0] is None
    assert [next(iter(entry.values()))["logprob"] for entry in ranked.prompt_logprobs[1:]] == \
        scored.logprobs.token_logprobs[1:4]


def test_stream_is_the_whole_answer_in_pieces(client):
    request = dict(prompt=[STORY, "The dog"], model="samebits", n=2, seed=5, max_tokens=12, logprobs=2, temperature=0.9)
    whole = client.completions.create(**request)
    texts, values, reasons, usage = [""] * 4, [[] for _ in range(4)], [None] * 4, None
    seeds = [set() for _ in range(4)]
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            seeds[choice.index].add(choice.seed)
            values[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert seeds == [{choice.seed} for choice in whole.choices] and 5 in seeds[0]
    assert values == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_loop_that_falls_behind_says_more_at_once(client, monkeypatch):
    request = dict(prompt=STORY, model="samebits", seed=5, max_tokens=40, logprobs=2, extra_body={"ignore_eos": True})
    whole, chunks = client.completions.create(**request).choices[0], CompletionReply.chunks
    monkeypatch.setattr(CompletionReply, "chunks", lambda *args: time.sleep(0.2) or chunks(*args))
    pieces = [chunk.choices[0] for chunk in client.completions.create(stream=True, **request)]
    assert len(pieces) < 20
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [value for piece in pieces for value in piece.logprobs.token_logprobs] == whole.logprobs.token_logprobs
    assert [top for piece in pieces for top in piece.logprobs.top_logprobs] == whole.logprobs.top_logprobs


def test_chat_with_logprobs_streamed_and_whole(client):
    request = dict(model="samebits", seed=3, n=2, max_completion_tokens=10, logprobs=True, top_logprobs=2,
                   messages=[{"role": "developer", "content": "Be kind."},
                             {"role": "user", "content": [{"type": "text", "text": "Tell me "},
                                                          {"type": "text", "text": "a story."}]}])
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.role == "assistant"
    content = whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == whole.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    texts, streamed = ["", ""], [[], []]
    for chunk in client.chat.completions.create(stream=True, **request):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert streamed == [choice.logprobs.content for choice in whole.choices]
    plain = request | {"messages": [{"role": "system", "content": "Be kind."},
                                    {"role": "user", "content": "Tell me a story."}]}
    assert client.chat.completions.create(**plain).choices == whole.choices


def test_logit_bias_and_salt(client):
    biased = client.completions.create(prompt=STORY, logit_bias={"300": 100}, extra_body={"return_token_ids": True},
                                       **GREEDY)
    assert biased.choices[0].token_ids == [300] * 8
    long = STORY * 40
    cached = [client.completions.create(prompt=long, extra_body={"cache_salt": salt}, **GREEDY).usage
              .prompt_tokens_details.cached_tokens for salt in ("a", "a", "b")]
    assert cached[0] == cached[2] == 0 < cached[1]


# Refusals.

REFUSED = [  # what is sent beside a prompt, status, the field that is named
    ({"suffix": "x"}, 400, "suffix"), ({"best_of": 3}, 400, "best_of"), ({"guided_json": {}}, 400, "guided_json"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"), ({"receipt": "yes"}, 400, "receipt"),
    ({"temperature": -1}, 400, "temperature"), ({"temperature": "1"}, 400, "temperature"), ({"n": 0}, 400, "n"),
    ({"temperature": float("nan")}, 400, "temperature"), ({"n": True}, 400, "n"), ({"n": 129}, 400, "n"),
    ({"top_p": 0}, 400, "top_p"), ({"stop": ["a"] * 17}, 400, "stop"), ({"stop": [""]}, 400, "stop"),
    ({"receipt": True, "max_tokens": 0, "echo": True}, 400, "receipt"), ({"max_tokens": 0}, 400, "max_tokens"),
    ({"min_tokens": 99}, 400, "min_tokens"), ({"seed": 2**63}, 400, "seed"),
    ({"logprobs": 21}, 400, "logprobs"), ({"logit_bias": {"a": 1}}, 400, "logit_bias.a"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias"), ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"prompt": []}, 400, "prompt"), ({"prompt": [99999]}, 400, "prompt"), ({"prompt": "x " * 2000}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"), ({"stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"), ({"model": "other"}, 404, "model"),
]


def test_what_is_refused_names_its_field(url):
    for extra, status, param in REFUSED:
        response = httpx.post(url + "/v1/completions", content=json.dumps({"prompt": STORY} | extra),
                              headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), (extra, error)
        assert error["message"] and error["type"]
    for extra, param in (({"tool_choice": "required"}, "tool_choice"), ({"top_logprobs": 2}, "top_logprobs"),
                         ({"tools": [{"type": "web_search"}]}, "tools"), ({"logprobs": 3}, "logprobs"),
                         ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
                         ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
                         ({"messages": [{"role": "king", "content": ""}]}, "messages.0.role")):
        response = post(url, "/v1/chat/completions", **{"messages": [{"role": "user", "content": "Hi"}]} | extra)
        assert response.status_code == 400, extra
        assert response.json()["error"]["param"].startswith(param), response.text


def test_what_cannot_alter_the_answer_is_dropped(url):
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s",
                "prompt_cache_key": "k", "best_of": 1, "suffix": None, "response_format": {"type": "text"},
                "logit_bias": None, "stop": None, "seed": None}
    answers = [post(url, prompt=STORY, **GREEDY | extra).json()["choices"][0]["text"] for extra in ({}, harmless)]
    assert answers[0] == answers[1]


def test_the_client_raises_its_own_exceptions(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt=STORY, model="other")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(prompt=STORY, model="samebits", temperature=-1)
    assert [model.id for model in client.models.list()] == ["samebits"]
    assert client.models.retrieve("samebits").max_model_len == 1024
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")


def test_hostile_bodies(served, url):
    head = {"Content-Type": "application/json"}
    for body in (b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "\xff\xfe"}', b"\x00" * 1000, b"[" * 200_000,
                 b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}', b'{"prompt": "a", "\\ud800": 1}',
                 b'{"prompt": "a", "stop_\\udfff": 1}', b'{"prompt": "a", "temperature": 1e999}',
                 b'{"prompt": "a", "presence_penalty": -Infinity}', b'{"prompt": [1, 2.5]}', b'{"prompt": [[]]}'):
        response = httpx.post(url + "/v1/completions", content=body, headers=head)
        assert response.status_code == 400 and response.json()["error"]["message"], (body[:40], response.text)
    for_nobody = b'{"prompt": "a", "model": "\\udfff"}'
    assert httpx.post(url + "/v1/completions", content=for_nobody, headers=head).status_code == 404
    nested = b'{"a":' * 900 + b"1" + b"}" * 901
    deep = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": ' + nested
    assert httpx.post(url + "/v1/chat/completions", content=deep, headers=head, timeout=60).status_code in (200, 400)
    big = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
    for content in (big, (big[i : i + 100_000] for i in range(0, len(big), 100_000))):  # with its length, and chunked
        try:
            assert httpx.post(url + "/v1/completions", content=content, headers=head).status_code == 413
        except (httpx.WriteError, httpx.ReadError):
            pass  # hung up on while still sending
    assert httpx.post(url + "/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 400
    assert httpx.get(url + "/v1/completions").json()["error"]["message"] == "Method Not Allowed"
    assert httpx.get(url + "/nothing").status_code == 404


def test_key_queue_and_time_limits():
    llm = LLM(progress=False, num_gpu_blocks_override=32)
    with serve(llm, api_key="sécret", max_pending=4, max_tokens=9, body_timeout=0.5) as (url, service):
        headers = {"Authorization": "Bearer sécret".encode()}
        for wrong in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "sécret".encode()}):
            response = httpx.post(url + "/v1/completions", json={"prompt": "a"}, headers=wrong)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(url + "/health").status_code == 200
        with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
            def ask(**body):
                return http.post("/v1/completions", json={"prompt": STORY, "ignore_eos": True} | body)

            assert ask(max_tokens=10).json()["error"]["param"] == "max_tokens"
            assert ask(n=5).json()["error"]["param"] == "n"
            chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}],
                                                           "ignore_eos": True})
            assert chat.json()["usage"]["completion_tokens"] == 9  # the limit is also the default
            step, gate = llm.step, threading.Event()
            llm.step = lambda: gate.wait(20) and step()
            waiting = threading.Thread(target=ask, kwargs={"n": 3, "max_tokens": 4})
            waiting.start()
            while service.engine.num_pending < 3:
                time.sleep(0.01)
            refused = ask(n=2)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            gate.set()
            waiting.join()
            assert ask(n=2, max_tokens=4).status_code == 200
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall("POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sécret\r\nContent-Type: "
                         "application/json\r\nContent-Length: 100\r\n\r\n{".encode())
            assert b" 408 " in slow.recv(100)
        assert 'requests_rejected_total{model_name="samebits",reason="queue_full"} 1.0' in httpx.get(
            url + "/metrics").text


def test_pages_of_other_origins_may_call_only_if_named(url):
    ours = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type"}
    assert "access-control-allow-origin" not in httpx.get(url + "/v1/models", headers=ours).headers
    llm = LLM(progress=False, num_gpu_blocks_override=16)
    with serve(llm, api_key="k", allowed_origins=("https://a.example",)) as (guarded, _):
        for response in (httpx.options(guarded + "/v1/completions", headers=ours),
                         httpx.get(guarded + "/v1/models", headers=ours)):  # the second is refused, and may be read
            assert response.headers["access-control-allow-origin"] == "https://a.example"
        theirs = ours | {"Origin": "https://b.example"}
        assert httpx.options(guarded + "/v1/completions", headers=theirs).status_code == 400


# Load, and what goes wrong.


def test_64_clients_at_once(url):
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        request = dict(model="samebits", prompt=f"{STORY} {i % 4}", max_tokens=6, temperature=0)
        if i % 2:
            return (await client.completions.create(**request)).choices[0].text
        stream = await client.completions.create(stream=True, **request)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def every() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    texts = asyncio.run(every())
    assert all(text == texts[i % 4] for i, text in enumerate(texts)) and all(texts)


def test_clients_that_leave_are_aborted(served, url, client):
    long = {"model": "samebits", "prompt": STORY, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(stream=True, n=2, **long)
    next(iter(stream))
    stream.close()
    assert_all_given_back(served[1], 5)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**long)
    assert_all_given_back(served[1], 5)


def test_a_failed_step_fails_its_own_requests(served, url, client, monkeypatch):
    llm = served[1].llm
    launch, calls = llm.runner.launch, []

    def fail_on_the_third(seqs):
        calls.append(len(seqs))
        if len(calls) == 3:
            raise RuntimeError("no such kernel")
        return launch(seqs)

    monkeypatch.setattr(llm.runner, "launch", fail_on_the_third)
    with pytest.raises(openai.InternalServerError, match="RuntimeError"):
        client.completions.create(prompt=STORY, **GREEDY)
    calls.clear()
    with pytest.raises(openai.APIError, match="RuntimeError"):
        list(client.completions.create(prompt=STORY, stream=True, **GREEDY))
    assert client.completions.create(prompt=STORY, **GREEDY).choices[0].text
    monkeypatch.setattr(LLM, "_absorb", lambda self, seq, result: (
        setattr(self._live[seq][0], "error", "a NaN"), self._finish(seq, "error")))
    with pytest.raises(openai.InternalServerError, match="a NaN"):
        client.completions.create(prompt=STORY, **GREEDY)
    assert "samebits:failed_steps_total" in httpx.get(url + "/metrics").text


def test_a_lost_engine_is_said_loudly():
    llm, lost = LLM(progress=False, num_gpu_blocks_override=16), threading.Event()
    with serve(llm, lost.set) as (url, _):
        llm.device = torch.device("cuda")  # the check after a failed step finds no device
        llm.step = lambda: 1 / 0
        assert post(url, prompt=STORY).status_code == 500
        assert lost.wait(10)
        assert httpx.get(url + "/health").status_code == post(url, prompt=STORY).status_code == 503


def test_tokenizing_holds_up_nobody(served, url, monkeypatch):
    tokenizer, encode = served[1].llm.tokenizer, served[1].llm.tokenizer.encode
    entered = threading.Event()

    def slow(*args):
        entered.set()
        time.sleep(1.5)
        return encode(*args)

    monkeypatch.setattr(tokenizer, "encode", slow)
    asking = threading.Thread(target=post, args=(url,), kwargs=dict(prompt=STORY, **GREEDY))
    asking.start()
    assert entered.wait(5)
    start = time.monotonic()
    assert httpx.get(url + "/health").status_code == 200
    assert post(url, prompt=[5, 6, 7], **GREEDY).status_code == 200
    assert time.monotonic() - start < 1.2 and asking.is_alive()
    asking.join()


def test_metrics_follow_the_requests(url, client):
    client.completions.create(prompt=STORY, **GREEDY)
    text = httpx.get(url + "/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
                 "prefix_cache_hits_total", "prefix_cache_queries_total", "time_to_first_token_seconds_bucket",
                 "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
                 "generation_tokens_total", "prompt_tokens_total"):
        assert f"samebits:{name}{{" in text, name


def start_program(*args: str) -> tuple[subprocess.Popen, str, list[str]]:
    process = subprocess.Popen([sys.executable, "server.py", "--port", "0", "--num-gpu-blocks-override", "32", *args],
                               cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = []
    for line in process.stderr:
        lines.append(line)
        if '"serving"' in line:
            return process, json.loads(line)["url"], lines
    raise AssertionError("".join(lines))


def test_a_taken_address_is_said_before_the_model_is_read(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert program.main(["--port", str(taken.getsockname()[1]), "--model", "none"]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_the_engines_options_are_those_of_its_own_command_line():
    args = program.build_parser().parse_args(["--max-num-seqs", "3", "--dtype", "float32"])
    assert cli.chosen(args, LLM).keys() >= {"model", "dtype", "max_num_seqs", "num_gpu_blocks_override", "schedule"}
    with pytest.raises(SystemExit):
        program.main(["--max-n", "0"])


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_drains_and_a_second_one_stops(signals):
    process, url, lines = start_program()
    try:
        with openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(model="models/embedded", prompt="A secret prompt", stream=True,
                                               max_tokens=60 if signals == 1 else 900, extra_body={"ignore_eos": True})
            chunks = iter(stream)
            next(chunks)
            assert httpx.get(url + "/health", headers={"Host": "elsewhere.example"}).status_code == 421
            process.send_signal(signal.SIGTERM)
            if signals == 1:
                reasons = [chunk.choices[0].finish_reason for chunk in chunks]
                assert reasons[-1] == "length"
            else:
                time.sleep(0.3)
                process.send_signal(signal.SIGTERM)
                start = time.monotonic()
                process.wait(10)
                assert time.monotonic() - start < 5
        lines += process.communicate(timeout=20)[1].splitlines()
    finally:
        process.kill()
    assert process.returncode == signals - 1
    assert "secret" not in "".join(lines)
    assert all(json.loads(line)["time"] for line in lines)
