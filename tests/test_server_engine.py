"""The thread that owns the engine, at its end."""

import asyncio
import threading

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from engine import LLM
from sampler import SamplingParams
from server_parts.engine_thread import EngineThread, Job
from server_parts.metrics import Metrics


def test_who_is_queued_when_the_engine_dies_is_told():
    """A job that arrives during the last step, and one that comes after it between `reserve` and `submit`."""
    llm = LLM(progress=False, num_gpu_blocks_override=16)
    stepping, dying = threading.Event(), threading.Event()

    def die():
        stepping.set()
        dying.wait(10)
        raise KeyboardInterrupt

    llm.step = die

    async def run() -> list[int]:
        engine = EngineThread(llm, Metrics(llm, "test"), 10)
        engine.start(asyncio.get_running_loop())
        jobs = [Job(0, [1, 2], SamplingParams(max_tokens=2), asyncio.Queue()) for _ in range(3)]
        engine.reserve(3)
        engine.submit(jobs[:1])
        await asyncio.to_thread(stepping.wait, 10)
        engine.submit(jobs[1:2])
        dying.set()
        await asyncio.to_thread(engine._thread.join, 10)
        engine.submit(jobs[2:])
        statuses = []
        for job in jobs:
            while not (event := await asyncio.wait_for(job.events.get(), 10)).is_last:
                pass
            statuses.append(event.error.status)
        assert engine.num_pending == 0
        return statuses

    assert asyncio.run(run()) == [500, 503, 503]
