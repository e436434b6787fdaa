"""One step of the model: build the `Batch` from the scheduled sequences, run it, choose the tokens.

Owns the device-side inputs, the CUDA graphs of decode steps and the copies between host and device. A step is
launched, and its results are collected later: meanwhile the host may launch the next one, whose inputs the device takes
from `drawn`. Reads sequences and never changes them; knows nothing of text.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch

import sampler
from cache import allocate_kv_cache
from kernels import Ops, upload
from kernels.collectives import DRAWN
from kernels.tiles import KV_SPLIT, KV_TILE
from kernels.work import ITEM_FIELDS, MERGE_FIELDS, AttentionWork, plan_decode, plan_prefill
from model import Batch, Model
from parallel import Ranks
from scheduler import Sequence

MAX_PARTIALS = 4096  # KV splits of one step that may have programs of their own: bounds the merge buffers
GRAPH_RESERVE = 1 << 29  # bytes left free for CUDA graphs, which are captured after the cache is sized
CPU_CACHE_BYTES = 1 << 30
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
    num_logits: int = 0

    def fields(self) -> dict[str, int]:
        """name -> number of int32 values, in the order they lie in the packed buffer. The work lists, whose tail
        may be dead in a graph, come last."""
        return {"input_ids": self.num_tokens, "positions": self.num_tokens, "slot_mapping": self.num_tokens,
                "block_tables": self.num_seqs * self.width, "counts": 3, "logits_rows": self.num_logits,
                "merges": self.merges * MERGE_FIELDS, "prefill_items": self.prefill_items * ITEM_FIELDS,
                "decode_items": self.decode_items * ITEM_FIELDS}

    def offsets(self) -> tuple[dict[str, int], int]:
        """(name -> where the field begins, length of the buffer): all fields in one int32 buffer, each on a 16-byte
        border so that a kernel's pointers always look alike."""
        offsets, end = {}, 0
        for name, size in self.fields().items():
            offsets[name] = end
            end += -(-size // 4) * 4
        return offsets, max(end, 4)


def pack(shape: Shape, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The packed buffer. Fields shorter than the shape's are padded: slots with -1, the rest with 0."""
    offsets, length = shape.offsets()
    buffer = np.zeros(length, np.int32)
    buffer[offsets["slot_mapping"] : offsets["slot_mapping"] + shape.num_tokens] = -1
    for name, array in arrays.items():
        buffer[offsets[name] : offsets[name] + array.size] = array.reshape(-1)
    return buffer


@dataclass(frozen=True)
class Step:
    """All that a rank needs to run a step's forward pass. `packed`: the buffer of `shape`, of a graph without the dead
    tail of its work lists. `slabs`: [*, 2] int32, (first row, number of rows) of the prompt logits wanted."""

    shape: Shape
    grid: tuple[int, int, int]
    is_graph: bool
    packed: np.ndarray
    slabs: np.ndarray

    def encode(self) -> tuple[list[int], np.ndarray]:
        return ([self.packed.size, self.is_graph, *self.grid, *astuple(self.shape)],
                np.concatenate([self.packed, self.slabs.ravel()]))

    @classmethod
    def decode(cls, numbers: list[int], payload: np.ndarray) -> "Step":
        size, is_graph, *rest = numbers
        return cls(Shape(*rest[3:11]), tuple(rest[:3]), bool(is_graph), payload[:size], payload[size:].reshape(-1, 2))


@dataclass(frozen=True)
class StepOutput:
    """What a step yields for one sequence: the next token, or None if its prompt is not done yet; and logprobs."""

    token_id: int | None
    logprob: float | None
    top_logprobs: dict[int, float] | None
    prompt_logprobs: list[tuple[float, dict[int, float]]]


class Runner:
    """Runs steps of `model` over `kv_cache` [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]: on rank 0
    of `ranks` those that `launch` is asked for, on the others what rank 0 sends (`serve`)."""

    def __init__(self, model: Model, ops: Ops, kv_cache: torch.Tensor, max_num_seqs: int, max_model_len: int,
                 enforce_eager: bool, ranks: Ranks | None = None):
        self.model, self.ops, self.kv_cache, self.ranks = model, ops, kv_cache, ranks or Ranks()
        self.device = model.device
        self.max_blocks = -(-max_model_len // KV_TILE)
        self.use_graphs = self.device.type == "cuda" and not enforce_eager
        sizes = {1, 2, 4, 8, 16, 64, *range(128, max_num_seqs, 128), max_num_seqs}  # what fills a tile of the products
        self.graph_sizes = sorted(size for size in sizes if size <= max_num_seqs)
        # A captured decode step has a static packed input and static logits: in `graph_logits`, unless gathered.
        self.graphs: dict[Shape, tuple[torch.Tensor, torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.graph_pool = None
        gathers_in_place = model.collectives is not None and model.collectives.in_place
        rows = max_num_seqs if self.use_graphs and not gathers_in_place else 0
        self.drawn = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)  # the last step's tokens
        self.graph_logits = torch.empty((rows, model.config.vocab_size), dtype=torch.float32, device=self.device)

    @torch.inference_mode()
    def launch(self, seqs: list[Sequence]) -> Callable[[], list[StepOutput]]:
        """Compute the scheduled tokens of `seqs` and choose the next token of those whose last token is among them: the
        r-th of these goes to `drawn[r]`. Returns the function that waits for the results, one a sequence."""
        sampling = [seq for seq in seqs if seq.samples_this_step]
        asked = self._prompt_slabs(seqs)
        step = self._plan(seqs, [(row, len(targets)) for _, row, targets in asked])
        if self.ranks.size > 1:
            self.ranks.send(*step.encode())
        prompt_logprobs: dict[int, list] = {}

        def score(slab: int, logits: torch.Tensor) -> None:
            seq, _, targets = asked[slab]
            prompt_logprobs.setdefault(id(seq), []).extend(
                self._logprobs(logits, torch.tensor(targets, device=self.device), seq.params.prompt_logprobs))
            if seq.observe:
                seq.observe(logits)

        logits = self._execute(step, score)
        wait = self._choose(logits, sampling) if sampling else list
        samples = [seq.samples_this_step for seq in seqs]

        def collect() -> list[StepOutput]:
            chosen = iter(wait())
            return [StepOutput(*(next(chosen) if sample else (None, None, None)), prompt_logprobs.get(id(seq), []))
                    for seq, sample in zip(seqs, samples, strict=True)]

        return collect

    @torch.inference_mode()
    def serve(self) -> None:
        """On a rank other than 0: run what rank 0 sends, until it closes the engine."""
        while received := self.ranks.receive():
            step = Step.decode(*received)
            self._execute(step)
            if step.is_graph or step.shape.num_logits:
                self._share_drawn()

    def _execute(self, step: Step, score: Callable = lambda slab, logits: None) -> torch.Tensor | None:
        """The forward pass, on every rank alike. Calls `score` with each slab's number and logits; returns those of
        the rows that choose a token, if there are any."""
        if step.is_graph:
            return self._run_graph(step)
        batch = self._batch(upload(step.packed, self.device), step.shape, step.grid)
        if len(step.slabs):  # every row may be wanted; otherwise only the last of each sequence goes on to the norm
            hidden_states = self.model.forward(replace(batch, logits_rows=None), self.kv_cache)
            for slab, (row, count) in enumerate(step.slabs.tolist()):
                score(slab, self.model.logits(hidden_states[row : row + count].contiguous()))
            hidden_states = hidden_states[batch.logits_rows]
        else:
            hidden_states = self.model.forward(batch, self.kv_cache)
        return self.model.logits(hidden_states.contiguous()) if step.shape.num_logits else None

    def _plan(self, seqs: list[Sequence], slabs: list[tuple[int, int]] = ()) -> Step:
        """The step that computes the scheduled tokens of `seqs`, on all ranks."""
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
        rows = [int(end) - 1 for seq, end in zip(seqs, np.cumsum(counts), strict=True) if seq.samples_this_step]
        config = self.model.config  # the whole model's: a rank's group of query heads is no larger
        seq_lens = starts + counts
        tile = self.ops.query_tile(config.num_heads // config.num_kv_heads, config.head_dim * self.kv_cache.itemsize)
        prefill = plan_prefill(offsets, counts, seq_lens, tile)
        # Splits are dealt out where a sequence alone would take much longer than its share of all the work.
        splits = -(-seq_lens[counts == 1] // KV_SPLIT)
        walkers = self.ops.decode_programs // self.model.num_kv_heads
        share = max(2.0, 1.2 * splits.sum() / max(1, walkers))
        split = bool(walkers > 0 and splits.max(initial=0) > share and splits.sum() <= MAX_PARTIALS)
        decode, merges = plan_decode(offsets, counts, seq_lens, walkers if split else 0)
        grid = (len(prefill), len(decode), len(merges))
        arrays = {"input_ids": np.concatenate(ids), "positions": positions, "slot_mapping": slots,
                  "block_tables": tables, "counts": np.array(grid), "merges": merges, "prefill_items": prefill,
                  "decode_items": decode, "logits_rows": np.array(rows)}
        size = self._graph_size(seqs)
        if size is None or slabs:
            shape = Shape(len(positions), len(seqs), width, *grid[:2], len(merges), split, len(rows))
            return Step(shape, grid, False, pack(shape, arrays), np.array(slabs, np.int32).reshape(-1, 2))
        capacity = MAX_PARTIALS if split else size
        shape = Shape(size, size, self.max_blocks, 0, capacity, size if split else 0, split)
        arrays["block_tables"] = np.pad(tables, ((0, 0), (0, self.max_blocks - width)))
        del arrays["logits_rows"]
        used = shape.offsets()[0]["decode_items"] + decode.size  # the dead tail of the work list stays behind
        return Step(shape, (0, 0, 0), True, pack(shape, arrays)[:used], np.empty((0, 2), np.int32))

    def _batch(self, packed: torch.Tensor, shape: Shape, grid) -> Batch:
        """Views of the packed buffer, named."""
        sizes, (offsets, _) = shape.fields(), shape.offsets()
        view = {name: packed[offsets[name] : offsets[name] + sizes[name]] for name in sizes}
        work = AttentionWork(
            view["positions"], view["slot_mapping"], view["block_tables"].view(shape.num_seqs, shape.width),
            view["prefill_items"].view(-1, ITEM_FIELDS), view["decode_items"].view(-1, ITEM_FIELDS),
            view["merges"].view(-1, MERGE_FIELDS), view["counts"], *grid, split_decode=shape.split_decode,
            max_partials=MAX_PARTIALS if shape.split_decode else 0)
        return Batch(view["input_ids"], work, self.drawn, view["logits_rows"])

    def _graph_size(self, seqs: list[Sequence]) -> int | None:
        """The captured size that holds this decode step; None if it is not one, or graphs are off."""
        if not self.use_graphs or any(seq.num_scheduled_tokens != 1 or not seq.samples_this_step for seq in seqs):
            return None
        return next((size for size in self.graph_sizes if size >= len(seqs)), None)

    def _run_graph(self, step: Step) -> torch.Tensor:
        """Replay the graph of the step's shape (captured at its first use) and return its logits, padding included."""
        packed = torch.from_numpy(step.packed).pin_memory()
        if step.shape not in self.graphs:
            self.graphs[step.shape] = self._capture(step.shape, packed)
        inputs, graph, logits = self.graphs[step.shape]
        inputs[: len(packed)].copy_(packed, non_blocking=True)
        graph.replay()
        return logits

    def _capture(self, shape: Shape, packed: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.CUDAGraph, torch.Tensor]:
        inputs = torch.zeros(shape.offsets()[1], dtype=torch.int32, device=self.device)
        inputs[: len(packed)].copy_(packed)
        kv_heads = self.model.num_kv_heads
        walkers = self.ops.decode_programs // kv_heads if shape.split_decode else shape.num_seqs
        batch = replace(self._batch(inputs, shape, (0, walkers, shape.merges)), logits_rows=None)

        def run() -> torch.Tensor:
            return self.model.logits(self.model.forward(batch, self.kv_cache), self.graph_logits[: shape.num_seqs])

        run()  # compiles; writing this step's keys twice writes the same bits
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool):
            logits = run()
        self.graph_pool = self.graph_pool or graph.pool()
        return inputs, graph, logits

    def _share_drawn(self) -> None:
        """Rank 0's `drawn` to all ranks: the next step may read it before the host does."""
        if self.ranks.size > 1:
            widths = [len(self.drawn)] + [0] * (self.ranks.size - 1)
            mine = self.drawn[None, : widths[self.ranks.rank]]
            self.drawn.copy_(self.model.collectives.gather(mine, widths, DRAWN)[0])

    def _choose(self, logits: torch.Tensor, seqs: list[Sequence]) -> Callable[[], list[tuple]]:
        """Choose the next token of each sequence, from the leading rows of `logits`; returns the function that waits
        for (token id, logprob, top logprobs) of each."""
        logits = logits[: len(seqs)]
        tokens = sampler.choose(logits, seqs, self.ops)
        self.drawn[: len(seqs)].copy_(tokens)
        self._share_drawn()
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

    def _prompt_slabs(self, seqs: list[Sequence]) -> list[tuple[Sequence, int, list[int]]]:
        """(sequence, first row, the tokens that follow its rows) of the prompt logits that this step is asked for.

        Only what the sequence does not have yet: after a preemption the early rows come round again.
        """
        slabs, start = [], 0
        for seq in seqs:
            if seq.wants_prompt_logprobs:
                first = max(1, len(seq.prompt_logprobs))  # token 0 has no logprob
                last = min(seq.num_prompt_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens + 1)
                for token in range(first, last, LOGITS_SLAB):
                    slabs.append((seq, start + token - 1 - seq.num_computed_tokens,
                                  seq.token_ids[token : min(token + LOGITS_SLAB, last)]))
            start += seq.num_scheduled_tokens
        return slabs

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """The largest step, on dummy tokens that write no key: what it allocates is the step's peak memory."""
        shape = Shape(num_tokens, 1, 1, 0, 0, 0, False, num_seqs)
        batch = self._batch(upload(pack(shape, {}), self.device), shape, (0, 0, 0))
        logits = self.model.logits(self.model.forward(batch, self.kv_cache))
        tokens = self.ops.argmax(logits).clamp(max=logits.shape[1] - 1)  # of unwritten rows: maybe no token at all
        self._logprobs(logits.clone(), tokens, 1)


def measure_blocks(model: Model, utilization: float, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """How many cache blocks fit beside the weights and the largest step's working memory."""
    c, device = model.config, model.device
    block_bytes = 2 * c.num_layers * model.num_kv_heads * KV_TILE * c.head_dim * model.dtype.itemsize
    if device.type == "cpu":
        return max(1, CPU_CACHE_BYTES // block_bytes)
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}")
    probe = allocate_kv_cache(c.num_layers, 1, model.num_kv_heads, c.head_dim, model.dtype, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    Runner(model, model.ops, probe, max_num_seqs, KV_TILE, True).profile(max_num_batched_tokens, max_num_seqs)
    working = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    logits = max_num_seqs * c.vocab_size * 4  # the static output of the graphs
    budget = free - (1 - utilization) * total - working - logits - GRAPH_RESERVE
    if budget < block_bytes:
        raise ValueError(f"no memory left for the cache: {free / 2**30:.1f} GiB free after the weights, a step needs "
                         f"{working / 2**30:.1f}; lower max_num_batched_tokens or raise gpu_memory_utilization")
    return int(budget // block_bytes)
