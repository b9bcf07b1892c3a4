"""Encode: pixels through the tower, several images at a time, in one thread; what came of it is kept.

Knows batches, who waits for what, and the cache. Does not know where embeddings go. An image that nobody waits for any more
when its turn comes is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from .cache import ByteCache, Key
from .identity import Pixels

if TYPE_CHECKING:
    import torch

    from headrace.engine.models.vision.encoder import ImageEncoder

log = structlog.get_logger("headrace.vision")


class PixelsGone(Exception):
    """The image was identified too long ago: identify it again."""


@dataclass(slots=True, eq=False)
class _Turn:
    """An image in the queue, or in the tower."""

    key: Key
    pixels: Pixels
    future: asyncio.Future[torch.Tensor]
    waiting: int = 0
    patches: int = 0


class Encoding:
    """`pixels(key)`: the resized image, or None. `spans` is what the rest of the service calls."""

    def __init__(
        self, encoder: ImageEncoder, pool: Executor, pixels: Callable[[Key], Pixels | None], forget: Callable[[Key], None],
        cache_bytes: int, batch_patches: int,
    ) -> None:  # fmt: skip
        self.cache: ByteCache[torch.Tensor] = ByteCache(cache_bytes)
        self.counters = dict.fromkeys(("batches", "encoded", "patches", "cached", "left_out"), 0)
        self.seconds = {"encode": 0.0}
        self._encoder, self._pool, self._pixels, self._forget = encoder, pool, pixels, forget
        self._batch_patches = batch_patches
        self._queue: OrderedDict[Key, _Turn] = OrderedDict()
        self._turns: dict[Key, _Turn] = {}  # queued and running
        self._running = False

    @property
    def steps(self) -> int:
        """Grows while the encoder computes, also when little of a core is left to it."""
        return self._encoder.vision.steps

    @property
    def pending(self) -> int:
        """Images queued or in the tower."""
        return len(self._turns)

    async def spans(self, keys: Sequence[Key]) -> tuple[list[torch.Tensor], int, int]:
        """Spans [tokens, width] in order; patches that were computed for them, and images that were kept. Raises PixelsGone."""
        turns, mine, out, cached = [], [], [], 0
        try:
            for key in keys:
                kept = self.cache.get(key)
                cached += kept is not None
                out.append(kept)
                turns.append(self._turn(key) if kept is None else None)
                if turns[-1] is not None:
                    mine.append(turns[-1])
                    turns[-1].waiting += 1
            self.counters["cached"] += cached
            self._start()
            for index, turn in enumerate(turns):
                if turn is not None:
                    out[index] = await asyncio.shield(turn.future)
        finally:
            for turn in mine:
                turn.waiting -= 1
            self._start()  # where the pixels of one are gone, the others leave the queue
        return out, sum(turn.patches for turn in mine), cached

    # ------------------------------------------------------------ below

    def _turn(self, key: Key) -> _Turn:
        turn = self._turns.get(key)
        if turn is None:
            pixels = self._pixels(key)
            if pixels is None:
                raise PixelsGone(key[1].hex())
            turn = _Turn(key, pixels, asyncio.get_running_loop().create_future())
            turn.future.add_done_callback(lambda future: future.cancelled() or future.exception())  # seen, should nobody wait
            turn.patches = self._encoder.grid(pixels.width, pixels.height).patches
            self._turns[key] = self._queue[key] = turn
        return turn

    def _start(self) -> None:
        if not self._running and self._queue:
            self._running = True
            asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._take():
            began = time.monotonic()
            try:
                spans = await loop.run_in_executor(self._pool, _compute, self._encoder, [turn.pixels for turn in batch])
            except Exception as error:
                log.error("encoding failed", images=len(batch), exc_info=error)
                for turn in batch:
                    self._turns.pop(turn.key, None)
                    if not turn.future.done():
                        turn.future.set_exception(RuntimeError(f"the encoder failed: {error!r}"))
                continue
            self.counters["batches"] += 1
            self.seconds["encode"] += time.monotonic() - began
            for turn, span in zip(batch, spans, strict=True):
                self.counters["encoded"] += 1
                self.counters["patches"] += turn.patches
                self.cache.put(turn.key, span, span.nbytes)
                self._forget(turn.key)
                self._turns.pop(turn.key, None)
                if not turn.future.done():
                    turn.future.set_result(span)
        self._running = False

    def _take(self) -> list[_Turn]:
        batch: list[_Turn] = []
        patches = 0
        while self._queue:
            key, turn = next(iter(self._queue.items()))
            if not turn.waiting:
                self.counters["left_out"] += 1
                del self._queue[key], self._turns[key]
                turn.future.cancel()
                continue
            if batch and patches + turn.patches > self._batch_patches:
                break
            del self._queue[key]
            batch.append(turn)
            patches += turn.patches
        return batch


def _compute(encoder: ImageEncoder, images: Sequence[Pixels]) -> list[torch.Tensor]:
    import torch

    frames = [torch.frombuffer(bytearray(i.data), dtype=torch.uint8).view(i.height, i.width, 3) for i in images]
    return [span.cpu() for span in encoder.encode(frames)]


def rows_of(span: torch.Tensor, dtype: str) -> Any:
    """A span as little-endian rows of `dtype`."""
    import torch

    wanted = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    return memoryview(span.to(wanted).contiguous().view(torch.uint8).numpy()).cast("B")
