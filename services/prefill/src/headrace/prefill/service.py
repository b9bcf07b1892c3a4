"""The prefill service: runs prompts and writes their KV into a decode node's memory.

Reads in the order of a job: run, lookup, submit, bind, write, commit; then sweeps. What an event means for a job, and what
follows, is its machine's (`attempt.py`). It queues at most a chunk or two, for waiting belongs to the gateway.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any
from zlib import crc32

from headrace.bus import messages as m
from headrace.bus.errors import BusError, NoResponder
from headrace.engine import api
from headrace.kv.grants import Ledger, Tombstones, effects, events, writer
from headrace.kv.grants.owner import flag_value
from headrace.kv.hashing import BlockHasher, content_binding
from headrace.transfer import GenerationRefused, Peer, PeerLost, TransferError
from headrace.worker import slab
from headrace.worker.service import WorkerService
from headrace.worker.settings import WorkerSettings
from headrace.worker.sight import Sight
from headrace.worker.visionclient import VisionError

from . import attempt
from .attempt import Phase
from .job import Abort, Job

QUEUE_CHUNKS = 2  # accepted work that is not computed yet, in chunks
STUCK_SECONDS = 0.1  # a prompt waits for memory so long, and nobody has any: those who wait pin it
ASK_SECONDS = 0.5  # patience with one question; the questions are repeated
INLINE_BYTES = 64 << 10  # more than this is checksummed in a thread
# HTTP status of a problem by its code; others are 502: the other side of the hand-off.
STATUS = {"invalid": 400, "internal": 500, "corrupt": 500, "bad_state": 500, "overloaded": 503, "stopping": 503,
          "vision_lost": 503, "vision_unknown": 503, "vision_busy": 503, "expired": 504, "deadline": 504}  # fmt: skip


class PrefillService(WorkerService):
    role = "prefill"
    description = "Runs prompts and writes their KV into a decode node's memory."
    Settings = WorkerSettings

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self.sight: Sight | None = None  # of a model that takes images
        self.jobs: dict[str, Job] = {}  # in order of arrival
        self.tickets: Ledger[writer.Ticket] = Ledger(writer.step, writer.tick, writer.over)
        self.by_ticket: dict[str, Job] = {}
        self.denied = Tombstones()  # tickets that we told their owner not to know
        self.counters = dict.fromkeys(("accepted", "busy", "committed", "failed", "cancelled", "bytes_written"), 0)
        self._waiting: dict[str, Job] = {}  # jobs that have no memory here yet
        self._hashers: dict[bytes, BlockHasher] = {}

    def verbs(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "cancel": self.cancel,
            "status": self.ticket_status,
            "grant": self.grant_status,
            "blocks": self.blocks,
            "audit": self.audit,
        }

    def prepare(self) -> None:
        self.sight = Sight.of(self, self.settings.image_bytes)

    async def stop(self) -> None:
        for job in list(self.jobs.values()):
            self.happens(job.key, attempt.Ends("stopping", f"{self.instance} stops"))
        end = time.monotonic() + 2.0
        while self.jobs and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if self.sight is not None:
            await self.sight.stop()
        await super().stop()

    async def drain(self) -> None:
        while self.jobs:  # noqa: ASYNC110  bounded outside
            await asyncio.sleep(0.02)
        await self.store.drain(5.0)

    def load(self) -> m.Load:
        load = super().load()
        if self.engine is not None:
            load.queued_tokens = sum(job.remaining for job in self.jobs.values())
            load.credits = max(0, QUEUE_CHUNKS * self.settings.max_num_batched_tokens - self._backlog())
        return load

    def _backlog(self) -> int:
        """Accepted tokens that wait. A prompt counts as one chunk of its own at most: the engine goes on with others beside a
        long one, so it must not keep the short ones out until its end is near."""
        return sum(min(job.remaining, self._most) for job in self.jobs.values())

    @property
    def _most(self) -> int:
        return max(1, self.settings.max_num_batched_tokens // 2)

    # ------------------------------------------------------------ run

    def run(self, message: m.Run) -> m.Accepted | m.Refused:
        """Accept a prompt, or say at once why not."""
        key = f"{message.request}/{message.attempt}"
        known = self.happens(key, attempt.Run())
        if known is not None and known.name == "Refused":
            return m.Refused(known.code, f"attempt {message.attempt} of {message.request} is over")
        if known is None:
            ids = m.unpack_ids(message.ids)
            if (refusal := self.not_ready() or self._refusal(message, ids)) is not None:
                self.happens(key, attempt.Judged(refusal.code))
                return refusal
            self.happens(key, attempt.Judged("", bool(message.images)), message=message, ids=ids)
        return m.Accepted(self.load())

    def _refusal(self, message: m.Run, ids: array) -> m.Refused | None:
        """Why a prompt is not taken here, or not now."""
        info = self.engine.info
        if not 1 <= len(ids) < info.max_model_len:
            return m.Refused("invalid", f"the prompt has {len(ids)} tokens; 1 to {info.max_model_len - 1} fit")
        if -(-len(ids) // info.block_tokens) > info.num_blocks:
            return m.Refused(
                "invalid", f"the prompt needs {-(-len(ids) // info.block_tokens)} blocks; {self.instance} has {info.num_blocks}"
            )
        queued, limit = self._backlog(), QUEUE_CHUNKS * self.settings.max_num_batched_tokens
        if queued and (queued + min(len(ids), self._most) > limit or len(self.jobs) >= info.max_num_seqs):
            self.counters["busy"] += 1
            load = self.load()
            wait = queued / load.tokens_per_second if load.tokens_per_second else 0.01
            return m.Refused("busy", f"{queued} tokens wait; {limit} may", load, min(wait, 5.0))
        if len(message.ids) <= INLINE_BYTES and (wrong := self._wrong_hashes(message)):
            return m.Refused("mismatch", wrong)
        return None

    def _take(self, key: str, message: m.Run, ids: array) -> Job:
        packed, now, queued = message.block_hashes, time.monotonic(), self._backlog()
        hashes = [packed[i : i + m.HASH_BYTES] for i in range(0, len(packed), m.HASH_BYTES)]
        job = self.jobs[key] = Job(key, message, ids, hashes, now + message.deadline, now)
        self.depend("decode", message.decode)
        self.counters["accepted"] += 1
        self.trace.event(message.request, "prefill.accepted", tokens=len(ids), queued=queued, client_id=message.client_id)
        return job

    def _wrong_hashes(self, run: m.Run) -> str:
        """What is wrong with the block hashes that came with a prompt; they would give its KV to other prompts."""
        hashes = self._hasher(run.namespace).hashes(run.ids, m.image_starts(run.images))
        if b"".join(hashes) == run.block_hashes:
            return ""
        sent = len(run.block_hashes) // m.HASH_BYTES
        layout = self.engine.info.layout_id
        return f"the {len(hashes)} block hashes of this prompt differ from the {sent} sent; hash with layout {layout}"

    async def _hash(self, job: Job) -> attempt.Hashed:
        """The content binding, and for long prompts the check of the hashes: nothing large is hashed on the loop."""
        run, info = job.run, self.engine.info

        def work() -> tuple[bytes, str]:
            content = content_binding(info.layout_id, run.namespace, run.ids, m.image_starts(run.images), info.checkpoint)
            return content, self._wrong_hashes(run) if len(run.ids) > INLINE_BYTES else ""

        job.content, wrong = work() if len(run.ids) <= INLINE_BYTES else await asyncio.to_thread(work)
        return attempt.Hashed(wrong)

    # ------------------------------------------------------------ lookup, images

    def _look_up(self, job: Job) -> None:
        """Pin the longest prefix of our own memory; then ask the kvstore for what follows. One row is always computed."""
        usable = job.hashes[: (job.prompt_tokens - 1) // self.engine.info.block_tokens]
        if job.run.prompt_logprobs >= 0:  # every row is computed
            usable = []
        job.pins = self.engine.pool.match(usable) if usable else []
        job.own = len(job.pins)
        if usable and self.store.wanted(usable, job.own, job.prompt_tokens):
            return self._begin(job, self._fetch(job, usable))
        if usable:
            self._looked_up(job, len(usable))
        self.happens(job.key, attempt.LookedUp())

    async def _fetch(self, job: Job, usable: list[bytes]) -> attempt.LookedUp:
        started = time.monotonic()
        fetched = await self.store.fetch(job.run.request, job.run.namespace, usable, job.own)
        job.pins += fetched.blocks
        job.fetched = len(fetched.blocks)
        job.lookup_seconds = time.monotonic() - started
        self._looked_up(job, len(usable))
        return attempt.LookedUp()

    def _looked_up(self, job: Job, usable: int) -> None:
        ms = job.lookup_seconds * 1e3
        self.trace.event(job.run.request, "prefill.lookup", ms=ms, own=job.own, kvstore=job.fetched, of=usable)

    async def _see(self, job: Job) -> attempt.Saw:
        """Embeddings of the images that this prompt's rows may touch."""
        if self.sight is None:
            raise Abort("invalid", f"the model at {self.instance} reads text only; the prompt has {len(job.run.images)} images")
        try:
            job.images = await self.sight.see(job.run, len(job.pins), job.deadline)
        except VisionError as error:
            raise Abort(error.code, str(error)) from error
        return attempt.Saw()

    # ------------------------------------------------------------ submit, bind

    def _submit(self, job: Job) -> None:
        run = job.run
        request = api.EngineRequest(
            request=job.key,
            ids=job.ids,
            hashes=job.hashes,
            sampling=api.SamplingParams(prompt_logprobs=run.prompt_logprobs),
            namespace=run.namespace,
            priority=run.priority,
            deadline=job.deadline,
            prefill_only=True,
            images=job.images,
        )
        try:
            self.engine.submit(request)
        except ValueError as error:
            self.happens(job.key, attempt.Ends("invalid", str(error)))
            return
        job.submitted = time.monotonic()
        self._waiting[job.key] = job
        self.host.wake()

    def step_begins(self) -> None:
        for key in [key for key in self._waiting if self.engine.begun(key)]:
            del self._waiting[key]
            self.happens(key, attempt.Begun())

    def _yield_pins(self, now: float) -> None:
        """Where nobody has memory any more and yet the first finds too little, those who wait hold it: what is resident of
        their prefixes. The last one lets go; it may have to compute that again."""
        if any(job.submitted and not job.released and key not in self._waiting for key, job in self.jobs.items()):
            return
        pinned = [job for job in self._waiting.values() if job.pins and now - job.submitted > STUCK_SECONDS]
        if pinned:
            self.engine.pool.release(pinned[-1].pins)
            pinned[-1].pins = []
            self.host.wake()

    def _bind(self, job: Job, wait: float = 0.0) -> None:
        """Ask for memory; the reader may be full for a moment. Our own was taken before: whoever holds a reader's memory waits
        for nothing that another one holds, who may wait for that."""
        if wait:
            job.timer = asyncio.get_running_loop().call_later(wait, self._bind, job)
            return
        sent = time.monotonic()
        job.asked = job.asked or sent
        future = self.bus.ask(f"headrace.decode.{job.run.decode}.bind", self._bind_message(job), ASK_SECONDS)
        future.add_done_callback(lambda future: self._bind_answered(job, future, sent))

    def _bind_answered(self, job: Job, future: asyncio.Future, sent: float) -> None:
        error = future.exception()
        if job.state.phase is Phase.BINDING:
            self.happens(job.key, self._of_bind(job, future.result() if error is None else error, sent))

    def _of_bind(self, job: Job, answer: Any, sent: float) -> Any:
        """What an answer, or the error in its place, means."""
        if isinstance(answer, m.Bound):
            return self._bound(job, answer, sent)
        if isinstance(answer, NoResponder):
            return attempt.Ends("lost", f"{job.run.decode} is gone: {answer}")
        if isinstance(answer, BusError):
            return attempt.NotBound(0.05)  # not connected, or no answer: it is idempotent
        code, text = getattr(answer, "code", "failed"), getattr(answer, "message", repr(answer))
        if code != "full":
            return attempt.Ends(code, text)  # also when the attempt is over there: who ended it may not have been heard
        wait, job.patience = max(answer.retry_after, job.patience), min(2 * job.patience, 0.25)
        return attempt.NotBound(wait)

    def _bound(self, job: Job, answer: m.Bound, sent: float) -> attempt.Bound:
        ticket = answer.ticket
        if ticket.ticket in self.denied:
            return attempt.Bound(denied=True)
        job.ticket, job.memory, job.written, job.renewed = ticket, answer.memory, ticket.first_block, sent
        self.by_ticket[ticket.ticket] = job
        self.tickets.add(ticket.ticket, *writer.bound(ticket.generation, ticket.ttl, sent, job.deadline))
        ms = (time.monotonic() - job.asked) * 1e3
        self.trace.event(job.run.request, "prefill.bound", ms=ms, ticket=ticket.ticket, have=ticket.first_block)
        return attempt.Bound()

    def _bind_message(self, job: Job) -> m.Bind:
        info, run = self.engine.info, job.run
        return m.Bind(
            run.request, run.attempt, self.instance, self.memory.incarnation, job.prompt_tokens, job.content, info.layout_id,
            info.checkpoint, self.draft,
        )  # fmt: skip

    def _renew(self, job: Job) -> None:
        """Bind again: the same ticket, a new lease. Unanswered, the lease ends."""
        sent = job.renewed = time.monotonic()
        future = self.bus.ask(f"headrace.decode.{job.run.decode}.bind", self._bind_message(job), ASK_SECONDS)

        def answered(future: asyncio.Future) -> None:
            answer = None if future.cancelled() or future.exception() else future.result()
            if isinstance(answer, m.Bound) and answer.ticket.ticket == job.ticket.ticket:
                self._feed(job, events.Renewed(writer.expires_at(job.ticket.ttl, sent)))
            elif isinstance(answer, m.Refused):
                self._feed(job, events.Cancelled(answer.message))

        future.add_done_callback(answered)

    # ------------------------------------------------------------ write

    async def _transfer(self, job: Job, operation: Callable[[Peer, float], Awaitable[None]]) -> None:
        """One operation under the ticket, if its machine lets it begin; its end is told, however it ends."""
        if not any(isinstance(effect, effects.Go) for effect in self._feed(job, events.WriteBegins())):
            raise Abort("", "the ticket is over")
        started, state = time.monotonic(), self.tickets.get(job.ticket.ticket)
        deadline = min(state.expires, state.deadline)
        error, ended = "", None
        try:
            peer = await self.links.get(job.memory, timeout=max(0.05, min(2.0, deadline - started)))
            job.by = peer.kind
            late = await self.faults.hold("write")  # 0 but in drills: a writer whose clock is slow by so much
            await operation(peer, deadline + late)
        except GenerationRefused as refused:  # the owner ended the ticket, and told whom it concerns
            ended = Abort("", str(refused))
            self._feed(job, events.Cancelled(str(refused)))
        except PeerLost as lost:
            ended = Abort("", str(lost))
            self._feed(job, events.OwnerLost())
        except (TransferError, OSError) as failure:
            error, ended = f"writing to {job.run.decode} failed: {failure}", Abort("", str(failure))
        finally:
            self._feed(job, events.WriteEnded(error))
        job.write_seconds += time.monotonic() - started
        if ended is not None:
            raise ended

    async def _write(self, job: Job) -> None:
        """Everything up to the flag. The commit and what follows is the ticket's machine (`_carry`)."""
        await self._write_blocks(job)
        await self._write_rest(job)
        self.happens(job.key, attempt.Placed())

    async def _write_blocks(self, job: Job) -> None:
        """Blocks go out as chunks finish, from the first one that the reader lacks."""
        targets = array("I")
        targets.frombytes(job.ticket.blocks)
        first, tokens = job.ticket.first_block, self.engine.info.block_tokens
        last = first + len(targets)
        while True:
            final = last if job.done is not None else min(job.position // tokens, last)
            if final > job.written:
                pieces = self._pieces(job.table[job.written : final], targets[job.written - first : final - first])
                await self._transfer(job, lambda peer, until, p=pieces: peer.write("kv", p, job.ticket.generation, until))
                job.nbytes += (final - job.written) * job.ticket.block_bytes
                job.written = final
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

    async def _write_rest(self, job: Job) -> None:
        """State, hidden vector and ids into the slab; then, after the flush, the flag."""
        ticket, data = job.ticket, slab.pack(job.done.handoff)
        if len(data) > ticket.slab_bytes:
            raise Abort("mismatch", f"the hand-off's slab is {len(data)} bytes; {job.run.decode} gave {ticket.slab_bytes}")

        async def place(peer: Peer, until: float) -> None:
            await peer.write("slab", [(ticket.slab_offset, data)], ticket.generation, until)
            await self.faults.hold("flush")
            await peer.commit("mailbox", ticket.mailbox, flag_value(ticket.generation), ticket.generation, until)

        checksums = await self._checksums(job, data) if self.settings.checksums else b""
        await self._transfer(job, place)
        job.placed = time.monotonic()
        self.counters["bytes_written"] += job.nbytes + len(data)
        job.record = m.Commit(
            ticket.ticket, job.run.request, job.run.attempt, ticket.generation, job.nbytes, len(data), checksums,
            self._usage(job), self._timing(job),
        )  # fmt: skip
        self.trace.event(
            job.run.request, "prefill.written", ms=job.write_seconds * 1e3, bytes=job.nbytes + len(data), by=job.by
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
            from_store = job.fetched and done.cached_tokens > job.own * self.engine.info.block_tokens
            source = ("kvstore" if from_store else "worker") + ("+snapshot" if done.snapshot_hit else "")
        return m.Usage(job.prompt_tokens, 0, done.cached_tokens, done.computed_rows, done.replay_rows, source)

    @staticmethod
    def _timing(job: Job) -> m.Timing:
        return m.Timing(
            queue=max(0.0, job.submitted - job.began - job.lookup_seconds),
            lookup=job.lookup_seconds,
            compute=job.computed - job.submitted,
            write=job.write_seconds,
        )

    # ------------------------------------------------------------ the attempt's machine

    def happens(self, key: str, event: Any, **facts: Any) -> attempt.Answer | None:
        """One event of an attempt: its machine says what follows, which is done. `facts`: what the effects need. -> the answer
        to whoever sent a message; None when it must be judged first, or nobody waits."""
        job = self.jobs.get(key)
        before = job.state if job is not None else attempt.Attempt(Phase.OVER if key in self.tombstones else Phase.UNKNOWN)
        after, wanted = attempt.step(before, event, time.monotonic())
        if job is not None:
            job.state = after  # now: what follows may bring further events
        answer = None
        for effect in wanted:
            match effect:
                case attempt.Answer():
                    answer = effect
                case attempt.Take():
                    job = self._take(key, **facts)
                    job.state = after
                    self._begin(job, self._hash(job))
                case attempt.Entomb():
                    self.tombstones.add(key, time.monotonic())
                case _:
                    self._carry_out(job, effect)
        if after.phase is Phase.OVER and job is not None:
            self._wind_up(job)
        return answer

    def _carry_out(self, job: Job, effect: Any) -> None:
        match effect:
            case attempt.LookUp():
                self._look_up(job)
            case attempt.See():
                self._begin(job, self._see(job))
            case attempt.Submit():
                self._submit(job)
            case attempt.Bind(wait):
                self._bind(job, wait)
            case attempt.Write():
                self._begin(job, self._write(job))
            case attempt.ToTicket(event):
                self._feed(job, event)
            case attempt.StopWork():
                self._stop_work(job)
            case attempt.TellGateway(code, text):
                self._report(job, code, text)
            case attempt.TellDecode(code, text):
                self._tell_decode(job, "fail", self._fail_message(job, code, text), lambda _: None)

    def _begin(self, job: Job, work: Coroutine[Any, Any, Any]) -> None:
        """What takes time; its result is the event of its end."""
        job.task = asyncio.create_task(work)
        job.task.add_done_callback(lambda task: self._task_ended(job, task))

    def _task_ended(self, job: Job, task: asyncio.Task) -> None:
        job.task = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Abort):
            self.happens(job.key, attempt.Ends(error.code, error.message))
        elif error is not None:
            self.log.error("job failed", request=job.run.request, exc_info=error)
            self.happens(job.key, attempt.Ends("internal", f"{self.instance}: {error!r}"))
        elif not task.cancelled() and task.result() is not None:
            self.happens(job.key, task.result())
        self._wind_up(job)

    def _stop_work(self, job: Job) -> None:
        self._waiting.pop(job.key, None)
        if job.timer is not None:
            job.timer.cancel()
        if job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()  # it may wait for a chunk, which nobody computes any more

    def _wind_up(self, job: Job) -> None:
        """It is over, and neither a task nor a ticket is left: nothing of it is here any more."""
        live = job.ticket is not None and job.ticket.ticket in self.tickets.live
        if job.state.phase is not Phase.OVER or job.task is not None or live or self.jobs.get(job.key) is not job:
            return
        self._release_source(job)
        del self.jobs[job.key]
        self.undepend(job.run.decode)
        outcome = ""
        if job.ticket is not None:
            del self.by_ticket[job.ticket.ticket]
            outcome = self.tickets.get(job.ticket.ticket).outcome
        if outcome == "admitted":
            self.counters["committed"] += 1
            self.trace.event(job.run.request, "prefill.committed", ms=(time.monotonic() - job.placed) * 1e3)
        else:
            self.counters["cancelled"] += not job.reported

    # ------------------------------------------------------------ the ticket's machine

    def _feed(self, job: Job, event: Any) -> list[Any]:
        wanted = self.tickets.feed(job.ticket.ticket, event, time.monotonic())
        for effect in wanted:
            self._carry(job, effect)
        return wanted

    def _carry(self, job: Job, effect: Any) -> None:
        """Do what the machine of `job`'s ticket wants."""
        match effect:
            case effects.SendCommit():
                self._send_commit(job)
            case effects.SendDone():
                done = m.WriterDone(job.ticket.ticket, job.ticket.generation)
                self._tell_decode(job, "writer_done", done, lambda _: events.DoneAnswered())
            case effects.SendFail(code, text):
                self._tell_decode(job, "fail", self._fail_message(job, code, text), lambda _: None)
            case effects.Report(code, text):
                self._report(job, code, text)
            case effects.StopTransfers():
                if job.task is not None:
                    job.task.cancel()
            case effects.ReleaseSource():
                self._release_source(job)
                self._stop_work(job)
        self._look_at_ticket(job)

    def _look_at_ticket(self, job: Job) -> None:
        """When the writer's machine is at its end, so is the attempt."""
        if job.ticket.ticket not in self.tickets.live:
            self.happens(job.key, attempt.TicketOver())

    def _send_commit(self, job: Job) -> None:
        self._tell_decode(
            job, "commit", job.record, lambda a: events.CommitAnswered(a.verdict if isinstance(a, m.Verdict) else "pending")
        )

    def _tell_decode(self, job: Job, verb: str, message: m.Message, event: Callable[[m.Message], Any]) -> None:
        """Ask once; the machine repeats what matters. Nobody there: the owner is gone."""
        future = self.bus.ask(f"headrace.decode.{job.run.decode}.{verb}", message, ASK_SECONDS)

        def answered(future: asyncio.Future) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if isinstance(error, NoResponder):
                said = events.OwnerLost()
            elif error is not None:
                return
            else:
                said = event(future.result())
            if said is not None and job.ticket is not None and job.ticket.ticket in self.tickets.live:
                self._feed(job, said)

        future.add_done_callback(answered)

    def _fail_message(self, job: Job, code: str, text: str) -> m.Fail:
        problem = m.Problem(STATUS.get(code, 502), f"prefill_{code}", text)
        return m.Fail(job.run.request, job.run.attempt, job.ticket.ticket if job.ticket else "", problem)

    def _report(self, job: Job, code: str, text: str) -> None:
        """FAILED, at once, to the gateway."""
        if job.reported:
            return
        job.reported = True
        run = job.run
        self.counters["failed"] += 1
        self.trace.event(run.request, "prefill.failed", code=code, message=text)
        problem = m.Problem(STATUS.get(code, 502), f"prefill_{code}", text)
        self.outbox.add_soon(run.gateway, m.OutEntry(run.request, run.attempt, 0, 0, b"", finish="abort", problem=problem))

    def ticket_status(self, message: m.TicketStatus) -> m.Message:
        """Decode saw a flag without its record, or holds memory in quarantine. "done": we shall not write, now or ever."""
        state, job = self.tickets.get(message.ticket), self.by_ticket.get(message.ticket)
        status = writer.status(state)
        if state is None:
            self.denied.add(message.ticket, time.monotonic())
        if status == "committed":
            return job.record if job is not None and job.record is not None else m.Done("done")
        return m.Done(status)

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
            elif kind is api.PromptScores:
                self.outbox.scores(job.run.gateway, job.run.request, job.run.attempt, event)
            elif kind is api.BlocksFilled:
                self.store.fill(event, job.run.namespace, job.run.request)
            elif kind is api.SnapshotTaken:
                self.store.snapshot(event, job.run.namespace, job.run.request)
            elif kind is api.Failed:
                self.happens(job.key, attempt.Ends(event.code, event.message))

    # ------------------------------------------------------------ ends

    def _release_source(self, job: Job) -> None:
        """Nothing reads this prompt's blocks here any more."""
        if job.released:
            return
        job.released = True
        if job.done is not None:
            self.engine.release(job.key)
        else:
            self.engine.cancel(job.key)
        self.engine.pool.release(job.pins)
        job.pins = []
        self.host.wake()

    def cancel(self, message: m.Cancel) -> m.Done:
        """Stop an attempt; one that is not here is refused if it comes later."""
        done = self.happens(f"{message.request}/{message.attempt}", attempt.Cancel(message.reason or "cancelled"))
        return m.Done(done.code)

    def peer_died(self, instance: str, why: str) -> None:
        for job in list(self.jobs.values()):
            if job.run.decode == instance:
                self.happens(job.key, attempt.Ends("lost", f"{instance} died: {why}"))
        if self.sight is not None:
            self.sight.peer_died(instance, why)

    # ------------------------------------------------------------ sweeps

    def tick(self, now: float) -> None:
        """Deadlines of what has no ticket yet, renewals, and what the tickets' machines do by themselves."""
        for job in list(self.jobs.values()):
            if job.ticket is None:
                if job.deadline <= now:
                    late = f"not computed within its deadline of {job.run.deadline:g} s"
                    self.happens(job.key, attempt.Ends("deadline", late))
            elif job.state.phase is Phase.WRITING and now - job.renewed > job.ticket.ttl / 3:
                self._renew(job)
        if self._waiting:
            self._yield_pins(now)
        for ticket, effect in self.tickets.tick(now):
            job = self.by_ticket.get(ticket)
            if job is not None:
                self._carry(job, effect)
        for job in list(self.by_ticket.values()):
            self._look_at_ticket(job)
        self.tombstones.tick(now)
        self.denied.tick(now)
        if self.sight is not None:
            self.sight.tick(now)

    def owners(self) -> dict[int, int]:
        out: dict[int, int] = {}
        for job in self.jobs.values():
            for block in job.pins:
                out[block] = out.get(block, 0) + 1
        return out

    def debts(self) -> dict[str, int]:
        debts = {"live": len(self.jobs), "tickets": len(self.tickets), "waiting": len(self._waiting)}
        if self.sight is not None:
            debts["deliveries"] = len(self.sight.staging)
        return debts

    def _hasher(self, namespace: bytes) -> BlockHasher:
        hasher = self._hashers.get(namespace)
        if hasher is None:
            if len(self._hashers) >= 1024:
                self._hashers.clear()
            hasher = self._hashers[namespace] = BlockHasher(self.engine.info.layout_id, namespace)
        return hasher
