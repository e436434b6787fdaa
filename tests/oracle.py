"""What transformers says, for test_parity.py and test_on_policy.py: a job (JSON) on stdin, the answers in the .pt file
that it names.

Run as a process of its own, in a temporary folder: transformers probes for packages by name, and this checkout's
`kernels/` must not be found as one of them.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(folder: str, dtype: str):
    # Experts one after the other: the grouped product of torch wants other alignments than tiny shapes have.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype),
                                                experts_implementation="eager").eval()


def run_tiny(folder: str, input_ids: list[int]) -> dict:
    """Logits [len(input_ids), vocab_size] in fp32 and bf16, and the rotary embedding's frequencies and factor.
    The model is also saved, as transformers spells its config, beside the folder."""
    models = {dtype: load(folder, dtype) for dtype in ("float32", "bfloat16")}
    models["float32"].save_pretrained(folder + "-saved")
    rotary = models["float32"].model.rotary_emb
    logits = {dtype: model(torch.tensor([input_ids])).logits[0].float() for dtype, model in models.items()}
    return logits | {"inv_freq": rotary.inv_freq.double(), "factor": float(rotary.attention_scaling)}


def run_greedy(folder: str, prompts: list[str], outputs: list[list[int]], messages: list[dict]) -> dict:
    """What greedy decoding in fp32 chooses after each prompt and each beginning of its output: one forward pass a
    prompt, which is by induction the same as decoding token by token. And the ids of prompts and chat template."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder, "float32")
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    chosen = [model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].argmax(-1).tolist()
              for before, after in zip(prompt_ids, outputs, strict=True)]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {"prompt_ids": prompt_ids, "chosen": chosen, "chat": chat, "eos": tokenizer.eos_token_id,
            "chat_ids": tokenizer(chat, add_special_tokens=False)["input_ids"]}


def run_gradients(folder: str, pairs: list, weights: list[float]) -> dict:
    """Gradients, by parameter name, of the weighted sum of the completions' logprobs in fp32."""
    model, weights = load(folder, "float32"), iter(weights)
    for prompt, completion in pairs:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        values = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        sum(value * w for value, w in zip(values, weights, strict=False)).backward()  # values first: they end first
    return {name: parameter.grad for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.load(sys.stdin)
    gradients = {name: run_gradients(**some) for name, some in job.get("gradients", {}).items()}
    with torch.inference_mode():
        answers = {name: run_tiny(folder, job["input_ids"]) for name, folder in job.get("folders", {}).items()}
        if "greedy" in job:
            answers |= run_greedy(**job["greedy"])
    torch.save(answers | gradients, job["out"])
