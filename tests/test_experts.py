"""Experts: routing, products and combination against formulas, and whose business a token's bits are."""

import pytest
import torch
from conftest import DEVICE, HAS_GPU, TINY_MOE
from test_kernels import close, place, random
from test_parallel import QWEN3, cells, compare, engine, write_config

import kernels
from kernels import same_bits
from model import ModelConfig, shard
from sampler import SamplingParams

pytestmark = pytest.mark.usefixtures("poisoned")
SHARED = TINY_MOE | {"hidden_size": 256, "intermediate_size": 320, "moe_intermediate_size": 200}


def ids_of(routing) -> list[list[int]]:
    """The experts of each token, read back from where its rows lie."""
    return routing.tiles[2:][routing.places // routing.tile].tolist()


def block(ops, up, down, routing):
    """A mixture as the model runs it: gated products, then the weighted sum."""
    hidden = ops.gated_linear(routing.x, up.flatten(0, 1), None, 1, routing.x.dtype, routing=routing)
    y = ops.linear(hidden, down.flatten(0, 1), None, 1, hidden.dtype, routing=routing)
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
    routing = ops.route(random(ops, M, 20), logits, top_k, normalise)
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
    routing = ops.route(random(ops, 4, 16), place(ops, logits), 2, True)
    assert ids_of(routing) == [[0, 1], [2, 4], [0, 1], [5, 6]]
    assert same_bits(routing.weights.cpu(), torch.full((4, 2), 0.5))


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_a_broken_row_harms_no_other(ops, nan):
    """Whatever experts a row of NaN, of either sign, gets: its numbers stay its own."""
    M, E, K, N = 5, 6, 96, 64
    x, (up, down), logits = random(ops, M, K), weights(ops, E, K, N, torch.float32), random(ops, M, E)
    whole = block(ops, up, down, ops.route(x, logits, 2, True))
    logits[0], x[0] = nan, nan
    routing = ops.route(x, logits, 2, True)
    assert all(0 <= e < E for e in ids_of(routing)[0])
    broken = block(ops, up, down, routing)
    assert broken[0].isnan().all() and same_bits(broken[1:], whole[1:])
    logits[1, 3] = nan
    assert ops.route(x, logits, 2, True).weights[1].isnan().any(), "one such logit shows, too"


@pytest.mark.parametrize("M, E, top_k", [(1, 128, 8), (33, 6, 2), (270, 9, 3)])
def test_rows_lie_as_a_stable_sort_puts_them(ops, M, E, top_k):
    """Field bug 26: slots of an expert in the order in which programs arrived. Every row is in a tile of its expert.
    The last case has two chunks of tokens."""
    logits, x = random(ops, M, E), random(ops, M, 24, seed=1, dtype=torch.float16)
    routing = ops.route(x, logits, top_k, True)
    tile, (begin, used, *of) = routing.tile, routing.tiles.tolist()
    assert begin == 0
    assert used <= len(of) and routing.x.shape == (len(of) * tile, 24)
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
        assert all(same_bits(routing.x[row], x[token]) for row in places)


def test_tallies_are_never_reset():
    """What a call counts is what it adds to them, whatever was counted before, of however many experts and tokens, and
    past an overflow. How many tokens are counted together places no row elsewhere."""
    from kernels.experts import route

    tallies, ops = torch.full((256, 3), 2**31 - 5, dtype=torch.int32, device=DEVICE), kernels.triton_ops(DEVICE)
    for M, E, chunk in ((3, 8, 256), (90, 5, 16), (20, 33, 7), (90, 5, 16), (3, 8, 1)):
        x, logits = random(ops, M, 16), random(ops, M, E)
        expected = route(x, logits, 2, True, 16, 1, torch.zeros_like(tallies))
        found = route(x, logits, 2, True, 16, 1, tallies, chunk=chunk)
        assert same_bits(found.places, expected.places)
        assert same_bits(*(routing.tiles[: 2 + expected.tiles[1]] for routing in (found, expected)))
    assert tallies.min() < 0, "none has overflowed"
    with pytest.raises(ValueError, match="20 tokens a step are too many for 33 experts: lower max_num_batched_tokens"):
        route(random(ops, 20, 16), random(ops, 20, 33), 2, True, 16, 1, tallies[:20], chunk=1)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_fails_between_its_kernels_leaves_no_count(monkeypatch, error):
    """Else the next call's rows would lie behind those of tokens that are long gone, outside of its memory."""
    from kernels import experts

    ops, tallies = kernels.triton_ops(DEVICE), torch.zeros((256, 3), dtype=torch.int32, device=DEVICE)
    x, logits = random(ops, 20, 16), random(ops, 20, 8)
    expected = experts.route(x, logits, 2, True, 16, 1, tallies)

    class Failing:
        def __getitem__(self, grid):
            raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(experts, "group_kernel", Failing())
        experts.route(x, logits, 2, True, 16, 1, tallies)
    found = experts.route(x, logits, 2, True, 16, 1, tallies)
    assert same_bits(found.places, expected.places)


@pytest.mark.parametrize("top_k, E, favoured", [(1, 4, [2]), (3, 6, [0, 4, 5]), (2, 3, [])],
                         ids=["one has all", "three have all", "all have some"])
def test_experts(ops, dtype, top_k, E, favoured):
    M, K, N = 19, 96, 70
    x, (up, down) = random(ops, M, K, dtype=dtype), weights(ops, E, K, N, dtype)
    routing = ops.route(x, crowd(ops, M, E, favoured), top_k, True)
    ids = ids_of(routing)
    if favoured:
        assert ids == [favoured] * M, "the others have no token"
    out = torch.zeros(M, K, dtype=torch.float64)
    for token, (of, ws) in enumerate(zip(ids, routing.weights.tolist(), strict=True)):
        for e, w in zip(of, ws, strict=True):
            gate, value = (up[e].double() @ x[token].double()).unflatten(0, (-1, 2)).unbind(1)
            out[token] += (w * (down[e].double() @ (gate / (1 + (-gate).exp()) * value))).cpu()
    close(block(ops, up, down, routing), out, dtype)


def test_a_token_does_not_know_its_neighbours(ops, dtype):
    """Its bits are the same alone, and among tokens that pick its experts or avoid them."""
    if ops.name == "triton" and dtype == torch.float32 and not HAS_GPU:
        pytest.skip("NumPy's fp32 product, the interpreter's dot, gives a row other bits elsewhere in a tile")
    M, E, top_k, K, N = 40, 8, 2, 96, 64
    x, (up, down) = random(ops, M, K, dtype=dtype), weights(ops, E, K, N, dtype)
    own = random(ops, 1, E, seed=9)
    own[:, [1, 5]] += 20
    alone = block(ops, up, down, ops.route(x[:1].contiguous(), own, top_k, True))
    for favoured in ([1, 5], [0, 7], [5, 6], []):
        for at in (0, 1, M - 1):
            logits, rows = crowd(ops, M, E, favoured), x.clone()
            logits[at], rows[at] = own[0], x[0]
            found = block(ops, up, down, ops.route(rows, logits, top_k, True))[at : at + 1]
            assert same_bits(found, alone), (favoured, at)


def test_an_expert_is_a_linear(ops):
    """A row has the bits of `linear` on its expert's weight: one chain along K, one rule for leaves."""
    M, E, K, N = 21, 5, 2304, 64
    x, up = random(ops, M, K), random(ops, E, N, K, seed=1)
    if ops.name == "triton" and not HAS_GPU:  # NumPy's product follows the place in the tile: leave nothing to round
        x, up = (x * 8).round(), (up * 8).round()
    routing = ops.route(x, random(ops, M, E), 2, True)
    for leaves in (1, 2):
        out = ops.linear(routing.x, up.flatten(0, 1), None, leaves, torch.float32, routing=routing)
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
    whole = ops.route(x, logits, 2, True)
    expected = ops.linear(whole.x, up.flatten(0, 1), None, 1, torch.float32, routing=whole)
    found, places = torch.zeros_like(expected), whole.places.flatten().long()
    for here in (range(0, 2), range(2, 3), range(3, 4), range(4, 5)):
        routing = ops.route(x, logits, 2, True, here)
        assert same_bits(routing.places, whole.places)
        own = up[here.start : here.stop].flatten(0, 1).contiguous()
        out = ops.linear(routing.x, own, None, 1, torch.float32, routing=routing)
        assert ops.name == "reference" or routing.x.isnan().any(1).sum() > whole.x.isnan().any(1).sum()
        mine = torch.tensor([e in here for of in ids_of(whole) for e in of], device=places.device)
        tiles = set((places[mine] // routing.tile).tolist())
        assert tiles == set(range(*routing.tiles[:2].tolist())), "it computes the tiles of its experts, and no other"
        assert (out[places[~mine]] == 0).all(), "what ranks add"
        found[places[mine]] = out[places[mine]]
    assert same_bits(found[places], expected[places])


def test_combine_is_a_chain_in_ascending_id(ops):
    """Field bug 36: a sum in the order of arrival. Numbers whose sum follows its order, added one by one."""
    M, top_k, N = 5, 8, 257
    routing = ops.route(random(ops, M, 16), random(ops, M, top_k), top_k, True)
    y = random(ops, len(routing.x), N).pow(5)

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
    config = SHARED | {"num_experts": 3}
    with pytest.raises(ValueError, match="num_experts 3 is too small for tensor_parallel_size 4"):
        engine(write_config(tmp_path / "model", config), 4, expert_parallel=True)
    assert all(map(len, shard(ModelConfig.from_dict(config), 4).moe_intermediate_size)), "by columns they are not"
    narrow = ModelConfig.from_dict(SHARED | {"moe_intermediate_size": 100})
    with pytest.raises(ValueError, match="moe_intermediate_size 100 is too small"):
        shard(narrow, 4)
    assert all(map(len, shard(narrow, 4, by_experts=True).num_experts)), "nor narrow ones by experts"


def test_experts_of_a_dense_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expert_parallel is for a mixture of experts, and this model has none"):
        engine(write_config(tmp_path / "model", QWEN3), 1, expert_parallel=True)


def test_the_row_style_is_refused(tmp_path):
    folder = write_config(tmp_path / "model", SHARED)
    with pytest.raises(ValueError, match="tp_style 'row' is not implemented for experts"):
        engine(folder, 2, tp_style="row")


def test_a_trace_does_not_see_how_a_prefill_is_cut(tmp_path):
    """Where an expert's rows lie follows the cut; what is in them does not."""
    folder, found = write_config(tmp_path / "model", SHARED), []
    for most in (512, 40, 118):  # of 119
        llm = engine(folder, max_num_batched_tokens=most)
        output = llm.generate([list(range(4, 120))], SamplingParams(max_tokens=3, seed=1, logprobs=0))[0]
        found.append(llm.receipt(output, trace=True)["trace"])
    assert found[0] == found[1] == found[2] and any("experts" in name for name in found[0])


@pytest.mark.gpu
def test_the_number_of_tokens_decides_no_bit():
    """The shape of Qwen3-30B-A3B: tokens alone, and in every tile height of the schedule table."""
    ops = kernels.make_ops(DEVICE)
    E, top_k, K, N, M = 128, 8, 2048, 768, 8200
    assert HAS_GPU
    x, (up, down) = random(ops, M, K, dtype=torch.bfloat16), weights(ops, E, K, N, torch.bfloat16)
    logits = random(ops, M, E, seed=4)
    expected = block(ops, up, down, ops.route(x, logits, top_k, True))
    for m in (1, 2, 17, 64, 129, 1000):
        found = block(ops, up, down, ops.route(x[:m], logits[:m], top_k, True))
        assert same_bits(found, expected[:m]), m
