"""Shared fixtures. Without a GPU, Triton kernels run in its interpreter; with one, `-m gpu` runs them for real."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # one worker a core; tests that are about threads set their own
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter's bf16 is broken (its dot and its casts), so without a GPU Triton runs in fp32 and fp16.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU else [])


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU (run with: python -m pytest -m gpu)")


def pytest_xdist_auto_num_workers():
    return 1 if HAS_GPU else None  # one process on a GPU, whose memory and timing it must not share


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(params=["triton", "reference"])
def ops(request):
    import kernels

    return kernels.triton_ops(DEVICE) if request.param == "triton" else kernels.reference_ops()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def poisoned(monkeypatch):
    """Every torch.empty of floats is filled with NaN, so that an element nobody wrote cannot pass for a value."""

    def poison(function):
        def wrapped(*args, **kwargs):
            tensor = function(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-(2**30) + 1)

        return wrapped

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


TINY = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 307, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 3}
TINY_MOE = TINY | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3,
                   "moe_intermediate_size": 80, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with the config of a two-layer random Qwen3 and no weights (for load_format="dummy")."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def check_integrity(scheduler) -> None:
    """Raise AssertionError unless every block is free or owned, by this scheduler's running sequences alone, and as
    often as their tables name it (call it after any step)."""
    blocks, tables = scheduler.blocks, [seq.block_table for seq in scheduler.running]
    assert not any(seq.block_table for seq in scheduler.waiting), "a waiting sequence holds blocks"
    assert all(tables), "a running sequence holds none"
    assert all(len(set(table)) == len(table) for table in tables), "a block appears twice in one table"
    owners = Counter(block for table in tables for block in table)
    assert [owners[block] for block in range(blocks.num_blocks)] == blocks.ref_count, "counts and tables disagree"
    assert sorted(blocks.free) == [i for i in range(blocks.num_blocks) if not owners[i]], "free is not what nobody owns"
    assert {key: block for key, (block, _) in blocks.index.items()} == {key: block for block, key in blocks.key.items()}
