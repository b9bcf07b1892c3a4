"""Prompts that a decode worker computes itself (`--both`): one process, one engine, no hand-off.

A request begins as every other (admit takes its credit and pins what is resident); instead of a bind comes `run`, and the
engine is given the prompt. Knows the way from `run` to the first token. Does not know output and ends: those are the service's.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from headrace.bus import messages as m
from headrace.engine import api
from headrace.kv.hashing import BlockHasher
from headrace.worker.visionclient import VisionError

from . import attempt
from .attempt import Phase
from .request import Request

if TYPE_CHECKING:
    from .service import DecodeService

HASHERS = 1024  # namespaces whose hasher is kept


class Prompts:
    """`run` and what follows from it, until `done`."""

    def __init__(self, service: DecodeService) -> None:
        self._service = service
        self._hashers: dict[bytes, BlockHasher] = {}
        self._tasks: set[asyncio.Task] = set()  # requests that ask the kvstore first

    def run(self, message: m.Run) -> m.Accepted | m.Refused:
        """Compute an admitted prompt here."""
        service, key = self._service, f"{message.request}/{message.attempt}"
        request = service.requests.get(key)
        if request is None:
            known = key in service.tombstones or key in service.finished
            return m.Refused("stale" if known else "unknown", f"attempt {message.attempt} of {message.request} is not here")
        if request.computing:
            return m.Accepted(service.load())
        if request.phase is not Phase.CREDIT:
            return m.Refused("stale", f"{message.request} is {request.phase.value} already")
        if wrong := self._wrong(request, message):
            return wrong
        request.computing = True
        ids, store = m.unpack_ids(message.ids), service.store
        service.trace.event(message.request, "decode.prompt", tokens=len(ids), have=len(request.pins))
        usable = request.hashes[: (len(ids) - 1) // service.engine.info.block_tokens]
        if request.sampling.prompt_logprobs >= 0:  # every row is computed
            usable = []
        fetch = usable and store.wanted(usable, min(len(request.pins), len(usable)), len(ids))
        if fetch or message.images:
            task = asyncio.create_task(self._gather_and_submit(request, message, ids, usable if fetch else []))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._submit(request, ids, [])
        return m.Accepted(service.load())

    def _wrong(self, request: Request, run: m.Run) -> m.Refused | None:
        info, admit = self._service.engine.info, request.admit
        if len(run.ids) != 4 * admit.prompt_tokens:
            return m.Refused("mismatch", f"{len(run.ids) // 4} ids came; {admit.prompt_tokens} were admitted")
        if run.images and self._service.sight is None:
            return m.Refused("invalid", f"the model at {self._service.instance} reads text only; the prompt has images")
        if run.images != admit.images:
            return m.Refused("mismatch", f"{len(run.images)} images came; {len(admit.images)} were admitted, or others")
        hashes = b"".join(self._hasher(run.namespace).hashes(run.ids, m.image_starts(run.images)))
        if hashes != run.block_hashes or run.block_hashes != admit.block_hashes or run.namespace != admit.namespace:
            return m.Refused("mismatch", f"the block hashes are not this prompt's; hash with layout {info.layout_id}")
        return None

    async def _gather_and_submit(self, request: Request, run: m.Run, ids: object, usable: list[bytes]) -> None:
        """The rest of the prefix from the kvstore, if it has it (its blocks stay pinned until the prompt is computed), and the
        embeddings of images."""
        service = self._service
        if usable:
            own = min(len(request.pins), len(usable))
            fetched = await service.store.fetch(request.admit.request, request.admit.namespace, usable, own)
            if request.phase is not Phase.CREDIT:  # it ended meanwhile, and gave its own pins back
                service.engine.pool.release(fetched.blocks)
                return
            request.pins += fetched.blocks
            request.fetched = len(fetched.blocks)
        images: list[api.ImageSpan] = []
        if run.images:
            try:
                resident = len(request.pins) if request.sampling.prompt_logprobs < 0 else 0
                images = await service.sight.see(run, resident, request.deadline)
            except VisionError as error:
                if request.phase is Phase.CREDIT:
                    service.problem(request, 500 if error.code == "vision_failed" else 503, f"prefill_{error.code}", str(error))
                return
            if request.phase is not Phase.CREDIT:
                return
        self._submit(request, ids, images)

    def _submit(self, request: Request, ids: object, images: list[api.ImageSpan]) -> None:
        service, admit = self._service, request.admit
        wanted = api.EngineRequest(
            request=request.key,
            ids=ids,
            hashes=request.hashes,
            sampling=request.sampling,
            namespace=admit.namespace,
            priority=admit.priority,
            deadline=request.deadline,
            output_tokens=admit.output_tokens,
            first_choice=admit.first_choice,
            images=images,
        )
        try:
            service.engine.submit(wanted)
        except ValueError as error:
            full = isinstance(error, api.NoRoom)
            return service.problem(request, 503 if full else 400, "full" if full else "invalid", str(error))
        request.admitted = time.monotonic()
        service.happens(request.key, attempt.Computes())
        service.host.wake()

    def done(self, request: Request, event: api.PromptDone) -> None:
        """The prompt is computed; what was pinned for it is the engine's alone from here on."""
        info, source = self._service.engine.info, ""
        if event.cached_tokens:
            own = len(request.pins) - request.fetched
            from_store = request.fetched and event.cached_tokens > own * info.block_tokens
            source = ("kvstore" if from_store else "worker") + ("+snapshot" if event.snapshot_hit else "")
        request.usage = m.Usage(
            request.admit.prompt_tokens, 0, event.cached_tokens, event.computed_rows, event.replay_rows, source
        )
        self._service.unpin(request)
        self._service.trace.event(
            request.admit.request, "decode.computed", ms=(time.monotonic() - request.admitted) * 1e3,
            computed_rows=event.computed_rows, replay_rows=event.replay_rows, cached_tokens=event.cached_tokens,
        )  # fmt: skip

    def _hasher(self, namespace: bytes) -> BlockHasher:
        hasher = self._hashers.get(namespace)
        if hasher is None:
            if len(self._hashers) >= HASHERS:
                self._hashers.clear()
            hasher = self._hashers[namespace] = BlockHasher(self._service.engine.info.layout_id, namespace)
        return hasher
