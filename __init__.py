"""`from samebits import LLM, SamplingParams`, anywhere after `pip install -e .`.

The checkout is flat, so that it reads as one program; this file is its face as a package. The flat modules are found
beside it while it imports them, and a module of the same name from elsewhere is reported instead of half used.
"""

import sys
from pathlib import Path

_here = str(Path(__file__).parent)
sys.path.insert(0, _here)
try:
    import engine
    import kernels
    import sampler
finally:
    sys.path.remove(_here)
for _module in (engine, kernels, sampler):
    if not str(Path(_module.__file__)).startswith(_here):
        raise ImportError(f"samebits needs its own {_module.__name__!r}, but {_module.__file__} is already imported")

LLM, RequestOutput, CompletionOutput = engine.LLM, engine.RequestOutput, engine.CompletionOutput
SamplingParams = sampler.SamplingParams
same_bits = kernels.same_bits
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "same_bits"]
