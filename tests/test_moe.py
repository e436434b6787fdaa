"""Experts: routing, products and combination against float64 formulas, and whose business a token's bits are."""

import pytest
import torch
from conftest import HAS_GPU
from test_kernels import BACKENDS, DEVICE, DTYPES, close, place, random

import kernels
from kernels import same_bits
from kernels.work import Routing

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=BACKENDS)
def ops(request):
    return kernels.triton_ops(DEVICE) if request.param == "triton" else kernels.reference_ops()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def route(ops, logits, top_k, normalise=True, padding=(), dtype=torch.float16):
    slots = torch.arange(len(logits), dtype=torch.int32)
    slots[list(padding)] = -1
    return ops.route(logits.contiguous(), top_k, normalise, place(ops, slots), dtype)


def experts(ops, x, up, down, routing):
    """The block as the model runs it: gated products, then the weighted sum."""
    hidden = ops.silu_and_mul(ops.expert_linear(x, up, 1, routing))
    return ops.combine(ops.expert_linear(hidden, down, 1, routing), routing)


def weights(ops, E, K, N, dtype):
    return (random(ops, E, 2 * N, K, dtype=dtype, seed=1, scale=K**-0.5),
            random(ops, E, K, N, dtype=dtype, seed=2, scale=N**-0.5))


def crowd(ops, M, E, favoured, seed=3):
    """Logits of M tokens, all of which choose the favoured experts first."""
    logits = random(ops, M, E, seed=seed)
    logits[:, favoured] += 20
    return logits


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("M, E, top_k", [(1, 8, 1), (7, 5, 5), (12, 128, 8)])
def test_route(ops, M, E, top_k, normalise):
    logits = random(ops, M, E, scale=2.0)
    routing = route(ops, logits, top_k, normalise)
    p, ids = logits.double().softmax(-1).cpu().topk(top_k)
    ids, order = ids.sort(1)
    p = p.gather(1, order)
    assert routing.ids.tolist() == ids.tolist(), "a token's experts are in ascending id"
    close(routing.weights, p / p.sum(1, keepdim=True) if normalise else p, torch.float32)


def test_ties_go_to_the_lowest_expert(ops):
    logits = torch.zeros(4, 7)
    logits[1, [6, 2, 4]] = 3.5
    logits[2] = -0.0
    logits[2, 3] = 0.0  # equal to its neighbours, whatever its sign
    logits[3, :5] = float("-inf")
    routing = route(ops, place(ops, logits), 2)
    assert routing.ids.tolist() == [[0, 1], [2, 4], [0, 1], [5, 6]]
    assert same_bits(routing.weights.cpu(), torch.full((4, 2), 0.5))


def test_a_broken_row_harms_no_other(ops):
    """A NaN comes after every number; the row still has its two experts, and they are different."""
    logits = random(ops, 3, 6)
    whole = route(ops, logits, 2)
    logits[0] = float("nan")
    logits[1, [0, 1, 2, 3, 4]] = float("nan")
    broken = route(ops, logits, 2)
    assert broken.ids.tolist()[:2] == [[0, 1], [0, 5]]
    assert same_bits(broken.weights[2], whole.weights[2]) and same_bits(broken.ids[2], whole.ids[2])


@pytest.mark.parametrize("S, E, block_m", [(40, 60, 16), (66, 6, 16), (900, 9, 64), (5000, 3, 64)])
def test_grouping_is_a_stable_sort(S, E, block_m):
    """Field bug 26: slots of an expert in the order in which programs arrived. Every row is in one tile of its expert,
    padding in none, and no more tiles are made than the grid has programs for."""
    from kernels.moe import TILE_FIELDS, group

    ids = torch.randint(0, E + 1, (S,), generator=torch.Generator().manual_seed(S), dtype=torch.int32)
    ids[ids == 1] = 0  # an expert without a slot
    rows, tiles = (torch.empty(shape, dtype=torch.int32, device=DEVICE)
                   for shape in ((S,), (1 + min(S, S // block_m + E), TILE_FIELDS)))
    group(ids.to(DEVICE), E, block_m, rows, tiles)
    live = int((ids < E).sum())
    assert rows[:live].tolist() == ids.argsort(stable=True)[:live].tolist()
    starts, expected = [0, *torch.bincount(ids, minlength=E + 1)[:E].cumsum(0).tolist()], []
    for e, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
        expected += [[e, row, end] for row in range(first, end, block_m)]
    assert tiles[0, 0] == len(expected) < len(tiles)
    assert tiles[1 : 1 + len(expected)].tolist() == expected


@pytest.mark.parametrize("E, block_m", [(3, 16), (128, 16), (128, 64)])
def test_there_is_room_for_every_tile(E, block_m):
    """The grid is fixed by shapes alone; the worst a batch can do is one row too many in every expert."""
    from kernels.moe import TILE_FIELDS, group

    ids = torch.arange(E, dtype=torch.int32).repeat_interleave(block_m + 1)
    S = len(ids)
    rows, tiles = (torch.empty(shape, dtype=torch.int32, device=DEVICE)
                   for shape in ((S,), (1 + S // block_m + E, TILE_FIELDS)))
    group(ids.to(DEVICE), E, block_m, rows, tiles)
    assert int(tiles[0, 0]) == 2 * E <= len(tiles) - 1


def test_few_slots_are_not_grouped():
    """Each is a tile of its own, empty where the token is padding, and the products are those of grouped slots."""
    ops, E, K = kernels.triton_ops(DEVICE), 6, 96
    logits, x = random(ops, 20, E), random(ops, 20, K, dtype=torch.float16)
    weight = random(ops, E, 64, K, dtype=torch.float16, seed=1)
    few = route(ops, logits[:4], 2, padding=[1])
    ids = few.ids.cpu().flatten().tolist()
    assert ids[2:4] == [E, E] and int(few.tiles[0, 0]) == 8
    tiles = few.tiles[1:].tolist()
    assert [tile[1:] for tile in tiles] == [[slot, slot + (slot not in (2, 3))] for slot in range(8)]
    assert [e for e, first, end in tiles if first < end] == [e for e in ids if e < E]
    assert few.rows.tolist() == list(range(8))
    many = ops.expert_linear(x, weight, 1, route(ops, logits, 2))
    some = ops.expert_linear(x[:4], weight, 1, few)
    live = place(ops, torch.tensor([0, 1, 4, 5, 6, 7]))
    assert same_bits(some[live], many[live])
    assert bool(some[2:4].isnan().all()), "nothing is computed for padding"


@pytest.mark.parametrize("top_k, E, favoured", [(1, 4, [2]), (3, 6, [0, 4, 5]), (2, 3, [])],
                         ids=["one has all", "three have all", "all have some"])
def test_experts(ops, dtype, top_k, E, favoured):
    M, K, N = 19, 96, 70
    x, (up, down) = random(ops, M, K, dtype=dtype), weights(ops, E, K, N, dtype)
    routing = route(ops, crowd(ops, M, E, favoured), top_k, dtype=dtype)
    if favoured:
        assert routing.ids.tolist() == [favoured] * M, "the others have no token"
    out = torch.zeros(M, K, dtype=torch.float64)
    for token, (ids, ws) in enumerate(zip(routing.ids.tolist(), routing.weights.tolist(), strict=True)):
        for e, w in zip(ids, ws, strict=True):
            gate, value = (up[e].double() @ x[token].double()).unflatten(0, (-1, 2)).unbind(1)
            out[token] += (w * (down[e].double() @ (gate / (1 + (-gate).exp()) * value))).cpu()
    close(experts(ops, x, up, down, routing), out, dtype)


def test_a_token_does_not_know_its_neighbours(ops, dtype):
    """Its bits are the same alone, among tokens that pick its experts, that avoid them, and that are padding."""
    if ops.name == "triton" and dtype == torch.float32 and not HAS_GPU:
        pytest.skip("NumPy's fp32 product, the interpreter's dot, gives a row other bits elsewhere in a tile")
    M, E, top_k, K, N = 24, 8, 2, 96, 64
    x, (up, down) = random(ops, M, K, dtype=dtype), weights(ops, E, K, N, dtype)
    own = random(ops, 1, E, seed=9)
    own[:, [1, 5]] += 20
    alone = experts(ops, x[:1].contiguous(), up, down, route(ops, own, top_k, dtype=dtype))
    for favoured, padding in (([1, 5], ()), ([0, 7], ()), ([5, 6], ()), ([1, 5], range(2, 20)), ([], ())):
        for place_of_own in (1, M - 1):
            logits, rows = crowd(ops, M, E, favoured), x.clone()
            logits[place_of_own], rows[place_of_own] = own[0], x[0]
            routing = route(ops, logits, top_k, padding=set(padding) - {place_of_own}, dtype=dtype)
            assert routing.ids[place_of_own].tolist() == [1, 5]
            found = experts(ops, rows, up, down, routing)[place_of_own : place_of_own + 1]
            assert same_bits(found, alone), (favoured, place_of_own)


def test_an_expert_is_a_linear(ops):
    """A slot's row has the bits of `linear` on its expert's weight: one chain along K, one rule for leaves."""
    M, E, K, N = 18, 5, 1152, 64
    x, up = random(ops, M, K), random(ops, E, N, K, seed=1)
    if ops.name == "triton" and not HAS_GPU:  # NumPy's product follows the place in the tile: leave nothing to round
        x, up = (x * 8).round(), (up * 8).round()
    routing = route(ops, random(ops, M, E), 2, dtype=torch.float32)
    for leaves in (1, 2):
        out = ops.expert_linear(x, up, leaves, routing)
        for slot, e in enumerate(routing.ids.flatten().tolist()):
            row = x[slot // 2 : slot // 2 + 1].contiguous()
            assert same_bits(out[slot : slot + 1], ops.linear(row, up[e].contiguous(), None, leaves, torch.float32))


def test_leaves_in_programs_of_their_own():
    """A split sum of experts is the walked one."""
    from dataclasses import replace

    from kernels import moe, tiles

    ops, arrived = kernels.triton_ops(DEVICE), torch.zeros(64, dtype=torch.int32, device=DEVICE)
    x, up = random(ops, 9, 512, dtype=torch.float16), random(ops, 4, 96, 512, dtype=torch.float16, seed=1)
    found = []
    for split in (False, True):
        schedule = replace(tiles.LinearSchedule(16, 64, 64, 4, 2), split=split)
        routing = moe.route(random(ops, 9, 4), 2, True, place(ops, torch.arange(9, dtype=torch.int32)), schedule)
        found.append(moe.expert_linear(x, up, 2, routing, arrived))
    assert same_bits(*found) and not arrived.any()


def test_combine_is_a_chain_in_ascending_id(ops):
    """Field bug 36: a sum in the order of arrival. Numbers whose sum follows its order, added one by one."""
    M, top_k, N = 5, 8, 257
    y = random(ops, M * top_k, N).pow(5)
    ws = random(ops, M, top_k, seed=1).abs()
    ids = place(ops, torch.arange(top_k, dtype=torch.int32).expand(M, top_k).contiguous())

    def chain(places):
        terms = [ws[:, i, None] * y.view(M, top_k, N)[:, i] for i in places]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    found = ops.combine(y, Routing(ws, ids))
    assert same_bits(found, chain(range(top_k))) and not same_bits(found, chain(reversed(range(top_k))))


@pytest.mark.gpu
def test_the_number_of_tokens_decides_no_bit():
    """The shape of Qwen3-30B-A3B: tokens alone, and in every tile height of the schedule table."""
    ops = kernels.make_ops(DEVICE)
    E, top_k, K, N, M = 128, 8, 2048, 768, 4096
    assert HAS_GPU
    x, (up, down) = random(ops, M, K, dtype=torch.bfloat16), weights(ops, E, K, N, torch.bfloat16)
    logits = random(ops, M, E, seed=4)
    expected = experts(ops, x, up, down, route(ops, logits, top_k, dtype=torch.bfloat16))
    for m in (1, 2, 17, 64, 129, 1000):
        found = experts(ops, x[:m], up, down, route(ops, logits[:m], top_k, dtype=torch.bfloat16))
        assert same_bits(found, expected[:m]), m
