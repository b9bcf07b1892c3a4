"""How a worker that computes prompts comes by their images: which embeddings a prompt needs, and getting them here.

Knows prompts' image spans, the engine's word on which rows it may run, and that a vision worker can die. What is said on the
bus is `VisionClient`'s, where bytes land `Staging`'s.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from headrace.bus import messages as m
from headrace.engine import api

from .staging import Staging
from .visionclient import VisionClient, VisionError, ask_grant

if TYPE_CHECKING:
    from .service import WorkerService

IMAGE_SECONDS = 60.0  # longest wait for the embeddings of a prompt's images
REGION_BYTES = 64 << 20


class Sight:
    """Of a worker whose model takes images; `Sight.of` says whether it does."""

    staging: Staging

    def __init__(self, service: WorkerService, nbytes: int) -> None:
        info = service.engine.info
        self._service = service
        self._asking: set[asyncio.Task] = set()
        self._deaths: dict[str, asyncio.Future[str]] = {}  # vision instance -> why, of those that somebody waits for
        self.dtype = info.extra["image_dtype"]
        ask = ask_grant(service.bus, "vision", lambda: self.staging, self._asking)
        self.staging = Staging(service.memory, "images", nbytes or REGION_BYTES, ask)
        row_bytes = info.hidden_bytes // (2 if self.dtype == "bfloat16" else 1)
        self.client = VisionClient(
            service.bus, service.instance, self.staging, lambda: service.address, service.peers.get, row_bytes, self.dtype
        )

    @staticmethod
    def of(service: WorkerService, nbytes: int) -> Sight | None:
        """None when the engine's model reads text only."""
        return Sight(service, nbytes) if "image_token_id" in service.engine.info.extra else None

    async def see(self, run: m.Run, resident: int, deadline: float) -> list[api.ImageSpan]:
        """The prompt's images, with the embeddings of those that rows may touch which run, when its `resident` leading blocks
        are pinned (computed or replayed). `deadline`: monotonic seconds. Raises VisionError."""
        first = self._service.engine.first_row(resident, len(run.ids) // 4)
        wanted = [image for image in run.images if image.start + image.tokens > first]
        rows = await self._fetch(run, wanted, deadline) if wanted else {}
        return [
            api.ImageSpan(i.start, i.tokens, i.digest, rows.get(i.digest) if i.start + i.tokens > first else None, self.dtype)
            for i in run.images
        ]

    async def _fetch(self, run: m.Run, wanted: list[m.ImageSpan], deadline: float) -> dict[bytes, bytes]:
        service, vision, began = self._service, run.vision, time.monotonic()
        death = self._deaths.setdefault(vision, asyncio.get_running_loop().create_future())
        service.depend("vision", vision)
        fetch = asyncio.ensure_future(
            self.client.fetch(vision, run.request, run.namespace, wanted, min(deadline, began + IMAGE_SECONDS), run.client_id)
        )
        try:
            await asyncio.wait({fetch, death}, return_when=asyncio.FIRST_COMPLETED)
            if not fetch.done():
                raise VisionError("vision_lost", f"{vision} died: {death.result()}")
            rows, answer = fetch.result()
        finally:
            fetch.cancel()
            service.undepend(vision)
        service.trace.event(
            run.request, "prefill.images", ms=(time.monotonic() - began) * 1e3, images=len(rows), of=len(run.images),
            bytes=sum(map(len, rows.values())), computed_patches=answer.computed,
        )  # fmt: skip
        return rows

    def peer_died(self, instance: str, why: str) -> None:
        """Whoever waits for it stops waiting."""
        death = self._deaths.pop(instance, None)
        if death is not None and not death.done():
            death.set_result(why)

    def tick(self, now: float) -> None:
        self.staging.tick(now)

    async def stop(self) -> None:
        await self.client.stop()
        for task in self._asking:
            task.cancel()
