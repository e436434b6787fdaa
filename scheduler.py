"""Which sequences run in a step, and how many of their tokens: continuous batching with chunked prefill.

A step computes, for each scheduled sequence, the next `num_scheduled_tokens` of its tokens: one for a decode, a chunk
for a prefill, mixed freely. Order is first come, first served; when blocks run out, the youngest running sequence is
preempted and later recomputed, which costs time and changes no bit. This file knows no tensors and no kernels.
"""

import enum
import time
from collections import deque
from dataclasses import dataclass, field

from cache import BlockManager
from sampler import SamplingParams


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Sequence:
    """One completion in the making: the prompt's tokens followed by those generated so far.

    `num_computed_tokens`: tokens whose keys are in the cache. `num_cached_tokens`: of these, how many the prefix cache
    gave at the first admission (set once). `max_new_tokens` 0 computes the prompt and stops (scoring).
    """

    token_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()  # end ids after which the sequence is finished
    cache_salt: str | None = None
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    block_table: list[int] = field(default_factory=list)
    block_uids: list[object] = field(default_factory=list)  # of the leading blocks that are in the prefix index
    prompt_logprobs: list = field(default_factory=list)  # entry i belongs to prompt token i; entry 0 is None
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self):
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def samples_this_step(self) -> bool:
        """Whether this step's last token is the sequence's last, so that its logits give the next one."""
        done = self.num_computed_tokens + self.num_scheduled_tokens
        return done == len(self.token_ids) and self.max_new_tokens > 0


class Scheduler:
    """Queues of waiting and running sequences over one `BlockManager`."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.blocks = blocks
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Sequence]:
        """Choose this step's sequences and set their `num_scheduled_tokens`; allocate the blocks they write.

        Running sequences go first, then waiting ones in order, until the token budget or the blocks run out. Empty
        only when there is no work.
        """
        budget = self.max_num_batched_tokens
        scheduled: list[Sequence] = []
        preemptions = self.num_preemptions
        for seq in list(self.running):
            if seq.status is not Status.RUNNING or budget == 0:
                continue  # preempted by an older one in this very loop, or no budget left
            count = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
            if self._make_room(seq, count):
                seq.num_scheduled_tokens = count
                scheduled.append(seq)
                budget -= count
        # Victims come from the tail of `running`, behind everything scheduled so far. A step that preempted admits
        # nobody: the blocks it freed are spoken for.
        crowded = self.num_preemptions > preemptions
        while self.waiting and not crowded and len(self.running) < self.max_num_seqs and budget > 0:
            seq = self.waiting[0]
            count = self._admit(seq, budget)
            if not count:
                break  # first come, first served: nobody overtakes the head of the queue
            self.waiting.popleft()
            self.running.append(seq)
            seq.status, seq.num_scheduled_tokens = Status.RUNNING, count
            scheduled.append(seq)
            budget -= count
        return scheduled

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.blocks.block_size)

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens of a running sequence, preempting the youngest if need be. False if `seq`
        itself had to go."""
        needed = self._blocks_for(seq.num_computed_tokens + count) - len(seq.block_table)
        while self.blocks.num_free < needed:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        seq.block_table += [self.blocks.allocate() for _ in range(needed)]
        return True

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Take the cached prefix and blocks for a first chunk; the number of tokens to compute, 0 if it must wait.

        Room is asked for the whole prompt, so that a long one does not enter only to be thrown out again.
        """
        root = self.blocks.root(seq.cache_salt)
        hit, uids = ([], []) if seq.wants_prompt_logprobs else self.blocks.match(seq.token_ids, root)
        unowned = sum(self.blocks.ref_count[block] == 0 for block in hit)
        if self._blocks_for(len(seq.token_ids)) - len(hit) + unowned > self.blocks.num_free:
            return 0
        for block in hit:
            self.blocks.acquire(block)
        cached = len(hit) * self.blocks.block_size
        count = min(len(seq.token_ids) - cached, budget)
        fresh = self._blocks_for(cached + count) - len(hit)
        seq.block_table = hit + [self.blocks.allocate() for _ in range(fresh)]
        seq.block_uids, seq.num_computed_tokens = uids, cached
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = cached
        return count

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it goes to the head of the queue and keeps its tokens."""
        self.running.remove(seq)
        self._release(seq)
        seq.status, seq.num_preemptions = Status.WAITING, seq.num_preemptions + 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def computed(self, seq: Sequence) -> None:
        """The step is done: advance `num_computed_tokens` and enter blocks that became full into the prefix index."""
        seq.num_computed_tokens += seq.num_scheduled_tokens
        seq.num_scheduled_tokens = 0
        size = self.blocks.block_size
        for i in range(len(seq.block_uids), seq.num_computed_tokens // size):
            parent = seq.block_uids[-1] if seq.block_uids else self.blocks.root(seq.cache_salt)
            tokens = seq.token_ids[i * size : (i + 1) * size]
            seq.block_uids.append(self.blocks.cache_block(seq.block_table[i], parent, tokens))

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence in any state ("stop", "length", "abort", "error") and free its blocks."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self._release(seq)
        seq.status, seq.finish_reason, seq.finish_time = Status.FINISHED, reason, time.perf_counter()

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq.block_table)
        seq.block_table, seq.block_uids = [], []
        seq.num_computed_tokens = seq.num_scheduled_tokens = 0

    def check_integrity(self) -> None:
        """Every block is free or owned, by these sequences alone (tests call it at each step)."""
        assert all(not seq.block_table for seq in self.waiting), "a waiting sequence holds blocks"
        self.blocks.check_integrity([seq.block_table for seq in self.running])
