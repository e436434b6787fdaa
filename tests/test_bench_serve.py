"""`bench.py serve` on the embedded model: what it prints, and what it refuses to print."""

import asyncio
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("openai")

from test_bench import TINY_LOADS
from test_server import assert_all_given_back, serve

import bench
from benchmarks.client import Client
from benchmarks.twins import batch_dependent
from engine import LLM
from kernels import reference_ops


@pytest.fixture
def call(capsys, monkeypatch):
    """call(*arguments) -> (exit code, lines of stdout, stderr), with small loads and short probes."""
    monkeypatch.setattr("benchmarks.workloads.SMALL", TINY_LOADS)
    monkeypatch.setattr("benchmarks.serve.PROBE_TOKENS", 6)

    def run(*args: str) -> tuple[int, list[str], str]:
        code = bench.main(["serve", *args, "--workloads", "small"])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return run


def test_our_own_server_is_swept_and_compared_with_the_library(call, tmp_path):
    file = tmp_path / "serve.json"
    code, lines, err = call("--device", "cpu", "--rates", "5,20", "--seconds", "0.5", "--probe-every", "0.1", "--reps",
                            "1", "--json", str(file))
    assert code == 0, err
    result = json.loads(lines[-1])
    assert result == json.loads(file.read_text())
    assert [row["rate"] for row in result["rates"]] == [5, 20]
    for row in result["rates"]:
        assert row["completed"] == row["requests"] and row["errors"] == {} and row["probes"] > 0
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"] and 0 < row["tpot_p50_s"] <= row["tpot_p99_s"]
        assert row["out_tokens_per_s"] > row["requests_per_s"] > 0
    price = result["overhead"]
    assert price["percent"] == pytest.approx((price["http_s"] / price["offline_s"] - 1) * 100)
    assert any("same bits" in line for line in lines) and any("TTFT p50" in line for line in lines)


def test_any_server_may_be_asked_and_its_errors_count(call, monkeypatch):
    """One that knows OpenAI's fields alone, and has little room."""
    monkeypatch.setattr("benchmarks.serve.ONLY_OURS", {"ignore_eos": True, "something_new": True})
    llm = LLM(progress=False, num_gpu_blocks_override=32)
    with serve(llm, max_pending=3) as (url, service):
        code, lines, err = call("--base-url", url + "/v1", "--rates", "60", "--seconds", "0.5", "--probe-every", "0.05",
                                "--user", "1,8,30", "--workload", "U", "--vocab-size", str(llm.config.vocab_size))
        assert code == 0, err
        (row,) = json.loads(lines[-1])["rates"]
        assert row["errors"].keys() == {"HTTP 429"} and row["completed"] + row["errors"]["HTTP 429"] == 30
        assert row["completed"] > 0
        assert_all_given_back(service)
        code, _, err = call("--base-url", url + "/v1", "--model", "another", "--rates", "1")
        assert code == 2 and "'another' is not served here" in err


def test_no_speed_where_bits_follow_the_load(call, tmp_path):
    llm = LLM(progress=False, num_gpu_blocks_override=64, ops=batch_dependent(reference_ops()))
    with serve(llm) as (url, service):
        args = ("--base-url", url + "/v1", "--rates", "30", "--seconds", "1", "--user", "1,20,20", "--workload", "U",
                "--vocab-size", str(llm.config.vocab_size), "--json", str(tmp_path / "serve.json"))
        code, lines, err = call(*args, "--probe-every", "0.1")
        assert code == 1 and "no speed is worth printing" in err
        assert len(lines) == 1 and json.loads(lines[0]).keys() == {"error"}
        assert json.loads((tmp_path / "serve.json").read_text()).keys() == {"error"}
        assert_all_given_back(service, 20)
        code, lines, _ = call(*args, "--probe-every", "0")
        assert code == 0 and any("not asked" in line for line in lines)


def test_what_cannot_be_measured_is_said(call):
    for args, words in ((("--rates", "0"), "--rates"), (("--workload", "X"), "'X'"), (("--user", "1,2"), "--user"),
                        (("--base-url", "http://127.0.0.1:9/v1"), "Connect call failed"),
                        (("--no-overhead", "--device", "cpu", "--server-args=--max-n=0"), "the server did not start")):
        code, lines, err = call(*args)
        assert code == 2 and words in err and not lines, (args, err)


@pytest.mark.parametrize("answer, fails", [
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n8\r\n{\"a\": 1}\r\n0\r\n\r\n", False),
    (b"\r\n\r\n", True), (b"SSH-2.0-x\r\n\r\n", True)])
def test_the_client_knows_http_when_it_sees_it(answer, fails):
    async def run():
        async def say(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            return await Client(f"http://{host}:{port}", None).fetch("GET", "/")

    if fails:
        with pytest.raises(ConnectionError, match="no HTTP"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == {"a": 1}


def test_the_first_request_is_not_behind_all_connections():
    """A thousand connections that are opened before a request is written would count as the server's time."""
    opened, first = 0, []

    async def answer(reader, writer):
        nonlocal opened
        opened += 1
        await reader.readuntil(b"\r\n\r\n")
        first.append(opened)
        await asyncio.sleep(0.05)  # many wait for answers at once
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def load():
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        got = await asyncio.gather(*(client.fetch("GET", "/") for _ in range(200)))
        server.close()
        return got

    assert asyncio.run(load()) == [{}] * 200
    assert first[0] < 64 and opened == 200
