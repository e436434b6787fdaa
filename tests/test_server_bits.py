"""The promise through HTTP: what a loaded server answers is, bit for bit, what the library says alone."""

import asyncio
import random

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from test_server import assert_all_given_back, serve

from engine import LLM, SamplingParams

NUM_REQUESTS, NUM_AT_ONCE = 60, 24
WORDS = ["once", "upon", "a", "time", "there", "was", "little", "dog", "who", "lived", "near", "the", "old", "mill"]


def make_requests(rng: random.Random) -> list[dict]:
    """Prompts of all lengths, half of them behind a shared prefix that the cache will know; all kinds of sampling."""
    shared = " ".join(rng.choices(WORDS, k=48))
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = (shared if i % 2 else "") + " " + " ".join(rng.choices(WORDS, k=rng.choice([1, 7, 30])))
        kind = rng.choice([{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20},
                           {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1}])
        requests.append({"prompt": prompt, "seed": rng.randrange(2**53), "max_tokens": rng.choice([1, 2, 6, 16]),
                         "logprobs": rng.choice([0, 2]), "n": rng.choice([1, 1, 1, 2]), **kind})
    return requests


async def ask(http: httpx.AsyncClient, request: dict, stream: bool) -> list[tuple[list[int], list[float]]]:
    """Token ids and logprobs of each choice; JSON carries a float64 exactly."""
    body = request | {"return_token_ids": True}
    if not stream:
        choices = (await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"]
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
    answers = [([], []) for _ in range(request["n"])]
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in httpx.Response(200, content=line[6:]).json()["choices"]:
                    if "token_ids" in choice:
                        answers[choice["index"]][0].extend(choice["token_ids"])
                        answers[choice["index"]][1].extend(choice["logprobs"]["token_logprobs"])
    return answers


async def leave(http: httpx.AsyncClient, request: dict, after: float) -> None:
    """A client that asks for a long answer and goes away."""
    try:
        await asyncio.wait_for(ask(http, request | {"max_tokens": 200, "ignore_eos": True}, after > 0.3), after)
    except asyncio.TimeoutError:
        pass


def test_answers_under_load_are_those_given_alone():
    rng = random.Random(7)
    requests = make_requests(rng)
    alone = LLM(progress=False, num_gpu_blocks_override=64, enable_prefix_caching=False)
    expected = []
    for request in requests:
        params = {name: value for name, value in request.items() if name != "prompt"}
        outputs = alone.generate(request["prompt"], SamplingParams(**params))[0].outputs
        expected.append([(out.token_ids, out.logprobs) for out in outputs])

    # Few blocks and a small step, so that requests are chunked and preempted; the order is not that of `expected`.
    llm = LLM(progress=False, num_gpu_blocks_override=6, max_num_seqs=16, max_num_batched_tokens=96)

    async def everything(url: str) -> list:
        turn = asyncio.Semaphore(NUM_AT_ONCE)

        async def one(i: int):
            async with turn:
                await asyncio.sleep(rng.random() * 0.05)
                return i, await ask(http, requests[i], stream=i % 3 == 0)

        async def gone(i: int):
            async with turn:
                await leave(http, requests[i], rng.choice([0.01, 0.1, 0.4, 0.8]))

        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            jobs = [one(i) for i in range(NUM_REQUESTS)] + [gone(i) for i in range(0, NUM_REQUESTS, 4)]
            rng.shuffle(jobs)
            return [done for done in await asyncio.gather(*jobs) if done is not None]

    with serve(llm) as (url, service):
        answers = asyncio.run(everything(url))
        assert_all_given_back(service)
        assert llm.scheduler.num_preemptions > 0, "the cache was not tight enough to test anything"
        llm.scheduler.check_integrity()
    assert len(answers) == NUM_REQUESTS
    wrong = [i for i, answer in answers if answer != expected[i]]  # no NaN, no -0.0: equal floats are equal bits
    assert not wrong, f"{len(wrong)} answers moved under load, first {requests[wrong[0]]}"
