"""The engine: `LLM`, from a request to its tokens.

`add_request` turns a request into `Sequence`s; each `step` asks the scheduler who computes what, has the runner compute
it, and absorbs the tokens. `generate`, `chat`, `stream` and `score` loop over `step`; cli.py is the command line."""

import gc
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

import checkpoint
import receipts
from cache import BlockManager
from kernels import Ops, make_ops
from kernels.tiles import KV_TILE
from model import DTYPES, Model, ModelConfig
from parallel import Ranks
from runner import Runner, StepOutput
from sampler import SamplingParams, completion_seed
from scheduler import Scheduler, Sequence
from text import Detokenizer, Tokenizer

DEFAULT_MODEL = "models/embedded"  # in this folder, wherever one is
GRAPH_RESERVE = 1 << 29  # bytes left free for CUDA graphs, which are captured after the cache is sized
BROKEN = "the model produced a NaN or no finite logit: check the weights and the dtype"
ASLEEP = "the engine is asleep, its cache lent out: call wake() first (or lost its ranks: make a new LLM)"
NOTHING = (list, ())  # no step in flight: no results to wait for, and no sequences


@dataclass
class CompletionOutput:
    """One completion so far: `text` is all of it, `delta` what the last step added; one of `logprobs` a token."""
    index: int
    seed: int
    text: str = ""
    delta: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it


@dataclass
class RequestOutput:
    """A request so far. `error`: why it could not run (no outputs then); `timings`: seconds since `arrival_time`."""
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, dict[int, float]] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    error: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    arrival_time: float = field(default_factory=time.perf_counter)


class LLM:
    """A model, its cache and its scheduler. All arguments after `model` are keywords; see `python engine.py --help`.
    model: folder or Hub id; revision: of a Hub id; schedule: "auto" or "reference": how fast, never which bits
    device: "auto", "cuda" or "cpu"; dtype: "auto" (checkpoint's; float32 on CPU), "bfloat16", "float16" or "float32"
    load_format: "auto" or "dummy" (random weights, for measuring); hf_overrides: entries that replace config.json's
    max_model_len: longest prompt + output [what the model and the cache allow]; async_scheduling [on a GPU]: see `step`
    max_num_seqs: most sequences in a step [1024 on a GPU of 64 GiB or more, else 256]
    max_num_batched_tokens: most tokens in a step [8192, on CPU 512]; tensor_parallel_size: GPUs to share; tp_style:
    "column" (the same bits on any number of them) or "row" (half the exchanges, bits of each number's own)
    expert_parallel: a rank has whole experts, not columns of all; num_gpu_blocks_override: size of the cache in blocks
    gpu_memory_utilization, enable_prefix_caching, enforce_eager: as in vLLM; ops: another op table (of one rank)"""

    def __init__(self, model: str | Path = DEFAULT_MODEL, *, revision: str | None = None, device: str = "auto",
                 dtype: str = "auto", schedule: str = "auto", load_format: str = "auto",
                 hf_overrides: dict | None = None, max_model_len: int | None = None, max_num_seqs: int | None = None,
                 max_num_batched_tokens: int | None = None, gpu_memory_utilization: float = 0.85,
                 num_gpu_blocks_override: int | None = None, enable_prefix_caching: bool = True,
                 enforce_eager: bool = False, async_scheduling: bool | None = None, ops: Ops | None = None,
                 progress: bool = True, tensor_parallel_size: int = 1, tp_style: str = "column",
                 expert_parallel: bool = False, _ranks: Ranks | None = None):
        options = {name: value for name, value in locals().items() if name not in ("self", "_ranks")}
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override", "tensor_parallel_size"):
            if options[name] is not None and options[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {options[name]}")
        for name, known in (("device", ("auto", "cuda", "cpu")), ("load_format", ("auto", "dummy")),
                            ("tp_style", ("column", "row"))):
            if options[name] not in known:
                raise ValueError(f"unknown {name} {options[name]!r}: use {' or '.join(map(repr, known))}")
        if ops and tensor_parallel_size > 1 and not _ranks:
            raise ValueError("an op table of one's own takes tensor_parallel_size 1")
        self.ranks = _ranks or Ranks(tensor_parallel_size)
        name = str(Path(__file__).parent / DEFAULT_MODEL) if str(model) == DEFAULT_MODEL else str(model)
        self.folder = checkpoint.resolve(name, revision)
        raw = checkpoint.read_json(self.folder, "config.json") | (hf_overrides or {})
        self.config, self.device = ModelConfig.from_dict(raw), pick_device(device)
        self.dtype = pick_dtype(dtype, self.config, self.device)
        large = self.device.type == "cuda" and torch.cuda.get_device_properties(self.device).total_memory >= 64 << 30
        max_num_seqs = max_num_seqs or (1024 if large else 256)
        self.ops, self.load_format = ops or make_ops(self.device, schedule), load_format
        limit = self.config.max_position_embeddings
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise ValueError(f"max_model_len {max_model_len} must be between 1 and {limit}, the model's own limit")
        if expert_parallel and not self.config.num_experts:
            raise ValueError("expert_parallel is for a mixture of experts, and this model has none")
        part = (self.dtype, max_model_len or limit, self.ranks.rank, self.ranks.size,
                tp_style == "row" and self.ranks.size > 1, expert_parallel and self.ranks.size > 1)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of an engine before this one
            need = Model(self.config, self.ops, torch.device("meta"), *part).weight_bytes
            if need > (free := torch.cuda.mem_get_info(self.device)[0]):
                raise ValueError(f"the weights take {need / 1e9:.1f} GB of a GPU, where {free / 1e9:.1f} are free: "
                                 "with a larger tensor_parallel_size each takes less")
        self.model = Model(self.config, self.ops, self.device, *part)
        self.ranks.start(self, options | {"model": self.folder, "revision": None, "progress": False})
        if load_format == "dummy":
            self.model.load_dummy(progress)
        else:
            self.model.load(checkpoint.Checkpoint(self.folder), progress)
        self.tokenizer = Tokenizer(self.folder) if (self.folder / "tokenizer.json").is_file() else None
        self.generation_config = checkpoint.read_json(self.folder, "generation_config.json")
        given = [self.generation_config.get("eos_token_id"), raw.get("eos_token_id"),
                 self.tokenizer and self.tokenizer.eos_token_id]  # each an id, a list of them or None: all end a text
        self.eos_token_ids = frozenset().union(*(x if isinstance(x, list) else [x] for x in given if x is not None))
        batched = max_num_batched_tokens or (8192 if self.device.type == "cuda" else 512)
        self.model.exchange = self.ranks.connect(self.device, self.model.exchanged_bytes(batched, max_num_seqs))
        num_blocks = num_gpu_blocks_override or self._measure_blocks(gpu_memory_utilization, max_num_seqs, batched)
        self.max_model_len = min(max_model_len or limit, num_blocks * KV_TILE)
        if max_model_len is not None and self.max_model_len < max_model_len:
            raise ValueError(f"the cache has room for {num_blocks * KV_TILE} tokens, less than max_model_len "
                             f"{max_model_len}: lower it, or give the engine more memory")
        self.runner = self.ranks.runner = Runner(self.model, num_blocks, max_num_seqs, self.max_model_len,
                                                 enforce_eager)
        self.scheduler = Scheduler(BlockManager(num_blocks, enable_prefix_caching), max_num_seqs, batched)
        self.async_scheduling = self.device.type == "cuda" if async_scheduling is None else async_scheduling
        self.requests: dict[str, RequestOutput] = {}
        self._live: dict[Sequence, tuple[RequestOutput, CompletionOutput, Detokenizer | None]] = {}  # until it ends
        self._in_flight = NOTHING
        self._changed: dict[str, RequestOutput] = {}  # since the last step began
        self.ranks.follow(self)

    def _measure_blocks(self, utilization: float, max_num_seqs: int, num_tokens: int) -> int:
        """How many cache blocks fit, on every rank, beside the weights and the largest step's working memory."""
        probe = Runner(self.model, 1, max_num_seqs, KV_TILE, True)
        block_bytes = probe.kv_cache.nbytes
        if self.device.type == "cpu":
            return min(self.ranks.of_all(max(1, (1 << 30) // block_bytes)))  # of 1 GiB
        if not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}")
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        probe.profile(num_tokens)
        working = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        logits = max_num_seqs * self.config.vocab_size * 4  # the static output of the graphs
        budget = free - (1 - utilization) * total - working - logits - GRAPH_RESERVE
        if budget < block_bytes:
            raise ValueError(f"no memory left for the cache: {free / 2**30:.1f} GiB free, a step needs "
                             f"{working / 2**30:.1f}: lower max_num_batched_tokens or raise gpu_memory_utilization")
        return min(self.ranks.of_all(int(budget // block_bytes)))

    fingerprint_parts, fingerprint = cached_property(receipts.fingerprint_parts), property(receipts.fingerprint)
    receipt, verify = receipts.make_receipt, receipts.verify  # the proof is a file of its own

    def add_request(self, prompt: str | list[int], params: SamplingParams | None = None, *,
                    request_id: str | None = None, cache_salt: str | None = None, score_only: int = 0,
                    observe: Callable | None = None, add_special_tokens: bool = True) -> str:
        """Queue a request and return its id; ValueError, and nothing queued, if it can never run. Requests with
        different `cache_salt`s share no cached prefix. `score_only` N: compute the prompt and stop, without logprobs of
        its first N tokens; `observe` is lent the sequence and the others' logits [num_rows, vocab_size]."""
        if self.runner.kv_cache is None:
            raise RuntimeError(ASLEEP)
        params = (params or SamplingParams()).resolve(self.generation_config)
        token_ids = self._encode(prompt, add_special_tokens)
        room = self.max_model_len - len(token_ids) + (score_only > 0)
        if room < 1:
            raise ValueError(f"the prompt has {len(token_ids)} tokens; with at least one to generate the limit is "
                             f"{self.max_model_len} (max_model_len)")
        if wrong := [i for i in (*params.stop_token_ids, *params.logit_bias) if i >= self.config.vocab_size]:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {self.config.vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model folder has no tokenizer.json")
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        request_id = f"req-{secrets.token_hex(8)}" if request_id is None else request_id
        seed = params.seed if params.seed is not None else secrets.randbits(53)
        self.ranks.tell("add_request", token_ids, replace(params, seed=seed), request_id=request_id,
                        cache_salt=cache_salt, score_only=score_only)  # nothing is left to chance
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        request = RequestOutput(request_id, prompt if isinstance(prompt, str) else None, token_ids, params)
        for index in range(params.n):
            own = params if index == 0 else replace(params, prompt_logprobs=None)
            seq = Sequence(list(token_ids), len(token_ids), own, completion_seed(seed, index),
                           0 if score_only else min(params.max_tokens or room, room), ends, cache_salt)
            if own.prompt_logprobs is not None:
                seq.prompt_logprobs, seq.observe = [None] * max(1, score_only), observe
            logprobs, likeliest = None if params.logprobs is None else [], [] if params.logprobs else None
            request.outputs.append(CompletionOutput(index, seq.seed, logprobs=logprobs, top_logprobs=likeliest))
            self._live[seq] = request, request.outputs[-1], self.tokenizer and Detokenizer(
                self.tokenizer, params.stop, params.include_stop_str_in_output, params.skip_special_tokens, token_ids)
            self.scheduler.waiting.append(seq)
        self.requests[request_id] = request
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that gained tokens or ended. If it raises, those that took part end. With
        `async_scheduling` the device is given a step's work before the tokens of the last are looked at, so the host's
        work costs no time; a token is then returned one call later, and the token after an end is thrown away. A
        request with penalties or prompt logprobs, whose tokens the host must see first, makes its steps wait."""
        if self.runner.kv_cache is None:
            raise RuntimeError(ASLEEP)
        for out in [out for request in self._changed.values() for out in request.outputs]:
            out.delta = ""
        self._changed.clear()
        took_part = [seq for seq, _ in self._in_flight[1]]
        try:
            self.ranks.tell("step")
            seqs = self.scheduler.schedule()
            took_part += seqs
            launched = (self.runner.launch(seqs), self.scheduler.launched(seqs)) if seqs else NOTHING
            self._collect()
            self._in_flight = launched
            if not self.async_scheduling or any(seq.params.has_penalties or seq.wants_prompt_logprobs for seq in seqs):
                self._collect()
        except BaseException:
            self._in_flight = NOTHING
            self.ranks.close(broken=True)
            for request, *_ in [self._live[seq] for seq in took_part if seq in self._live]:
                self.abort(request.request_id)
            raise
        self.ranks.since = None
        return list(self._changed.values())

    def _collect(self) -> None:
        """Wait for the step in flight, if there is one, and take its results in."""
        (collect, entries), self._in_flight = self._in_flight, NOTHING
        for (seq, position), result in zip(entries, collect()):
            if seq not in self._live:
                continue  # it ended, or was aborted, while this was under way
            seq.prompt_logprobs += result.prompt_logprobs
            if result.token_id is not None:
                seq.token_ids[position] = result.token_id
                self._absorb(seq, result)
            elif seq.max_new_tokens == 0 and position == seq.num_prompt_tokens:
                self._finish(seq, "length")

    def abort(self, request_id: str) -> None:
        """End a request wherever it is and free its blocks. An unknown id is ignored: it may have just ended."""
        self.ranks.tell("abort", request_id)
        for seq in [seq for seq, (request, *_) in self._live.items() if request.request_id == request_id]:
            self._live[seq][1].delta = ""
            self._finish(seq, "abort")

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def _encode(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        size = self.config.vocab_size
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model folder has no tokenizer.json: give the prompt as token ids")
            token_ids = self.tokenizer.encode(prompt, add_special_tokens)
            if (last := max(token_ids, default=0)) >= size:
                raise ValueError(f"token {last} is none of {size}: tokenizer.json does not belong to these weights")
        else:  # by types: `isinstance` of an abstract class took 10 ms of 8,192 tokens
            kinds = {kind for kind in set(map(type, prompt)) if issubclass(kind, Integral) and kind is not bool}
            if wrong := [token for token in prompt if type(token) not in kinds or not 0 <= token < size]:
                raise ValueError(f"prompt token {wrong[0]!r} is no id below the vocabulary size {size}")
            token_ids = [int(token) for token in prompt]
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        return token_ids

    def _absorb(self, seq: Sequence, result: StepOutput) -> None:
        """Take a new token into a sequence: its text, its logprobs, and whether it is the last."""
        (request, out, detokenizer), token = self._live[seq], result.token_id
        if token >= self.config.vocab_size:
            request.error = BROKEN
            return self._finish(seq, "error")
        request.timings.setdefault("ttft_s", time.perf_counter() - request.arrival_time)
        self._changed[request.request_id] = request
        out.token_ids.append(token)
        for asked, new in ((out.logprobs, result.logprob), (out.top_logprobs, result.top_logprobs)):
            if asked is not None:
                asked.append(new)
        params, count = request.params, len(out.token_ids)
        ended = token in seq.stop_token_ids and count >= params.min_tokens
        if detokenizer and (not ended or params.include_stop_str_in_output):
            piece = detokenizer.push(token, check_stop=count >= params.min_tokens)
            out.text, out.delta = out.text + piece, out.delta + piece
        stop = detokenizer.stop_reason if detokenizer else None
        if ended or stop:
            out.stop_reason = stop or (token if token in params.stop_token_ids else None)
            self._finish(seq, "stop")
        elif count >= seq.max_new_tokens:
            self._finish(seq, "length")

    def _finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence; with the last of its sequences, the request."""
        request, out, detokenizer = self._live.pop(seq)
        self.scheduler.finish(seq)
        self._changed[request.request_id], out.finish_reason = request, reason
        if detokenizer:
            rest = detokenizer.finish()  # nothing after a stop string
            out.text, out.delta = out.text + rest, out.delta + rest
        if out.index == 0:
            request.num_cached_tokens, request.prompt_logprobs = seq.num_cached_tokens or 0, seq.prompt_logprobs or None
        if all(out.finish_reason for out in request.outputs):
            request.finished = True
            request.timings["total_s"] = time.perf_counter() - request.arrival_time
            del self.requests[request.request_id]

    def generate(self, prompts, params: SamplingParams | list[SamplingParams] | None = None,
                 progress: bool = False, **options) -> list[RequestOutput]:
        """Complete each prompt (text or a list of token ids) of a list, or one alone; results in the order given.
        params: one for all, or one each. A request that cannot run comes back with `error` set and the others go on;
        if none can run, ValueError. Meanwhile Python's search for garbage is off, in all threads."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} SamplingParams: give one, or one each")
        results, collecting = [], gc.isenabled()
        try:
            gc.disable()  # a step leaves no cycles behind; to look for some takes up to 0.2 s, and the GPU would wait
            for prompt, own in zip(prompts, each, strict=True):
                try:
                    results.append(self.requests[self.add_request(prompt, own, **options)])
                except ValueError as why:
                    text, ids = (prompt, []) if isinstance(prompt, str) else (None, list(prompt))
                    results.append(RequestOutput("", text, ids, own or SamplingParams(), finished=True, error=str(why)))
            if prompts and all(output.error for output in results):
                raise ValueError(results[0].error)
            for output in tqdm(results, "prompts", disable=not progress):
                while not output.finished:  # our steps end it, or somebody else aborts it
                    self.step()
        finally:
            if collecting:
                gc.enable()
            for output in [output for output in results if not output.finished]:  # interrupted: leave nothing behind
                self.abort(output.request_id)
        return results

    def chat(self, messages: list, params: SamplingParams | None = None, progress: bool = False,
             **template) -> list[RequestOutput]:
        """Complete a conversation (list of {"role", "content"}) or several; `template`: e.g. enable_thinking=False."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self.apply_chat_template(conversation, **template) for conversation in conversations]
        return self.generate(prompts, params, progress, add_special_tokens=False)

    def apply_chat_template(self, messages: list[dict], **template) -> str:
        if self.tokenizer is None:
            raise ValueError("this model folder has no tokenizer.json, so it cannot chat")
        return self.tokenizer.apply_chat_template(messages, **template)

    def stream(self, prompt: str | list[int], params: SamplingParams | None = None,
               **options) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the request as it gains tokens (see `CompletionOutput.delta`)."""
        output = self.requests[self.add_request(prompt, params, **options)]
        state = [(0, 0, None)] * len(output.outputs)
        try:
            while True:
                shown, state = state, [(len(o.text), len(o.token_ids), o.finish_reason) for o in output.outputs]
                if state != shown:  # by our own step, or that of another consumer
                    for out, (length, *_) in zip(output.outputs, shown):
                        out.delta = out.text[length:]
                    yield output
                elif output.finished:
                    return
                else:
                    self.step()
        finally:
            self.abort(output.request_id)

    def score(self, prompt: str | list[int], completion: str | list[int]) -> list[float]:
        """Log-probability of each token of `completion` after `prompt`, by one prefill: the very bits that decoding
        reports. Text is tokenized apart and joined; give token ids where that matters. ValueError if one is NaN."""
        before, after = self._encode(prompt, True), self._encode(completion, False)
        params = SamplingParams(temperature=0.0, prompt_logprobs=0)
        output = self.generate([before + after], params, score_only=len(before))[0]
        logprobs = [logprob for logprob, _ in output.prompt_logprobs[len(before) :]]
        if any(map(math.isnan, logprobs)):
            raise ValueError(BROKEN)
        return logprobs

    def update_weights(self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, by checkpoint name, into the place of the old, rounded to this engine's dtype. Where one is
        missing, unknown or of another shape, ValueError names it and the old ones stay (see examples/ON_POLICY.md)."""
        self._settle()
        new = {name: tensor.detach() for name, tensor in dict(weights).items()}
        self.model.load(SimpleNamespace(shapes={name: tensor.shape for name, tensor in new.items()},
                                        dtypes={name: tensor.dtype for name, tensor in new.items()},
                                        tensors=lambda progress: new.items()))
        self.load_format = "updated"
        self.__dict__.pop("fingerprint_parts", None)
        if self.ranks.pipes:  # of a view, pickle would send all that it is a view of
            new = {name: new[name].cpu().clone(memory_format=torch.contiguous_format) for name in self.model.whole}
            self.ranks.tell("update_weights", new)
            self.fingerprint_parts = receipts.fingerprint_parts(self, new)  # now, while there are whole weights

    def sleep(self) -> None:
        """Lend the memory of the KV cache and the CUDA graphs to others, until `wake`; the weights stay."""
        self._settle()
        self.ranks.tell("sleep")
        self.runner.use_cache(None)
        torch.cuda.empty_cache()  # nothing where there is no GPU

    def wake(self) -> None:
        """Take the memory back. The cache is empty; graphs are captured again when they are first needed."""
        if self.runner.kv_cache is None:
            self.ranks.tell("wake")
            self.runner.use_cache(self.scheduler.blocks.num_blocks)

    def _settle(self) -> None:
        if self.requests:
            raise RuntimeError(f"{len(self.requests)} requests are running: finish or abort them first")
        self.ranks.tell("_settle")
        self._collect()  # a step may outlive its requests
        self.scheduler.blocks.reset_prefix_cache()


def pick_device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device 'cuda' asked for, but torch sees no GPU: use 'auto' or 'cpu'")
    if (capability := torch.cuda.get_device_capability()) < (8, 0):
        raise ValueError(f"this GPU's compute capability is {capability}, not (8, 0) or newer: use --device cpu")
    return torch.device("cuda", torch.cuda.current_device())


def pick_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    wanted = {"auto": config.dtype if device.type == "cuda" else "float32"}.get(name, name)  # on CPU products are fp32
    if wanted not in DTYPES:
        raise ValueError(f"unknown dtype {wanted!r}: use 'auto', {', '.join(map(repr, DTYPES))}")
    return DTYPES[wanted]


if __name__ == "__main__":
    from cli import main
    raise SystemExit(main())
