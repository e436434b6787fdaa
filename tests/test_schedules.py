"""The reduction law. On a GPU: every schedule against the reference schedule, bit for bit. Anywhere: every schedule
compiles for the chips it is meant for, and holds no float atomic and no fused multiply-add that nobody wrote."""

import json
import os
import subprocess
import sys
from collections import defaultdict

import pytest
import torch
from conftest import HAS_GPU, ROOT, TINY, TINY_MOE
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from engine import LLM
from kernels import same_bits, tiles
from sampler import SamplingParams
from tools import selfcheck

SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
NUMERICS = {  # kernel -> constants that decide bits; they may not change with the number of rows
    "linear_kernel": ("LEAVES", "LEAF"),
    "rms_norm_kernel": ("BLOCK", "num_warps"),
    "rotary_and_cache_kernel": ("HEADS", "BLOCK_SIZE", "num_warps"),
    "paged_attention_kernel": ("TILE", "SPLIT"),
    "logprobs_kernel": ("SCALE_BITS",),
    "sample_kernel": ("SCALE_BITS",),
    "choose_kernel": ("SCALE_BITS", "TOP_K"),
}
REDUCING = ("mm", "sum", "mean", "softmax", "norm", "argmax", "amax", "max", "topk", "sort", "cumsum", "prod", "var",
            "std", "einsum", "linear", "conv", "attention", "dot", "logsumexp", "matmul", "scatter_add", "index_add")


def compile_schedules(*args) -> list[dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, ROOT / "tests" / "compile_schedules.py", *args], env=env, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_schedule_compiles_for_its_chips():
    found, shares = compile_schedules(), 0
    assert {f["target"] for f in found} == set(SHARED_LIMIT)
    assert {f["kernel"] for f in found if f["target"] == "sm_90"} >= (
        set(NUMERICS) | {"merge_kernel", "peak_kernel", "group_kernel", "combine_kernel"})
    for f in found:
        assert f["shared"] <= SHARED_LIMIT[f["target"]], f
        if f["table"] == "conservative":
            assert f["shared"] <= 99 * 1024, f
        if (f["kernel"], f["table"]) == ("paged_attention_kernel", "hopper") and "'BLOCK_M': 64" in f["constants"]:
            # q and three tiles of keys and values, and room for another such program on the multiprocessor.
            assert 112 * 1024 < f["shared"] <= 113 * 1024, f
            shares += 1
        assert f["float_atomics"] == 0, f
        if f["target"] != "gfx942":  # compiled, but no claim is made for AMD's code
            # Written ones: an fp32 dot is a chain of them ("ieee"), so is the logarithm of CUDA's libdevice, and
            # attention has one a score, in each of its two loops.
            is_fp32_dot = f["fp32"] and f["kernel"] in ("linear_kernel", "paged_attention_kernel")
            written = f["scores"]
            if f["target"] == "sm_100" and f["fma"] == 2 * written:  # its loops are there twice
                written *= 2
            assert f["fma"] == written or is_fp32_dot or f["kernel"] in ("sample_kernel", "logprobs_kernel"), f
    assert shares, "prefill of the hopper table is not among what was compiled"


def test_no_numerics_constant_follows_the_batch():
    """Field bug 1: a block size chosen by the number of rows."""
    values = defaultdict(set)
    rows = set()
    for launch in compile_schedules("contract"):
        rows.add(launch["rows"])
        for name in NUMERICS.get(launch["kernel"], ()):
            shape = tuple(launch.get(k) for k in ("N", "K", "HEAD_DIM"))
            values[launch["kernel"], shape, name].add(launch[name])
    assert len(rows) == 6 and {kernel for kernel, _, _ in values} == set(NUMERICS)
    for key, seen in values.items():
        assert len(seen) == 1, (key, seen)


class Recorder(TorchDispatchMode):
    """Names of the library ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [TINY, TINY_MOE], ids=["dense", "experts"])
def test_no_library_op_reduces_between_input_ids_and_token(shape, tmp_path):
    """The engine on the Triton table (interpreted without a GPU): field bugs 10 and 11, a pinned path never reached."""
    config = shape | {"num_hidden_layers": 1, "torch_dtype": "bfloat16" if HAS_GPU else "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    device = torch.device("cuda" if HAS_GPU else "cpu")
    llm = LLM(tmp_path, load_format="dummy", ops=kernels.triton_ops(device), num_gpu_blocks_override=8, progress=False,
              enforce_eager=True)
    with Recorder() as recorder:
        outputs = llm.generate([[5, 6, 7], [9]], [
            SamplingParams(temperature=0.9, seed=1, top_p=0.9, top_k=9, max_tokens=2, logprobs=1, ignore_eos=True),
            SamplingParams(temperature=0.0, max_tokens=2, repetition_penalty=1.3, prompt_logprobs=0, ignore_eos=True)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 2]
    assert recorder.names, "nothing was recorded"
    bad = {n for n in recorder.names if any(n.strip("_") == r or n.startswith((r + "_", "_" + r)) for r in REDUCING)}
    assert not bad, f"library reductions on the path to a token: {bad}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("K", [None, *selfcheck.LENGTHS])
@pytest.mark.parametrize("table", ["auto", "conservative"])
def test_every_schedule_gives_the_reference_bits(table, K, dtype):
    """One K a case, so that `-n 8` compiles them side by side; without a K, everything that is not a product."""
    device = torch.device("cuda")
    auto = tiles.schedules("auto", torch.cuda.get_device_capability())
    found = tiles.CONSERVATIVE if table == "conservative" else auto
    checks = list(selfcheck.check_schedules(device, dtype, found, K, experts=K == 2048))
    products = {"linear", "experts"} if K == 2048 else {"linear"}
    assert {c.op for c in checks} == (products if K else {"attention", "rms_norm", "rotary"})
    assert not [c for c in checks if not c.same]


@pytest.mark.gpu
def test_past_two_to_the_31_elements():
    """Addresses are int64: an output, and a cache, of more than 2^31 elements."""
    ops = kernels.make_ops(torch.device("cuda"))
    x = torch.randn(35000, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(65536, 128, device="cuda", dtype=torch.bfloat16)
    out = ops.linear(x, w, None, 1, torch.bfloat16)
    assert out.numel() > 2**31 and same_bits(out[-1:], ops.linear(x[-1:], w, None, 1, torch.bfloat16))
    del x, w, out
    import test_kernels

    args, _ = test_kernels.attention_case(ops, torch.bfloat16, [1, 70], [300, 70], 32, 8, 128, False)
    small = ops.paged_attention(*args)
    q, k, v, work, scale = args
    far = 35000  # x 8 x 64 x 128 elements a block
    big = [torch.full((far + len(c), *c.shape[1:]), float("nan"), dtype=c.dtype, device="cuda") for c in (k, v)]
    for cache, pages in zip(big, (k, v), strict=True):
        cache[far:] = pages
    work.block_tables.add_(far)
    assert big[0].numel() > 2**31 and same_bits(ops.paged_attention(q, *big, work, scale), small)


@pytest.mark.gpu
def test_a_kernel_launched_twice_gives_the_same_bits(tiny_folder):
    """Field bug 28."""
    ops = kernels.make_ops(torch.device("cuda"))
    x = torch.randn(33, 12288, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, 12288, device="cuda", dtype=torch.bfloat16)
    first = ops.linear(x, w, None, 2, torch.bfloat16)
    assert all(same_bits(ops.linear(x, w, None, 2, torch.bfloat16), first) for _ in range(200))


@pytest.mark.gpu
def test_reference_schedule_and_graphs_change_no_bit(tiny_folder):
    """`--schedule reference`, eager and graph replay: one answer."""
    found = []
    for options in ({"schedule": "reference"}, {"enforce_eager": True}, {}):
        llm = LLM(tiny_folder, load_format="dummy", num_gpu_blocks_override=64, progress=False, **options)
        outputs = llm.generate([[5, 6, 7], list(range(4, 300))], SamplingParams(
            temperature=0.7, seed=3, max_tokens=20, logprobs=0, ignore_eos=True))
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1] == found[2]


def test_schedules_of_a_number_of_rows_have_one_height_of_tile():
    """Experts' rows are laid out for a height before it is known which of the schedules a product takes."""
    for table in (tiles.HOPPER, tiles.CONSERVATIVE, tiles.REFERENCE):
        every = {one for _, *kinds in table.linear for kind in kinds for one in kind}
        for one in (table, *(selfcheck.without(table, {failed}) for failed in every)):
            for _, *kinds in one.linear:
                assert len({schedule.BLOCK_M for kind in kinds for schedule in kind}) == 1
