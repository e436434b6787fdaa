"""A mixture of experts around `linear`: whose rows each expert computes (`route`), and their weighted sum (`combine`).

All of it is integers, or one operation an element, which leaves no order to choose: torch does it on every device."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """weights: [num_tokens, top_k] fp32, of a token's experts in ascending id; places: [num_tokens, top_k], their rows
    sources: [num_rows], the token of each row. Rows lie in tiles of `tile`, each of one expert, filled up at its end
    tiles: [1 + num_rows / tile] int32, the number of tiles in use and their experts; rows: of an expert, on average
    """
    weights: torch.Tensor
    places: torch.Tensor
    sources: torch.Tensor
    tiles: torch.Tensor
    tile: int
    num_experts: int
    rows: int


def route(logits: torch.Tensor, top_k: int, normalise: bool, tile: int, logprobs: Callable, exp: Callable) -> Routing:
    """The `top_k` likeliest experts of each token, ties to the lowest id.

    logits: [num_tokens, num_experts] fp32; tile: rows of the products to come; logprobs, exp: the backend's
    normalise: whether a token's weights add up to one, or are those of a softmax over all experts

    Reduction order: the softmax is that of `logprobs`, an integer sum; a token's weights are added in ascending expert.
    Schedule: tile. A token's row goes where a stable sort by expert puts it; which one it is changes no bit."""
    (M, E), S = logits.shape, len(logits) * top_k
    _, ids, values = logprobs(logits, logits.new_zeros(M, dtype=torch.int64), top_k)
    ids, order = ids.long().clamp(0, E - 1).sort(1)  # a row of NaN names none
    weights = exp(values.gather(1, order))
    if normalise:
        weights = weights / sum(weights.unbind(1))[:, None]
    expert, slot = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(E, device=logits.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    tiles = (counts + tile - 1) // tile
    last = tiles.cumsum(0)
    place = ((last - tiles) * tile - (ends - counts))[expert] + torch.arange(S, device=logits.device)
    num_tiles = min(S, S // tile + E)  # no load makes more
    of = torch.searchsorted(last, torch.arange(num_tiles, device=logits.device), right=True)
    return Routing(weights, torch.empty_like(place).index_copy_(0, slot, place).view(M, top_k),
                   place.new_zeros(num_tiles * tile).index_copy_(0, place, slot // top_k),
                   torch.cat([last[-1:], of]).int(), tile, E, -(-S // E))


def combine(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[num_rows, N] -> [num_tokens, N], dtype of y: the sum over a token's experts of weight * y.

    Reduction order: products in fp32, added as a chain in ascending expert id, rounded once.
    Schedule: nothing varies."""
    weighted = y[routing.places].float().mul_(routing.weights[:, :, None])
    return sum(weighted.unbind(1)).to(y.dtype)
