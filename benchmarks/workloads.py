"""What the bench serves: model shapes with random weights, and workloads as token ids.

The full workloads are those that vLLM was measured on (peers.json): the same lengths, seeds and ids. The small ones
keep their character and fit the embedded model on a slow CPU.
"""

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engine import DEFAULT_MODEL

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
         "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}
SHAPES = {  # hidden size, MLP size, layers, heads, whether the head is the embedding
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
    "qwen3-32b": (5120, 25600, 64, 64, False),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, False),
}
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
MORE = {"qwen3-30b-a3b": {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4, "num_experts": 128,
                          "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}}
# Arguments of the engine that a bench may set.
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override", "tensor_parallel_size", "tp_style",
          "expert_parallel")


def model_options(name: str | None, on_gpu: bool) -> tuple[str, dict]:
    """(name, the `LLM` arguments that make it). A built-in shape gets its config in a temporary folder, no weights."""
    name = name or ("qwen3-8b" if on_gpu else DEFAULT_MODEL)
    if name not in SHAPES:  # the embedded model is in the checkout, wherever the bench is called from
        return name, {"model": str(Path(__file__).parent.parent / name) if name == DEFAULT_MODEL else name}
    folder = Path(tempfile.mkdtemp(prefix="samebits-"))
    config = QWEN3 | dict(zip(FIELDS, SHAPES[name], strict=True)) | MORE.get(name, {})
    (folder / "config.json").write_text(json.dumps(config))
    return name, {"model": str(folder), "load_format": "dummy"}


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once, one entry each: `prompts` in token ids, `outputs` in tokens to generate.

    `figure`, what it is known by: "wall_s", seconds for all of it; "ttft_s", seconds to the first token; "step_ms",
    milliseconds a decode step, (all tokens' seconds - one token's) / (tokens - 1).
    """

    name: str
    prompts: list[list[int]]
    outputs: list[int]
    figure: str

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + n for prompt, n in zip(self.prompts, self.outputs, strict=True))

    @property
    def load(self) -> str:
        tokens = [f"{min(n)}-{max(n)}" if min(n) < max(n) else str(n[0]) for n in
                  ([len(prompt) for prompt in self.prompts], self.outputs)]
        return f"{len(self.outputs)} x {tokens[0]} -> {tokens[1]}"


FULL = {"A": (1000, (64, 256), (90, 110)), "B": (256, (100, 1024)), "C": 256, "D": (128, (8, 64, 256), 128),
        "E": (8192, 32768), "G": (32, 8192, 64), "U": (64, 512, 128)}
SMALL = {"A": (12, (16, 64), (8, 12)), "B": (6, (16, 96)), "C": 24, "D": (32, (2, 4, 8), 12),
         "E": (128, 512), "G": (3, 200, 6), "U": (4, 64, 16)}


def workloads(vocab_size: int, small: bool, user: tuple[int, int, int] | None = None) -> dict[str, Workload]:
    """Name -> workload, A to G and U, the user's own: (requests, prompt tokens, output tokens)."""
    size = SMALL if small else FULL
    made = []

    def add(name, prompts, outputs, figure):
        made.append(Workload(name, prompts, outputs, figure))

    def draw(rng, length):
        return [rng.randrange(1, vocab_size) for _ in range(length)]

    requests, lengths, outputs = size["A"]
    rng = random.Random(1)
    prompts = [draw(rng, rng.randint(*lengths)) for _ in range(requests)]
    add("A", prompts, [rng.randint(*outputs) for _ in range(requests)], "wall_s")
    requests, lengths = size["B"]
    rng, top = random.Random(0), min(10000, vocab_size - 1)  # nano-vllm's own bench.py
    prompts = [[rng.randint(0, top) for _ in range(rng.randint(*lengths))] for _ in range(requests)]
    add("B", prompts, [rng.randint(*lengths) for _ in range(requests)], "wall_s")
    length, batches, output = size["D"]
    rng = random.Random(2)
    prompts = [draw(rng, length) for _ in range(batches[-1])]
    add("C", prompts[:1], [size["C"]], "step_ms")
    for batch in batches:
        add(f"D{batch}", prompts[:batch], [output] * batch, "step_ms")
    rng = random.Random(3)
    for length in size["E"]:
        name = f"E{length // 1024}k" if length >= 1024 else f"E{length}"
        add(name, [draw(rng, length)], [1], "ttft_s")
    requests, length, output = size["G"]
    add("G", [draw(rng, length) for _ in range(requests)], [output] * requests, "step_ms")
    requests, length, output = user or size["U"]
    rng = random.Random(4)
    add("U", [draw(rng, length) for _ in range(requests)], [output] * requests, "wall_s")
    return {workload.name: workload for workload in made}
