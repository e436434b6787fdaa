"""Clients as the internet has them: gone, slow to write, slow to read, or calling by a name that is not ours."""

import gc
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from conftest import check_integrity
from test_server import STORY, assert_all_given_back, post, serve

from engine import LLM
from server import is_loopback
from server_parts import connection

STATM = Path("/proc/self/statm")


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def message(**body) -> bytes:
    """A whole request for a completion, as bytes."""
    content = json.dumps({"prompt": STORY, "ignore_eos": True} | body).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(content)) + content


def answer(client: socket.socket) -> tuple[int, dict]:
    """Status and error of what the server says before it hangs up."""
    client.settimeout(10)
    received = b""
    while data := client.recv(4096):
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def drip(client: socket.socket, seconds: float) -> None:
    """A byte now and then, for ever, or until nobody listens."""
    def send() -> None:
        try:
            while True:
                client.sendall(b"x")
                time.sleep(seconds)
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()


def test_1000_clients_that_connect_and_drop():
    """All kinds of half requests, and long answers nobody waits for: objects, memory and blocks are as before."""
    llm, rng = LLM(progress=False, num_gpu_blocks_override=64, max_num_seqs=32), random.Random(0)
    whole = message(max_tokens=500, stream=True)

    def drop(url: str, count: int) -> None:
        for i in range(count):
            with socket.create_connection(address(url)) as client:
                if i % 2:
                    client.sendall(whole[: rng.randrange(len(whole) + 1)])
                elif i % 4:
                    client.sendall(whole)
                    client.recv(rng.randrange(1, 200))

    def held() -> tuple[int, int]:
        gc.collect()
        pages = int(STATM.read_text().split()[1]) if STATM.exists() else 0
        return len(gc.get_objects()), pages * os.sysconf("SC_PAGE_SIZE")

    with serve(llm) as (url, service):
        drop(url, 200)  # what is made once is made now
        assert_all_given_back(service, 20)
        objects, size = held()
        drop(url, 1000)
        assert_all_given_back(service, 20)
        more_objects, more_size = held()
        assert more_objects - objects < 500 and more_size - size < 8 << 20, (more_objects - objects, more_size - size)
        assert post(url, prompt=STORY, max_tokens=2).status_code == 200
    check_integrity(llm.scheduler)


def test_slow_writers_are_hung_up_on():
    """Whoever is slow with a head, a first or a later one, or goes on with a body that was answered, is not waited
    for; what is no HTTP is told so as everything else is."""
    llm = LLM(progress=False, num_gpu_blocks_override=16)
    with serve(llm, header_timeout=0.6, max_body_bytes=1000) as (url, _):
        silent, slow, again, refused, garbage = clients = [socket.create_connection(address(url)) for _ in range(5)]
        slow.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        drip(slow, 0.05)
        again.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 200 " in again.recv(4096)
        again.sendall(b"GET /health HT")
        refused.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                        b"Transfer-Encoding: chunked\r\n\r\n800\r\n" + b" " * 0x800)
        assert b" 413 " in refused.recv(4096)
        refused.sendall(b"\r\n1000000\r\n")
        drip(refused, 0.05)
        start = time.monotonic()
        garbage.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, error = answer(garbage)
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert post(url, prompt=STORY, max_tokens=2).status_code == 200
        for client in (silent, slow, again):
            status, error = answer(client)
            assert status == 408 and "0.6 seconds" in error["message"]
        refused.settimeout(10)
        try:
            while refused.recv(4096):
                pass
        except ConnectionResetError:
            pass  # hung up on with bytes on the way
        assert 0.4 < time.monotonic() - start < 10
        for client in clients:
            client.close()


def narrow_listener() -> socket.socket:
    """A socket whose connections hold little that was not read, so that the server soon notices."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    return listener


def narrow_client(url: str, **body) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(address(url))
    client.sendall(message(**body))
    return client


def assert_cut_off(client: socket.socket) -> None:
    """What was on its way still comes, and no end of it."""
    received = b""
    while data := client.recv(1 << 16):
        received += data
    assert received and b"[DONE]" not in received and not received.endswith(b"}")
    client.close()


def test_slow_readers_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(connection, "LEAST_READ", 1 << 13)
    llm = LLM(progress=False, num_gpu_blocks_override=64)
    large = dict(prompt=list(range(5, 305)), prompt_logprobs=20, max_tokens=1)
    with serve(llm, sockets=[narrow_listener()], send_timeout=0.6) as (url, service):
        stuck = narrow_client(url, max_tokens=900, logprobs=20, stream=True)
        assert stuck.recv(100)
        begin, told = time.monotonic(), []
        while service.engine.num_pending:
            told += [len(request.outputs[0].token_ids) for request in list(llm.requests.values())]
            start = time.monotonic()
            assert post(url, prompt=STORY, max_tokens=2).status_code == 200
            assert time.monotonic() - start < 5 and start - begin < 20
        assert told[0] < max(told) < 900, "the engine went on for it, until it was cut off"
        assert_cut_off(stuck)
        stuck = narrow_client(url, **large)
        while not service.engine.num_pending:
            time.sleep(0.01)
        assert_all_given_back(service)
        time.sleep(1)
        assert_cut_off(stuck)

        # Slow is no crime, as long as something is taken in each such time.
        steady, received, begin = narrow_client(url, **large), b"", time.monotonic()
        while not received.endswith(b"]}") and (data := steady.recv(1 << 12)):
            received += data
            time.sleep(0.04)
        assert time.monotonic() - begin > 1.5
        choice = json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]
        assert len(choice["prompt_logprobs"]) == 300
        steady.close()


def test_every_loopback_address_is_local():
    local = {host: is_loopback(host) for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost", "0.0.0.0", "::", "box")}
    assert [host for host in local if local[host]] == ["127.0.0.1", "127.0.0.2", "::1", "localhost"]


def test_only_our_own_names_are_answered_to():
    """A page of rebound.example, whose name leads to this machine, sends that name."""
    llm = LLM(progress=False, num_gpu_blocks_override=16)
    ours = ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:80", "box.example:8000")
    others = ("rebound.example", "rebound.example:8000", "localhost.rebound.example", "127.0.0.1.nip.io", "", "[",
              "::1", "localhost:80:80", "[::1", "[localhost", "[localhost]", "evil@localhost", "127.0.0.2")
    with serve(llm, allowed_hosts=("localhost", "127.0.0.1", "::1", "Box.Example")) as (url, _), \
            httpx.Client(base_url=url) as http:
        for host in ours:
            assert http.get("/health", headers={"Host": host}).status_code == 200, host
        for host in others:
            for path in ("/", "/health", "/metrics", "/v1/models"):
                response = http.get(path, headers={"Host": host})
                assert (response.status_code, response.json()["error"]["code"]) == (421, "host_not_allowed"), host
        with socket.create_connection(address(url)) as client:
            client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert answer(client)[0] == 421


def test_a_refused_prompt_ends_the_others_of_its_request():
    """One request, two prompts, the second too long: the first, accepted by then, is not generated to its end."""
    llm = LLM(progress=False, num_gpu_blocks_override=64, max_num_seqs=8)
    steps, step = [], llm.step
    llm.step = lambda: steps.append(1) or step()
    with serve(llm) as (url, service):
        refused = post(url, prompt=[[5, 6], [7] * 2000], max_tokens=900, ignore_eos=True)
        assert refused.status_code == 400 and "2000 tokens" in refused.json()["error"]["message"]
        assert_all_given_back(service)
    assert len(steps) < 450, "it went on for nobody"
