"""Experts: routing, products and combination against formulas, and whose business a token's bits are."""

import pytest
import torch
from conftest import DEVICE, HAS_GPU, TINY_MOE
from test_kernels import close, place, random
from test_parallel import cells, compare, engine, write_config

import kernels
from kernels import same_bits
from sampler import SamplingParams

pytestmark = pytest.mark.usefixtures("poisoned")
SHARED = TINY_MOE | {"hidden_size": 256, "intermediate_size": 320, "moe_intermediate_size": 200}


def ids_of(routing) -> list[list[int]]:
    """The experts of each token, read back from where its rows lie."""
    return routing.tiles[2:][routing.places // routing.tile].tolist()


def block(ops, x, up, down, routing):
    """A mixture as the model runs it: gated products, then the weighted sum."""
    hidden = ops.gated_linear(x.index_select(0, routing.sources), up.flatten(0, 1), None, 1, x.dtype, routing=routing)
    y = ops.linear(hidden, down.flatten(0, 1), None, 1, x.dtype, routing=routing)
    return ops.combine(routing.weights, routing.places, y)


def weights(ops, E, K, N, dtype):
    return (random(ops, E, 2 * N, K, dtype=dtype, seed=1, scale=K**-0.5),
            random(ops, E, K, N, dtype=dtype, seed=2, scale=N**-0.5))


def crowd(ops, M, E, favoured, seed=3):
    """Logits of M tokens, all of which choose the favoured experts first."""
    logits = random(ops, M, E, seed=seed)
    logits[:, favoured] += 20
    return logits


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("M, E, top_k", [(1, 8, 1), (7, 5, 5), (40, 128, 8)])
def test_route(ops, M, E, top_k, normalise):
    logits = random(ops, M, E, scale=2.0)
    routing = ops.route(logits, top_k, normalise, torch.float32)
    p, ids = logits.double().softmax(-1).cpu().topk(top_k)
    ids, order = ids.sort(1)
    p = p.gather(1, order)
    assert ids_of(routing) == ids.tolist(), "a token's experts are in ascending id"
    close(routing.weights, p / p.sum(1, keepdim=True) if normalise else p, torch.float32)


def test_ties_go_to_the_lowest_expert(ops):
    logits = torch.zeros(4, 7)
    logits[1, [6, 2, 4]] = 3.5
    logits[2] = -0.0
    logits[2, 3] = 0.0  # equal to its neighbours, whatever its sign
    logits[3, :5] = float("-inf")
    routing = ops.route(place(ops, logits), 2, True, torch.float32)
    assert ids_of(routing) == [[0, 1], [2, 4], [0, 1], [5, 6]]
    assert same_bits(routing.weights.cpu(), torch.full((4, 2), 0.5))


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_a_broken_row_harms_no_other(ops, nan):
    """Whatever experts a row of NaN, of either sign, gets: its numbers stay its own."""
    M, E, K, N = 5, 6, 96, 64
    x, (up, down), logits = random(ops, M, K), weights(ops, E, K, N, torch.float32), random(ops, M, E)
    whole = block(ops, x, up, down, ops.route(logits, 2, True, torch.float32))
    logits[0], x[0] = nan, nan
    routing = ops.route(logits, 2, True, torch.float32)
    assert all(0 <= e < E for e in ids_of(routing)[0])
    broken = block(ops, x, up, down, routing)
    assert broken[0].isnan().all() and same_bits(broken[1:], whole[1:])
    logits[1, 3] = nan
    assert ops.route(logits, 2, True, torch.float32).weights[1].isnan().any(), "one such logit shows, too"


@pytest.mark.parametrize("M, E, top_k", [(1, 128, 8), (33, 6, 2), (300, 9, 3), (1400, 4, 3)])
def test_rows_lie_as_a_stable_sort_puts_them(ops, M, E, top_k):
    """Field bug 26: slots of an expert in the order in which programs arrived. Every row is in a tile of its expert.
    The last case has more slots than the kernel counts at once."""
    logits = random(ops, M, E)
    routing = ops.route(logits, top_k, True, torch.float16)
    tile, (begin, used, *of) = routing.tile, routing.tiles.tolist()
    assert begin == 0
    assert used <= len(of) and len(routing.sources) == len(of) * tile
    expected, ids = {}, logits.cpu().topk(top_k).indices.sort(1).values.tolist()
    first = 0
    for e in range(E):
        rows = [token for token in range(M) if e in ids[token]]
        tiles = range(first, first + -(-len(rows) // tile))
        assert of[tiles.start : tiles.stop] == [e] * len(tiles)
        expected |= {(token, e): first * tile + i for i, token in enumerate(rows)}
        first = tiles.stop
    assert first == used
    for token, places in enumerate(routing.places.tolist()):
        assert places == [expected[token, e] for e in ids[token]]
        assert all(routing.sources[row] == token for row in places)


@pytest.mark.parametrize("top_k, E, favoured", [(1, 4, [2]), (3, 6, [0, 4, 5]), (2, 3, [])],
                         ids=["one has all", "three have all", "all have some"])
def test_experts(ops, dtype, top_k, E, favoured):
    M, K, N = 19, 96, 70
    x, (up, down) = random(ops, M, K, dtype=dtype), weights(ops, E, K, N, dtype)
    routing = ops.route(crowd(ops, M, E, favoured), top_k, True, dtype)
    ids = ids_of(routing)
    if favoured:
        assert ids == [favoured] * M, "the others have no token"
    out = torch.zeros(M, K, dtype=torch.float64)
    for token, (of, ws) in enumerate(zip(ids, routing.weights.tolist(), strict=True)):
        for e, w in zip(of, ws, strict=True):
            gate, value = (up[e].double() @ x[token].double()).unflatten(0, (-1, 2)).unbind(1)
            out[token] += (w * (down[e].double() @ (gate / (1 + (-gate).exp()) * value))).cpu()
    close(block(ops, x, up, down, routing), out, dtype)


def test_a_token_does_not_know_its_neighbours(ops, dtype):
    """Its bits are the same alone, and among tokens that pick its experts or avoid them."""
    if ops.name == "triton" and dtype == torch.float32 and not HAS_GPU:
        pytest.skip("NumPy's fp32 product, the interpreter's dot, gives a row other bits elsewhere in a tile")
    M, E, top_k, K, N = 40, 8, 2, 96, 64
    x, (up, down) = random(ops, M, K, dtype=dtype), weights(ops, E, K, N, dtype)
    own = random(ops, 1, E, seed=9)
    own[:, [1, 5]] += 20
    alone = block(ops, x[:1].contiguous(), up, down, ops.route(own, top_k, True, dtype))
    for favoured in ([1, 5], [0, 7], [5, 6], []):
        for at in (0, 1, M - 1):
            logits, rows = crowd(ops, M, E, favoured), x.clone()
            logits[at], rows[at] = own[0], x[0]
            found = block(ops, rows, up, down, ops.route(logits, top_k, True, dtype))[at : at + 1]
            assert same_bits(found, alone), (favoured, at)


def test_an_expert_is_a_linear(ops):
    """A row has the bits of `linear` on its expert's weight: one chain along K, one rule for leaves."""
    M, E, K, N = 21, 5, 2304, 64
    x, up = random(ops, M, K), random(ops, E, N, K, seed=1)
    if ops.name == "triton" and not HAS_GPU:  # NumPy's product follows the place in the tile: leave nothing to round
        x, up = (x * 8).round(), (up * 8).round()
    routing = ops.route(random(ops, M, E), 2, True, torch.float32)
    for leaves in (1, 2):
        rows = x.index_select(0, routing.sources)
        out = ops.linear(rows, up.flatten(0, 1), None, leaves, torch.float32, routing=routing)
        for token, (of, places) in enumerate(zip(ids_of(routing), routing.places.tolist(), strict=True)):
            for e, row in zip(of, places, strict=True):
                alone = ops.linear(x[token : token + 1].contiguous(), up[e].contiguous(), None, leaves, torch.float32)
                assert same_bits(out[row : row + 1], alone)


def test_a_rank_computes_the_rows_of_its_experts(ops):
    """Of experts that are dealt out, each row is some rank's, and has the bits that it has where all are together."""
    M, E, K, N = 50, 5, 96, 64
    x, up = random(ops, M, K), random(ops, E, N, K, seed=1)
    if ops.name == "triton" and not HAS_GPU:
        x, up = (x * 8).round(), (up * 8).round()
    logits = random(ops, M, E)
    logits[:, 4] -= 99  # has no token
    whole = ops.route(logits, 2, True, torch.float32)
    rows = x.index_select(0, whole.sources)
    expected = ops.linear(rows, up.flatten(0, 1), None, 1, torch.float32, routing=whole)
    found, places = torch.zeros_like(expected), whole.places.flatten().long()
    for here in (range(0, 2), range(2, 3), range(3, 4), range(4, 5)):
        routing = ops.route(logits, 2, True, torch.float32, here)
        assert same_bits(routing.places, whole.places) and same_bits(routing.sources, whole.sources)
        own = up[here.start : here.stop].flatten(0, 1).contiguous()
        out = ops.linear(rows, own, None, 1, torch.float32, routing=routing)
        mine = torch.tensor([e in here for of in ids_of(whole) for e in of], device=places.device)
        found[places[mine]] = out[places[mine]]
    assert same_bits(found[places], expected[places])


def test_combine_is_a_chain_in_ascending_id(ops):
    """Field bug 36: a sum in the order of arrival. Numbers whose sum follows its order, added one by one."""
    M, top_k, N = 5, 8, 257
    routing = ops.route(random(ops, M, top_k), top_k, True, torch.float32)
    y = random(ops, len(routing.sources), N).pow(5)

    def chain(order):
        total = torch.zeros(M, N, device=y.device)
        for i in order:
            total = total + routing.weights[:, i, None] * y[routing.places[:, i]]
        return total

    found = ops.combine(routing.weights, routing.places, y)
    assert same_bits(found, chain(range(top_k))) and not same_bits(found, chain(reversed(range(top_k))))


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_change_no_bit(size, expert_parallel, tmp_path):
    folder = write_config(tmp_path / "model", SHARED | {"mlp_only_layers": [1]})
    compare(folder, size, cells()[:3], expert_parallel=expert_parallel)


def test_experts_for_fewer_ranks_are_refused(tmp_path):
    folder = write_config(tmp_path / "model", SHARED | {"num_experts": 3})
    with pytest.raises(ValueError, match="num_experts 3 is too small for tensor_parallel_size 4"):
        engine(folder, 4, expert_parallel=True)


def test_the_row_style_is_refused(tmp_path):
    folder = write_config(tmp_path / "model", SHARED)
    with pytest.raises(ValueError, match="tp_style 'row' is not implemented for experts"):
        engine(folder, 2, tp_style="row")


def test_a_trace_does_not_see_how_a_prefill_is_cut(tmp_path):
    """Where an expert's rows lie follows the cut; what is in them does not."""
    folder, found = write_config(tmp_path / "model", SHARED), []
    for most in (512, 40):
        llm = engine(folder, max_num_batched_tokens=most)
        output = llm.generate([list(range(4, 120))], SamplingParams(max_tokens=3, seed=1, logprobs=0))[0]
        found.append(llm.receipt(output, trace=True)["trace"])
    assert found[0] == found[1] and any("experts" in name for name in found[0])


@pytest.mark.gpu
def test_the_number_of_tokens_decides_no_bit():
    """The shape of Qwen3-30B-A3B: tokens alone, and in every tile height of the schedule table."""
    ops = kernels.make_ops(DEVICE)
    E, top_k, K, N, M = 128, 8, 2048, 768, 4096
    assert HAS_GPU
    x, (up, down) = random(ops, M, K, dtype=torch.bfloat16), weights(ops, E, K, N, torch.bfloat16)
    logits = random(ops, M, E, seed=4)
    expected = block(ops, x, up, down, ops.route(logits, top_k, True, torch.bfloat16))
    for m in (1, 2, 17, 64, 129, 1000):
        found = block(ops, x[:m], up, down, ops.route(logits[:m], top_k, True, torch.bfloat16))
        assert same_bits(found, expected[:m]), m
