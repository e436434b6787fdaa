"""The whole recipe of models/embedded: a 7M-parameter Qwen3 that tells little stories and answers simple questions.

    python tools/smollm2.py                       # the writer: SmolLM2-135M-Instruct
    python examples/train_embedded.py all         # or, one after the other: corpus, tokenizer, train, write, compare

    corpus     the writer, run by samebits, writes stories and chats (embedded_corpus.py, embedded_words.json)
    tokenizer  a byte-level BPE of 4,096 tokens from the corpus
    train      plain torch: bf16, AdamW, cosine schedule, held-out loss; resumes from its last checkpoint
    write      models/embedded in Hugging Face's format, and the loss curve under results/
    compare    bits per byte on the held-out text, beside the writer's

`corpus` goes on from the shards that are done, `train` from its last checkpoint. Several writers share the GPU, because
one leaves it idle while it prepares a step.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from embedded_corpus import END, START, STOP, documents, write_shards

WRITER = ROOT / "models" / "SmolLM2-135M-Instruct"
TEMPLATE = (  # ChatML; <|im_end|> ends a turn
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 256,
    "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": None, "eos_token_id": 0, "initializer_range": 0.02}
ROW = 1024  # tokens of a training row; it begins with the beginning of a document


# Stage 1: the corpus.

def make_corpus(work: Path, args: argparse.Namespace) -> None:
    folder = work / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    if args.worker is not None:
        return write_shards(folder, WRITER, list(range(args.worker, args.shards, args.workers)), args.shard_size)
    start = time.perf_counter()
    command = [sys.executable, __file__, "corpus", "--work", work, "--shards", args.shards, "--shard-size",
               args.shard_size, "--workers", args.workers, "--worker"]
    children = [subprocess.Popen([*map(str, command), str(i)]) for i in range(args.workers)]
    if any([child.wait() for child in children]):
        sys.exit("error: a worker failed; run `corpus` again to go on from the shards that are done")
    shards = [json.loads((folder / f"{i:04d}.jsonl").read_text().splitlines()[-1]) for i in range(args.shards)]
    tokens = sum(s["tokens"] for s in shards)
    span = max(s["began"] + s["seconds"] for s in shards) - min(s["began"] for s in shards)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record(work, corpus={"tokens": tokens, "seconds": round(span, 1), "tokens_per_s": round(tokens / span),
                         "workers": args.workers, "device": device})
    print(f"corpus: {tokens} tokens in {span:.0f} s ({time.perf_counter() - start:.0f} s with the start): "
          f"{tokens / span:.0f} tokens/s with {args.workers} workers")


# Stage 2: the tokenizer.

def make_tokenizer(work: Path, args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    train, held, counts = documents(work)
    print(f"documents: {len(train)} to train on, {len(held)} held out; {counts}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=CONFIG["vocab_size"], special_tokens=[END, START, STOP],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(train, trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    (work / "checkpoint.pt").unlink(missing_ok=True)  # of a model that spoke another tokenizer
    for name, texts in (("train", train), ("held_out", held)):
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        np.save(work / f"{name}.npy", np.concatenate([np.array(i, np.uint16) for i in ids]))
        np.save(work / f"{name}_lengths.npy", np.array([len(i) for i in ids], np.int64))
    (work / "held_out.jsonl").write_text("".join(json.dumps(text) + "\n" for text in held), encoding="utf-8")
    total = int(np.load(work / "train_lengths.npy").sum())
    record(work, documents={"train": len(train), "held_out": len(held), "train_tokens": total, **counts})
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens; {total} tokens to train on, "
          f"{sum(map(len, train)) / total:.2f} characters a token")


# Stage 3: training.

class Block(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        H, D, heads, kv = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        self.heads, self.kv, self.eps = heads, kv, c["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm, self.q_norm, self.k_norm = (
            nn.Parameter(torch.ones(n)) for n in (H, H, D, D))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(H, n * D, bias=False) for n in (heads, kv, kv))
        self.o_proj = nn.Linear(heads * D, H, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(H, c["intermediate_size"], bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c["intermediate_size"], H, bias=False)

    def norm(self, x, weight):
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self.eps)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        h = self.norm(x, self.input_layernorm)
        q, k, v = (p(h).view(B, T, n, -1).transpose(1, 2) for p, n in
                   ((self.q_proj, self.heads), (self.k_proj, self.kv), (self.v_proj, self.kv)))

        def rotate(y, weight):
            a, b = self.norm(y, weight).float().chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(v.dtype)

        y = F.scaled_dot_product_attention(rotate(q, self.q_norm), rotate(k, self.k_norm), v, is_causal=True,
                                           enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        h = self.norm(x, self.post_attention_layernorm)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Qwen3(nn.Module):
    """The training twin of model.py: same shapes and formulas, plain torch, gradients."""

    def __init__(self, c: dict):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.weight = nn.Parameter(torch.ones(c["hidden_size"]))
        half = c["head_dim"] // 2
        angle = torch.arange(ROW)[:, None] * c["rope_theta"] ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for name, p in self.named_parameters():
            if p.dim() == 2:  # projections into the residual are scaled down, as in GPT-2
                scale = (2 * c["num_hidden_layers"]) ** -0.5 if re.search("o_proj|down_proj", name) else 1.0
                nn.init.normal_(p, std=c["initializer_range"] * scale)

    def forward(self, ids, targets):
        """Mean cross-entropy in nats of targets [B, T] (-100: not counted) given ids [B, T]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        x = self.layers[0].norm(x, self.weight)
        return F.cross_entropy(F.linear(x, self.embed_tokens.weight).float().flatten(0, 1), targets.flatten(),
                               ignore_index=-100)


def rows_of(tokens: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Documents in `order` laid into rows of ROW + 1 tokens, -1 where a row has no room for the next one."""
    starts = np.cumsum(lengths) - lengths
    rows, used = [np.full(ROW + 1, -1, np.int32)], 0
    for i in order:
        n = int(lengths[i])
        if n > ROW:
            continue
        if used + n > ROW + 1:
            rows.append(np.full(ROW + 1, -1, np.int32))
            used = 0
        rows[-1][used : used + n] = tokens[starts[i] : starts[i] + n]
        used += n
    return np.stack(rows)


def train_model(work: Path, args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    data = {name: (np.load(work / f"{name}.npy"), np.load(work / f"{name}_lengths.npy"))
            for name in ("train", "held_out")}
    held = rows_of(*data["held_out"], np.arange(len(data["held_out"][1])))[:128]
    model = Qwen3(CONFIG).to(device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}],
                                  lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    step, log, saved = 0, [], work / "checkpoint.pt"
    if saved.is_file():
        state = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, log = state["step"], state["log"]
        print(f"going on from step {step}")
    run = torch.compile(model) if device.type == "cuda" else model

    def loss_of(rows: np.ndarray):
        batch = torch.from_numpy(rows).to(device, non_blocking=True).long()
        with torch.autocast(device.type, torch.bfloat16):
            targets = batch[:, 1:]
            return run(batch[:, :-1].clamp(min=0), torch.where(targets < 0, -100, targets))

    @torch.no_grad()
    def held_out_loss() -> float:
        total, count = 0.0, 0
        for at in range(0, len(held), args.batch):
            rows = held[at : at + args.batch]
            n = int((rows[:, 1:] >= 0).sum())
            if len(rows) < args.batch:  # one shape only: nothing is compiled twice
                rows = np.concatenate([rows, np.full((args.batch - len(rows), ROW + 1), -1, np.int32)])
            total, count = total + float(loss_of(rows)) * n, count + n
        return total / count

    start, tokens, last = time.perf_counter(), 0, None
    bar = tqdm(total=args.steps, initial=step, desc="training", disable=not sys.stderr.isatty())
    epoch, done = 0, 0  # steps of the epochs before this one
    while step < args.steps:
        rows = rows_of(*data["train"], np.random.default_rng(epoch).permutation(len(data["train"][1])))
        per_epoch = len(rows) // args.batch
        if not per_epoch:
            sys.exit(f"error: the corpus fills {len(rows)} rows, less than a batch of {args.batch}: write more shards")
        for at in range(step - done, per_epoch):  # empty if a checkpoint is past this epoch
            if step == args.steps:
                break
            warm = min(1.0, (step + 1) / 200)
            rate = args.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = loss_of(rows[at * args.batch : (at + 1) * args.batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + args.batch * ROW
            bar.update(1)
            if step % 100 == 0 or step == args.steps:
                last = held_out_loss()
                log.append([step, loss.item(), last])
                seconds = time.perf_counter() - start
                print(f"step {step}: loss {loss.item():.4f}, held out {last:.4f}, {tokens / seconds:.0f} tokens/s",
                      flush=True)
            if step % 1000 == 0 or step == args.steps:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                            "log": log}, saved.with_suffix(".part"))
                saved.with_suffix(".part").rename(saved)
        epoch, done = epoch + 1, done + per_epoch
    if last is not None:
        seconds = time.perf_counter() - start
        record(work, training={"steps": step, "batch_tokens": args.batch * ROW, "epochs": round(step / per_epoch, 1),
                               "seconds": round(seconds), "held_out_nats_per_token": round(last, 4),
                               "parameters": sum(p.numel() for p in model.parameters()), "log": log})


# Stage 4: the folder.

def write_folder(work: Path, args: argparse.Namespace) -> None:
    from safetensors.torch import save_file

    state = torch.load(work / "checkpoint.pt", map_location="cpu", weights_only=True)["model"]
    names = {"embed_tokens.weight": "embed_tokens.weight", "weight": "norm.weight"}
    tensors = {}
    for name, tensor in state.items():
        if name in ("cos", "sin"):
            continue
        name = names.get(name, name)
        name = re.sub(r"\.([qkvo]_proj|[qk]_norm)", r".self_attn.\1", name)
        name = re.sub(r"\.(gate_proj|up_proj|down_proj)", r".mlp.\1", name)
        name += "" if name.endswith(".weight") else ".weight"
        tensors["model." + name] = tensor.to(torch.bfloat16).contiguous()
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    files = {
        "config.json": CONFIG,
        "generation_config.json": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [0, 2],
                                   "pad_token_id": 0},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END,
                                  "model_max_length": CONFIG["max_position_embeddings"], "chat_template": TEMPLATE,
                                  "clean_up_tokenization_spaces": False}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    size = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: {sum(t.numel() for t in tensors.values())} parameters, {size / 1e6:.1f} MB")
    plot_losses(work, ROOT / "results" if folder == ROOT / "models" / "embedded" else folder)


def plot_losses(work: Path, folder: Path) -> None:
    """The loss curve as embedded-loss.png in `folder`, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        return print("no matplotlib here, so no loss curve: run `write` again where there is one")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    log = np.array(json.loads((work / "figures.json").read_text())["training"]["log"])
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(log[:, 0], log[:, 1], color="0.7", label="training (one batch)")
    axes.plot(log[:, 0], log[:, 2], label="held out")
    axes.set(xlabel="step", ylabel="nats a token", title=f"models/embedded: {log[-1, 2]:.3f} nats a token held out")
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "embedded-loss.png", dpi=120)


# Stage 5: beside the writer.

def compare(work: Path, args: argparse.Namespace) -> None:
    """Bits per byte of the held-out documents, each from its second token on; the end tokens are left out."""
    from engine import LLM, SamplingParams

    texts = [json.loads(line) for line in (work / "held_out.jsonl").read_text().splitlines()]
    texts = {"stories": [t.removesuffix(END) for t in texts if t.endswith(END)][: args.documents],
             "chats": [t for t in texts if not t.endswith(END)][: args.documents]}
    found = {}
    for name, model in (("embedded", args.out), ("SmolLM2-135M-Instruct", WRITER)):
        llm = LLM(model, max_model_len=1024, num_gpu_blocks_override=4096, progress=False)
        for kind, some in texts.items():
            ids = [llm.tokenizer.encode(text, False) for text in some]
            outputs = llm.generate(ids, SamplingParams(temperature=0.0, prompt_logprobs=0), score_only=True)
            nats = -sum(value for o in outputs for value, _ in o.prompt_logprobs[1:])
            size = sum(len(text.encode()) - len(llm.tokenizer.decode(i[:1]).encode())
                       for text, i in zip(some, ids, strict=True))
            found.setdefault(name, {})[kind] = round(nats / math.log(2) / size, 4)
            print(f"{name}: {found[name][kind]:.4f} bits per byte on {len(some)} held-out {kind}", flush=True)
        del llm
    record(work, bits_per_byte=found)


def record(work: Path, **figures) -> None:
    """Add to the figures of this run: work/figures.json."""
    path = work / "figures.json"
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(old | figures, indent=1) + "\n")


STAGES = {"corpus": make_corpus, "tokenizer": make_tokenizer, "train": train_model, "write": write_folder,
          "compare": compare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["all", *STAGES])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embedded", help="folder for what is in between")
    parser.add_argument("--out", default=str(ROOT / "models" / "embedded"), help="folder of the model")
    parser.add_argument("--shards", type=int, default=48)
    parser.add_argument("--shard-size", type=int, default=2048, help="stories, and chats, a shard")
    parser.add_argument("--workers", type=int, default=8, help="engines that share the GPU")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=128, help="rows of 1,024 tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--documents", type=int, default=400, help="held-out documents of a kind that `compare` reads")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for name in STAGES if args.stage == "all" else [args.stage]:
        STAGES[name](args.work, args)


if __name__ == "__main__":
    main()
