"""One step of the model: build the `Batch` from the scheduled sequences, run it, choose the tokens.

Owns the device-side inputs, the CUDA graphs of decode steps and the copies between host and device. A step is
launched, and its results are collected later: meanwhile the host may launch the next one, whose inputs the device takes
from `drawn`. Reads sequences and never changes them; knows nothing of text.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

import sampler
from kernels import Ops, upload
from kernels.tiles import KV_SPLIT, KV_TILE
from kernels.work import ITEM_FIELDS, MERGE_FIELDS, AttentionWork, plan_decode, plan_prefill
from model import Batch, Model
from scheduler import Sequence

MAX_PARTIALS = 4096  # KV splits of one step that may have programs of their own: bounds the merge buffers
LOGITS_SLAB = 512  # rows of prompt logits computed at a time: 512 x 152k x 4 bytes = 311 MB


@dataclass(frozen=True)
class Shape:
    """Sizes of a step's input fields. A CUDA graph is captured for one Shape and serves every batch that fits."""

    num_tokens: int
    num_seqs: int
    width: int  # columns of the block tables
    prefill_items: int
    decode_items: int
    merges: int
    split_decode: bool

    def fields(self) -> dict[str, int]:
        """name -> number of int32 values, in the order they lie in the packed buffer. The work lists, whose tail
        may be dead in a graph, come last."""
        return {"input_ids": self.num_tokens, "positions": self.num_tokens, "slot_mapping": self.num_tokens,
                "block_tables": self.num_seqs * self.width, "counts": 3, "merges": self.merges * MERGE_FIELDS,
                "prefill_items": self.prefill_items * ITEM_FIELDS, "decode_items": self.decode_items * ITEM_FIELDS}


def pack(shape: Shape, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, int]]:
    """All fields in one int32 buffer, each on a 16-byte border so that a kernel's pointers always look alike.

    Returns (buffer, name -> offset). Fields shorter than the shape's are padded: slots with -1, the rest with 0."""
    offsets, end = {}, 0
    for name, size in shape.fields().items():
        offsets[name] = end
        end += -(-size // 4) * 4
    buffer = np.zeros(max(end, 4), np.int32)
    buffer[offsets["slot_mapping"] : offsets["slot_mapping"] + shape.num_tokens] = -1
    for name, array in arrays.items():
        buffer[offsets[name] : offsets[name] + array.size] = array.reshape(-1)
    return buffer, offsets


@dataclass(frozen=True)
class StepOutput:
    """What a step yields for one sequence: the next token, or None if its prompt is not done yet; and logprobs."""

    token_id: int | None
    logprob: float | None
    top_logprobs: dict[int, float] | None
    prompt_logprobs: list[tuple[float, dict[int, float]]]


class Runner:
    """Runs steps of `model` over `kv_cache` [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]."""

    def __init__(self, model: Model, ops: Ops, kv_cache: torch.Tensor, max_num_seqs: int, max_model_len: int,
                 enforce_eager: bool):
        self.model, self.ops, self.kv_cache = model, ops, kv_cache
        self.device = model.device
        self.max_blocks = -(-max_model_len // KV_TILE)
        self.use_graphs = self.device.type == "cuda" and not enforce_eager
        sizes = {1, 2, 4, 8, 16, 64, *range(128, max_num_seqs, 128), max_num_seqs}  # what fills a tile of the products
        self.graph_sizes = sorted(size for size in sizes if size <= max_num_seqs)
        # A captured decode step has a static packed input, and leaves its logits in `graph_logits`.
        self.graphs: dict[Shape, tuple[torch.Tensor, torch.cuda.CUDAGraph]] = {}
        self.graph_pool = None
        rows = max_num_seqs if self.use_graphs else 0
        self.drawn = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)  # the last step's tokens
        self.graph_logits = torch.empty((rows, model.config.vocab_size), dtype=torch.float32, device=self.device)

    @torch.inference_mode()
    def launch(self, seqs: list[Sequence]) -> Callable[[], list[StepOutput]]:
        """Compute the scheduled tokens of `seqs` and choose the next token of those whose last token is among them: the
        r-th of these goes to `drawn[r]`. Returns the function that waits for the results, one a sequence."""
        shape, arrays, grid = self._plan(seqs)
        sampling = [seq for seq in seqs if seq.samples_this_step]
        prompts = [seq for seq in seqs if seq.wants_prompt_logprobs]
        ends = np.cumsum([seq.num_scheduled_tokens for seq in seqs])
        rows = [int(end) - 1 for seq, end in zip(seqs, ends, strict=True) if seq.samples_this_step]
        graph_size = self._graph_size(seqs)
        if graph_size and not prompts:
            logits = self._run_graph(shape, arrays, graph_size)
            prompt_logprobs = {}
        else:
            buffer, offsets = pack(shape, arrays)
            batch = self._batch(upload(buffer, self.device), offsets, shape, grid)
            if prompts:  # every row may be wanted; otherwise only the last of each sequence goes on to the norm
                hidden_states = self.model.forward(batch, self.kv_cache)
                prompt_logprobs = self._score_prompts(seqs, ends, hidden_states)
                hidden_states = hidden_states[rows]
            else:
                prompt_logprobs = {}
                index = upload(np.array(rows, np.int64), self.device)
                hidden_states = self.model.forward(replace(batch, logits_rows=index), self.kv_cache)
            logits = self.model.logits(hidden_states.contiguous()) if rows else None
        wait = self._choose(logits, sampling) if sampling else list
        samples = [seq.samples_this_step for seq in seqs]

        def collect() -> list[StepOutput]:
            chosen = iter(wait())
            return [StepOutput(*(next(chosen) if sample else (None, None, None)), prompt_logprobs.get(id(seq), []))
                    for seq, sample in zip(seqs, samples, strict=True)]

        return collect

    def _plan(self, seqs: list[Sequence]) -> tuple[Shape, dict[str, np.ndarray], tuple[int, int, int]]:
        """The step's arrays, their exact shape, and the grid sizes."""
        counts = np.array([seq.num_scheduled_tokens for seq in seqs])
        starts = np.array([seq.num_computed_tokens for seq in seqs])
        offsets = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) - np.repeat(offsets - starts, counts)
        width = max(len(seq.block_table) for seq in seqs)
        tables = np.zeros((len(seqs), width), np.int32)
        for row, seq in zip(tables, seqs, strict=True):
            row[: len(seq.block_table)] = seq.block_table
        ids = [seq.token_ids[seq.num_computed_tokens : seq.num_computed_tokens + seq.num_scheduled_tokens]
               for seq in seqs]
        slots = tables[np.repeat(np.arange(len(seqs)), counts), positions // KV_TILE] * KV_TILE + positions % KV_TILE
        config = self.model.config
        seq_lens = starts + counts
        tile = self.ops.query_tile(config.num_heads // config.num_kv_heads, config.head_dim * self.kv_cache.itemsize)
        prefill = plan_prefill(offsets, counts, seq_lens, tile)
        # Splits are dealt out where a sequence alone would take much longer than its share of all the work.
        splits = -(-seq_lens[counts == 1] // KV_SPLIT)
        walkers = self.ops.decode_programs // config.num_kv_heads
        share = max(1.0, 1.2 * splits.sum() / max(1, walkers))
        split = bool(walkers > 0 and splits.max(initial=0) > share and splits.sum() <= MAX_PARTIALS)
        decode, merges = plan_decode(offsets, counts, seq_lens, walkers if split else 0)
        grid = (len(prefill), len(decode), len(merges))
        shape = Shape(len(positions), len(seqs), width, len(prefill), len(decode), len(merges), split)
        return shape, {"input_ids": np.concatenate(ids), "positions": positions, "slot_mapping": slots,
                       "block_tables": tables, "counts": np.array(grid), "merges": merges, "prefill_items": prefill,
                       "decode_items": decode}, grid

    def _batch(self, packed: torch.Tensor, offsets: dict[str, int], shape: Shape, grid) -> Batch:
        """Views of the packed buffer, named."""
        sizes = shape.fields()
        view = {name: packed[offsets[name] : offsets[name] + sizes[name]] for name in sizes}
        work = AttentionWork(
            view["positions"], view["slot_mapping"], view["block_tables"].view(shape.num_seqs, shape.width),
            view["prefill_items"].view(-1, ITEM_FIELDS), view["decode_items"].view(-1, ITEM_FIELDS),
            view["merges"].view(-1, MERGE_FIELDS), view["counts"], *grid, split_decode=shape.split_decode,
            max_partials=MAX_PARTIALS if shape.split_decode else 0)
        return Batch(view["input_ids"], work, self.drawn)

    def _graph_size(self, seqs: list[Sequence]) -> int | None:
        """The captured size that holds this decode step; None if it is not one, or graphs are off."""
        if not self.use_graphs or any(seq.num_scheduled_tokens != 1 or not seq.samples_this_step for seq in seqs):
            return None
        return next((size for size in self.graph_sizes if size >= len(seqs)), None)

    def _run_graph(self, live: Shape, arrays: dict[str, np.ndarray], size: int) -> torch.Tensor:
        """Replay the graph of `size` sequences (captured at its first use) and return its logits."""
        capacity = MAX_PARTIALS if live.split_decode else size
        shape = Shape(size, size, self.max_blocks, 0, capacity, size if live.split_decode else 0, live.split_decode)
        tables = np.zeros((live.num_seqs, self.max_blocks), np.int32)
        tables[:, : live.width] = arrays["block_tables"]
        buffer, offsets = pack(shape, {**arrays, "block_tables": tables})
        used = offsets["decode_items"] + arrays["decode_items"].size  # the dead tail of the work list stays behind
        if shape not in self.graphs:
            self.graphs[shape] = self._capture(shape, buffer, offsets)
        inputs, graph = self.graphs[shape]
        inputs[:used].copy_(torch.from_numpy(buffer[:used]).pin_memory(), non_blocking=True)
        graph.replay()
        return self.graph_logits[: live.num_seqs]

    def _capture(self, shape: Shape, buffer: np.ndarray,
                 offsets: dict[str, int]) -> tuple[torch.Tensor, torch.cuda.CUDAGraph]:
        inputs = upload(buffer, self.device)
        kv_heads = self.model.config.num_kv_heads
        walkers = self.ops.decode_programs // kv_heads if shape.split_decode else shape.num_seqs
        batch = self._batch(inputs, offsets, shape, (0, walkers, shape.merges))

        def run() -> None:
            self.model.logits(self.model.forward(batch, self.kv_cache), self.graph_logits[: shape.num_seqs])

        run()  # compiles; writing this step's keys twice writes the same bits
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool):
            run()
        self.graph_pool = self.graph_pool or graph.pool()
        return inputs, graph

    def _choose(self, logits: torch.Tensor, seqs: list[Sequence]) -> Callable[[], list[tuple]]:
        """Choose the next token of each sequence; returns the function that waits for (token id, logprob, top logprobs)
        of each."""
        tokens = sampler.choose(logits, seqs, self.ops)
        self.drawn[: len(seqs)].copy_(tokens)
        wanted = [seq.params.logprobs for seq in seqs]
        asking = [i for i, want in enumerate(wanted) if want is not None]
        results = [tokens]
        if asking:
            if len(asking) < len(seqs):
                index = upload(np.array(asking), self.device)
                logits, tokens = logits[index], tokens[index]
            tokens = tokens.clamp(max=logits.shape[1] - 1)  # a broken row's logprob is never shown
            results += self.ops.logprobs(logits, tokens, max(wanted[i] for i in asking))
        wait = self._download(results)

        def collect() -> list[tuple]:
            ids, *values = [result.tolist() for result in wait()]
            chosen = [(token, None, None) for token in ids]
            for i, value, *top in zip(asking, *values):
                chosen[i] = ids[i], value, dict(list(zip(*top, strict=True))[: wanted[i]])
            return chosen

        return collect

    def _download(self, tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start to copy tensors to the host; returns the function that waits for them."""
        if self.device.type == "cpu":
            return lambda: tensors
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        done = torch.cuda.Event()
        done.record()

        def wait() -> list[torch.Tensor]:
            done.synchronize()
            return copies

        return wait

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[tuple[float, dict[int, float]]]:
        values, *tops = (result.tolist() for result in self.ops.logprobs(logits, tokens, top))
        return [(value, dict(zip(*top, strict=True))) for value, *top in zip(values, *tops, strict=True)]

    def _score_prompts(self, seqs, ends, hidden_states) -> dict[int, list]:
        """Logprobs of the prompt tokens that follow this step's rows, for the sequences that ask: id(seq) -> list.

        Only what the sequence does not have yet: after a preemption the early rows come round again."""
        scores: dict[int, list] = {}
        for seq, end in zip(seqs, ends, strict=True):
            if not seq.wants_prompt_logprobs:
                continue
            start = int(end) - seq.num_scheduled_tokens
            first = max(1, len(seq.prompt_logprobs))  # token 0 has no logprob
            last = min(seq.num_prompt_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens + 1)
            found = []
            for token in range(first, last, LOGITS_SLAB):
                targets = seq.token_ids[token : min(token + LOGITS_SLAB, last)]
                row = start + token - 1 - seq.num_computed_tokens
                logits = self.model.logits(hidden_states[row : row + len(targets)].contiguous())
                if seq.observe:
                    seq.observe(seq, logits)
                found += self._logprobs(logits, torch.tensor(targets, device=self.device), seq.params.prompt_logprobs)
            scores[id(seq)] = found
        return scores

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """The largest step, on dummy tokens that write no key: what it allocates is the step's peak memory."""
        zeros = np.zeros(num_tokens, np.int64)
        shape = Shape(num_tokens, 1, 1, 0, 0, 0, False)
        buffer, offsets = pack(shape, {"input_ids": zeros, "positions": zeros})
        batch = self._batch(upload(buffer, self.device), offsets, shape, (0, 0, 0))
        index = torch.zeros(num_seqs, dtype=torch.int64, device=self.device)
        hidden_states = self.model.forward(replace(batch, logits_rows=index), self.kv_cache)
        logits = self.model.logits(hidden_states)
        self._logprobs(logits.clone(), self.ops.argmax(logits), 1)
