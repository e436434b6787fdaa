"""The corpus of models/embedded (see train_embedded.py): asked for, written by SmolLM2 through samebits, filtered.

Stories are made in two calls, because a small writer left alone neither begins at once nor ends: it continues a given
opening, is cut at a sentence, and continues the first words of an ending. Everything is seeded by the shard's number.
"""

import hashlib
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

WORDS = json.loads((Path(__file__).parent / "embedded_words.json").read_text())
STORY_SYSTEM = "You write very short stories for little children, in simple words and short sentences."
CHAT_SYSTEM = "You answer in one short, simple sentence."
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
HELD_OUT = 100  # one document in so many is held out


def story(rng: random.Random) -> dict:
    """One story to be written: the instruction, the opening and the first words of the ending that the answer must
    have, and the question that a chat would ask for it."""
    pick = {"name": rng.choice(WORDS["names"]), "trait": rng.choice(WORDS["traits"]),
            "who": rng.choice(WORDS["animals"] if rng.random() < 0.6 else WORDS["people"]),
            "thing": rng.choice(WORDS["things"]), "adjective": rng.choice(WORDS["adjectives"]),
            "place": rng.choice(WORDS["places"]), "theme": rng.choice(WORDS["themes"])}
    opening = rng.choice(WORDS["openings"]).format(**pick)
    about = rng.choice(["a {who} and a {thing}", "a {who} in a {place}", "a {who} and {theme}", "a {trait} {who}"])
    ask = rng.choice(["Write a very short story about {}.", "Write a bedtime story about {}.",
                      "Write a short story about {}. Someone speaks in it."])
    question = rng.choice(["Tell me a story about {}.", "Write a short story about {}.", "I want a story about {}."])
    hero = pick["name"] if pick["name"] in opening else f"the {pick['who']}"
    about = about.format(**pick)
    return {"kind": "told" if rng.random() < 0.3 else "story", "ask": fix(ask.format(about)),
            "opening": fix(opening), "ending": rng.choice(WORDS["endings"]).format(hero=hero),
            "question": fix(question.format(about))}


def chat(rng: random.Random) -> dict:
    """One question for a little assistant."""
    kind = rng.choice(["animals", "nature", "foods", "objects", "jobs", "feelings", "things", "themes", "places"])
    question = rng.choice(WORDS["questions"][kind]).format(rng.choice(WORDS[kind]))
    if rng.random() < 0.12:
        question = rng.choice(WORDS["plain_questions"])
    return {"kind": "chat", "question": fix(question)}


def fix(text: str) -> str:
    return re.sub(r"\b([Aa]) ([aeiou])", r"\1n \2", text)


def to_last_sentence(text: str) -> str:
    """`text` up to the end of its last whole sentence."""
    ends = [match.end() for match in re.finditer(r"[.!?][\"”]?(?=\s|$)", text)]
    return text[: ends[-1]] if ends else ""


def write_shards(folder: Path, writer: Path, shards: list[int], size: int) -> None:
    """Write corpus/NNNN.jsonl, `size` stories and as many chats, for each of `shards` that is not there."""
    from engine import LLM, SamplingParams

    todo = [shard for shard in shards if not (folder / f"{shard:04d}.jsonl").is_file()]
    if not todo:
        return
    llm = LLM(writer, max_model_len=512, max_num_seqs=512, num_gpu_blocks_override=4096, progress=False)
    tokens = 0

    def write(asks: list[str], system: str, starts: list[str], seed: int, max_tokens: int, **options) -> list:
        """The writer's answers, each continuing its start."""
        nonlocal tokens
        prompts = [llm.apply_chat_template([{"role": "system", "content": system}, {"role": "user", "content": ask}])
                   + start for ask, start in zip(asks, starts, strict=True)]
        params = [SamplingParams(temperature=0.7, top_p=0.95, frequency_penalty=0.3, presence_penalty=0.2,
                                 max_tokens=max_tokens, seed=seed << 20 | i, **options) for i in range(len(asks))]
        outputs = llm.generate(prompts, params, progress=sys.stderr.isatty(), add_special_tokens=False)
        tokens += sum(len(o.outputs[0].token_ids) for o in outputs)
        return [o.outputs[0] for o in outputs]

    for shard in todo:
        began, tokens, rng = time.time(), 0, random.Random(shard)
        stories, chats = [story(rng) for _ in range(size)], [chat(rng) for _ in range(size)]
        asks, starts = [s["ask"] for s in stories], [s["opening"] for s in stories]
        bodies = write(asks, STORY_SYSTEM, starts, 3 * shard, 90)
        starts = [f"{start}{to_last_sentence(out.text)}\n\n{s['ending']}"
                  for start, out, s in zip(starts, bodies, stories, strict=True)]
        endings = write(asks, STORY_SYSTEM, starts, 3 * shard + 1, 45, stop=["\n"])
        answers = write([c["question"] for c in chats], CHAT_SYSTEM, [""] * size, 3 * shard + 2, 64)
        lines = [{"kind": s["kind"], "question": s["question"], "text": to_last_sentence(start + out.text)}
                 for s, start, out in zip(stories, starts, endings, strict=True)]
        lines += [{**c, "text": to_last_sentence(out.text)} for c, out in zip(chats, answers, strict=True)]
        seconds = time.time() - began
        lines.append({"kind": "figures", "tokens": tokens, "seconds": seconds, "began": began})
        part = folder / f"{shard:04d}.part"
        part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        part.rename(part.with_suffix(".jsonl"))  # whole or not at all
        print(f"shard {shard}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s", flush=True)


JUNK = re.compile(r"SmolLM|Hugging|language model|\bAI\b|As an |\b(this|the|my) story\b|the moral|assistant|http|"
                  r"[*#<>{}\[\]_|\\=@~^`]", re.IGNORECASE)


def clean(line: dict) -> str | None:
    """The text of a generated line in plain characters, or None if it is junk: a loop, a cut-off, not English."""
    text = line["text"]
    for old, new in (("’", "'"), ("‘", "'"), ("“", '"'), ("”", '"'), ("—", " - "), ("–", "-"), ("…", "...")):
        text = text.replace(old, new)
    text = re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()
    words = re.findall(r"[a-z']+", text.lower())
    low, high = (3, 60) if line["kind"] == "chat" else (35, 230)
    if not text.isascii() or JUNK.search(text) or not low <= len(words) <= high:
        return None
    if text[-1] not in '.!?"' or text.count('"') % 2 or not text[0].isupper():
        return None
    if re.search(r"^\s*(\d+[.)]|-|Title:)", text, re.MULTILINE):
        return None
    grams = Counter(zip(*(words[i:] for i in range(4)), strict=False))
    if grams and max(grams.values()) > 2:
        return None
    sentences = [s for s in re.split(r"[.!?\"]\s+", text.lower()) if len(s) > 12]
    if len(set(sentences)) < len(sentences) or (line["kind"] != "chat" and len(set(words)) < 0.4 * len(words)):
        return None
    return text


def documents(work: Path) -> tuple[list[str], list[str], dict]:
    """(training documents, held-out documents, counts) from the shards, filtered and without duplicates.

    A document ends with the token that ends it. A chat holds one to three questions, of which some ask for a story.
    """
    seen, train, held = set(), [], []
    counts = Counter()
    chats = []
    for path in sorted((work / "corpus").glob("*.jsonl")):
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if line["kind"] == "figures":
                continue
            counts["generated"] += 1
            text = clean(line)
            if text is None:
                counts["junk"] += 1
                continue
            # Twice the same answer, story's end or story's middle is a duplicate.
            words = text.lower().split()
            keys = {hashlib.md5(" ".join(part).encode()).digest()[:8] for part in (
                [line["question"], *words] if line["kind"] == "chat" else words[-12:],
                [line["question"], *words] if line["kind"] == "chat" else words[20:32])}
            if keys & seen:
                counts["duplicate"] += 1
                continue
            seen |= keys
            counts[line["kind"]] += 1
            if line["kind"] == "story":
                (held if int.from_bytes(min(keys), "big") % HELD_OUT == 0 else train).append(text + END)
            else:
                chats.append((int.from_bytes(min(keys), "big"), line["question"], text))
    rng = random.Random(0)
    rng.shuffle(chats)
    identity = [(1, q, a) for q, a in WORDS["identity"]] * (len(chats) // 600)
    chats += identity
    rng.shuffle(chats)
    while chats:
        turns = [chats.pop() for _ in range(min(len(chats), rng.choice((1, 1, 2, 3))))]
        text = "".join(f"{START}user\n{q}{STOP}\n{START}assistant\n{a}{STOP}\n" for _, q, a in turns)
        (held if turns[0][0] % HELD_OUT == 0 else train).append(text)
    rng.shuffle(train)
    return train, held, dict(counts)
