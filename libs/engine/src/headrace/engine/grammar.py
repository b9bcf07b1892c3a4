"""Grammars: which tokens may come next, so that an output is what its request demands.

    grammars = Grammars("checkpoint/tokenizer.json", vocab_size, eos_token_ids)
    grammars.compile(grammar)             # any thread; GrammarError says where the grammar is wrong
    matcher = grammars.matcher(grammar)   # one for each choice
    row = matcher.mask()                  # bits of the tokens that may come next
    matcher.accept([token])

llguidance keeps the parser: an Earley parser over lazily built lexers, walked over the trie of the vocabulary's bytes. Its
work is bounded in steps, not in time. This file knows what a grammar may cost, which tokens are text, and where in an output
a grammar begins. It does not know requests, batches or tensors.

Rows are int32 [ceil(vocabulary / 32)], bit v % 32 of word v // 32 for token v. EOS is allowed exactly where the grammar may
end.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from . import api
from .alternatives import MAX_WAYS, Wide, children, fragments, overflow, wide_places

MAX_TEXT = 256 << 10  # characters of a grammar
KEPT, KEPT_TEXT = 256, 16 << 20  # compiled grammars kept, and characters of all of them
MAX_MULTIPLE = 50_000  # least common multiple of a schema's `multipleOf`: an automaton counts to it
# Between JSON's tokens: a few blanks, or one line break and an indent. A model can't fill its answer with empty lines.
WHITESPACE = r"[\x20\x09]{1,8}|[\x20\x09]{0,8}\x0D?\x0A[\x20\x09]{0,64}"
TRIALS = 64  # parts of a wrong schema that are tried to find the wrong one

_LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=MAX_WAYS, verbose_errors=False)

Rule = tuple[np.ndarray | None, tuple[int, ...]]  # the bits allowed (None: all), and tokens that are not


class GrammarError(ValueError):
    """A grammar that can't be followed; the message names the place and the reason."""


class Grammars:
    """The grammars of one vocabulary, compiled once and kept while they are in use. All methods may be called in any thread.

    `tokenizer`: path of the checkpoint's tokenizer.json, read when the first grammar comes or by `load`.
    """

    def __init__(self, tokenizer: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.path, self.vocab_size, self.eos = Path(tokenizer), vocab_size, tuple(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher | GrammarError] = OrderedDict()
        self._text = 0  # characters of what is kept
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def load(self) -> None:
        """Read the tokenizer and build its trie: about half a second. Raises GrammarError."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = _load(self.path, self.vocab_size, self.eos)

    @property
    def loaded(self) -> bool:
        return self._tokenizer is not None

    def knows(self, grammar: api.Grammar) -> bool:
        """Whether `compile` would answer at once."""
        with self._lock:
            return (grammar.kind, grammar.text) in self._compiled

    def compile(self, grammar: api.Grammar) -> None:
        """Make a grammar ready. Milliseconds for what clients send, seconds for the worst that is accepted. Raises
        GrammarError: the same one when the same grammar comes again."""
        self._find(grammar)

    def matcher(self, grammar: api.Grammar) -> Matcher:
        """A new output's state. Raises GrammarError."""
        return Matcher(self._find(grammar), grammar, self.vocab_size, self.eos)

    def _find(self, grammar: api.Grammar) -> LLMatcher:
        key = (grammar.kind, grammar.text)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
        if found is None:
            self.load()
            try:
                found = _compile(self._tokenizer, *key)
            except GrammarError as error:
                found = error
            self._keep(key, found)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found

    def _keep(self, key: tuple[str, str], found: LLMatcher | GrammarError) -> None:
        with self._lock:
            if key not in self._compiled:
                self._text += len(key[1])
            self._compiled[key] = found
            while len(self._compiled) > KEPT or (self._text > KEPT_TEXT and len(self._compiled) > 1):
                self._text -= len(self._compiled.popitem(last=False)[0][1])


class Matcher:
    """Where one output stands in its grammar. It follows the ids it is told of, forward and back. What it was told can always
    be told again, so a preempted, moved or replayed output needs nothing but its ids (`sync`)."""

    __slots__ = ("_compiled", "_eos", "_state", "grammar", "seen", "start", "vocab_size")

    def __init__(self, compiled: LLMatcher, grammar: api.Grammar, vocab_size: int, eos: tuple[int, ...]) -> None:
        self.grammar, self.vocab_size = grammar, vocab_size
        self._compiled, self._eos, self._state = compiled, eos, compiled.deep_copy()
        self.seen = 0  # tokens of the output that it was told of
        self.start = 0 if grammar.after < 0 else -1  # output tokens before the grammar begins; -1: it has not begun

    def fresh(self) -> Matcher:
        """The same grammar for an output that has no token yet."""
        return Matcher(self._compiled, self.grammar, self.vocab_size, self._eos)

    @property
    def ended(self) -> bool:
        """Nothing but EOS may follow."""
        return self.start >= 0 and self._state.is_stopped() and not self._state.is_error()

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens that may not come although `mask` says nothing: the grammar must begin before the output ends."""
        return self._eos if self.start < 0 and not self.grammar.optional else ()

    def sync(self, output: Sequence[int]) -> None:
        """Be where `output`, all tokens of this choice so far, leads. Raises GrammarError if the grammar doesn't allow it."""
        self.rollback(max(0, self.seen - len(output)))
        told = self.accept(output[self.seen :])
        if self.seen < len(output):
            raise GrammarError(f"token {output[self.seen]} at {self.seen} of the output is not allowed; {told} before it were")

    def accept(self, ids: Sequence[int]) -> int:
        """Follow `ids` as far as the grammar allows; returns how many that were. Raises GrammarError: too much to work out."""
        done, free = 0, ()
        if self.start < 0:
            free = self.held
            while done < len(ids) and self.start < 0 and ids[done] not in free:
                done, self.seen = done + 1, self.seen + 1
                if ids[done - 1] == self.grammar.after:
                    self.start = self.seen
            if self.start < 0:
                return done
        if done < len(ids):
            taken = self._state.try_consume_tokens(list(ids[done:]))
            self._check()
            done, self.seen = done + taken, self.seen + taken
        return done

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        assert 0 <= count <= self.seen
        inside = min(count, self.seen - self.start) if self.start >= 0 else 0
        if inside:
            self._state.rollback(inside)
            self._check()
        self.seen -= count
        if self.start > self.seen:
            self.start = -1

    def mask(self) -> np.ndarray | None:
        """Bits of the tokens that may come next; None: all but those in `held`. Raises GrammarError: too much to work out."""
        if self.start < 0:
            return None
        row = np.zeros(-(-self.vocab_size // 32), dtype=np.int32)
        self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        if not row.any():
            raise GrammarError(f"nothing may follow the first {self.seen} tokens of the output, and it may not end there")
        return row

    def rule(self) -> Rule:
        """(mask(), held): all that is to be known of the next token."""
        return self.mask(), self.held

    def block(self, draft: Sequence[int]) -> list[Rule]:
        """For the verification of a drafted block: the rule at its start and after each token of it, as far as the grammar
        allows the block: len(result) - 1 tokens of it. The state is left as it was."""
        walk = Walk(self)
        rules = [walk.rule]
        for token in draft:
            if not walk.take(token):
                break
            rules.append(walk.rule)
        walk.back()
        if walk.error:
            raise walk.error
        return rules

    def _check(self) -> None:
        if self._state.is_error():
            raise GrammarError(f"the grammar is too complex to go on: {_reason(self._state.get_error())}")


class Walk:
    """A look ahead: `take` tokens one by one, with the `rule` for the next; `back` ends where it began. Behind a token that the
    grammar refuses, behind its end, and where it is too much to work out (`error`), there is no rule."""

    __slots__ = ("_alive", "_matcher", "_seen", "error", "rule")

    def __init__(self, matcher: Matcher) -> None:
        self._matcher, self._seen, self._alive = matcher, matcher.seen, True
        self.error: GrammarError | None = None
        self.rule: Rule = (None, ())
        self._look()

    def take(self, token: int) -> bool:
        """Whether the grammar allows it."""
        self._look(token)
        return self._alive

    def back(self) -> None:
        if self.error is None:
            self._matcher.rollback(self._matcher.seen - self._seen)

    def _look(self, token: int | None = None) -> None:
        try:
            if token is not None:
                self._alive = self._alive and not self._matcher.ended and self._matcher.accept([token]) == 1
            self.rule = self._matcher.rule() if self._alive else (None, ())
        except GrammarError as error:
            self.rule, self._alive, self.error = (None, ()), False, error


# ------------------------------------------------------------------ vocabulary


class _Text:
    """What llguidance asks of a tokenizer. Text that it finds forced is spelled in ordinary tokens, also where it reads like a
    control token's: by itself llguidance would take that token, and then refuse it, for control tokens are never text."""

    def __init__(self, definition: str, vocabulary: LLTokenizer, eos: tuple[int, ...]) -> None:
        self._tokenizer = Tokenizer.from_str(definition)
        self._tokenizer.encode_special_tokens = True
        self.eos_token_id, self.bos_token_id = eos[0], None
        self.tokens = [vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size)]
        self.special_token_ids = [token for token in range(vocabulary.vocab_size) if vocabulary.is_special_token(token)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False).ids


def _load(path: Path, vocab_size: int, eos: tuple[int, ...]) -> LLTokenizer:
    """Added tokens are control, never text, whatever the file says of them: no string of an answer may hold one."""
    try:
        definition = json.loads(path.read_text("utf-8"))
        definition["added_tokens"] = [{**token, "special": True} for token in definition.get("added_tokens", [])]
        text = json.dumps(definition)
        vocabulary = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos), slices=[])  # knows the bytes of every id
        wrapper = TokenizerWrapper(_Text(text, vocabulary, eos))
        return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(eos), slices=LLTokenizer.json_slices())
    except FileNotFoundError:
        raise GrammarError(f"{path} does not exist: without the tokenizer no output can follow a grammar") from None
    except Exception as error:  # llguidance raises what it meets
        raise GrammarError(f"{path} can't be used for grammars: {error}") from None


# ------------------------------------------------------------------ compiling


def _compile(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    if len(text) > MAX_TEXT:
        raise GrammarError(f"the grammar has {len(text):,} characters; at most {MAX_TEXT:,} are accepted")
    if kind == "json_schema":
        text = "{}" if text.strip() == "true" else text
        schema = _schema(text)
    wide = [(part, place) for part in _schemas(kind, text) for place in wide_places(part)]
    for _, place in wide:
        if place.least > MAX_WAYS:  # known beforehand: what is so wide takes many seconds to compile
            raise _too_wide(kind, place, place.least, more=True)
    source = _source(kind, text)
    matcher = LLMatcher(tokenizer, source, limits=_LIMITS, log_level=0)
    if not matcher.is_error():
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if not probe.is_error():
            _refuse_wide(tokenizer, matcher, kind, wide)
            return matcher
        reason = _reason(probe.get_error())
    else:
        reason = _reason(matcher.get_error())
    if kind != "json_schema":
        raise GrammarError(f"the {'regular expression' if kind == 'regex' else 'grammar'} can't be followed: {reason}")
    raise GrammarError(f"the schema can't be followed at {_place(schema, reason)}: {reason}")


def _schemas(kind: str, text: str) -> list[dict[str, Any]]:
    """The JSON schemas that a grammar holds."""
    return [json.loads(text)] if kind == "json_schema" else list(fragments(text)) if kind == "lark" else []


def _refuse_wide(tokenizer: LLTokenizer, matcher: LLMatcher, kind: str, wide: list[tuple[dict[str, Any], Wide]]) -> None:
    """Raises GrammarError where an output would end at a place that has more ways than are followed."""
    for part, place in wide:
        text = json.dumps(_alone(place.schema, part))
        alone = LLMatcher(tokenizer, _source("json_schema", text), limits=_LIMITS, log_level=0)
        if ways := overflow(alone, tokenizer):
            raise _too_wide(kind, place, ways)
    if ways := overflow(matcher, tokenizer):
        raise GrammarError(f"the grammar can't be followed: it begins with {ways:,} ways to go on at once; at most "
                           f"{MAX_WAYS:,} are accepted: in Lark, write fixed texts as one terminal "
                           '(`WORD: "a" | "b"`)')  # fmt: skip


def _too_wide(kind: str, place: Wide, ways: int, more: bool = False) -> GrammarError:
    what = "the schema" if kind == "json_schema" else "a schema in the grammar"
    return GrammarError(f"{what} can't be followed at {place.place}: {place.reason(ways, more)}")


def _alone(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema by itself, with the definitions that it may refer to."""
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def _source(kind: str, text: str) -> str:
    """llguidance's own form of a grammar."""
    try:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
        if kind == "lark":
            return LLMatcher.grammar_from_lark(text)
        if (len(text) - len(text.rstrip("\\"))) % 2:  # llguidance would drop it
            raise GrammarError(f"the regular expression ends in a backslash that escapes nothing: {text[-40:]!r}")
        return LLMatcher.grammar_from_regex(text)
    except ValueError as error:
        raise GrammarError(f"the schema can't be read: {error}") from None


def _schema(text: str) -> dict[str, Any]:
    """The schema's value, checked for what llguidance has no bound for."""
    try:
        schema = json.loads(text)
        multiples = list(_multiples(schema))
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    common = math.lcm(*(m.numerator for m in multiples)) * math.lcm(*(m.denominator for m in multiples))
    if common > MAX_MULTIPLE:
        raise GrammarError(f"multipleOf: numbers whose least common multiple is {common}; at most {MAX_MULTIPLE} is accepted")
    if not isinstance(schema, dict):
        raise GrammarError(f"the schema must be an object; got {text.strip()[:40]}")
    return schema


def _multiples(node: Any) -> Iterator[Fraction]:
    """Every `multipleOf` of a schema (and of what looks like one: enums are walked too)."""
    if isinstance(node, dict):
        value = node.get("multipleOf")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            yield Fraction(repr(value))
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _multiples(child)


# ------------------------------------------------------------------ saying what is wrong


def _place(schema: dict[str, Any], reason: str) -> str:
    """JSON pointer of the smallest part that fails for the same reason by itself."""
    place, node, trials = "#", schema, TRIALS
    while True:
        for inner, child in children(place, node):
            trials -= 1
            if trials < 0:
                return place
            if _failure(_alone(child, schema)) == reason:
                place, node = inner, child
                break
        else:
            return place


def _failure(schema: Any) -> str:
    """Why a schema can't be compiled; "" if it can."""
    try:
        return _reason(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)), None, limits=_LIMITS))
    except ValueError as error:
        return str(error)


def _reason(text: str) -> str:
    """llguidance's words, on one line."""
    lines = " ".join(text.replace("<non-verbose/>", "").split())
    names = {"NoExtensionBias": "nothing matches it", "ParserTooComplex": "too many alternatives at once"}
    names |= {"LexerTooComplex": "a pattern needs too many states"}
    return names.get(lines, lines)[:500]
