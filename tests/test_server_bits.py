"""The promise through HTTP: what a loaded server answers is, bit for bit, what the library says alone."""

import asyncio
import json
import random

import numpy as np
import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from conftest import check_integrity
from test_server import assert_all_given_back, serve

from engine import LLM, SamplingParams

NUM_REQUESTS, NUM_TWICE, NUM_LEAVING = 200, 30, 30
WORDS = ["once", "upon", "a", "time", "there", "was", "little", "dog", "who", "lived", "near", "the", "old", "mill"]


def make_requests(rng: random.Random) -> list[dict]:
    """Prompts of all lengths, some behind a shared prefix that the cache will know (it keeps blocks of 64 tokens), some
    that need a second block while they are answered; all kinds of sampling."""
    shared = rng.choices(WORDS, k=68)
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = " ".join(shared[: (68, 0, 62, 0, 0, 0)[i % 6]] + rng.choices(WORDS, k=rng.choice([1, 3, 12])))
        kind = rng.choice([{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20},
                           {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1}])
        requests.append({"prompt": prompt, "seed": rng.randrange(2**53), "max_tokens": rng.choice([1, 2, 3, 4]),
                         "logprobs": rng.choice([0, 2]), "n": rng.choice([1, 1, 1, 1, 2]), **kind})
    return requests


def bits(token_ids: list[int], logprobs: list[float]) -> tuple[list[int], list[int]]:
    """As integers, all 64 bits of each number: JSON carries a double exactly."""
    return token_ids, np.array(logprobs, np.float64).view(np.int64).tolist()


async def ask(http: httpx.AsyncClient, request: dict, stream: bool) -> tuple[list, int]:
    """The bits of each choice, and how many prompt tokens came from the cache."""
    body = request | {"return_token_ids": True}
    if not stream:
        answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
        chunks = [answer]
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            chunks = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]
    found = [([], []) for _ in range(request["n"])]
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if "token_ids" in choice):
        found[choice["index"]][0].extend(choice["token_ids"])
        found[choice["index"]][1].extend(choice["logprobs"]["token_logprobs"])
    return [bits(*choice) for choice in found], chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


async def leave(http: httpx.AsyncClient, request: dict, after: float) -> None:
    """A client that asks for a long answer and goes away."""
    try:
        await asyncio.wait_for(ask(http, request | {"max_tokens": 200, "ignore_eos": True}, after > 0.3), after)
    except asyncio.TimeoutError:
        pass


def test_answers_under_load_are_those_given_alone():
    """Whole or streamed, and some both ways, at random times and among clients that come and leave."""
    rng = random.Random(7)
    requests = make_requests(rng)
    alone = LLM(progress=False, num_gpu_blocks_override=64, enable_prefix_caching=False)
    expected = []
    for request in requests:
        params = {name: value for name, value in request.items() if name != "prompt"}
        outputs = alone.generate(request["prompt"], SamplingParams(**params))[0].outputs
        expected.append([bits(out.token_ids, out.logprobs) for out in outputs])

    # Few blocks and a small step, so that requests are chunked and preempted; the order is not that of `expected`.
    llm = LLM(progress=False, num_gpu_blocks_override=5, max_num_seqs=16, max_num_batched_tokens=96)

    async def everything(url: str) -> list:
        at_once = 64

        async def one(i: int, stream: bool):
            return i, *await ask(http, requests[i], stream)

        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            jobs = [one(i, i % 3 == 0) for i in range(NUM_REQUESTS)] + [one(i, i % 3 > 0) for i in range(NUM_TWICE)]
            jobs += [leave(http, rng.choice(requests), rng.choice([0.01, 0.1, 0.4])) for _ in range(NUM_LEAVING)]
            rng.shuffle(jobs)
            under_way, done = set(), []
            for job in jobs:
                under_way.add(asyncio.create_task(job))
                at_once = rng.choice([1, 4, 24, 64]) if rng.random() < 0.05 else at_once
                while len(under_way) >= at_once:
                    ended, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                    done += [task.result() for task in ended]
            return [found for found in done + await asyncio.gather(*under_way) if found]

    with serve(llm) as (url, service):
        answers = asyncio.run(everything(url))
        assert_all_given_back(service)
        assert llm.scheduler.num_preemptions > 0, "the cache was not tight enough to test anything"
        check_integrity(llm.scheduler)
    assert len(answers) == NUM_REQUESTS + NUM_TWICE
    cached = [count for *_, count in answers]
    assert min(cached) == 0 and sum(count > 0 for count in cached) > 5, "cold and warm prompts were wanted"
    wrong = [i for i, answer, _ in answers if answer != expected[i]]
    assert not wrong, f"{len(wrong)} answers moved under load, first {requests[wrong[0]]}"
