"""Conversation to token ids, with a segment cache.

A prompt is special tokens and the plain gaps between them. Every special token is its added-vocabulary id; every gap
is encoded alone with the added vocabulary off. So a gap's ids depend on its text only, and the cache that keeps them
by text is exact: the next turn of a chat costs about its new gaps.
"""

import asyncio
from array import array
from collections import OrderedDict

from .conversation import Conversation
from .render import CallTurn, Rendered, template
from .replay import ReplayCache, Turn
from .tokenizer import Tokenizer
from .tokens import DEFAULT_TOKENS, V41_TOKENS, SpecialTokens

LONG_TEXT = 8192  # characters of unknown gaps above which `encode_async` leaves the event loop
_ENTRY_BYTES = 256  # bookkeeping of one cache entry, about


class MissingToken(RuntimeError):
    """The tokenizer is not of the kind that the template wants: it lacks one of its special tokens."""


class SegmentCache:
    """Ids of gaps by (namespace, text), least recently used dropped. Namespaces never see each other's entries."""

    def __init__(self, max_bytes: int = 64 << 20):
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[bytes, str]) -> "array[int] | None":
        """Ids of a gap, marked as just used."""
        ids = self._entries.get(key)
        if ids is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return ids

    def put(self, key: tuple[bytes, str], ids: "array[int]") -> None:
        """Keep the ids of a gap unless it alone exceeds the bound."""
        size = _size(key, ids)
        if key in self._entries or size > self.max_bytes:
            return
        self._entries[key] = ids
        self.bytes += size
        while self.bytes > self.max_bytes:
            old_key, old_ids = self._entries.popitem(last=False)
            self.bytes -= _size(old_key, old_ids)


class Encoding:
    """The prompt encoding of one model version: `render` to text, `encode` to ids."""

    def __init__(
        self,
        version: str,
        tokenizer: Tokenizer | None = None,
        special_tokens: SpecialTokens | None = None,
        cache: SegmentCache | None = None,
    ):
        """`version`: "v4" or "v41". Without `special_tokens` the spellings are those that the tokenizer knows."""
        if special_tokens is None:
            special_tokens = _spellings(tokenizer)
        self.version = version
        self.special_tokens = special_tokens
        self.tokenizer = tokenizer
        self.cache = SegmentCache() if cache is None else cache
        self._template = template(version, special_tokens)
        self._ids: dict[str, int] = {}

    @property
    def image_token(self) -> int | None:
        """Id of the image placeholder; None where the tokenizer has none."""
        return None if self.tokenizer is None else self.tokenizer.added_token_id(self.special_tokens.image)

    def render(self, conversation: Conversation) -> Rendered:
        """The prompt as text, special ranges and images."""
        return self._template.render(conversation)

    def encode(self, conversation: Conversation, namespace: bytes = b"", replay: ReplayCache | None = None) -> "array[int]":
        """Token ids. Cached segments are shared within `namespace` only, and so are turns that `replay` remembers.

        Raises RuntimeError without a tokenizer, or when it lacks a special token that the template writes.
        """
        return self.encode_rendered(self.render(conversation), namespace, replay)

    def encode_rendered(self, rendered: Rendered, namespace: bytes = b"", replay: ReplayCache | None = None) -> "array[int]":
        """Token ids of a rendered prompt."""
        ids = array("I")
        at = 0
        for turn in rendered.turns if replay is not None else ():
            found = replay.find(namespace, turn.message)
            if found is None or not self._repeats(rendered, turn, found):
                continue
            ids += self._encode_pieces(rendered.slice(at, turn.start + 1), namespace)
            ids += found.ids
            at = turn.end
        return ids + self._encode_pieces(rendered.slice(at) if at else rendered, namespace)

    def _repeats(self, rendered: Rendered, turn: CallTurn, found: Turn) -> bool:
        """Whether the template shows the turn as it was sampled: after the same token, with the same reasoning."""
        tokens = self.special_tokens
        if not found.thinking:
            return rendered.pieces[turn.start] == tokens.thinking_end
        return rendered.pieces[turn.start] == tokens.thinking_start and turn.message.reasoning_content == found.reasoning

    def _encode_pieces(self, rendered: Rendered, namespace: bytes) -> "array[int]":
        ids = array("I")
        specials = self._special_ids(rendered)
        gaps = rendered.gaps()
        for gap, special in zip(gaps, specials, strict=False):
            if gap:
                ids += self._gap(gap, namespace)
            ids.append(special)
        if gaps[-1]:
            ids += self._gap(gaps[-1], namespace)
        return ids

    async def encode_async(
        self, conversation: Conversation, namespace: bytes = b"", replay: ReplayCache | None = None
    ) -> "array[int]":
        """`encode` that works in a thread when much text is new, so that the event loop stays free."""
        rendered = self.render(conversation)
        entries = self.cache._entries
        fresh = [gap for gap in rendered.gaps() if len(gap) > 64 and (namespace, gap) not in entries]
        if sum(map(len, fresh)) > LONG_TEXT:
            tokenizer = self._need_tokenizer()
            loop = asyncio.get_running_loop()
            for gap in fresh:
                ids = await loop.run_in_executor(None, tokenizer.encode_long, gap)
                self.cache.put((namespace, gap), array("I", ids))
        return self.encode_rendered(rendered, namespace, replay)

    def _gap(self, gap: str, namespace: bytes) -> "array[int]":
        key = (namespace, gap)
        ids = self.cache.get(key)
        if ids is None:
            ids = array("I", self._need_tokenizer().encode_plain(gap))
            self.cache.put(key, ids)
        return ids

    def _special_ids(self, rendered: Rendered) -> list[int]:
        known = self._ids
        try:
            return [known[token] for token in rendered.specials()]
        except KeyError:
            tokenizer = self._need_tokenizer()
            for token in rendered.specials():
                token_id = tokenizer.added_token_id(token)
                if token_id is None:
                    raise MissingToken(f'special token "{token}" is not in the added vocabulary') from None
                known[token] = token_id
            return [known[token] for token in rendered.specials()]

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RuntimeError("encoding to ids needs a tokenizer; pass one to Encoding(version, tokenizer)")
        return self.tokenizer


def _size(key: tuple[bytes, str], ids: "array[int]") -> int:
    """Memory of an entry, bytes: text (up to 4 a character), ids, bookkeeping."""
    return _ENTRY_BYTES + len(key[1]) * 2 + len(ids) * ids.itemsize


def _spellings(tokenizer: Tokenizer | None) -> SpecialTokens:
    if tokenizer is None or tokenizer.added_token_id(DEFAULT_TOKENS.image) is not None:
        return DEFAULT_TOKENS
    return DEFAULT_TOKENS if tokenizer.added_token_id(V41_TOKENS.image) is None else V41_TOKENS
