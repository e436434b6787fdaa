"""The paged KV cache: who owns which block.

`BlockManager` deals in integers: token ids in, block ids out. It knows neither sequences' state nor the model. A block
is free (reference count 0) or held by one or more sequences. A full block whose keys are computed can be *cached*: it
is entered under the exact tokens it holds and the block before it, and stays findable, while free, until reused."""

from collections import OrderedDict

from kernels.tiles import KV_TILE


class BlockManager:
    """Owner of block ids 0 .. num_blocks - 1 of KV_TILE tokens. The prefix index maps (uid of the block before, the
    block's own tokens) to a block and its uid. A dict compares keys in full: prefixes whose hashes collide are told
    apart. A uid is an object of its own, made when a block is cached: entries behind an evicted block can no longer be
    reached. "Before" the first block is ("root", salt): requests with different salts share nothing."""

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True):
        self.num_blocks, self.enable_prefix_caching = num_blocks, enable_prefix_caching
        self.ref_count = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self.index: dict[tuple, tuple[int, object]] = {}
        self.key: dict[int, tuple] = {}  # cached block -> its key in `index`

    def acquire(self, token_ids: list[int], salt: str | None) -> tuple[list[int], list[object]]:
        """(blocks, the root and their uids) of the longest cached prefix, whole blocks only, each owned once more.
        The last token is left to compute, its hidden state being wanted: a prompt cached whole matches a block less."""
        blocks, uids = [], [("root", salt)]
        for end in range(KV_TILE, len(token_ids), KV_TILE):
            block, uid = self.index.get((uids[-1], tuple(token_ids[end - KV_TILE : end])), (None, None))
            if block is None:
                break
            self.ref_count[block] += 1
            self.free.pop(block, None)
            blocks.append(block)
            uids.append(uid)
        return blocks, uids

    def allocate(self) -> int:
        """The least recently used free block, of which there must be one, now owned once; its cache entry is gone."""
        block, _ = self.free.popitem(last=False)
        if key := self.key.pop(block, None):
            del self.index[key]
        self.ref_count[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        """Give back one reference to each block. The tail goes first, so that it is evicted before the head."""
        for block in reversed(blocks):
            assert self.ref_count[block] > 0, f"block {block} released more often than taken"
            self.ref_count[block] -= 1
            if not self.ref_count[block]:
                self.free[block] = None

    def cache_block(self, block: int, parent: object, token_ids: list[int]) -> object:
        """Enter a full, computed block under (uid of the block before it, its tokens). Returns the uid to chain the
        next block to: this block's, or that of the block which already holds the same prefix."""
        if not self.enable_prefix_caching:
            return None
        key = (parent, tuple(token_ids))
        if key not in self.index:
            self.index[key], self.key[block] = (block, object()), key
        return self.index[key][1]

    def reset_prefix_cache(self) -> None:
        """Forget all cached content (the weights changed). Nobody may run: its blocks would be entered later."""
        self.index.clear()
        self.key.clear()
