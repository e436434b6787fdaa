"""The CPU backend's own law: the library calls it is made of give a row the same bits wherever it stands.

Rows permuted, alone, beside NaN, in a buffer at an odd offset, with more or fewer neighbours; weights sliced and
permuted as a shard would; 1, 2 and 4 threads.
"""

import pytest
import torch

from kernels import reference, same_bits


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def yardstick():
    """x [40, K], w [200, K] and their product, one row at a time on one thread; by K."""
    torch.set_num_threads(1)
    found = {}
    for K in (33, 64, 576, 1536):
        generator = torch.Generator().manual_seed(K)
        x, w = torch.randn(40, K, generator=generator), torch.randn(200, K, generator=generator)
        found[K] = x, w, torch.cat([reference.tiled_matmul(x[i : i + 1], w) for i in range(40)])
    return found


def test_product(threads, yardstick):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    columns = torch.randperm(200, generator=torch.Generator().manual_seed(2))
    for K, (x, w, expected) in yardstick.items():
        for M in (1, 2, 3, 7, 40):
            assert same_bits(reference.tiled_matmul(x[:M], w), expected[:M])
        assert same_bits(reference.tiled_matmul(x[order], w), expected[order])
        offset = torch.empty(40 * K + 3)[3:].view(40, K).copy_(x)
        assert same_bits(reference.tiled_matmul(offset, w), expected)
        beside_nan = torch.full_like(x, float("nan"))
        beside_nan[5] = x[5]
        assert same_bits(reference.tiled_matmul(beside_nan, w)[5], expected[5])
        for rows in (slice(0, 64), slice(64, 200), slice(3, 131), slice(190, 200)):
            assert same_bits(reference.tiled_matmul(x, w[rows]), expected[:, rows])
        assert same_bits(reference.tiled_matmul(x, w[columns]), expected[:, columns])


def test_leaves_read_in_place(threads, yardstick):
    """A leaf of K is a view into the full weight: the same bits as a copy of it."""
    x, w, _ = yardstick[1536]
    parts = [reference.tiled_matmul(x[:, i : i + 768].contiguous(), w[:, i : i + 768].contiguous()) for i in (0, 768)]
    assert same_bits(reference.linear(x, w, None, 2, torch.float32), parts[0] + parts[1])


@pytest.mark.parametrize("function", [torch.exp2, torch.exp, torch.log])
def test_lanes(threads, function):
    """An element's bits do not depend on where in a tensor it stands, nor on the tensor's size."""
    x = torch.rand(100_003, generator=torch.Generator().manual_seed(0)) * 9 + 1e-3
    whole = reference.by_lanes(function, x)
    for start, stop in ((0, 1), (1, 17), (5, 5000), (70_001, 100_003)):
        assert same_bits(reference.by_lanes(function, x[start:stop].clone()), whole[start:stop])
    assert same_bits(reference.by_lanes(function, x.flip(0)), whole.flip(0))


def test_norm(threads, yardstick):
    for K, (x, _, _) in yardstick.items():
        weight = torch.linspace(0.5, 1.5, K)
        whole = reference.rms_norm(x, weight, 1e-6)
        for i in (0, 13, 39):
            assert same_bits(reference.rms_norm(x[i : i + 1], weight, 1e-6), whole[i : i + 1])
