"""Text on one side, token ids on the other: tokenizer, chat template, incremental decoding, stop strings.

Must not know the model or the scheduler. A `Tokenizer` may be shared; a `Detokenizer` belongs to one sequence. What it
releases, joined, is what `Tokenizer.decode` gives for the same ids up to the stop string, wherever the tokens' borders
lie. (Where <0x..> tokens spell broken UTF-8, `decode` takes back the run's good characters; released text stays.)"""

import codecs
import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path

import tokenizers
from jinja2 import Template, TemplateError, TemplateSyntaxError, ext, sandbox


class Tokenizer:
    """The tokenizer of a checkpoint folder; its ids are those of transformers' AutoTokenizer.
    vocab_size: one more than the largest id; bos_token_id, eos_token_id: None where the settings name no such token
    special_token_ids: what `decode` leaves out by default. ValueError if a file is missing or cannot be read."""

    def __init__(self, folder: Path):
        self._folder = Path(folder)
        path, settings = self._folder / "tokenizer.json", {}
        if not path.is_file():
            raise ValueError(f"{path} is missing; fetch it with the weights (samebits reads no other tokenizer format)")
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
            for path in (self._folder / "special_tokens_map.json", self._folder / "tokenizer_config.json"):
                settings |= json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except Exception as error:  # the Rust side raises a bare Exception
            raise ValueError(f"{path} cannot be read ({error}); fetch it again") from error
        self._backend.no_truncation()  # what is left over from training must not touch a prompt
        self._backend.no_padding()
        # What the settings declare and tokenizer.json lacks, or has with other flags, is added, as transformers does.
        for _, fields in sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            self._backend.add_tokens([tokenizers.AddedToken(**{key: fields[key] for key in fields if key != "__type"})])
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(self._backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        # "bos_token", "eos_token", ...: plain text, or a dict with its text under "content".
        named = ((key, value.get("content") if isinstance(value, dict) else value) for key, value in settings.items())
        self._named_tokens = {key: text for key, text in named if key.endswith("_token") and isinstance(text, str)}
        self.bos_token_id, self.eos_token_id = (
            self._backend.token_to_id(self._named_tokens.get(name, "")) for name in ("bos_token", "eos_token"))
        # A byte-level vocabulary has printable Latin-1 as it is; the others, in order, from U+0100 on. Its decoder, and
        # no other, reads the two bytes of an é out of two characters.
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        byte_of = dict(zip(sorted(alphabet), sorted(range(256), key=lambda byte: chr(byte) not in alphabet)))
        decoder = self._backend.decoder
        self._byte_of = byte_of if decoder and decoder.decode(["Ã", "©"]) == "é" else None
        template, path = settings.get("chat_template"), self._folder / "chat_template.jinja"
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        self._template = path.read_text(encoding="utf-8") if path.is_file() else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text` and of what tokenizer.json adds; a text that begins with BOS gets no other. (What
        `apply_chat_template` gives needs no special tokens.) Raises ValueError for what is no valid text."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"text to encode must be a string of valid Unicode: {error}") from error
        # The mask is 1 where a token was added, 0 where the text itself has one.
        is_doubled = encoding.ids[:2] == [self.bos_token_id] * 2 and encoding.special_tokens_mask[:2] == [1, 0]
        return encoding.ids[is_doubled:]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, its spaces untouched; ValueError names an id outside the vocabulary."""
        if wrong := [token_id for token_id in ids if not 0 <= token_id < self.vocab_size]:
            raise ValueError(f"token id {wrong[0]} is outside the tokenizer's vocabulary [0, {self.vocab_size})")
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes a token stands for, or None where its text depends on the token before it."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:  # a model whose embedding is padded can sample an id without a token
            return b""
        if self._byte_of is not None:
            is_plain = not self._byte_of.keys() >= set(piece)  # an added token, kept as it is
            return piece.encode("utf-8") if is_plain else bytes(map(self._byte_of.get, piece))
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)  # text like any other where the decoder leaves it as it is
        return bytes.fromhex(byte[1]) if byte and self.decode([token_id], skip_special_tokens=False) != piece else None

    def apply_chat_template(self, messages: list[dict], **variables) -> str:
        """Render `messages` with the model's chat template; `variables` reach it (`tools`, `enable_thinking=False`).
        Raises ValueError if there is no template, a message is malformed, or the template fails or refuses."""
        if not isinstance(messages, (list, tuple)) or not messages or not all(
                isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
            raise ValueError("messages must be a non-empty list of dicts, each with a 'role' string")
        if self._template is None:
            raise ValueError(f"{self._folder} has no chat template; use a plain prompt, or add a chat_template.jinja")
        # OpenAI clients send `"tool_calls": null`; many templates would print it as "None".
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._compiled_template.render(variables, messages=messages)
        except TemplateSyntaxError as error:
            raise ValueError(f"{self._folder}: chat template, line {error.lineno}: {error.message}") from error
        except Exception as error:  # a template is foreign code: whatever it raises, the messages did not suit it
            raise ValueError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error

    @cached_property
    def _compiled_template(self) -> Template:
        def raise_exception(message):
            raise TemplateError(message)
        # `{% generation %}` marks what to train on; to render, it is a scope like any other.
        template = re.sub(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})", r"\1 \2with \3", self._template)
        env = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
        # Jinja's own `tojson` sorts keys and escapes <, > and & for HTML.
        env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        env.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
        return env.from_string(template, globals=self._named_tokens | {"tools": None, "add_generation_prompt": True})


def unfinished_start(text: str, string: str) -> int:
    """Return where the longest end of `text` that is a proper beginning of `string` starts; len(text) if none is."""
    return len(text) - max(n for n in range(min(len(string), len(text) + 1)) if text.endswith(string[:n]))


class Detokenizer:
    """Turns one sequence's tokens into text as they come, and ends it at a stop string (`stop_reason`, else None).
    All goes through an incremental UTF-8 decoder, as bytes; a token whose text depends on the one before it (the first
    space of sentencepiece) is decoded behind that one: constant work a token. The stop string complete first wins; of
    two complete at one character, the longer. Text is held back only while its end can become one. Stop strings are not
    empty. Give `prompt_ids` where the text continues the prompt, to keep its first space."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop_str_in_output: bool = False,
                 skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()):
        self._tokenizer, self._stop, self._include_stop = tokenizer, stop, include_stop_str_in_output
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._before = next(([i] for i in reversed(prompt_ids)  # the last token that has text, if there is one
                             if i not in self._skipped_ids and tokenizer.token_bytes(i) != b""), [])
        self._held, self.stop_reason = "", None

    def push(self, token_id: int, check_stop: bool = True) -> str:
        """Take one token; return the text it releases, which may be empty (always, after a stop string). With
        `check_stop=False` (fewer than `min_tokens` so far) a stop string that ends in this token passes; one that ends
        in a later, checked token counts wherever it begins, so its beginning is held back all the same."""
        data = b"" if token_id in self._skipped_ids else self._tokenizer.token_bytes(token_id)
        if data == b"" or self.stop_reason is not None:
            return ""
        before, self._before = self._before, [token_id]
        if data is None:
            known, text = (self._tokenizer.decode(ids, False) for ids in (before, [*before, token_id]))
            data = text[len(known):].encode()  # as bytes it ends a run of byte tokens, whole or not
        text = self._held + self._utf8.decode(data)
        # A match ends in the new text: what was held before is unfinished, or passed unchecked.
        for end in range(len(self._held) + 1, len(text) + 1) if check_stop else ():
            if complete := [string for string in self._stop if text.endswith(string, 0, end)]:
                self.stop_reason = max(complete, key=len)
                return text[:end if self._include_stop else end - len(self.stop_reason)]
        cut = min((unfinished_start(text, string) for string in self._stop), default=len(text))
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """End the sequence: release what is held, be it the beginning of a stop string or half a character."""
        rest, self._held = self._held + self._utf8.decode(b"", final=True), ""
        return "" if self.stop_reason is not None else rest
