"""Word cache: a pre-tokeniser in `re` and a bounded dictionary from word to token ids.

Byte-pair encoding never merges across the words that the pre-tokeniser cuts, so ids of a text are the ids of its words.
The V4 pre-tokeniser is rewritten here as one pattern for the characters in `ALPHABET`, whose Unicode classes are old
and settled. A line with any other character, and any tokeniser with another pre-tokeniser, goes to the full tokeniser:
a line may be encoded alone because a word never crosses from a newline to a non-space character.
"""

import re
import unicodedata
from collections.abc import Callable
from itertools import chain
from typing import Any

_PUNCT_WORD = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
_V4_SPLITS = (
    "[一-龥\u3040-ゟ゠-ヿ]+",
    _PUNCT_WORD + "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_DIGIT_RUNS = {"\\p{N}{1,3}": 3, "\\p{N}": 1}
_CJK = ("一龥", "\u3040ヿ")  # the second split's ranges
_SPACES = " \t\n\r"
# Blocks whose assigned characters have kept their classes since Unicode 6; marks and format characters are left out.
_BLOCKS = ("!~", "¡ɏ", "Ͱϡ", "Ѐӿ", "‐‧", "‰⁞", "₠₵", "←⋿", "─◿", "、〿", "ぁゖ", "ァヿ", "一龥", "가힣", "！～")
_EXCLUDED = "\u00ad"

MAX_WORD = 64  # characters; longer words are encoded but not kept
MAX_WORDS = 200_000


class WordCache:
    """Encodes plain text (added vocabulary off) through a dictionary of words. Exact for any text."""

    def __init__(self, digits: int, encode: Callable[[str], list[int]], encode_word: Callable[[str], list[int]]):
        """`digits`: longest run of digits that is one word. `encode`: the full tokeniser. `encode_word`: the merges
        alone, for text that is known to be one word."""
        self._encode = encode
        self._encode_word = encode_word
        self._words: dict[str, tuple[int, ...]] = {}
        self._findall = _word_pattern(digits).findall
        self._foreign = _FOREIGN.search

    @classmethod
    def for_tokenizer(
        cls, tokenizer: dict[str, Any], encode: Callable[[str], list[int]], encode_word: Callable[[str], list[int]]
    ) -> "WordCache | None":
        """A cache for a tokenizer.json whose words this module can cut, else None."""
        digits = _digit_run(tokenizer)
        return None if digits is None else cls(digits, encode, encode_word)

    def __len__(self) -> int:
        return len(self._words)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        if not self._foreign(text):
            return self._encode_known(text)
        ids: list[int] = []
        for known, group in _runs(_LINES(text), self._foreign):
            ids += self._encode_known(group) if known else self._encode(group)
        return ids

    def _encode_known(self, text: str) -> list[int]:
        words = self._findall(text)
        parts = list(map(self._words.get, words))
        if None in parts:
            for index, part in enumerate(parts):
                if part is None:
                    parts[index] = self._learn(words[index])
        return list(chain.from_iterable(parts))

    def _learn(self, word: str) -> tuple[int, ...]:
        known = self._words.get(word)  # an earlier miss of the same text
        if known is not None:
            return known
        ids = tuple(self._encode_word(word))
        if len(word) <= MAX_WORD:
            if len(self._words) >= MAX_WORDS:
                self._words = dict(list(self._words.items())[MAX_WORDS // 2 :])  # the newer half stays
            self._words[word] = ids
        return ids


def _digit_run(tokenizer: dict[str, Any]) -> int | None:
    """Longest digit word of a V4-like tokenizer.json, None when it cuts words in any other way."""
    model, pre = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    normalizers = (tokenizer.get("normalizer") or {}).get("normalizers", [])
    steps = pre.get("pretokenizers") or []
    if model.get("type") != "BPE" or model.get("dropout") or normalizers or len(steps) != 4:
        return None
    splits, byte_level = steps[:3], steps[3]
    patterns = [s.get("pattern", {}).get("Regex") for s in splits if s.get("type") == "Split"]
    isolated = all(s.get("behavior") == "Isolated" and not s.get("invert") for s in splits)
    plain_bytes = byte_level.get("type") == "ByteLevel" and not byte_level.get("add_prefix_space")
    if tuple(patterns[1:]) != _V4_SPLITS or not isolated or not plain_bytes or byte_level.get("use_regex"):
        return None
    return _DIGIT_RUNS.get(patterns[0])


def _alphabet() -> dict[str, set[str]]:
    """Known characters by class: L, N, P, S as the pre-tokeniser's third split sees them, and CJK for the second's."""
    classes: dict[str, set[str]] = {name: set() for name in ("L", "N", "P", "S", "CJK")}
    for first, last in _BLOCKS:
        for char in map(chr, range(ord(first), ord(last) + 1)):
            category = unicodedata.category(char)[0]
            if any(low <= char <= high for low, high in _CJK):
                # The third split cuts the second's words again, at symbols; only letters are surely one word.
                category = "CJK" if category == "L" else ""
            if category in classes and char not in _EXCLUDED:
                classes[category].add(char)
    return classes


def _char_class(chars: set[str]) -> str:
    """The inside of a `[...]` that matches exactly `chars`."""
    codes, result = sorted(map(ord, chars)), []
    start = previous = codes[0]
    for code in [*codes[1:], -1]:
        if code != previous + 1:
            result.append(f"\\U{start:08x}-\\U{previous:08x}")
            start = code
        previous = code
    return "".join(result)


def _word_pattern(digits: int) -> re.Pattern[str]:
    letter, number, symbol = _char_class(_CLASSES["L"]), _char_class(_CLASSES["N"]), _char_class(_CLASSES["P"] | _CLASSES["S"])
    cjk = _char_class(_CLASSES["CJK"])
    return re.compile(
        f"[ \t]?[{letter}]+|{_PUNCT_WORD}"  # disjoint starts: the common case first
        f"|[{number}]{{1,{digits}}}|[{cjk}]+"
        f"| ?[{symbol}]+[\r\n]*|[{_SPACES}]*[\r\n]+"
        # A split before digits and CJK ends the piece, so there the look-ahead sees an end, not a character.
        f"|[{_SPACES}]+(?![^{_SPACES}{number}{cjk}])|[{_SPACES}]+"
    )


def _runs(lines: list[str], foreign: Callable[[str], Any]) -> list[tuple[bool, str]]:
    """Neighbouring lines joined by whether they hold only known characters."""
    result: list[tuple[bool, str]] = []
    for line in lines:
        known = foreign(line) is None
        if result and result[-1][0] == known:
            result[-1] = (known, result[-1][1] + line)
        else:
            result.append((known, line))
    return result


_CLASSES = _alphabet()
ALPHABET = frozenset(_SPACES).union(*_CLASSES.values())
_FOREIGN = re.compile(f"[^{_char_class(set(ALPHABET))}]")
_LINES = re.compile(r"(?<=\n)(?=\S)").split
