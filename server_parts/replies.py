"""From the engine's results to OpenAI's objects, streamed or whole. Whole is what the stream's pieces join to."""

import hashlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import replace

from engine import LLM
from server_parts.chat_parsing import ChatParser, Delta
from server_parts.engine_thread import Event, Job, Part
from server_parts.protocol import (
    AnswerMessage,
    AnswerToolCall,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    FunctionCall,
    PromptLogprob,
    PromptTokensDetails,
    RequestError,
    TokenLogprob,
    Usage,
)


def whole_parts(job: Job) -> list[Part]:
    return [Part(out.index, out.seed, out.text, out.token_ids, out.logprobs, out.top_logprobs, out.finish_reason,
                 out.stop_reason) for out in job.output.outputs]


def joined(parts: list[Part]) -> Part:
    """What a completion gained in several steps, as one part."""
    def all_of(name: str) -> list | None:
        return None if getattr(parts[0], name) is None else [x for part in parts for x in getattr(part, name)]

    lists = {name: all_of(name) for name in ("token_ids", "logprobs", "top_logprobs")}
    return replace(parts[-1], text="".join(part.text for part in parts), **lists)


class Reply:
    """The answer to one HTTP request: what its objects share. `jobs` are its prompts."""

    id_prefix: str

    def __init__(self, request, jobs: list[Job], llm: LLM, model_name: str):
        self.request, self.jobs, self.llm, self.tokenizer = request, jobs, llm, llm.tokenizer
        self.receipts: dict[tuple[Job, int], dict] = {}  # by prompt and completion
        self._held: list[tuple[Job, Part]] = []  # ends whose receipts are not written yet
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.common = {"id": self.id, "created": int(time.time()), "model": model_name,
                       "system_fingerprint": llm.fingerprint, "seed": jobs[0].output.outputs[0].seed}

    def write_receipts(self, job: Job) -> None:
        """Write those that were asked for, once the job is done. In a worker thread: the engine has let go of its
        output by then, and neither it nor HTTP should wait for this."""
        for out in job.output.outputs if self.request.receipt else ():
            try:
                self.receipts[job, out.index] = self.llm.receipt(job.output, out.index)
            except ValueError as error:
                raise RequestError(400, str(error), "receipt") from error

    def ready(self, news: list[Event]) -> list[tuple[Job, Part]]:
        """What to tell of a stream's news: each completion's in one part, so that a loop which falls behind the engine
        has less to do for each token. An end that needs a receipt waits for it."""
        parts: dict[tuple[Job, int], list[Part]] = {}
        for event in news:
            for part in event.parts:
                parts.setdefault((event.job, part.index), []).append(part)
        told = self._held + [(job, joined(some)) for (job, _), some in parts.items()]
        is_held = [self.request.receipt and part.finish_reason is not None and (job, part.index) not in self.receipts
                   for job, part in told]
        self._held = [one for one, holds in zip(told, is_held, strict=True) if holds]
        return [one for one, holds in zip(told, is_held, strict=True) if not holds]

    def usage(self) -> Usage:
        outputs = [job.output for job in self.jobs]
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(out.token_ids) for output in outputs for out in output.outputs)
        cached = PromptTokensDetails(cached_tokens=sum(output.num_cached_tokens for output in outputs))
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
                     prompt_tokens_details=cached)

    def common_choice(self, job: Job, part: Part) -> dict:
        extra = {"token_ids": part.token_ids} if self.request.return_token_ids else {}
        if part.finish_reason and self.request.receipt:
            extra["receipt"] = self.receipts[job, part.index]
        return {"index": job.index * self.request.n + part.index, "seed": part.seed,
                "finish_reason": part.finish_reason, "stop_reason": part.stop_reason} | extra

    def token_text(self, token_id: int) -> str:
        """The token by itself; half a character shows as U+FFFD."""
        if self.tokenizer is None or token_id >= self.tokenizer.vocab_size:
            return ""
        data = self.tokenizer.token_bytes(token_id)
        if data is not None:
            return data.decode("utf-8", "replace")
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def prompt_logprobs(self, job: Job) -> dict:
        """OpenAI has no such field; this is vLLM's, a dict a token, the prompt's own token first."""
        if self.request.prompt_logprobs is None:
            return {}
        ids, scored = job.output.prompt_token_ids, job.output.prompt_logprobs
        return {"prompt_logprobs": [entry and {
            token: PromptLogprob(logprob=value, decoded_token=self.token_text(token))
            for token, value in ({own: entry[0]} | dict(list(entry[1].items())[: self.request.prompt_logprobs])).items()
        } for own, entry in zip(ids, scored)]}


class CompletionReply(Reply):
    id_prefix = "cmpl"

    def __init__(self, request: CompletionRequest, *rest):
        super().__init__(request, *rest)
        self.common["object"] = "text_completion"
        self._offsets: dict[int, int] = {}  # of a choice's next token in the text its tokens make up

    def prompt_text(self, job: Job) -> str:
        prompt = self.request.prompts[job.index]
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.decode(prompt, self.request.skip_special_tokens) if self.tokenizer else ""

    def opening(self) -> Iterable[Completion]:
        """The chunks before any token."""
        for job in self.jobs:
            echoed = self.prompt_text(job) if self.request.echo else ""
            ids = {"prompt_token_ids": job.prompt_ids} if self.request.return_token_ids else {}
            if echoed or ids:
                yield from (self._chunk(CompletionChoice(index=job.index * self.request.n + out.index, seed=out.seed,
                                                         text=echoed, finish_reason=None, **ids))
                            for out in job.output.outputs)

    def chunks(self, job: Job, part: Part) -> Iterable[Completion]:
        """What one part gives: a chunk, or none while its text is held back."""
        choice = CompletionChoice(text=part.text, logprobs=self._logprobs(job, part), **self.common_choice(job, part))
        if part.text or choice.logprobs or choice.token_ids or part.finish_reason:
            yield self._chunk(choice)

    def whole(self) -> Completion:
        choices = []
        for job in self.jobs:
            echoed = self.prompt_text(job) if self.request.echo else ""
            ids = {"prompt_token_ids": job.prompt_ids} if self.request.return_token_ids else {}
            for part in whole_parts(job):
                choices.append(CompletionChoice(text=echoed + part.text, logprobs=self._logprobs(job, part), **ids,
                                                **self.prompt_logprobs(job), **self.common_choice(job, part)))
        return Completion(choices=choices, usage=self.usage(), **self.common)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return Completion(choices=[choice], **self.common)

    def _logprobs(self, job: Job, part: Part) -> CompletionLogprobs | None:
        top = self.request.logprobs
        if top is None:
            return None
        entries = [(token, value, part.top_logprobs[i] if top else {})
                   for i, (token, value) in enumerate(zip(part.token_ids, part.logprobs or []))]
        if self.request.echo:
            scored = zip(job.prompt_ids, job.output.prompt_logprobs)
            entries = [(token, *(entry or (None, None))) for token, entry in scored] + entries
        texts, tops, offsets = [], [], []
        offset = self._offsets.get(index := job.index * self.request.n + part.index, 0)
        for token, value, others in entries:
            texts.append(self.token_text(token))
            offsets.append(offset)
            offset += len(texts[-1])
            named: dict[str, float] = {}
            for other, logprob in [*list((others or {}).items())[:top], (token, value)]:
                named.setdefault(self.token_text(other), logprob)  # of two with one text, the likelier
            tops.append(None if others is None else named)
        self._offsets[index] = offset
        return CompletionLogprobs(tokens=texts, token_logprobs=[value for _, value, _ in entries], top_logprobs=tops,
                                  text_offset=offsets)


class ChatReply(Reply):
    id_prefix = "chatcmpl"

    def __init__(self, request: ChatRequest, jobs: list[Job], llm: LLM, model_name: str, parser: dict):
        super().__init__(request, jobs, llm, model_name)
        self.parsers = [ChatParser(**parser) for _ in range(request.n)]

    def opening(self) -> Iterable[ChatChunk]:
        job = self.jobs[0]
        ids = {"prompt_token_ids": job.prompt_ids} if self.request.return_token_ids else {}
        for out in job.output.outputs:
            yield self._chunk(AnswerMessage(role="assistant", content=""),
                              {"index": out.index, "seed": out.seed, "finish_reason": None}, **ids)
            ids = {}

    def chunks(self, job: Job, part: Part) -> Iterable[ChatChunk]:
        """One chunk a delta; the part's logprobs and token ids go with the first, its end with the last."""
        deltas = self._parse(part)
        messages = [self._streamed(job, part, delta) for delta in deltas]
        choice = self.common_choice(job, part) | self._logprobs(part)
        end = {"finish_reason": self._finish_reason(part)} | {
            name: choice.pop(name) for name in ("stop_reason", "receipt") if name in choice}
        if part.finish_reason or choice.keys() & {"logprobs", "token_ids"}:
            messages = messages or [AnswerMessage()]
        for i, message in enumerate(messages):
            yield self._chunk(message, choice | (end if i == len(messages) - 1 else {"finish_reason": None}))
            choice = {name: choice[name] for name in ("index", "seed")}

    def whole(self) -> Chat:
        job, choices = self.jobs[0], []
        for part in whole_parts(job):
            deltas = self._parse(part)
            texts = {kind: "".join(delta.text for delta in deltas if delta.kind == kind)
                     for kind in ("content", "reasoning")}
            calls = [self._call(job, part, delta) for delta in deltas if delta.kind == "call"]
            fields = {"content": texts["content"] or (None if calls or texts["reasoning"] else "")}
            fields |= {"reasoning_content": texts["reasoning"]} if texts["reasoning"] else {}
            fields |= {"tool_calls": calls} if calls else {}
            common = self.common_choice(job, part) | self._logprobs(part)
            choices.append(ChatChoice(message=AnswerMessage(role="assistant", **fields),
                                      **common | {"finish_reason": self._finish_reason(part)}))
        ids = {"prompt_token_ids": job.prompt_ids} if self.request.return_token_ids else {}
        return Chat(object="chat.completion", choices=choices, usage=self.usage(), **ids, **self.prompt_logprobs(job),
                    **self.common)

    def _chunk(self, message: AnswerMessage, choice: dict, **extra) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=[ChatChunkChoice(delta=message, **choice)],
                         **extra, **self.common)

    def _parse(self, part: Part) -> list[Delta]:
        parser = self.parsers[part.index]
        return parser.push(part.text) + (parser.finish() if part.finish_reason else [])

    def _finish_reason(self, part: Part) -> str | None:
        called = part.finish_reason == "stop" and self.parsers[part.index].num_calls
        return "tool_calls" if called else part.finish_reason

    def _streamed(self, job: Job, part: Part, delta: Delta) -> AnswerMessage:
        if delta.kind != "call":
            return AnswerMessage(**{"content" if delta.kind == "content" else "reasoning_content": delta.text})
        return AnswerMessage(tool_calls=[self._call(job, part, delta).model_copy(update={"index": delta.number})])

    def _call(self, job: Job, part: Part, delta: Delta) -> AnswerToolCall:
        """The id is hashed from what the answer is a function of: it returns in the next turn's prompt."""
        digest = hashlib.sha256(f"{job.prompt_ids} {part.seed} {delta.number} {delta.name} {delta.text}".encode())
        return AnswerToolCall(id=f"call_{digest.hexdigest()[:24]}", type="function",
                              function=FunctionCall(name=delta.name, arguments=delta.text))

    def _logprobs(self, part: Part) -> dict:
        if not self.request.logprobs:
            return {}

        def described(token: int, logprob: float) -> dict:
            data = self.tokenizer.token_bytes(token)
            return {"token": self.token_text(token), "logprob": logprob,
                    "bytes": None if data is None else list(data)}

        tops = part.top_logprobs or [{}] * len(part.token_ids)
        content = [ChatTokenLogprob(**described(token, value),
                                    top_logprobs=[TokenLogprob(**described(*other)) for other in top.items()])
                   for token, value, top in zip(part.token_ids, part.logprobs, tops)]
        return {"logprobs": ChatLogprobs(content=content)}
