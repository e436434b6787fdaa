"""Which sequences run in a step, and how many of their tokens: continuous batching with chunked prefill.

A step computes, for each scheduled sequence, the next `num_scheduled_tokens` of its tokens: one for a decode, a chunk
for a prefill, mixed freely. Order is first come, first served; when blocks run out, the youngest running sequence is
preempted and later recomputed, which costs time and changes no bit. This file knows no tensors and no kernels."""

from collections import deque
from dataclasses import dataclass, field

from cache import KV_TILE, BlockManager
from sampler import SamplingParams


@dataclass(eq=False)
class Sequence:
    """One completion in the making: the prompt's tokens followed by those generated so far. A negative id stands for a
    token that the device is choosing (kernels/reference.py), until the host knows it."""
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_new_tokens: int  # 0 computes the prompt and stops (scoring)
    stop_token_ids: frozenset[int] = frozenset()  # end ids after which the sequence is finished
    cache_salt: str | None = None
    num_computed_tokens: int = 0  # whose keys are in the cache
    num_cached_tokens: int | None = None  # of these, those that the prefix cache gave at the first admission
    num_scheduled_tokens: int = 0
    block_table: list[int] = field(default_factory=list)  # empty unless it is running
    block_uids: list[object] = field(default_factory=list)  # root, then those of the leading blocks that are full
    prompt_logprobs: list = field(default_factory=list)  # entry i belongs to prompt token i; entry 0 is None
    observe: object = None  # a function of it and of the logits that its prompt logprobs come from

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def samples_this_step(self) -> bool:
        """Whether this step's last token is the sequence's last, so that its logits give the next one."""
        return self.num_computed_tokens + self.num_scheduled_tokens == len(self.token_ids) and self.max_new_tokens > 0


class Scheduler:
    """Queues of waiting and running sequences over one `BlockManager`."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.blocks, self.max_num_seqs, self.max_num_batched_tokens = blocks, max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0

    def schedule(self) -> list[Sequence]:
        """Choose this step's sequences, set their `num_scheduled_tokens`, allocate their blocks. Running ones go first,
        then waiting ones in order, until the tokens or the blocks run out. Empty only if no work is left to begin."""
        budget, before = self.max_num_batched_tokens, self.num_preemptions
        for seq in list(self.running):
            self._cache_full_blocks(seq)
            if seq.block_table:  # else it was preempted by an older one in this very loop
                budget -= self._grant(seq, budget)
        # Victims come from the tail, behind all scheduled so far; then nobody is admitted: their blocks are spoken for.
        while (self.waiting and self.num_preemptions == before and len(self.running) < self.max_num_seqs and budget > 0
               and (granted := self._admit(self.waiting[0], budget))):  # nobody overtakes the first
            self.running.append(self.waiting.popleft())
            budget -= granted
        return [seq for seq in self.running if seq.num_scheduled_tokens]

    def _grant(self, seq: Sequence, budget: int) -> int:
        """Schedule up to `budget` more tokens, with their blocks, preempting the youngest. Returns how many: 0 if there
        are none to compute (the last of all, which may be under way, never is), or if `seq` had to go."""
        end = min(len(seq.token_ids), seq.num_prompt_tokens + max(0, seq.max_new_tokens - 1))
        seq.num_scheduled_tokens = min(end - seq.num_computed_tokens, budget)
        needed = -(-(seq.num_computed_tokens + seq.num_scheduled_tokens) // KV_TILE) - len(seq.block_table)
        while len(self.blocks.free) < needed:
            self.preempt(self.running[-1])
            if not seq.block_table:
                return 0
        seq.block_table += [self.blocks.allocate() for _ in range(needed)]
        return seq.num_scheduled_tokens

    def _admit(self, seq: Sequence, budget: int) -> int:
        """`_grant` a first chunk behind the cached prefix. 0 if it must wait: room is asked for the whole prompt, so
        that a long one does not enter only to be thrown out again."""
        hit, uids = self.blocks.acquire([] if seq.wants_prompt_logprobs else seq.token_ids, seq.cache_salt)
        if -(-len(seq.token_ids) // KV_TILE) - len(hit) > len(self.blocks.free):
            self.blocks.release(hit)
            return 0
        seq.block_table, seq.block_uids = hit, uids
        seq.num_computed_tokens = len(hit) * KV_TILE
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
        return self._grant(seq, budget)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it goes to the head of the queue and keeps its tokens."""
        self.finish(seq)
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def launched(self, seqs: list[Sequence]) -> list[tuple[Sequence, int]]:
        """The step is under way, and what follows on the device comes after it: its tokens count as computed, and the
        r-th to be drawn gets a place, as id -1 - r. Returns each sequence with the number of its computed tokens."""
        for seq in seqs:
            seq.num_computed_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
        for row, seq in enumerate([seq for seq in seqs if seq.samples_this_step], 1):
            seq.token_ids.append(-row)
        return [(seq, seq.num_computed_tokens) for seq in seqs]

    def _cache_full_blocks(self, seq: Sequence) -> None:
        """Enter blocks that are full, and whose tokens are known, into the prefix index."""
        first = len(seq.block_uids) - 1
        for i, block in enumerate(seq.block_table[first : seq.num_computed_tokens // KV_TILE], first):
            tokens = seq.token_ids[i * KV_TILE : (i + 1) * KV_TILE]
            if tokens[-1] < 0:
                break
            seq.block_uids.append(self.blocks.cache_block(block, seq.block_uids[-1], tokens))

    def finish(self, seq: Sequence) -> None:
        """Take a waiting or running sequence out of its queue and free its blocks."""
        self._cache_full_blocks(seq)
        (self.running if seq.block_table else self.waiting).remove(seq)
        self.blocks.release(seq.block_table)
        seq.block_table, seq.block_uids = [], []
        seq.num_computed_tokens = seq.num_scheduled_tokens = 0
