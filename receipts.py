"""Which arithmetic an answer came from: the fingerprint.

`output bits = f(weights, prompt ids, sampling params, seed, fingerprint)`. Whatever may change bits is a part of it;
nothing that may not (batch, ports, cache, restarts) is.
"""

import hashlib
import json
import platform
import re
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoint import Checkpoint
from kernels import Ops
from kernels.tiles import numerics_hash
from model import ModelConfig

DIGEST_FILE = ".samebits-digest.json"


def weight_digest(folder: Path) -> str:
    """sha256 over the safetensors files, 16 hex digits; cached beside the model by each file's size and time."""
    files = Checkpoint(folder).files
    stamp = {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in files}
    cached = folder / DIGEST_FILE
    with suppress(OSError, ValueError, KeyError):  # there is none yet, or it is broken
        known = json.loads(cached.read_text())
        if known["files"] == stamp:
            return known["digest"]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        shown = {"total": stamp[file.name][0], "desc": f"digest of {file.name}", "leave": False}
        with open(file, "rb") as raw, tqdm.wrapattr(raw, "read", **shown) as stream:
            while chunk := stream.read(1 << 24):
                digest.update(chunk)
    with suppress(OSError):  # a read-only folder: computed again next time
        cached.write_text(json.dumps({"files": stamp, "digest": digest.hexdigest()[:16]}))
    return digest.hexdigest()[:16]


def tensor_digest(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> str:
    """sha256 over the weights that an engine holds, 16 hex digits: the same on every device."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(name.encode() + tensor.to(dtype).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def processor_kind() -> str:
    """The processor's model name: on CPU it takes part in the bits."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def fingerprint_parts(config: ModelConfig, ops: Ops, device: torch.device, dtype: torch.dtype, weights: str) -> dict:
    """Everything that may change bits, by name."""
    parts = {"numerics": numerics_hash(), "dtype": str(dtype).removeprefix("torch."), "tp_style": "column",
             "backend": ops.name, "torch": torch.__version__.split("+")[0], "weights": weights,
             "config": hashlib.sha256(repr(config).encode()).hexdigest()[:16]}
    if device.type == "cuda":
        import triton

        return parts | {"device": torch.cuda.get_device_name(device), "triton": triton.__version__}
    return parts | {"device": processor_kind(), "isa": torch.backends.cpu.get_cpu_capability()}


def fingerprint(parts: dict) -> str:
    """"sb1-" and 20 hex digits of the sha256 of the parts."""
    return "sb1-" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]
