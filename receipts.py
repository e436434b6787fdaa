"""Which arithmetic an answer came from (the fingerprint), and proof that it did (receipts).

`output bits = f(weights, prompt ids, sampling params, seed, fingerprint)`. Whatever may change bits is a part of the
fingerprint; nothing that may not (batch, ports, cache, restarts) is. A receipt states both sides of that equation for
one completion. Its digest is a checksum and no signature; what cannot be forged is the replay (tools/verify.py)."""

import hashlib
import json
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from runpy import run_path

import torch
from tqdm import tqdm

from checkpoint import Checkpoint
from kernels.tiles import NUMERICS


def file_digest(file: Path) -> str:
    """sha256 of a file, in hex. The Hub's cache names a large file by it: nothing is read then."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
        return blob.name
    digest, shown = hashlib.sha256(), {"total": file.stat().st_size, "desc": f"digest of {file.name}", "leave": False}
    with open(file, "rb") as raw, tqdm.wrapattr(raw, "read", disable=None, **shown) as stream:  # None: to a terminal
        while chunk := stream.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def weight_digest(folder: Path) -> str:
    """sha256 over the safetensors files' names and sha256s, 16 hex digits; cached beside them, by size and time."""
    files, cached = Checkpoint(folder).files, folder / ".samebits-digest.json"
    stamp = json.dumps([[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files])
    with suppress(OSError, ValueError, KeyError, TypeError):  # there is none yet, it is of other files, or broken
        return json.loads(cached.read_text())[stamp]
    digest = hashlib.sha256(json.dumps([[f.name, file_digest(f)] for f in files]).encode()).hexdigest()[:16]
    with suppress(OSError):  # a read-only folder: computed again next time
        cached.write_text(json.dumps({stamp: digest}))
    return digest


def tensor_digest(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> str:
    """sha256 over the weights that an engine holds, 16 hex digits: the same on every device."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(name.encode() + tensor.to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def processor_kind() -> str:
    """The processor's model name: on CPU it takes part in the bits."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def fingerprint_parts(llm, tensors: dict[str, torch.Tensor] | None = None) -> dict:
    """Everything that may change bits, by name: end tokens, too, which min_tokens bans. `tensors`: whole weights."""
    weights = "dummy" if llm.load_format == "dummy" else (
        tensor_digest(tensors or llm.model.weights, llm.dtype) if llm.load_format == "updated"
        else weight_digest(llm.folder))
    parts = {"numerics": hashlib.sha256(json.dumps(NUMERICS, sort_keys=True).encode()).hexdigest()[:16],
             "dtype": str(llm.dtype).removeprefix("torch."),
             "tp_style": f"row, {llm.ranks.size} ranks" if llm.model.by_rows else "column",
             "backend": llm.ops.name, "torch": torch.__version__.split("+")[0], "end_tokens": sorted(llm.eos_token_ids),
             "weights": weights, "config": hashlib.sha256(repr(llm.config).encode()).hexdigest()[:16]}
    if llm.device.type == "cuda":
        import triton
        return parts | {"device": torch.cuda.get_device_name(llm.device), "triton": triton.__version__}
    return parts | {"device": processor_kind(), "isa": torch.backends.cpu.get_cpu_capability()}


def fingerprint(llm) -> str:
    """"sb1-" and 20 hex digits of the sha256 of the parts."""
    return "sb1-" + hashlib.sha256(json.dumps(llm.fingerprint_parts, sort_keys=True).encode()).hexdigest()[:20]


def make_receipt(llm, output, index: int = 0, trace: bool = False) -> dict:
    """Receipt of a finished completion that was asked for logprobs; `trace`: with a digest of every op's output."""
    return tool("verify")["make_receipt"](llm, output, index, trace)


def verify(llm, receipt: dict):
    """Replay a receipt in one prefill; returns a `Verdict` (tools/verify.py). ValueError if that cannot be done."""
    return tool("verify")["verify"](llm, receipt)


@cache
def tool(name: str) -> dict:
    """What a file of tools/ defines. Loaded when asked for, by its path: it is found wherever the engine came from."""
    return run_path(str(Path(__file__).parent / "tools" / f"{name}.py"))
