"""What goes over the wire: OpenAI's names, checked by pydantic, and an error in OpenAI's shape.

A request field is one of three things: served, harmless (it cannot alter an answer, and is dropped), or refused by
name. Nothing that would alter an answer is ignored. `null` means "not given", as OpenAI's clients use it.
"""

import json
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sampler import MAX_LOGPROBS, SamplingParams

HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention"}
# Fields that are not served, each with the value that asks for nothing: that one is dropped, any other is refused.
NEUTRAL = {"best_of": 1, "suffix": "", "parallel_tool_calls": True, "response_format": {"type": "text"},
           "modalities": ["text"]}
SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)}


class RequestError(HTTPException):
    """Ends one request with an HTTP status and an error object that names the field at fault, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(status, message, {"Retry-After": "1"} if status == 429 else None)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Strict(BaseModel):
    """A model that converts nothing: "1" is no number, and an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Strict):
    include_usage: bool = False


class GenerationRequest(Strict):
    """What completions and chats have in common."""

    default_max_tokens: ClassVar[int | None] = None  # None: what fits

    # Ranges are the engine's, but where they end in what float32 cannot hold: 1e300, 5e-324.
    model: str | None = Field(None, description="a name that /v1/models lists; left out, the model that is served")
    max_tokens: int | None = Field(None, ge=0, description="most tokens to generate")
    min_tokens: int = Field(0, ge=0, description="end tokens and stop strings do not count before it")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy; left out, the checkpoint's own")
    top_k: int | None = Field(None, ge=-1, description="keep the most likely tokens; 0 and -1 keep all")
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="left out, one is drawn; the answer says which")
    n: int = Field(1, ge=1, description="choices a prompt; the first is what n = 1 gives")
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] = {}
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    cache_salt: str | None = Field(None, min_length=1, description="requests of different salts share no cached prefix")
    return_token_ids: bool = Field(False, description="add token_ids to each choice, and the prompt's")
    stream: bool = False
    stream_options: StreamOptions | None = None
    receipt: bool = Field(False, description="add to each choice a receipt, which LLM.verify can check")

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None and name not in HARMLESS
                and (name not in NEUTRAL or NEUTRAL[name] != value)}

    @model_validator(mode="after")
    def stream_fits(self):
        if self.stream_options and not self.stream:
            raise RequestError(400, "stream_options needs stream", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(400, "prompt_logprobs cannot be streamed", "prompt_logprobs")
        return self

    def sampling_params(self, **changes) -> SamplingParams:
        given = {name: value for name, value in self if name in SAMPLING_FIELDS and value is not None}
        given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        given |= changes
        if self.receipt and given.get("logprobs") is None:
            given["logprobs"] = 0  # a receipt holds them, whether the answer shows them or not
        return SamplingParams(**given)


class CompletionRequest(GenerationRequest):
    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's

    # From left to right: where every form is tried, a long prompt costs an error a token for each that it is not.
    prompt: Annotated[str | list[int] | Annotated[list[str], Field(min_length=1)] | list[list[int]],
                      Field(union_mode="left_to_right")]
    max_tokens: int | None = Field(None, ge=0, description="left out, 16; 0, with echo, scores the prompt")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="alternatives to report for each token")
    echo: bool = Field(False, description="begin the text with the prompt")

    @model_validator(mode="after")
    def echo_fits(self):
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(400, "max_tokens 0 needs echo: there would be nothing to answer", "max_tokens")
        if self.max_tokens == 0 and self.receipt:
            raise RequestError(400, "a receipt is of generated tokens: max_tokens 0 asks for none", "receipt")
        if self.stream and self.echo and self.logprobs is not None:
            raise RequestError(400, "logprobs of an echoed prompt cannot be streamed", "logprobs")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt

    def sampling_params(self) -> SamplingParams:
        scored = [k for k in (self.prompt_logprobs, self.logprobs if self.echo else None) if k is not None]
        return super().sampling_params(max_tokens=self.max_tokens or None, prompt_logprobs=max(scored, default=None))


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: str
    arguments: str = Field(description="JSON")


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def drop_what_says_nothing(cls, data: Any) -> Any:
        """An answer's message may come back whole, with OpenAI's empty fields in it."""
        return {k: v for k, v in data.items() if v is not None and v != []} if isinstance(data, dict) else data


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="the older name of max_completion_tokens")
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] = Field([], description="given to the chat template")
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field({}, description='such as {"enable_thinking": false}')

    @field_validator("tools")
    @classmethod
    def tools_are_functions(cls, tools: list[dict]) -> list[dict]:
        for tool in tools:
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(
                    function.get("name"), str):
                raise ValueError('each tool must be {"type": "function", "function": {"name": ..., ...}}')
            if function.get("strict"):
                raise ValueError("function.strict is not supported: answers are not held to a schema")
        return tools

    @field_validator("chat_template_kwargs")
    @classmethod
    def kwargs_are_free(cls, kwargs: dict) -> dict:
        if taken := {"self", "messages", "tools", "add_generation_prompt"} & kwargs.keys():
            raise ValueError(f"{min(taken)} is not to be set here")
        return kwargs

    @model_validator(mode="after")
    def logprobs_fit(self):
        if self.top_logprobs and not self.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs", "top_logprobs")
        return self

    def sampling_params(self) -> SamplingParams:
        return super().sampling_params(max_tokens=self.max_completion_tokens or self.max_tokens,
                                       logprobs=self.top_logprobs if self.logprobs else None)

    def template_messages(self) -> list[dict]:
        """The messages as chat templates know them: text in one piece, tool arguments as objects."""
        rendered = []
        for message in self.messages:
            entry = message.model_dump(exclude_unset=True)
            if isinstance(message.content, list):
                entry["content"] = "".join(part.text for part in message.content)
            if message.role == "developer":  # OpenAI's newer name for the same thing
                entry["role"] = "system"
            for call in entry.get("tool_calls", ()):
                try:
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
                except ValueError:
                    pass  # a model's broken JSON is shown to it as it was
            rendered.append(entry)
        return rendered


# Answers. Only what was set is written, so that a field nobody asked for does not appear.


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """As OpenAI's completions have them: lists with an entry a token, the prompt's first where it is echoed."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class PromptLogprob(BaseModel):
    logprob: float
    decoded_token: str


class Choice(BaseModel):
    index: int
    seed: int
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    receipt: dict[str, Any] | None = None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class AnswerToolCall(BaseModel):
    index: int | None = None  # of a streamed call
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(Choice):
    delta: AnswerMessage
    logprobs: ChatLogprobs | None = None


class Answer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    seed: int | None = None
    usage: Usage | None = None


class Completion(Answer):
    choices: list[CompletionChoice]


class Chat(Answer):
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class ChatChunk(Answer):
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail
