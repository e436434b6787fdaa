"""The one thread that steps the engine. HTTP hands it jobs through a queue and reads what comes of them from another.

Nothing here waits for a client, and nothing in the event loop waits for the engine: commands go in by a thread-safe
queue, and each step's events go back to the loop in one call, which sorts them into their requests' own queues.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from engine import LLM, RequestOutput
from sampler import SamplingParams
from server_parts.metrics import Metrics
from server_parts.protocol import RequestError

log = logging.getLogger("samebits.engine")


@dataclass(eq=False)
class Job:
    """One prompt of an HTTP request, as the engine thread takes it. `output` belongs to the engine until it is done."""

    index: int  # of the prompt in its HTTP request
    prompt_ids: list[int]
    params: SamplingParams
    events: "asyncio.Queue[Event]" = None  # one for all jobs of the HTTP request, made in the event loop
    is_streamed: bool = False
    score_only: bool = False
    cache_salt: str | None = None
    output: RequestOutput | None = None
    sent: list[tuple[int, int]] = field(default_factory=list)  # of each completion: tokens and characters told
    is_done: bool = False  # as the event loop knows it


@dataclass(frozen=True)
class Part:
    """What one completion gained since it was last told."""

    index: int
    seed: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class Event:
    """The first of a job says that it was accepted (or why not); the last, that it is done, well or with an error."""

    job: Job
    parts: list[Part] = field(default_factory=list)
    is_last: bool = False
    error: RequestError | None = None


class EngineThread:
    """Owns the `LLM` from `start` to `close`: no other thread may call it.

    max_pending: most completions accepted and unfinished, running or waiting. on_lost is called, from the thread,
    when the device no longer answers or the thread itself failed: there is nothing left to serve with.
    """

    def __init__(self, llm: LLM, metrics: Metrics, max_pending: int, on_lost: Callable[[], None] = lambda: None):
        self.llm, self.metrics, self.max_pending, self.on_lost = llm, metrics, max_pending, on_lost
        self.is_alive = False
        self.num_pending = 0  # the event loop's own count
        self._commands: queue.SimpleQueue[tuple[str, list[Job]]] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}  # by the LLM's request id
        self._outbox: list[Event] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from the event loop.

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.is_alive = loop, True
        self._thread.start()

    def reserve(self, count: int) -> None:
        """Take room for the completions of one HTTP request, before any work is done for it. Raises RequestError 429
        if there is none now, 400 if there never is, 503 if the engine is gone."""
        if not self.is_alive:
            raise RequestError(503, "the engine is not running")
        if count > self.max_pending:
            raise RequestError(400, f"{count} completions in one request; this server takes {self.max_pending}", "n")
        if self.num_pending + count > self.max_pending:
            self.metrics.rejected("queue_full").inc()
            raise RequestError(429, f"{self.num_pending} completions are under way, and {self.max_pending} is the "
                                    "limit: try again later", code="queue_full")
        self.num_pending += count

    def release(self, count: int) -> None:
        """Give reserved room back; each submitted job does so itself when it is done."""
        self.num_pending -= count

    def submit(self, jobs: list[Job]) -> None:
        """Queue the jobs of one HTTP request, for which there is room."""
        self._commands.put(("add", jobs))
        if not self.is_alive:  # it ended since there was room
            self._deliver(self._refusals())

    def abort(self, jobs: list[Job]) -> None:
        """End these jobs wherever they are; those that are done stay done."""
        self._commands.put(("abort", jobs))

    def close(self, timeout: float = 10.0) -> None:
        """Abort what is left and end the thread, waiting at most `timeout` seconds for its step."""
        if self._thread.ident is not None:
            self._commands.put(("close", []))
            self._thread.join(timeout)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if event.is_last:
                event.job.is_done = True
                self.release(event.job.params.n)
            event.job.events.put_nowait(event)

    # Called from the thread.

    def _run(self) -> None:
        try:
            while self._obey():
                if self.llm.has_unfinished_requests:
                    self._step()
                self._flush()
        except BaseException:
            log.critical("the engine thread ended", exc_info=True)
            self.is_alive = False
            self._fail(list(self._jobs.values()), "the engine stopped")
            self._outbox += self._refusals()
            self._flush()  # before the server drains: what it waits for must have been told
            self.on_lost()
        finally:
            self.is_alive = False
            self._outbox += self._refusals()
            self._flush()

    def _obey(self) -> bool:
        """Carry out the commands that have come, waiting for one if there is nothing to step. False: close."""
        while not (self._commands.empty() and self.llm.has_unfinished_requests):
            if self._commands.empty():
                self._flush()  # before a wait of any length
            name, jobs = self._commands.get()
            if name == "add":  # all of a request's jobs before any step, so that their first events come first
                for job in jobs:
                    self._add(job)
            else:
                for job in jobs if name == "abort" else list(self._jobs.values()):
                    if job.output is not None:  # else it was not accepted
                        self.llm.abort(job.output.request_id)
                        self._publish(job)
            if name == "close":
                return False
        return True

    def _add(self, job: Job) -> None:
        try:
            request_id = self.llm.add_request(job.prompt_ids, job.params, cache_salt=job.cache_salt,
                                              score_only=job.score_only)
        except ValueError as error:
            self._outbox.append(Event(job, is_last=True, error=RequestError(400, str(error))))
            return
        job.output = self.llm.requests[request_id]
        job.sent = [(0, 0)] * len(job.output.outputs)
        self._jobs[request_id] = job
        self._outbox.append(Event(job))

    def _step(self) -> None:
        try:
            outputs = self.llm.step()
        except Exception as error:
            log.error("a step failed", exc_info=True)
            self.metrics.failed_steps.inc()
            ended = [job for job in self._jobs.values() if job.output.finished]
            aborted = [job for job in ended if any(out.finish_reason == "abort" for out in job.output.outputs)]
            self._fail(aborted, f"a step failed with {type(error).__name__}; the server's log says more")
            for job in ended:
                self._publish(job)
            if self.llm.device.type == "cuda":
                torch.cuda.synchronize(self.llm.device)  # raises if the device is lost: the end of this thread
            if self.llm.runner.kv_cache is None:
                raise  # so is the engine, without its other ranks
            return
        for output in outputs:
            if job := self._jobs.get(output.request_id):
                self._publish(job)

    def _publish(self, job: Job) -> None:
        """Tell what is new: each step to a streamed job, the end to any."""
        output = job.output
        if output.request_id not in self._jobs:
            return
        if output.finished:
            del self._jobs[output.request_id]
            self.metrics.observe(output)
            if output.error:
                self._outbox.append(Event(job, is_last=True, error=RequestError(500, output.error)))
                return
        parts = self._news(job) if job.is_streamed else []
        if parts or output.finished:
            self._outbox.append(Event(job, parts, output.finished))

    def _news(self, job: Job) -> list[Part]:
        """Copies, since the engine goes on writing to the outputs."""
        parts = []
        for i, out in enumerate(job.output.outputs):
            tokens, characters = job.sent[i]
            is_told = tokens < 0  # its end, too
            if is_told or (out.finish_reason is None and len(out.token_ids) == tokens):
                continue
            parts.append(Part(i, out.seed, out.text[characters:], out.token_ids[tokens:],
                              None if out.logprobs is None else out.logprobs[tokens:],
                              None if out.top_logprobs is None else out.top_logprobs[tokens:],
                              out.finish_reason, out.stop_reason))
            job.sent[i] = (-1, -1) if out.finish_reason else (len(out.token_ids), len(out.text))
        return parts

    def _fail(self, jobs: list[Job], message: str) -> None:
        for job in jobs:
            del self._jobs[job.output.request_id]
            self._outbox.append(Event(job, is_last=True, error=RequestError(500, message)))

    def _refusals(self) -> list[Event]:
        """What to tell the jobs that are still queued when nobody will take them."""
        queued: list[Job] = []
        with suppress(queue.Empty):
            while True:
                name, jobs = self._commands.get_nowait()
                queued += jobs if name == "add" else []
        return [Event(job, is_last=True, error=RequestError(503, "the engine stopped")) for job in queued]

    def _flush(self) -> None:
        """Hand this round's events to the loop, in one wake-up."""
        if self._outbox:
            events, self._outbox = self._outbox, []
            try:
                self._loop.call_soon_threadsafe(self._deliver, events)
            except RuntimeError:
                pass  # the loop is closed: nobody is left to tell
