"""Identify: from a URL or bytes to a digest of the resized pixels, their grid and how many tokens they take.

Knows fetching, decoding and what is kept of it. Does not know the encoder's weights or messages. An image is known by its
encoded bytes first (the same upload again costs one hash), then by its pixels: two files of one picture are one image.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from headrace.recipe.images import ImageError, ImageFetcher, ImageRules, encoder_pixels

from .cache import ByteCache, Key

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """`digest` covers pixels and size; lengths in pixels."""

    digest: bytes
    width: int
    height: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pixels:
    """RGB bytes [height, width, 3]."""

    data: bytes
    width: int
    height: int


class Identifier:
    """`encoded(key)`: whether the embeddings of an image are at hand, so that its pixels need not be."""

    def __init__(
        self, rules: ImageRules, fetcher: ImageFetcher, pool: Executor, pixel_bytes: int, encoded: Callable[[Key], bool]
    ) -> None:
        self.pixels: ByteCache[Pixels] = ByteCache(pixel_bytes)
        self.known: ByteCache[Identity] = ByteCache(4 << 20)  # by encoded bytes and detail
        self.counters = dict.fromkeys(("identified", "known", "fetched", "fetched_bytes", "decoded", "refused"), 0)
        self.seconds = dict.fromkeys(("fetch", "decode"), 0.0)
        self.decoding = 0  # in a thread, or waiting for one
        self._rules, self._fetcher, self._pool, self._encoded = rules, fetcher, pool, encoded

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """Raises ImageError."""
        began = time.monotonic()
        data = await self._fetcher.fetch(url)
        self.counters["fetched"] += 1
        self.counters["fetched_bytes"] += len(data)
        self.seconds["fetch"] += time.monotonic() - began
        if max_bytes and len(data) > max_bytes:
            raise ImageError("TotalSizeTooLarge", f"the image has {len(data):,} bytes; {max_bytes:,} are left to this request")
        return data

    async def identify(self, namespace: bytes, data: bytes, detail: str) -> Identity:
        """Raises ImageError. Afterwards pixels or embeddings of it are at hand, for a while."""
        self.decoding += 1
        try:
            return await self._identify(namespace, data, detail)
        except ImageError:
            self.counters["refused"] += 1
            raise
        finally:
            self.decoding -= 1

    async def _identify(self, namespace: bytes, data: bytes, detail: str) -> Identity:
        loop = asyncio.get_running_loop()
        raw = (namespace, await loop.run_in_executor(self._pool, _raw_digest, data, detail))
        known = self.known.get(raw)
        self.counters["identified"] += 1
        if known is not None:
            key = (namespace, known.digest)
            if self._encoded(key) or self.pixels.get(key) is not None:
                self.counters["known"] += 1
                return known
        began = time.monotonic()
        identity, pixels = await loop.run_in_executor(self._pool, _decode, data, detail, self._rules)
        self.counters["decoded"] += 1
        self.seconds["decode"] += time.monotonic() - began
        self.known.put(raw, identity, 64)
        if not self._encoded((namespace, identity.digest)):
            self.pixels.put((namespace, identity.digest), pixels, len(pixels.data))
        return identity


def _raw_digest(data: bytes, detail: str) -> bytes:
    size = b"low" if detail == "low" else b"full"  # the other details are one
    return blake2b(data, digest_size=DIGEST_BYTES, person=size).digest()


def _decode(data: bytes, detail: Any, rules: ImageRules) -> tuple[Identity, Pixels]:
    rgb, size = encoder_pixels(data, detail, rules)
    digest = blake2b(rgb, digest_size=DIGEST_BYTES, key=b"%d,%d" % (size.width, size.height)).digest()
    return Identity(digest, size.width, size.height, size.tokens), Pixels(rgb, size.width, size.height)
