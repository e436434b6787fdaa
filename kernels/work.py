"""Who computes what: in paged attention, which query tokens meet which KV splits, and who merges; and `Routing`.

The former is planned once a step, on the host. How it is cut is schedule: any cut adds the same splits in one order."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kernels.tiles import KV_SPLIT

ITEM_FIELDS = 6  # sequence, first token, query tokens (0: no work), first split, last (exclusive), first partial row
MERGE_FIELDS = 3  # token, first partial row, number of splits


@dataclass(frozen=True)
class AttentionWork:
    """Where a step's tokens stand and what they attend to: int32 tensors, and the grid sizes the host must know.

    positions: [num_tokens]; slot_mapping: [num_tokens], block * block_size + offset, -1 for padding
    block_tables: [num_seqs, max_blocks]; prefill_items, decode_items: [*, ITEM_FIELDS]; merges: [*, MERGE_FIELDS]
    counts: [3], entries of the three lists; grid: for how many of each is launched (a CUDA graph's is fixed)
    host_plans: what the CPU backend works out from these lists once a step, for all layers"""
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    prefill_items: torch.Tensor
    decode_items: torch.Tensor
    merges: torch.Tensor
    counts: torch.Tensor
    grid: tuple[int, int, int]
    max_partials: int  # KV splits that are merged through memory, at most; 0: each sequence is walked by one program
    host_plans: dict = field(default_factory=dict)


class Routing(NamedTuple):
    """Which rows each expert of a mixture computes, made a layer at a time by kernels/experts.py.
    x: [num_tiles * tile, K], a token's row for each of its experts; the others hold anything, and are read by nobody
    weights: [num_tokens, top_k] fp32, of a token's experts in ascending id; places: [num_tokens, top_k], their rows
    tiles: [2 + num_tiles] int32, the first and the end of those to compute here, and the expert of each, counted from
        the first here; num_experts: here; is_part: others are elsewhere; rows: to choose a schedule by"""
    x: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    tiles: torch.Tensor
    tile: int
    num_experts: int
    is_part: bool
    rows: int


def plan_prefill(query_starts, query_lens, seq_lens, query_tile: int) -> np.ndarray:
    """Items of the sequences with more than one query token: tiles of `query_tile` tokens, longest walk first.

    query_starts, query_lens, seq_lens: int arrays [num_seqs]; returns [num_items, ITEM_FIELDS] int32"""
    items = []
    for seq in np.flatnonzero(np.asarray(query_lens) > 1):
        start, length, seq_len = int(query_starts[seq]), int(query_lens[seq]), int(seq_lens[seq])
        for offset in range(0, length, query_tile):
            count = min(query_tile, length - offset)
            items.append((seq, start + offset, count, 0, -(-(seq_len - length + offset + count) // KV_SPLIT), -1))
    return np.array(sorted(items, key=lambda item: -item[4]), np.int32).reshape(-1, ITEM_FIELDS)


def plan_decode(query_starts, query_lens, seq_lens, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """(items, merges), int32, of the sequences with one query token.

    slots: how many items run at once, if there are splits enough. All sequences' splits, in a row, are dealt out in
        equal shares: item i is slot i % slots's, or empty. 0: an item a sequence, longest first, nothing to merge."""
    seqs = np.flatnonzero(np.asarray(query_lens) == 1)
    tokens = np.asarray(query_starts)[seqs]
    splits = -(-np.asarray(seq_lens)[seqs] // KV_SPLIT)
    border = np.append(0, np.cumsum(splits)).astype(int)  # of the sequences, in that row
    slots = min(slots, border[-1])
    share = np.arange(slots) * border[-1] // max(1, slots)  # where that of each slot begins
    start = np.union1d(border[:-1], share).astype(int)  # an item ends with the share or the sequence
    seq, length = np.searchsorted(border, start, "right") - 1, np.diff(start, append=border[-1])
    first = start - border[seq]
    items = np.stack([seqs[seq], tokens[seq], np.ones_like(seq), first, first + length, start], 1).astype(np.int32)
    if not slots:
        return items[np.argsort(-splits, kind="stable")], np.zeros((0, MERGE_FIELDS), np.int32)
    slot = np.searchsorted(share, start, "right") - 1
    turn = np.arange(len(slot)) - np.searchsorted(slot, slot)
    dealt = np.zeros(((turn.max() + 1) * slots, ITEM_FIELDS), np.int32)
    dealt[turn * slots + slot] = items
    return dealt, np.stack([tokens, border[:-1], splits], 1).astype(np.int32)
