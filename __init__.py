"""`from samebits import LLM, SamplingParams`, anywhere after `pip install -e .`.

The checkout is flat, so that it reads as one program; this file is its face as a package. The flat modules are found
beside it while it imports them, and a module of the same name from elsewhere is reported instead of half used."""

import sys
from pathlib import Path

sys.path.insert(0, __path__[0])
try:
    import engine
finally:
    sys.path.remove(__path__[0])
if Path(engine.__file__).parent != Path(__path__[0]):
    raise ImportError(f"samebits needs its own 'engine', but {engine.__file__} is already imported")
from engine import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
