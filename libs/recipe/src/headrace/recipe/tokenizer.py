"""Text to ids and back, over a Hugging Face tokenizer.json.

Two vocabularies: the full one, where text that spells an added token becomes it, and the plain one, where nothing a
caller writes can become a control token. Knows no templates.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Fast

from .words import WordCache

_MAX_TABLES = 64
_PLACEHOLDER = "<｜place▁holder▁no▁{}｜>"
_MM_SPAN = "<|place_holder_mm_span_{:04}|>"


class Tokenizer:
    """A byte-level BPE tokenizer."""

    def __init__(self, definition: dict[str, Any]):
        """`definition`: the parsed tokenizer.json. Raises ValueError when it is not a byte-level BPE."""
        if definition.get("model", {}).get("type") != "BPE":
            raise ValueError(f"tokenizer model {definition.get('model', {}).get('type')!r} is not supported; need BPE")
        self._full = _Fast.from_str(json.dumps(definition))
        self._plain = _Fast.from_str(json.dumps({**definition, "added_tokens": []}))
        self._added = {token["content"]: token["id"] for token in definition.get("added_tokens", [])}
        self._added_by_id = {token_id: text for text, token_id in self._added.items()}
        self._bytes = _byte_table(definition)
        self._tables: dict[frozenset[str], Any] = {}
        self._model = self._plain.model
        self.words = WordCache.for_tokenizer(definition, self._encode_full_plain, self._encode_word)

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Load a tokenizer.json."""
        return cls(json.loads(Path(path).read_text("utf-8")))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; spelled added tokens become their ids. No BOS is added."""
        return self._full.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` with the added vocabulary off: no text can become a control token."""
        return self._encode_full_plain(text) if self.words is None else self.words.encode(text)

    def encode_long(self, text: str) -> list[int]:
        """`encode_plain` without the word cache and without the interpreter lock, for use in a thread."""
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def token_to_id(self, token: str) -> int | None:
        """Id of an added or ordinary token by its spelling in the file."""
        found = self._added.get(token)
        return self._plain.token_to_id(token) if found is None else found

    def added_token_id(self, token: str) -> int | None:
        """Id of an added token, None for any other text."""
        return self._added.get(token)

    def added_token(self, token_id: int) -> str | None:
        """Spelling of an added token, None for any other id."""
        return self._added_by_id.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; b"" for an id outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def plain_table(self, triggers: frozenset[str], make: Callable[["Tokenizer", frozenset[str]], Any]) -> Any:
        """The table that `make` builds for a set of trigger characters, shared by outputs with the same set."""
        table = self._tables.get(triggers)
        if table is None:
            if len(self._tables) >= _MAX_TABLES:  # stop sequences of clients make sets of their own
                self._tables.clear()
            table = self._tables[triggers] = make(self, triggers)
        return table

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, added tokens spelled out, broken UTF-8 replaced by U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _encode_word(self, word: str) -> list[int]:
        """Ids of text that the pre-tokeniser leaves whole."""
        return [token.id for token in self._model.tokenize(word.encode().decode("latin-1").translate(_BYTE_SPELLING))]

    def _encode_full_plain(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids


def v41_tokenizer_json(v4: dict[str, Any]) -> dict[str, Any]:
    """The V4.1 tokenizer from V4's: the same BPE, added tokens respelled as V4.1 checkpoints spell them.

    128799 becomes the System token, 129264 the image placeholder, 128847..129270 and 129279 the numbered spans.
    """
    return {**v4, "added_tokens": [{**t, "content": _v41_name(t["id"], t["content"])} for t in v4["added_tokens"]]}


def _v41_name(token_id: int, name: str) -> str:
    if 128000 <= token_id <= 128798:
        return _PLACEHOLDER.format(token_id - 128000)
    if token_id == 128799:
        return "<｜System｜>"
    if token_id == 129264:
        return "<｜deepseek_image｜>"
    if 128847 <= token_id <= 129261:
        return _MM_SPAN.format(token_id - 128826)
    if 129265 <= token_id <= 129270:
        return _MM_SPAN.format(token_id - 128829)
    return _MM_SPAN.format(442) if token_id == 129279 else name


def _byte_table(definition: dict[str, Any]) -> list[bytes]:
    """Bytes of every id. Vocabulary entries are written in GPT-2's printable alphabet, one character a byte."""
    vocab: dict[str, int] = definition["model"]["vocab"]
    added: list[dict[str, Any]] = definition.get("added_tokens", [])
    table = [b""] * (max([*vocab.values(), *(t["id"] for t in added)], default=-1) + 1)
    alphabet = _gpt2_alphabet()
    for spelled, token_id in vocab.items():
        try:
            table[token_id] = bytes([alphabet[char] for char in spelled])
        except KeyError:
            table[token_id] = spelled.encode()  # an added token that is listed in the vocabulary as well
    for token in added:
        table[token["id"]] = token["content"].encode()
    return table


def _gpt2_alphabet() -> dict[str, int]:
    """GPT-2's byte spelling: printable Latin-1 stands for itself, the other bytes for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_SPELLING = {byte: char for char, byte in _gpt2_alphabet().items()}
