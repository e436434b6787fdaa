"""One step of the model: build the `Batch` from the scheduled sequences, run it, choose the tokens.

Owns the device-side inputs, the CUDA graphs of decode steps and the copies between host and device. A step is
launched, and its results are collected later: meanwhile the host may launch the next one, whose inputs the device takes
from `drawn`. Reads sequences and never changes them; knows nothing of text."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch

import sampler
from kernels import upload
from kernels.tiles import KV_SPLIT, KV_TILE
from kernels.work import ITEM_FIELDS, MERGE_FIELDS, AttentionWork, plan_decode, plan_prefill
from model import LOGITS_SLAB, Batch, Model
from scheduler import Sequence

MAX_PARTIALS = 4096  # KV splits of one step that may be merged through memory: bounds those buffers


def input_shapes(num_tokens: int, num_seqs: int, width: int, decode_items: int = 0, merges: int = 0) -> dict:
    """Shapes of a step's input by field; `width` is that of the block tables. The work list whose tail may be dead in a
    graph comes last."""
    return {"input_ids": (num_tokens,), "positions": (num_tokens,), "slot_mapping": (num_tokens,),
            "block_tables": (num_seqs, width), "counts": (3,), "merges": (merges, MERGE_FIELDS),
            "prefill_items": (0, ITEM_FIELDS), "decode_items": (decode_items, ITEM_FIELDS)}


def pack(fields: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]]) -> tuple[np.ndarray, dict[str, slice]]:
    """One int32 buffer of fields of these shapes, and where each lies: on 16-byte borders, so that kernels' pointers
    look alike. Beyond what is given they are empty: no token has a slot, no list an entry."""
    places, end = {}, 0
    for name, shape in shapes.items():
        places[name] = slice(end, end + math.prod(shape))
        end += -(-math.prod(shape) // 4) * 4
    buffer = np.zeros(end, np.int32)
    buffer[places["slot_mapping"]] = -1
    for name, array in fields.items():
        buffer[places[name]].reshape(shapes[name])[tuple(map(slice, array.shape))] = array
    return buffer, places


@dataclass
class StepOutput:
    """What a step yields for one sequence: the next token, or None if its prompt is not done yet; and logprobs."""
    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    prompt_logprobs: list[tuple[float, dict[int, float]]] = field(default_factory=list)


class Runner:
    """Runs steps of `model` over `kv_cache` [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]."""

    def __init__(self, model: Model, num_blocks: int | None, max_num_seqs: int, max_model_len: int, eager: bool):
        self.model, self.ops, self.device, self.max_num_seqs = model, model.ops, model.device, max_num_seqs
        self.max_blocks = -(-max_model_len // KV_TILE)
        self.decode_slots = self.ops.decode_programs // model.most_kv_heads  # all ranks must split alike
        self.use_graphs = self.device.type == "cuda" and not eager
        sizes = {1, 2, 4, 8, 16, 64, 192, *range(128, max_num_seqs, 128), max_num_seqs}  # what fills tiles
        self.graph_sizes = sorted(size for size in sizes if size <= max_num_seqs)
        self.drawn = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)  # the last step's tokens
        self.use_cache(num_blocks)

    def use_cache(self, num_blocks: int | None) -> None:
        """Go on with a cache of NaN (a read of what nobody wrote must show) or none. Graphs hold addresses, and go."""
        self.graphs: dict[tuple[int, bool], tuple[torch.Tensor, torch.cuda.CUDAGraph]] = {}  # by size and split decode
        model, c, rows = self.model, self.model.config, self.max_num_seqs if self.use_graphs and num_blocks else 0
        self.graph_logits = torch.empty((rows, c.vocab_size), dtype=torch.float32, device=self.device)
        shape = c.num_layers, 2, num_blocks, model.num_kv_heads, KV_TILE, c.head_dim
        self.kv_cache = torch.full(shape, torch.nan, dtype=model.dtype, device=self.device) if num_blocks else None

    @torch.inference_mode()
    def launch(self, seqs: list[Sequence]) -> Callable[[], list[StepOutput]]:
        """Compute the scheduled tokens of `seqs` and choose the next token of those whose last token is among them: the
        r-th of these goes to `drawn[r]`. Returns the function that waits for the results, one a sequence."""
        fields = self._plan(seqs)
        outputs, samples = [StepOutput() for _ in seqs], [seq.samples_this_step for seq in seqs]
        scoring = any(seq.wants_prompt_logprobs for seq in seqs)  # then every row may be wanted, not only the last
        if self.use_graphs and not scoring and all(samples) and len(fields["input_ids"]) == len(seqs):  # all decode
            logits = self._run_graph(fields)
        else:
            batch, _ = self._batch(fields)
            rows = upload(np.cumsum([seq.num_scheduled_tokens for seq in seqs])[samples] - 1, self.device)
            hidden_states = self.model.forward(replace(batch, logits_rows=None if scoring else rows), self.kv_cache)
            if scoring:
                parts = hidden_states.split([seq.num_scheduled_tokens for seq in seqs])
                for seq, output, part in zip(seqs, outputs, parts, strict=True):
                    if seq.wants_prompt_logprobs:
                        output.prompt_logprobs = self._score_prompt(seq, part)
                hidden_states = hidden_states[rows]
            logits = self.model.logits(hidden_states) if any(samples) else None
        return self._choose(logits, seqs, outputs) if any(samples) else lambda: outputs

    def _plan(self, seqs: list[Sequence]) -> dict[str, np.ndarray]:
        """The fields of the step's input."""
        counts, starts = np.array([(seq.num_scheduled_tokens, seq.num_computed_tokens) for seq in seqs]).T
        offsets = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) - np.repeat(offsets - starts, counts)
        tables = np.zeros((len(seqs), max(len(seq.block_table) for seq in seqs)), np.int32)
        for row, seq in zip(tables, seqs, strict=True):
            row[: len(seq.block_table)] = seq.block_table
        ids = [seq.token_ids[start : start + count] for seq, start, count in zip(seqs, starts, counts, strict=True)]
        slots = tables[np.repeat(np.arange(len(seqs)), counts), positions // KV_TILE] * KV_TILE + positions % KV_TILE
        model, seq_lens = self.model, starts + counts
        group, row_bytes = model.num_heads // model.num_kv_heads, model.config.head_dim * model.dtype.itemsize
        prefill = plan_prefill(offsets, counts, seq_lens, self.ops.query_tile(group, row_bytes))
        # Splits are dealt out where one sequence has more than its share of all, by a tenth, which merging them costs.
        splits, n = -(-seq_lens[counts == 1] // KV_SPLIT), self.decode_slots
        split = splits.max(initial=1) * n > max(n, 1.1 * splits.sum()) and splits.sum() <= MAX_PARTIALS
        decode, merges = plan_decode(offsets, counts, seq_lens, n if split else 0)
        return {"input_ids": np.concatenate(ids), "positions": positions, "slot_mapping": slots,
                "block_tables": tables, "counts": np.array([len(prefill), len(decode), len(merges)]), "merges": merges,
                "prefill_items": prefill, "decode_items": decode}

    def _batch(self, fields: dict[str, np.ndarray], shapes=None, grid=None) -> tuple[Batch, torch.Tensor]:
        """The fields, padded to `shapes` if given, on the device, and the packed tensor that they are views of."""
        shapes = shapes or {name: array.shape for name, array in fields.items()}
        prefill, decode, merges = fields["counts"].tolist() if fields else (0, 0, 0)
        grid = grid or (prefill, self.decode_slots if merges else decode, merges)
        buffer, places = pack(fields, shapes)
        packed = upload(buffer, self.device)
        view = {name: packed[place].view(shapes[name]) for name, place in places.items()}
        input_ids = view.pop("input_ids")
        work = AttentionWork(**view, grid=grid, max_partials=MAX_PARTIALS if grid[2] else 0)
        return Batch(input_ids, work, self.drawn), packed

    def _run_graph(self, live: dict[str, np.ndarray]) -> torch.Tensor:
        """Replay the smallest graph that holds these sequences (captured at its first use) and return its logits."""
        count, split = len(live["block_tables"]), len(live["merges"]) > 0
        size = next(size for size in self.graph_sizes if size >= count)
        items, merges = (MAX_PARTIALS + self.decode_slots, size) if split else (size, 0)
        shapes = input_shapes(size, size, self.max_blocks, items, merges)
        if (size, split) not in self.graphs:
            batch, inputs = self._batch(live, shapes, (0, self.decode_slots if split else size, merges))
            graph, pool = torch.cuda.CUDAGraph(), next((other.pool() for _, other in self.graphs.values()), None)
            for mode in (nullcontext(), torch.cuda.graph(graph, pool)):  # the first time it runs, to compile
                with mode:  # writing a step's keys twice writes the same bits
                    self.model.logits(self.model.forward(batch, self.kv_cache), self.graph_logits[:size])
            self.graphs[size, split] = inputs, graph
        inputs, graph = self.graphs[size, split]
        buffer, places = pack(live, shapes)
        used = places["decode_items"].start + live["decode_items"].size  # the dead tail of the work list stays behind
        inputs[:used].copy_(torch.from_numpy(buffer[:used]).pin_memory(), non_blocking=True)
        graph.replay()
        return self.graph_logits[:count]

    def _choose(self, logits: torch.Tensor, seqs: list[Sequence], outputs: list[StepOutput]) -> Callable:
        """Choose the next token of those that sample; returns the function that waits for it and fills `outputs`."""
        seqs, chosen = zip(*[pair for pair in zip(seqs, outputs, strict=True) if pair[0].samples_this_step])
        tokens = sampler.choose(logits, seqs, self.ops)
        self.drawn[: len(seqs)].copy_(tokens)
        wanted = {i: seq.params.logprobs for i, seq in enumerate(seqs) if seq.params.logprobs is not None}
        results = [tokens]
        if wanted:
            if len(wanted) < len(seqs):
                index = upload(np.array(list(wanted)), self.device)
                logits, tokens = logits[index], tokens[index]
            tokens = tokens.clamp(max=logits.shape[1] - 1)  # a broken row's logprob is never shown
            results += self.ops.logprobs(logits, tokens, max(wanted.values()))
        results = [result.to("cpu", non_blocking=True) for result in results]  # they come over while the host goes on
        done = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

        def collect() -> list[StepOutput]:
            if done is not None:
                done.synchronize()
            ids, *values = [result.tolist() for result in results]
            for output, token in zip(chosen, ids, strict=True):
                output.token_id = token
            for (i, count), value, *top in zip(wanted.items(), *values):
                chosen[i].logprob, chosen[i].top_logprobs = value, dict(list(zip(*top, strict=True))[:count])
            return outputs

        return collect

    def _score_prompt(self, seq: Sequence, hidden_states: torch.Tensor) -> list[tuple[float, dict[int, float]]]:
        """Logprobs of the prompt tokens that follow a sequence's rows of this step: of those it has not yet, since
        after a preemption the early rows come round again."""
        last = min(seq.num_prompt_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens + 1)
        found = []
        for token in range(max(1, len(seq.prompt_logprobs)), last, LOGITS_SLAB):  # token 0 has no logprob
            targets = torch.tensor(seq.token_ids[token : min(token + LOGITS_SLAB, last)], device=self.device)
            row = token - 1 - seq.num_computed_tokens
            logits = self.model.logits(hidden_states[row : row + len(targets)].contiguous())
            if seq.observe:
                seq.observe(seq, logits)
            results = self.ops.logprobs(logits, targets, seq.params.prompt_logprobs)
            found += [(value, dict(zip(*top))) for value, *top in zip(*(result.tolist() for result in results))]
        return found

    @torch.inference_mode()
    def profile(self, num_tokens: int) -> None:
        """The largest step, on dummy tokens that write no key: what it allocates is the step's peak memory."""
        batch, _ = self._batch({}, input_shapes(num_tokens, 1, 1), (0, 0, 0))
        index = torch.zeros(self.max_num_seqs, dtype=torch.int64, device=self.device)
        logits = self.model.logits(self.model.forward(batch, self.kv_cache)[index])
        self.ops.logprobs(logits.clone(), index, 1)
