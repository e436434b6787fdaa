"""The proofs that the command line offers instead of an answer: --fingerprint, --verify FILE and --selfcheck."""

import argparse
import json
from pathlib import Path

from engine import LLM
from tools.verify import check_format


def load_receipts(file: str | Path) -> list[dict]:
    """The receipts of a file of JSON lines. Raises ValueError naming the line that is none, OSError if unreadable."""
    receipts = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        try:
            if line.strip():
                receipts.append(json.loads(line))
                check_format(receipts[-1])
        except (ValueError, RecursionError) as error:
            what = "" if type(error) is ValueError else "no whole JSON object (is it cut short?): "
            raise ValueError(f"{file}, line {number}: {what}{error}") from error
    if not receipts:
        raise ValueError(f"{file} holds no receipt: write one with --receipt")
    return receipts


def verify(llm: LLM, receipts: list[dict]) -> int:
    """Print what becomes of each receipt. Exit code 0, or 1 if one is not verified."""
    failed = 0
    for number, receipt in enumerate(receipts, 1):
        try:
            verdict = llm.verify(receipt)
        except ValueError as error:
            raise ValueError(f"receipt {number}: {error}") from error
        print(f"receipt {number}: {'verified' if verdict.verified else 'NOT verified'}, {verdict.num_tokens} tokens in "
              f"{verdict.seconds:.3g} s (generated in {verdict.generation_seconds:.3g} s)")
        print("".join(f"  {problem}\n" for problem in verdict.problems), end="", flush=True)
        failed += not verdict.verified
    return 1 if failed else 0


def prove(args: argparse.Namespace, options: dict) -> int:
    """What the command line's `args` ask for, of an engine made with `options`. Exit code 0, or 1 if it fails."""
    if args.prompt or args.prompt_file or args.receipt:
        raise ValueError("--fingerprint, --verify and --selfcheck take no prompt: one of these at a time")
    receipts = load_receipts(args.verify) if args.verify else []
    llm = LLM(**options)
    if args.verify:
        return verify(llm, receipts)
    if args.selfcheck:
        from tools.selfcheck_serving import selfcheck

        return selfcheck(llm)
    print(llm.fingerprint)
    for name, value in llm.fingerprint_parts.items():
        print(f"  {name:12s}{value}")
    return 0
