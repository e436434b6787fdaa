"""Grade models/embedded over 100 seeds, and print the samples of its model card: nothing is selected.

    python examples/grade_embedded.py [--model FOLDER] [--json results/embedded-grade.json]

A story passes if it ends by itself within 300 tokens and repeats no four tokens more than three times. Exit code 1 if
fewer than 90 of 100 pass.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine import LLM, SamplingParams

LIMIT = 300
PROMPT = "Once upon a time"
QUESTIONS = ("What is a dog?", "Why do birds sing?", "How do I make tea?", "I feel sad today.",
             "Tell me a story about a fox and a bell.")


def repeats(token_ids: list[int]) -> int:
    """How often the most frequent run of four tokens occurs."""
    return max(Counter(zip(*(token_ids[i:] for i in range(4)), strict=False)).values(), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent.parent / "models" / "embedded"))
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the grades and the samples here")
    args = parser.parse_args()
    llm = LLM(args.model)
    params = [SamplingParams(seed=seed, max_tokens=LIMIT) for seed in range(args.seeds)]
    stories = [o.outputs[0] for o in llm.generate([PROMPT] * args.seeds, params, progress=True)]
    ended = [s.finish_reason == "stop" for s in stories]
    calm = [repeats(s.token_ids) <= 3 for s in stories]
    passed = sum(map(all, zip(ended, calm, strict=True)))
    chats = [o.outputs[0].text.strip() for o in llm.chat(
        [[{"role": "user", "content": question}] for question in QUESTIONS], SamplingParams(seed=0, max_tokens=LIMIT))]
    for seed, story in enumerate(stories[:5]):
        print(f"\nSeed {seed}:\n\n> {(PROMPT + story.text).replace(chr(10), chr(10) + '> ')}")
    for question, answer in zip(QUESTIONS, chats, strict=True):
        print(f"\n**{question}** {answer}")
    grades = {"seeds": args.seeds, "ended_within_300": sum(ended), "no_4gram_over_3_times": sum(calm),
              "passed": passed, "mean_tokens": sum(len(s.token_ids) for s in stories) / args.seeds}
    print("\n" + json.dumps(grades))
    if args.json:
        args.json.write_text(json.dumps({**grades, "command": "python " + " ".join(sys.argv), "stories": [
            PROMPT + s.text for s in stories[:5]], "chats": dict(zip(QUESTIONS, chats, strict=True))}, indent=1) + "\n")
    return 0 if passed >= 0.9 * args.seeds else 1


if __name__ == "__main__":
    sys.exit(main())
