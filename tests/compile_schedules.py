"""Compile every kernel, at every schedule of the tables, for GPUs that are not here. Run in a process of its own.

Launchers are called on meta tensors with `JITFunction.run` replaced by a recorder, so that what is compiled is what a
launch would compile: the same signature, constants, alignment and options. Prints one JSON object a compilation:
kernel, target, constants, shared memory in bytes, and how many float atomics and fused multiply-adds its code holds.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(Path(__file__).parent.parent))
from kernels import attention, experts, linear, norm, sample, tiles
from kernels.work import ITEM_FIELDS, MERGE_FIELDS, AttentionWork

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
           "gfx942": GPUTarget("hip", "gfx942", 64)}
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32",
         torch.int64: "*i64"}
launches: list[tuple] = []


def record(self, *args, grid, warmup, **options):
    bound = dict(zip([p.name for p in self.params], args, strict=True))
    launches.append((self, bound, {k: v for k, v in options.items() if k != "num_ctas"}))


def source(kernel: JITFunction, bound: dict) -> tuple[ASTSource, dict]:
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = bound[param.name]
        if param.is_constexpr or value is None:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[param.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, tuple):  # of tensors
            signature[param.name] = tuple(TYPES[one.dtype] for one in value)
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(len(value))}
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), constants


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_table(table: tiles.Schedules, rows: int) -> None:
    """Every op at one number of rows, on the shapes of Qwen3-8B, through its launcher."""
    arrived = meta(16384, dtype=torch.int32)
    for N, K, gated in ((6144, 4096, False), (24576, 4096, True), (4096, 12288, False), (960, 576, False),
                        (8192, 2048, True), (3072, 576, True), (151936, 4096, False)):
        leaves = tiles.leaf_count(N, K)
        dtype = torch.float32 if N == 151936 else torch.bfloat16
        for one in next(kinds for bound, *kinds in table.linear if bound >= rows)[leaves > 1]:
            if one.fits(dtype.itemsize):
                bias = meta(N) if N == 6144 else None
                width = N // (1 + gated)
                shares = [meta(rows, 2 * width, dtype=dtype)[:, :width] for _ in range(2)]  # of two ranks
                for out in (None, shares):
                    linear.linear(meta(rows, K), meta(N, K), bias, leaves, dtype, one, arrived, out, gated)
    for gated in (False, True):
        linear.linear(meta(rows, 576, dtype=torch.float32), meta(960, 576, dtype=torch.float32), None, 1,
                      torch.float32, table.linear_for(rows, 960, 1, 4), arrived, gated=gated)
    norm.rms_norm(meta(rows, 4096), meta(4096), 1e-6, meta(rows, 4096))
    ints = meta(rows, dtype=torch.int32)
    work = AttentionWork(ints, ints, meta(rows, 4, dtype=torch.int32), meta(1, ITEM_FIELDS, dtype=torch.int32),
                         meta(rows, ITEM_FIELDS, dtype=torch.int32), meta(rows, MERGE_FIELDS, dtype=torch.int32),
                         meta(3, dtype=torch.int32), (1, rows, rows), max_partials=rows)
    cache = meta(100, 8, 64, 128)
    norm.rotary_and_cache(meta(rows, 6144), meta(128), meta(128), 1e-6, meta(4096, 128, dtype=torch.float32), work,
                            cache, cache, 32)
    walked = replace(work, max_partials=0)
    only_prefill = replace(walked, grid=(1, 0, 0))
    for dtype, D, one in ((torch.bfloat16, 128, work), (torch.bfloat16, 128, walked),
                          (torch.bfloat16, 256, only_prefill), (torch.float32, 128, only_prefill)):
        cache = meta(100, 8, 64, D, dtype=dtype)
        decodes, prefill = table.attention_for(D * dtype.itemsize)
        for decode in decodes:
            for out in (None, [meta(rows, 64 * D, dtype=dtype)[:, : 32 * D] for _ in range(2)]):
                attention.paged_attention(meta(rows, 32, D, dtype=dtype), cache, cache, one, 0.1, decode, prefill, out)
    logits = meta(rows, 151936, dtype=torch.float32)
    sample.logprobs(logits, meta(rows, dtype=torch.int64), 4)
    sample.argmax(logits)
    column = {t: meta(rows, dtype=t) for t in (torch.float32, torch.int32, torch.int64)}
    f, i, j = column.values()
    sample.sample(logits, f, j, j, f, j, i)
    routing = experts.route(meta(rows, 2048), meta(rows, 128, dtype=torch.float32), 8, True, 16, rows,
                            meta(1 << 16, 3, dtype=torch.int32))
    experts.combine(routing.weights, routing.places, meta(rows * 8, 2048))


def launch_selfcheck(table: tiles.Schedules) -> None:
    """What --selfcheck asks of the products that the engine does not: of any schedule one leaf, and an fp32 result."""
    for one in {one for _, *kinds in table.linear for kind in kinds for one in kind}:
        for leaves, dtype in ((1, torch.bfloat16), (1, torch.float32), (2, torch.float32)):
            if one.fits(dtype.itemsize):
                linear.linear(meta(257, 512), meta(272, 512), None, leaves, dtype, one, meta(16384, dtype=torch.int32))
        tiles_of = meta(10, dtype=torch.int32)  # of nine row tiles, eight experts
        routing = experts.Routing(None, None, None, tiles_of, one.BLOCK_M, 8, False, 1)
        linear.linear(meta(9 * one.BLOCK_M, 2048), meta(8 * 272, 2048), None, 1, torch.bfloat16, one,
                      meta(16384, dtype=torch.int32), gated=True, routing=routing)


def written_scores(constants: dict, options: dict) -> int:
    """Scores of attention that a thread computes in the code of its loops, one or two; 0 for another kernel."""
    if "SKIP_MASK" not in constants:
        return 0
    return constants["BLOCK_M"] * constants["TILE"] * (1 + constants["SKIP_MASK"]) // (32 * options["num_warps"])


def main() -> None:
    JITFunction.run = record
    plan = [("sm_90", tiles.HOPPER)] + [(target, table) for target in TARGETS for table in
                                        (tiles.CONSERVATIVE, tiles.REFERENCE) if target != "gfx942" or
                                        table is tiles.CONSERVATIVE]
    if sys.argv[1:] == ["contract"]:  # what of a launch is numerics, at several numbers of rows
        for rows in (1, 3, 16, 64, 300, 4096):
            launches.clear()
            launch_table(tiles.HOPPER, rows)
            for kernel, bound, options in launches:
                constants = {k: v for k, v in bound.items() if kernel.params[list(bound).index(k)].is_constexpr}
                print(json.dumps({"rows": rows, "kernel": kernel.__name__, "constants": str(constants), **constants,
                                  "num_warps": options.get("num_warps")}))
        return
    done = set()
    for target, table in plan:
        launches.clear()
        for bound, *_ in table.linear:
            launch_table(table, min(bound, 4096))
        launch_selfcheck(table)
        for kernel, bound, options in launches:
            src, constants = source(kernel, bound)
            key = (target, kernel.__name__, str(src.signature), str(constants), str(options), str(src.attrs))
            if key in done:
                continue
            done.add(key)
            result = compile(src, target=TARGETS[target], options=options)
            code = result.asm.get("ptx") or result.asm["amdgcn"]
            print(json.dumps({
                "kernel": kernel.__name__, "target": target, "table": table.name, "shared": result.metadata.shared,
                "constants": str(constants), "scores": written_scores(constants, options),
                "fp32": "fp32" in next(iter(src.signature.values())),
                "float_atomics": len(re.findall(r"(atom|red)\.[\w.:]*\.b?f\d+|atomic_(pk_)?add_[bf]\d+", code)),
                # bf16 is left out: sm_80 has no bf16 multiply and spells it fma(a, b, -0).
                "fma": len(re.findall(r"\bfma\.[\w.]*\.f(?:64|32|16x2|16)\b", code))}), flush=True)


if __name__ == "__main__":
    main()
