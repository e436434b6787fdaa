"""The HTTP application: OpenAI's routes over one `EngineThread`.

One request's way: gate.py lets it in, pydantic checks it, a worker thread renders and tokenizes its prompts, the engine
thread accepts them (or says why not), and replies.py turns what comes of them into OpenAI's objects.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from engine import LLM
from server_parts.chat_parsing import CALL, THINK
from server_parts.engine_thread import EngineThread, Event, Job
from server_parts.gate import Gate
from server_parts.metrics import Metrics
from server_parts.protocol import Chat, ChatRequest, Completion, CompletionRequest, ErrorAnswer, RequestError
from server_parts.replies import ChatReply, CompletionReply

log = logging.getLogger("samebits.http")
PAGE = Path(__file__).parent / "index.html"
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                                           "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"}
TOKENIZER_THREADS = 2
SHORT = 4096  # tokens of a request that may be written in the event loop: a tenth of a millisecond


@dataclass(frozen=True)
class Settings:
    """What the server allows. Sizes in bytes, times in seconds."""

    model_name: str = "samebits"
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    max_pending: int = 4096  # completions accepted and unfinished
    max_n: int = 128
    max_stop: int = 16
    max_tokens: int | None = None  # None: what the engine has room for
    max_body_bytes: int = 4 << 20
    body_timeout: float = 60.0
    header_timeout: float = 10.0
    send_timeout: float = 60.0  # to read what was sent
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header; none: any


def clean_path(loc: tuple) -> str | None:
    """A validation error's place as a user would write it: no "body", and no branches of a union."""
    parts = [str(part) for part in loc[1:] if part not in ("str", "int") and "[" not in str(part)]
    return ".".join(parts) or None


async def until_done(events: "asyncio.Queue[Event]", jobs: list[Job]) -> AsyncIterator[list[Event]]:
    """All that has come of accepted jobs since the last look, until they have ended; raises the first error."""
    left = len(jobs)
    while left:
        news = [await events.get()]
        while not events.empty():
            news.append(events.get_nowait())
        yield [event for event in news if not event.error]
        for event in news:
            if event.error:
                raise event.error
        left -= sum(event.is_last for event in news)


class Service:
    """The routes' common work. One a server; lives in the event loop's thread."""

    def __init__(self, llm: LLM, settings: Settings, on_lost: Callable[[], None]):
        self.llm, self.settings = llm, settings
        self.metrics = Metrics(llm, settings.model_name)
        self.engine = EngineThread(llm, self.metrics, settings.max_pending, on_lost)
        self.workers = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer")
        self.created, self.fingerprint = int(time.time()), llm.fingerprint  # it reads the weights once: now
        # A tag counts where the model knows it as one token.
        self.heeds = {tag: llm.tokenizer is not None and len(llm.tokenizer.encode(tag, False)) == 1
                      for tag in (THINK, CALL)}

    def model_card(self) -> dict:
        return {"id": self.settings.model_name, "object": "model", "created": self.created, "owned_by": "samebits",
                "max_model_len": self.llm.max_model_len, "system_fingerprint": self.fingerprint}

    def check(self, body: CompletionRequest | ChatRequest) -> None:
        limits = self.settings
        if body.model not in (None, limits.model_name):
            raise RequestError(404, f"the model {body.model!r} is not served here; {limits.model_name!r} is", "model",
                               "model_not_found")
        stops = 1 if isinstance(body.stop, str) else len(body.stop)
        longest = getattr(body, "max_completion_tokens", None) or body.max_tokens or 0
        for name, value, most in (("n", body.n, limits.max_n), ("stop", stops, limits.max_stop),
                                  ("stop_token_ids", len(body.stop_token_ids), limits.max_stop),
                                  ("max_tokens", longest, limits.max_tokens)):
            if most is not None and value > most:
                raise RequestError(400, f"{name}: this server allows {most} at most, got {value}", name)
        size = self.llm.config.vocab_size
        for name, ids in (("stop_token_ids", body.stop_token_ids), ("logit_bias", map(int, body.logit_bias))):
            if wrong := [token for token in ids if not 0 <= token < size]:
                raise RequestError(400, f"{name}: token id {wrong[0]} is outside the vocabulary of {size}", name)

    def completion_jobs(self, body: CompletionRequest) -> tuple[list[Job]]:
        """In a worker thread: prompts to token ids."""
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        if texts and self.llm.tokenizer is None:
            raise RequestError(400, "this model has no tokenizer: give the prompt as token ids", "prompt")
        return ([self._job(body, i, self.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
                 for i, prompt in enumerate(body.prompts)],)

    def chat_jobs(self, body: ChatRequest) -> tuple[list[Job], dict]:
        """In a worker thread: messages to token ids, and how to parse the answer."""
        tools = body.tools if body.tool_choice != "none" else []
        prompt = self.llm.apply_chat_template(body.template_messages(), tools=tools or None,
                                              **body.chat_template_kwargs)
        parser = {"reasoning": self.heeds[THINK], "tools": bool(tools) and self.heeds[CALL],
                  "in_reasoning": prompt.rstrip().endswith(THINK)}
        return [self._job(body, 0, self.llm.tokenizer.encode(prompt, add_special_tokens=False))], parser

    def _job(self, body: CompletionRequest | ChatRequest, index: int, prompt_ids: list[int]) -> Job:
        params = body.sampling_params()
        score_only = body.max_tokens == 0
        if params.max_tokens is None and not score_only:
            given = (most for most in (body.default_max_tokens, self.settings.max_tokens) if most is not None)
            params = replace(params, max_tokens=min(given, default=None))
        return Job(index, prompt_ids, params, is_streamed=body.stream, score_only=score_only,
                   cache_salt=body.cache_salt)

    async def answer(self, body: CompletionRequest | ChatRequest, request: Request) -> Response:
        """Serve one request. The engine's work for it ends with it, whichever way it ends."""
        start = time.perf_counter()
        self.check(body)
        is_chat = isinstance(body, ChatRequest)
        in_worker = asyncio.get_running_loop().run_in_executor
        count = body.n * (1 if is_chat else len(body.prompts))
        self.engine.reserve(count)
        try:
            if not is_chat and not any(isinstance(prompt, str) for prompt in body.prompts):  # nothing to tokenize
                jobs, *parser = self.completion_jobs(body)
            else:
                jobs, *parser = await in_worker(self.workers, self.chat_jobs if is_chat else self.completion_jobs, body)
        except BaseException as error:
            self.engine.release(count)
            raise self._bad_request(error, body) if isinstance(error, ValueError) else error from None
        events: asyncio.Queue[Event] = asyncio.Queue()
        for job in jobs:
            job.events = events
        self.engine.submit(jobs)
        watcher = asyncio.create_task(self._abort_when_gone(request, jobs))
        try:
            for _ in jobs:  # each job's first event is whether it was accepted, and these come before all others
                if error := (await events.get()).error:
                    raise error
            reply = (ChatReply if is_chat else CompletionReply)(body, jobs, self.llm, self.settings.model_name, *parser)
        except BaseException as error:
            self._leave(watcher, jobs)
            raise self._bad_request(error, body) if isinstance(error, RequestError) else error from None
        if body.stream:
            return StreamingResponse(self._stream(reply, events, watcher, start), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache"})
        try:
            async for _ in until_done(events, jobs):
                pass
            # A change of threads waits for the engine's; a short answer is sooner written than handed over.
            is_short = not body.receipt and reply.usage().total_tokens < SHORT
            content = self._whole(reply) if is_short else await in_worker(self.workers, self._whole, reply)
            return Response(content, media_type="application/json")
        finally:
            self._leave(watcher, jobs)
            self._log(reply, start)

    @staticmethod
    def _whole(reply: CompletionReply | ChatReply) -> str:
        """In a worker thread: the answer, as JSON."""
        for job in reply.jobs:
            reply.write_receipts(job)
        return reply.whole().model_dump_json(exclude_unset=True)

    async def _stream(self, reply: CompletionReply | ChatReply, events: asyncio.Queue, watcher: asyncio.Task,
                      start: float) -> AsyncIterator[str]:
        def line(chunk: BaseModel) -> str:
            return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"

        try:
            for chunk in reply.opening():
                yield line(chunk)
            async for news in until_done(events, reply.jobs):
                for event in news:
                    if event.is_last and reply.request.receipt:
                        await asyncio.get_running_loop().run_in_executor(self.workers, reply.write_receipts, event.job)
                lines = []
                for job, part in reply.ready(news):
                    for chunk in reply.chunks(job, part):
                        lines.append(line(chunk))
                if lines:
                    yield "".join(lines)
            if reply.request.stream_options and reply.request.stream_options.include_usage:
                yield line(chunk.model_copy(update={"choices": [], "usage": reply.usage()}))
        except RequestError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
        finally:
            self._leave(watcher, reply.jobs)
            self._log(reply, start)
        yield "data: [DONE]\n\n"

    async def _abort_when_gone(self, request: Request, jobs: list[Job]) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.engine.abort(jobs)

    def _leave(self, watcher: asyncio.Task, jobs: list[Job]) -> None:
        watcher.cancel()
        if unfinished := [job for job in jobs if not job.is_done]:
            self.engine.abort(unfinished)

    def _bad_request(self, error: Exception, body: CompletionRequest | ChatRequest) -> RequestError:
        """The engine's ValueError names the parameter in its text; say it in `param` too."""
        if isinstance(error, RequestError) and (error.status != 400 or error.param):
            return error
        message = error.message if isinstance(error, RequestError) else str(error)
        names = (name for name in re.findall(r"\w+", message) if name in type(body).model_fields)
        return RequestError(400, message, next(names, "messages" if isinstance(body, ChatRequest) else "prompt"))

    @staticmethod
    def _log(reply: CompletionReply | ChatReply, start: float) -> None:
        usage = reply.usage()
        reasons = [out.finish_reason for job in reply.jobs for out in job.output.outputs]
        log.info("request", extra={"fields": {
            "id": reply.id, "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens, "finish_reasons": reasons,
            "seconds": round(time.perf_counter() - start, 4)}})


def build_app(llm: LLM, settings: Settings | None = None, on_lost: Callable[[], None] = lambda: None) -> FastAPI:
    """The application. Its `state.service.engine` runs from start-up to shutdown; on_lost as in `EngineThread`."""
    settings = settings or Settings()
    service = Service(llm, settings, on_lost)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start(asyncio.get_running_loop())
        yield
        await asyncio.get_running_loop().run_in_executor(None, service.engine.close)
        service.workers.shutdown(wait=False)

    errors = {status: {"model": ErrorAnswer} for status in (400, 401, 404, 408, 413, 421, 422, 429, 500, 503)}
    app = FastAPI(title="samebits", description="Answers whose bits do not depend on the load.", docs_url=None,
                  redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Gate, settings.api_key, settings.max_body_bytes, settings.body_timeout, settings.allowed_hosts)
    if settings.allowed_origins:  # in front of the gate, so that a page may read a refusal
        app.add_middleware(CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["GET", "POST"],
                           allow_headers=["Authorization", "Content-Type"])

    @app.post("/v1/completions", response_model=Completion, responses=errors)
    async def completions(body: CompletionRequest, request: Request):
        return await service.answer(body, request)

    @app.post("/v1/chat/completions", response_model=Chat, responses=errors)
    async def chat_completions(body: ChatRequest, request: Request):
        return await service.answer(body, request)

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{name:path}", responses=errors)
    async def model(name: str) -> dict:
        if name != settings.model_name:
            raise RequestError(404, f"the model {name!r} is not served here", "model", "model_not_found")
        return service.model_card()

    @app.get("/health", responses=errors)
    async def health() -> dict:
        if not service.engine.is_alive:
            raise RequestError(503, "the engine is not running")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        errors = error.errors()
        # Of a field that may have several forms, the form that went furthest is the one that was meant.
        first = max((e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]), key=lambda e: len(e["loc"]))
        param = clean_path(first["loc"])
        if first["type"] == "extra_forbidden":
            message = f"{param} is not supported, and is refused because it could alter the answer"
        elif first["type"] == "json_invalid":
            message, param = f"the body is not JSON: {first.get('ctx', {}).get('error', '')}", None
        else:
            message = f"{param or 'the body'}: {first['msg'].removeprefix('Value error, ')}"
        return as_response(RequestError(400, message, param))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        if not isinstance(error, RequestError):  # raised by the framework: no such route, no such method
            error = RequestError(error.status_code, str(error.detail))
        return as_response(error)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return as_response(RequestError(500, f"the server failed with {type(error).__name__}; its log says more"))

    return app


def as_response(error: RequestError) -> Response:
    # The message is not logged: it may quote the request. It is sent as ASCII, since that may be half a surrogate pair.
    log.info("refused", extra={"fields": {"status": error.status, "param": error.param, "code": error.code}})
    return Response(json.dumps(error.body()), error.status, error.headers, "application/json")
