"""From the text of a thinking, tool-calling model (Qwen3's tags) to reasoning, content and tool calls, as it comes.

`<think>` counts at the beginning of an answer only; `<tool_call>` anywhere after the thinking. What looks like a tag
and turns out to be none, and a call that is no JSON, stays content: no text is lost.
"""

import json
from dataclasses import dataclass

from text import unfinished_start

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Delta:
    """A piece of an answer: text of kind "content" or "reasoning", or a "call" of a function (its name and JSON)."""

    kind: str
    text: str
    name: str = ""
    number: int = 0  # of the call in its answer


class ChatParser:
    """Splits one choice's text; how it arrives in pieces does not matter.

    in_reasoning: the prompt itself ends in <think>. reasoning, tools: which tags to heed. White space around the
    reasoning, and between content and a call, belongs to the tags.
    """

    def __init__(self, reasoning: bool = True, tools: bool = True, in_reasoning: bool = False):
        self._tools = tools
        self._state = "reasoning" if reasoning and in_reasoning else "start" if reasoning else "content"
        self._rest = ""  # taken, and not yet understood
        self._strip = self._state == "reasoning"  # drop white space until there is text
        self.num_calls = 0

    def push(self, text: str) -> list[Delta]:
        """Take the next piece of text; returns what it settles."""
        self._rest += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """The text has ended: returns what was held back."""
        text, self._rest = self._rest, ""
        if self._state == "call":
            text = CALL + text
        elif self._strip or self._state == "reasoning":
            text = text.strip() if self._state == "reasoning" else text.lstrip()
        return [Delta("reasoning" if self._state == "reasoning" else "content", text)] if text else []

    def _advance(self, deltas: list[Delta]) -> bool:
        """Settle what can be settled; returns whether the state changed, so that there may be more."""
        if self._state == "start":
            bare = self._rest.lstrip()
            if THINK.startswith(bare) and bare != THINK:
                return False  # still open
            thinks = bare.startswith(THINK)
            self._state = "reasoning" if thinks else "content"
            self._rest, self._strip = (bare[len(THINK):], True) if thinks else (self._rest, False)
            return True
        if self._state == "call":
            body, end, rest = self._rest.partition(END_CALL)
            if not end:
                return False
            deltas.append(self._call(body))
            self._state, self._rest = "content", rest
            return True
        tag = END_THINK if self._state == "reasoning" else CALL if self._tools else ""
        if self._strip:
            self._rest = self._rest.lstrip()
        before, found, rest = self._rest.partition(tag) if tag else (self._rest, "", "")
        if found:
            shown, self._rest = before.rstrip(), rest
        else:  # hold back the beginning of a tag and the white space before it
            cut = unfinished_start(before, tag) if tag else len(before)
            cut = len(before[:cut].rstrip()) if tag else cut
            shown, self._rest = before[:cut], before[cut:]
        if shown:
            deltas.append(Delta("reasoning" if self._state == "reasoning" else "content", shown))
            self._strip = False
        if found:
            self._strip = self._state == "reasoning"
            self._state = "content" if self._state == "reasoning" else "call"
        return bool(found)

    def _call(self, body: str) -> Delta:
        try:
            call = json.loads(body)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, TypeError, KeyError, RecursionError):
            name, arguments = None, None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return Delta("content", CALL + body + END_CALL)
        self.num_calls += 1
        return Delta("call", json.dumps(arguments, ensure_ascii=False), name, self.num_calls - 1)
