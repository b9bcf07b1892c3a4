"""The prefill service: runs prompts and writes their KV into a decode node's memory.

Reads in the order of a job: run, lookup, submit, bind, write, commit; then how it ends, cancels, sweeps. A job is one task; it
queues at most a chunk or two, for waiting belongs to the gateway.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

from headrace.bus import messages as m
from headrace.bus.errors import BusError, BusTimeout, NoResponder
from headrace.engine import api
from headrace.kv.hashing import BlockHasher, content_binding
from headrace.transfer import DeadlineExceeded, GenerationRefused, PeerLost, TransferError
from headrace.worker import slab
from headrace.worker.service import WorkerService
from headrace.worker.settings import WorkerSettings

from .job import Abort, Job

SEQUENCE = 1  # of the flag: a ticket has one commit
QUEUE_CHUNKS = 2  # accepted work that is not computed yet, in chunks
GUARD = 0.1  # part of a lease that the writer leaves unused
RETRY_SECONDS = 0.5  # of an unanswered bind or commit
NOTIFY_TRIES = 8
INLINE_BYTES = 64 << 10


class PrefillService(WorkerService):
    role = "prefill"
    description = "Runs prompts and writes their KV into a decode node's memory."
    Settings = WorkerSettings

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self.jobs: dict[str, Job] = {}  # in order of arrival
        self.counters = dict.fromkeys(("accepted", "busy", "committed", "failed", "cancelled", "bytes_written"), 0)
        self._records: dict[str, m.Commit] = {}  # ticket -> its commit, while the job lives
        self._unbound = 0  # jobs whose compute is not near yet
        self._hashers: dict[bytes, BlockHasher] = {}
        self._notices: set[asyncio.Task] = set()
        self._swept = 0.0

    def verbs(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "cancel": self.cancel,
            "status": self.ticket_status,
            "blocks": self.blocks,
            "audit": self.audit,
        }

    async def stop(self) -> None:
        for job in list(self.jobs.values()):
            job.stop(Abort(503, "stopping", f"{self.instance} stops"))
        await asyncio.sleep(0)
        if self._notices:
            await asyncio.wait(self._notices, timeout=2.0)
        await super().stop()

    async def drain(self) -> None:
        while self.jobs:
            await asyncio.sleep(0.02)
        await self.store.drain(5.0)

    def load(self) -> m.Load:
        load = super().load()
        if self.engine is not None:
            load.running = len(self.jobs)
            load.queued_tokens = sum(job.remaining for job in self.jobs.values())
            load.credits = max(0, QUEUE_CHUNKS * self.settings.max_num_batched_tokens - load.queued_tokens)
        return load

    # ------------------------------------------------------------ run

    def run(self, message: m.Run) -> m.Accepted | m.Refused:
        """Accept a prompt, or say at once why not."""
        key = f"{message.request}/{message.attempt}"
        if key in self.jobs:
            return m.Accepted(self.load())
        if (refusal := self.not_ready()) is not None:
            return refusal
        if key in self.tombstones:
            return m.Refused("stale", f"attempt {message.attempt} of {message.request} was cancelled")
        ids, info = m.unpack_ids(message.ids), self.engine.info
        if not 1 <= len(ids) < info.max_model_len:
            return m.Refused("invalid", f"the prompt has {len(ids)} tokens; 1 to {info.max_model_len - 1} fit")
        if -(-len(ids) // info.block_tokens) > info.num_blocks:
            return m.Refused(
                "invalid", f"the prompt needs {-(-len(ids) // info.block_tokens)} blocks; {self.instance} has {info.num_blocks}"
            )
        queued = sum(job.remaining for job in self.jobs.values())
        limit = QUEUE_CHUNKS * self.settings.max_num_batched_tokens
        if queued and (queued + len(ids) > limit or len(self.jobs) >= info.max_num_seqs):
            self.counters["busy"] += 1
            load = self.load()
            wait = queued / load.tokens_per_second if load.tokens_per_second else 0.01
            return m.Refused("busy", f"{queued} tokens wait; {limit} may", load, min(wait, 5.0))
        hashes = self._hasher(message.namespace).hashes(message.ids)
        if b"".join(hashes) != message.block_hashes:
            return m.Refused(
                "mismatch", f"the {len(hashes)} block hashes of this prompt differ from the {len(message.block_hashes) // 16} sent; "
                f"hash with layout {info.layout_id}"
            )  # fmt: skip
        now = time.monotonic()
        job = Job(key, message, ids, hashes, now + message.deadline, now)
        self.jobs[key] = job
        self.prober.watch("decode", message.decode)
        self.counters["accepted"] += 1
        self.trace.event(message.request, "prefill.accepted", tokens=len(ids), queued=queued, client_id=message.client_id)
        job.task = asyncio.create_task(self._work(job))
        job.task.add_done_callback(lambda task: self._over(job, task))
        return m.Accepted(self.load())

    async def _work(self, job: Job) -> None:
        """The whole leg. Raises Abort; a CancelledError means `job.abort`."""
        await self._lookup(job)
        self._submit(job)
        if job.may_bind is not None:
            await job.may_bind
        await self._bind(job)
        try:
            await self._write(job)
            await self._place_rest(job)
        except (PeerLost, OSError) as error:
            raise Abort(502, "decode_lost", f"writing to {job.run.decode} failed: {error}") from error
        except GenerationRefused as error:
            raise Abort(409, "stale", f"{job.run.decode} took the memory back: {error}", quiet=True) from error
        except (DeadlineExceeded, TransferError) as error:
            raise Abort(504, "transfer_failed", f"writing to {job.run.decode} failed: {error}") from error
        await self._commit(job)

    # ------------------------------------------------------------ lookup

    async def _lookup(self, job: Job) -> None:
        """Pin the longest prefix of our own memory; then ask the kvstore for what follows. One row is always computed."""
        usable = job.hashes[: (job.prompt_tokens - 1) // self.engine.info.block_tokens]
        if not usable:
            return
        job.pins = self.engine.pool.match(usable)
        own = len(job.pins)
        if own < len(usable) and self.store.available:
            started = time.monotonic()
            fetched = await self.store.fetch(job.run.request, job.run.namespace, usable, own)
            job.pins += fetched.blocks
            job.fetched = len(fetched.blocks)
            job.lookup_seconds = time.monotonic() - started
        self.trace.event(
            job.run.request, "prefill.lookup", ms=job.lookup_seconds * 1e3, own=own, kvstore=job.fetched, of=len(usable)
        )

    # ------------------------------------------------------------ submit, bind

    def _submit(self, job: Job) -> None:
        run = job.run
        request = api.EngineRequest(
            request=job.key,
            ids=job.ids,
            hashes=job.hashes,
            sampling=_NO_SAMPLING,
            namespace=run.namespace,
            priority=run.priority,
            deadline=job.deadline,
            prefill_only=True,
        )
        try:
            self.engine.submit(request)
        except ValueError as error:
            raise Abort(400, "invalid", str(error)) from error
        job.submitted = time.monotonic()
        self.host.wake()
        if sum(other.remaining for other in self._ahead(job)) >= self.settings.max_num_batched_tokens:
            job.may_bind = asyncio.get_running_loop().create_future()
            self._unbound += 1

    def _ahead(self, job: Job) -> Iterable[Job]:
        for other in self.jobs.values():
            if other is job:
                return
            if other.submitted:
                yield other

    def _let_bind(self) -> None:
        """Jobs that will be in the next step may take memory at their reader."""
        ahead = 0
        for job in self.jobs.values():
            if job.may_bind is not None and not job.may_bind.done() and ahead < self.settings.max_num_batched_tokens:
                job.may_bind.set_result(None)
                self._unbound -= 1
            ahead += job.remaining if job.submitted else 0

    async def _bind(self, job: Job) -> None:
        """Ask for memory until there is some; the reader may be full for a moment."""
        message, started = self._bind_message(job), time.monotonic()
        while True:
            sent = time.monotonic()
            try:
                answer = await self.bus.ask(f"headrace.decode.{job.run.decode}.bind", message, RETRY_SECONDS)
            except NoResponder as error:
                raise Abort(502, "decode_lost", f"{job.run.decode} is gone: {error}") from error
            except BusError:
                await asyncio.sleep(0.05)  # not connected, or no answer: it is idempotent
                continue
            if isinstance(answer, m.Bound):
                break
            if not isinstance(answer, m.Refused) or answer.code != "full":
                quiet = getattr(answer, "code", "") in ("stale", "unknown")
                raise Abort(502, getattr(answer, "code", "invalid"), getattr(answer, "message", repr(answer)), quiet)
            await asyncio.sleep(max(answer.retry_after, 0.01))
        job.ticket, job.memory, job.written = answer.ticket, answer.memory, answer.ticket.first_block
        self._leased(job, sent)
        self.trace.event(
            job.run.request, "prefill.bound", ms=(time.monotonic() - started) * 1e3, ticket=job.ticket.ticket, have=job.written
        )

    def _bind_message(self, job: Job) -> m.Bind:
        info, run = self.engine.info, job.run
        content = content_binding(info.layout_id, run.namespace, run.ids, (), info.checkpoint)
        return m.Bind(
            run.request, run.attempt, self.instance, self.memory.incarnation, job.prompt_tokens, content, info.layout_id,
            info.checkpoint, self.draft,
        )  # fmt: skip

    def _leased(self, job: Job, sent: float) -> None:
        """The lease counts from when we asked, less a guard: we stop before the owner thinks that we should have."""
        job.renewed, job.lease = sent, sent + job.ticket.ttl * (1 - GUARD)

    def _renew(self, job: Job) -> None:
        """Bind again: the same ticket, a new lease."""
        sent = job.renewed = time.monotonic()
        future = self.bus.ask(f"headrace.decode.{job.run.decode}.bind", self._bind_message(job), RETRY_SECONDS)

        def answered(future: asyncio.Future) -> None:
            if future.cancelled() or future.exception() is not None:
                return  # the tick asks again, or the lease ends
            answer = future.result()
            if isinstance(answer, m.Bound) and job.ticket is not None and answer.ticket.ticket == job.ticket.ticket:
                self._leased(job, sent)
            elif isinstance(answer, m.Refused) and job.record is None:
                job.stop(Abort(409, answer.code, answer.message, quiet=answer.code in ("stale", "unknown")))

        future.add_done_callback(answered)

    # ------------------------------------------------------------ write, commit

    async def _write(self, job: Job) -> None:
        """Blocks go out as chunks finish, from the first one that the reader lacks."""
        peer = await self.links.get(job.memory, timeout=max(0.1, min(2.0, job.lease - time.monotonic())))
        blocks = array("I")
        blocks.frombytes(job.ticket.blocks)
        first, tokens = job.ticket.first_block, self.engine.info.block_tokens
        last = first + len(blocks)
        while True:
            final = last if job.done is not None else min(job.position // tokens, last)
            if final > job.written:
                started = time.monotonic()
                pieces = self._pieces(job.table[job.written : final], blocks[job.written - first : final - first])
                await peer.write("kv", pieces, job.ticket.generation, self._until(job))
                job.nbytes += (final - job.written) * job.ticket.block_bytes
                job.written = final
                job.write_seconds += time.monotonic() - started
            elif job.done is not None:
                return
            else:
                await job.changed()

    def _pieces(self, sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, memoryview]]:
        """(offset there, bytes here), neighbours joined."""
        size, out = self.engine.info.block_bytes, []
        index = 0
        while index < len(targets):
            end = index + 1
            while end < len(targets) and sources[end] == sources[end - 1] + 1 and targets[end] == targets[end - 1] + 1:
                end += 1
            start = sources[index] * size
            out.append((targets[index] * size, self.kv[start : start + (end - index) * size]))
            index = end
        return out

    @staticmethod
    def _until(job: Job) -> float:
        return min(job.lease, job.deadline)

    async def _place_rest(self, job: Job) -> None:
        """State, hidden vector and ids into the slab; then, after the flush, the flag."""
        started, ticket = time.monotonic(), job.ticket
        data = slab.pack(job.done.handoff)
        if len(data) > ticket.slab_bytes:
            raise Abort(
                500, "slab_too_small", f"the hand-off's slab is {len(data)} bytes; {job.run.decode} gave {ticket.slab_bytes}"
            )
        peer = await self.links.get(job.memory, timeout=1.0)
        await peer.write("slab", [(ticket.slab_offset, data)], ticket.generation, self._until(job))
        checksums = await self._checksums(job, data) if self.settings.checksums else b""
        await peer.commit("mailbox", ticket.mailbox, ticket.generation << 32 | SEQUENCE, ticket.generation, self._until(job))
        now = time.monotonic()
        job.write_seconds += now - started
        self.counters["bytes_written"] += job.nbytes + len(data)
        job.record = m.Commit(
            ticket.ticket, job.run.request, job.run.attempt, ticket.generation, job.nbytes, len(data), checksums,
            self._usage(job), self._timing(job),
        )  # fmt: skip
        self._records[ticket.ticket] = job.record
        self.trace.event(
            job.run.request, "prefill.written", ms=job.write_seconds * 1e3, bytes=job.nbytes + len(data), by=peer.kind
        )

    async def _checksums(self, job: Job, data: bytes) -> bytes:
        size, table = self.engine.info.block_bytes, job.table[job.ticket.first_block :]

        def work() -> bytes:
            sums = [crc32(self.kv[block * size : (block + 1) * size]) for block in table]
            return array("I", [*sums, crc32(data)]).tobytes()

        return work() if len(table) * size + len(data) <= INLINE_BYTES else await asyncio.to_thread(work)

    def _usage(self, job: Job) -> m.Usage:
        done = job.done
        source = ""
        if done.cached_tokens:
            own = len(job.pins) - job.fetched
            from_store = job.fetched and done.cached_tokens > own * self.engine.info.block_tokens
            source = ("kvstore" if from_store else "worker") + ("+snapshot" if done.snapshot_hit else "")
        return m.Usage(job.prompt_tokens, 0, done.cached_tokens, done.computed_rows, done.replay_rows, source)

    @staticmethod
    def _timing(job: Job) -> m.Timing:
        started = job.first_chunk or job.computed
        return m.Timing(
            queue=max(0.0, job.submitted - job.began - job.lookup_seconds),
            lookup=job.lookup_seconds,
            compute=max(0.0, job.computed - job.submitted) if started else 0.0,
            write=job.write_seconds,
        )

    async def _commit(self, job: Job) -> None:
        """Say that everything is placed until there is a verdict."""
        subject, started = f"headrace.decode.{job.run.decode}.commit", time.monotonic()
        if self.settings.fault("prefill.lose_commit") is not None:
            await asyncio.sleep(job.deadline - started)
        while True:
            wait = RETRY_SECONDS
            try:
                answer = await self.bus.ask(subject, job.record, RETRY_SECONDS)
            except NoResponder as error:
                raise Abort(502, "decode_lost", f"{job.run.decode} is gone: {error}") from error
            except BusTimeout:
                continue
            except BusError:
                answer, wait = None, 0.05
            if isinstance(answer, m.Refused):
                raise Abort(502, answer.code, answer.message)
            verdict = answer.verdict if isinstance(answer, m.Verdict) else "pending"
            if verdict == "admitted":
                break
            if verdict != "pending":
                raise Abort(409, verdict, f"{job.run.decode} says that ticket {job.ticket.ticket} is {verdict}", quiet=True)
            await asyncio.sleep(min(wait, 0.05))
        job.admitted = True
        self.counters["committed"] += 1
        self.trace.event(job.run.request, "prefill.committed", ms=(time.monotonic() - started) * 1e3)

    def ticket_status(self, message: m.TicketStatus) -> m.Message:
        """Decode saw a flag without its record."""
        record = self._records.get(message.ticket)
        return record if record is not None else m.Done("unknown")

    # ------------------------------------------------------------ the engine's events

    def handle_events(self, events: list[api.Event]) -> None:
        now = time.monotonic()
        for event in events:
            job = self.jobs.get(event.request)
            if job is None:
                continue
            kind = type(event)
            if kind is api.ChunkDone:
                job.position, job.table = event.position, event.block_table
                if not job.first_chunk:
                    job.first_chunk = now
                self.trace.event(
                    job.run.request, "prefill.chunk", ms=(now - (job.chunk_at or job.submitted)) * 1e3, position=event.position
                )
                job.chunk_at = now
                job.wake()
            elif kind is api.PrefillDone:
                job.done, job.table, job.computed = event, event.block_table, now
                self.trace.event(
                    job.run.request, "prefill.computed", ms=(now - job.submitted) * 1e3, computed_rows=event.computed_rows,
                    replay_rows=event.replay_rows, cached_tokens=event.cached_tokens, snapshot=event.snapshot_hit,
                )  # fmt: skip
                job.wake()
            elif kind is api.BlocksFilled:
                self.store.fill(event, job.run.namespace)
            elif kind is api.SnapshotTaken:
                self.store.snapshot(event, job.run.namespace)
            elif kind is api.Failed:
                job.stop(Abort(500, event.code, event.message))
        if self._unbound:
            self._let_bind()

    # ------------------------------------------------------------ ends

    def _over(self, job: Job, task: asyncio.Task) -> None:
        """Whatever happened: give back what the job holds, and tell both sides if it was not admitted."""
        error = job.abort if task.cancelled() else task.exception()
        if job.may_bind is not None and not (job.may_bind.done() and not job.may_bind.cancelled()):
            self._unbound -= 1
        if job.done is not None:
            self.engine.release(job.key)
        else:
            self.engine.cancel(job.key)
        self.engine.pool.release(job.pins)
        job.pins = []
        del self.jobs[job.key]
        self.prober.unwatch(job.run.decode)
        if job.ticket is not None:
            self._records.pop(job.ticket.ticket, None)
        self.host.wake()
        if self._unbound:
            self._let_bind()
        if job.admitted:
            return
        if not isinstance(error, Abort):
            if error is not None:
                self.log.error("job failed", request=job.run.request, exc_info=error)
            error = Abort(500, "internal", f"prefill failed in {self.instance}: {error!r}")
        self.tombstones.add(job.key)
        self._report(job, error)

    def _report(self, job: Job, error: Abort) -> None:
        """FAILED, at once, to the gateway and to decode; then that we shall not write any more."""
        run = job.run
        self.counters["cancelled" if error.quiet else "failed"] += 1
        self.trace.event(run.request, "prefill.failed", code=error.problem.code, message=error.problem.message)
        if not error.quiet:
            entry = m.OutEntry(run.request, run.attempt, 0, 0, b"", finish="abort", problem=error.problem)
            self.outbox.add_soon(run.gateway, entry)
        ticket = job.ticket
        notices: list[tuple[str, m.Message]] = []
        if not error.quiet:
            notices.append(("fail", m.Fail(run.request, run.attempt, ticket.ticket if ticket else "", error.problem)))
        if ticket is not None:
            notices.append(("writer_done", m.WriterDone(ticket.ticket, ticket.generation)))
        if notices:
            task = asyncio.create_task(self._notify(run.decode, notices))
            self._notices.add(task)
            task.add_done_callback(self._notices.discard)

    async def _notify(self, decode: str, notices: list[tuple[str, m.Message]]) -> None:
        """Idempotent; repeated until answered or pointless. What is lost all the same, decode asks for (`cancel`)."""
        for verb, message in notices:
            for _ in range(NOTIFY_TRIES):
                try:
                    await self.bus.ask(f"headrace.decode.{decode}.{verb}", message, RETRY_SECONDS)
                    break
                except NoResponder:
                    return
                except BusTimeout:
                    continue
                except BusError:
                    await asyncio.sleep(0.1)

    def cancel(self, message: m.Cancel) -> m.Done:
        """Stop an attempt. "unknown" also means: nothing of it will ever be written by us."""
        key = f"{message.request}/{message.attempt}"
        job = self.jobs.get(key)
        if job is None:
            self.tombstones.add(key)
            return m.Done("unknown")
        job.stop(Abort(499, message.reason or "cancelled", "cancelled", quiet=True))
        return m.Done("cancelled")

    def peer_died(self, instance: str, why: str) -> None:
        for job in list(self.jobs.values()):
            if job.run.decode == instance:
                job.stop(Abort(502, "decode_lost", f"{instance} died: {why}"))

    # ------------------------------------------------------------ sweeps

    def tick(self, now: float) -> None:
        """Deadlines, leases and their renewal."""
        for job in list(self.jobs.values()):
            if job.deadline <= now:
                job.stop(Abort(504, "deadline", f"not computed within its deadline of {job.run.deadline:g} s"))
            elif job.ticket is not None and not job.admitted:
                if job.lease <= now and job.record is None:
                    job.stop(Abort(504, "lease_lost", f"{job.run.decode} did not renew the ticket in time"))
                elif now - job.renewed > job.ticket.ttl / 3:
                    self._renew(job)
        if now - self._swept > 1.0:
            self._swept = now
            self.tombstones.sweep(now)

    def owners(self) -> dict[int, int]:
        out: dict[int, int] = {}
        for job in self.jobs.values():
            for block in job.pins:
                out[block] = out.get(block, 0) + 1
        return out

    def debts(self) -> dict[str, int]:
        return {"live": len(self.jobs), "records": len(self._records), "notices": len(self._notices)}

    def _hasher(self, namespace: bytes) -> BlockHasher:
        hasher = self._hashers.get(namespace)
        if hasher is None:
            if len(self._hashers) >= 1024:
                self._hashers.clear()
            hasher = self._hashers[namespace] = BlockHasher(self.engine.info.layout_id, namespace)
        return hasher


_NO_SAMPLING = api.SamplingParams()  # prefill samples nothing
