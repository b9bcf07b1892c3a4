"""All requests of a gateway: what happens to them is told to their machines, and what those want is done.

Knows the router, the line, timers and probes, and who is told what. Does not know what an event means for a request
(`request.py`), how workers are asked (`legs.py`), what becomes of their output (`output.py`), HTTP, protocols or text.

No request has a task of its own: `Dispatcher.run` is awaited by whoever brought it, and everything happens in callbacks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import structlog

from headrace.bus import Bus, Disconnected, Peers, Prober, Pulse, Trace, subjects
from headrace.bus import messages as m

from . import errors, request
from .errors import GatewayError
from .legs import Legs
from .line import Line
from .output import Output, PartSink
from .record import Record
from .request import Phase
from .routing import Router

NUDGE_SECONDS = 0.25
TICK_SECONDS = 0.05  # deadlines are noticed this much late

log = structlog.get_logger("headrace.gateway")


class Dispatcher:
    def __init__(self, bus: Bus, peers: Peers, gateway: str, epoch: int, router: Router, trace: Trace, settings: Any):
        self.bus, self.peers, self.gateway = bus, peers, gateway
        self.router, self.trace, self.settings = router, trace, settings
        self.records: dict[str, Record] = {}
        self.line = Line()
        self.legs = Legs(bus, gateway, epoch, settings)
        self.pulse = Pulse(bus, self._on_disconnect, self._on_reconnect)
        self.prober = Prober(bus, gateway, self.worker_died, self._on_pong, self.pulse.doubt)
        self.counters = dict.fromkeys(
            ("retries", "migrations", "gaps", "resumes", "unknown_outputs", "stale_outputs", "deaths", "deadlines", "cancels",
             "queued"), 0,
        )  # fmt: skip
        self.output = Output(self)
        self.loop = asyncio.get_running_loop()
        self._nudge: asyncio.TimerHandle | None = None
        self._ticking = False
        self._grace: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._arrivals = itertools.count(1)

    async def start(self) -> None:
        await self.bus.subscribe(subjects.out(self.gateway), self.output.on_out)
        self.bus.on_disconnect.append(self._on_disconnect)
        self.bus.on_reconnect.append(self._on_reconnect)
        self.prober.start()

    async def stop(self) -> None:
        for record in list(self.records.values()):
            self.happens(record, request.Breaks(errors.draining()))
        await self.prober.stop()
        await self.pulse.stop()
        self.output.stop()
        for handle in (self._nudge, self._grace):
            if handle is not None:
                handle.cancel()
        await self.legs.stop()

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    # ------------------------------------------------------------ one request

    async def run(self, record: Record) -> None:
        """Carry a request through; its output and its end are told to the sink. Cancelling the caller cancels the request."""
        if len(self.records) >= self.settings.max_requests:
            limit = self.settings.max_requests
            return record.sink.fail(errors.busy(f"{len(self.records)} requests are in flight here; the limit is {limit}"))
        record.arrival = next(self._arrivals)
        record.done = self.loop.create_future()
        self._begin(record)
        try:
            if not record.over:
                await record.done
        finally:
            self.shed(record)  # cancelled; does nothing when it ended by itself

    def shed(self, record: Record) -> None:
        """The client takes its output too slowly, or is gone."""
        self.happens(record, request.Leaves())

    def _begin(self, record: Record) -> None:
        if record.over:
            return
        self.records[record.request] = record
        self._idle.clear()
        if not self._ticking:
            self._ticking = True
            self.loop.call_later(TICK_SECONDS, self._tick)
        s = self.settings
        self.happens(record, request.Arrives(request.Limits(
            s.max_attempts, s.max_migrations, s.queue_seconds, s.worker_seconds, s.command_seconds, s.bus_grace_seconds
        )))  # fmt: skip

    def _tick(self) -> None:
        """Deadlines, patience and silent streams: one timer for all requests, which is cheaper than some for each."""
        now, silence = time.monotonic(), self.settings.keepalive_seconds
        for record in list(self.records.values()):
            if now >= record.state.due:
                self._carry_out(record, *request.tick(record.state, now))
            elif record.state.phase is Phase.OFFLINE and self.on_the_bus:
                self.happens(record, request.BusBack())
            else:
                record.sink.tick(now, silence)
        self._ticking = bool(self.records)
        if self._ticking:
            self.loop.call_later(TICK_SECONDS, self._tick)

    # ------------------------------------------------------------ the machine of a request

    def happens(self, record: Record, event: Any) -> None:
        """One event of a request: its machine says what follows, which is done."""
        self._carry_out(record, *request.step(record.state, event, time.monotonic()))

    def _carry_out(self, record: Record, after: request.Request, effects: list[Any]) -> None:
        ends = after.phase is Phase.OVER and not record.over
        record.state = after  # now: what follows may bring further events
        try:
            for effect in effects:
                self._do(record, effect)
        except Exception:
            self.defect(record)
        if ends:
            self._forget(record)

    def _do(self, record: Record, effect: Any) -> None:
        match effect:
            case request.Place():
                self.happens(record, request.Placed(bool(self.line.waiting)))
            case request.Choose(without):
                self._choose(record, without)
            case request.Join(always):
                self._join(record, always)
            case request.LeaveLine():
                self.line.leave(record)
                self.capacity()
            case request.Look():
                record.look = self.legs.aside(self._look(record))
            case request.Admit(attempt):
                record.expect()  # here, not at a loss: one that was merely refused may have had questions open too
                self._admit(record, attempt)
            case request.Hold(attempt, watched):
                prefill, decode = record.pair
                self.router.sent(prefill, decode, record.prompt.hashes, len(record.prompt.ids))
                for leg in watched:
                    self.prober.watch((decode if leg == decode.instance else prefill).presence.role, leg)
            case request.Run(attempt, _, have):
                self._run(record, attempt, have)
            case request.Unwatch(_, worker):
                self.prober.unwatch(worker)
            case request.LetGo(_, watched):
                for leg in watched:
                    self.prober.unwatch(leg)
                for worker in record.pair:
                    self.router.done(worker)
            case request.Cancel(attempt, role, worker, reason):
                self.counters["cancels"] += 1
                kept = {n: c.kept for n, c in enumerate(record.choices) if c.kept >= 0} if reason == "stop" else {}
                self.legs.cancel(role, worker, m.Cancel(record.request, attempt, reason, kept), record.deadline)
            case _:
                self._tell(record, effect)

    def _tell(self, record: Record, effect: Any) -> None:
        """What the client hears, and traces."""
        ms = (time.monotonic() - record.received) * 1e3
        match effect:
            case request.Finish(number, reason, last):
                record.sink.finish(number, reason, last)
            case request.Flush():
                record.sink.flush()
            case request.End():
                usage = record.total_usage()
                self.trace.event(
                    record.request, "gateway.finished", ms, tokens=usage.completion_tokens, cached=usage.cached_tokens
                )
                record.sink.end(usage)
            case request.Fail(error):
                self.counters["deadlines"] += error.code == "deadline_exceeded"
                self.trace.event(record.request, "gateway.failed", ms, status=error.status, why=error.message)
                record.sink.fail(error)
            case request.Shed():
                self.trace.event(record.request, "gateway.cancelled", ms)
            case request.Retry(attempt, worker, why, migrates):
                record.replay()
                tokens = sum(choice.next for choice in record.choices)
                self.counters["migrations" if migrates else "retries"] += 1
                self.trace.event(record.request, "gateway.migrate" if migrates else "gateway.retry", None, attempt=attempt,
                                 lost=worker, why=why, tokens=tokens)  # fmt: skip
            case request.Split():
                record.parts = [
                    record.split(PartSink(self, record, number), number)
                    for number, choice in enumerate(record.choices) if not choice.over
                ]  # fmt: skip
                for part in record.parts:
                    self._begin(part)
            case request.EndParts():
                for part in record.parts:
                    self.happens(part, request.Leaves("failed"))

    def _forget(self, record: Record) -> None:
        if self.records.get(record.request) is record:
            del self.records[record.request]
        if not self.records:
            self._idle.set()
        if record.look is not None and record.look is not asyncio.current_task():
            record.look.cancel()
        if record.done is not None and not record.done.done():
            record.done.set_result(None)

    def defect(self, record: Record) -> None:
        """Something broke here while one request was handled; the others go on."""
        log.exception("request failed", request=record.request)
        self.happens(record, request.Breaks(errors.internal()))

    # ------------------------------------------------------------ a pair, and the line

    def _choose(self, record: Record, without: frozenset[str]) -> None:
        """The best pair of its model's workers now. Output of one checkpoint is not continued by another."""
        self.line.step_out(record)
        group = self.router.group(record.group.model) or record.group
        if record.state.begun and (group.layout_id, group.checkpoint) != record.origin:
            missing = f"worker with the checkpoint that began this output ({record.group.checkpoint})"
            return self.happens(record, request.OtherOutput(missing))
        record.group = group
        record.pair = self.router.choose(group, record.prompt.hashes, len(record.prompt.ids), set(without))
        if record.pair is None:
            missing = "" if group.prefills and group.decodes else "prefill " if group.decodes else "decode "
            return self.happens(record, request.NoPair(f"{missing}worker for {group.model}"))
        self.happens(record, request.Pair(record.pair[0].instance, record.pair[1].instance))

    async def _look(self, record: Record) -> None:
        try:
            await record.look_again(record.seen)  # type: ignore[misc, arg-type]
            seen = request.Seen()
        except GatewayError as error:
            seen = request.Seen(error)
        except Exception:
            return self.defect(record)
        self.happens(record, seen)

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return self.line.queued

    def _join(self, record: Record, always: bool) -> None:
        if not always and self.line.queued >= self.settings.max_queue:
            return self.happens(record, request.LineFull(self.line.queued))
        if not record.slot:
            self.counters["queued"] += 1
            self.trace.event(record.request, "gateway.queued", None, waiting=self.line.queued + 1)
            self.loop.call_soon(self.capacity)
        self.line.join(record)
        if self._nudge is None:
            self._nudge = self.loop.call_later(NUDGE_SECONDS, self._on_nudge)

    def _on_nudge(self) -> None:
        """Room is told, but words get lost: ask again now and then while somebody waits."""
        self._nudge = self.loop.call_later(NUDGE_SECONDS, self._on_nudge) if self.line.waiting else None
        self.capacity()

    def capacity(self) -> None:
        """There may be room: let as many try, in their order, as the workers' last words allow, and always one."""
        for record in self.line.call_up(self.router.room()):
            self.loop.call_soon(self.happens, record, request.Called())

    # ------------------------------------------------------------ the legs' answers

    def _admit(self, record: Record, attempt: int) -> None:
        if self.pulse.silent:
            return self.happens(record, request.Offline(attempt))
        decode = record.pair[1].instance
        record.asked = time.monotonic()

        def heard(answer: Any) -> None:
            if isinstance(answer, m.Admitted):
                self.router.loaded(decode, answer.load)
                self._traced(record, attempt, "gateway.admitted", decode=decode, have=answer.have)
                return self.happens(record, request.Admitted(attempt, answer.have))
            self._not_taken(record, attempt, decode, answer)

        self.legs.admit(record, record.pair[1], heard)

    def _run(self, record: Record, attempt: int, have: int) -> None:
        prefill, decode = record.pair
        record.asked = time.monotonic()

        def heard(answer: Any) -> None:
            if isinstance(answer, m.Accepted):
                self.router.loaded(prefill.instance, answer.load)
                self._traced(record, attempt, "gateway.accepted", prefill=prefill.instance)
                return self.happens(record, request.Accepted(attempt))
            self._not_taken(record, attempt, prefill.instance, answer)

        self.legs.run(record, prefill, decode.instance, have, heard)

    def _traced(self, record: Record, attempt: int, name: str, **fields: Any) -> None:
        if attempt == record.attempt and not record.over:
            self.trace.event(record.request, name, (time.monotonic() - record.asked) * 1e3, **fields, attempt=attempt)

    def _not_taken(self, record: Record, attempt: int, worker: str, answer: Any) -> None:
        """Refused, or nothing was heard, or we are off the bus."""
        if isinstance(answer, Disconnected):
            return self.happens(record, request.Offline(attempt))
        if not isinstance(answer, m.Refused):
            known = self.pulse.doubt()
            return known.add_done_callback(lambda carries: self._unanswered(record, attempt, worker, carries.result()))
        if answer.code not in ("busy", "full", "invalid"):
            self.router.avoid(worker)
        self.router.loaded(worker, answer.load)
        log.debug("refused", instance=worker, code=answer.code, message=answer.message)
        self.happens(record, request.Refused(attempt, worker, answer))

    def _unanswered(self, record: Record, attempt: int, worker: str, carries: bool) -> None:
        """The worker is to blame only if the bus carries anything."""
        if not carries:
            return self.happens(record, request.Offline(attempt))
        self.router.avoid(worker)
        self.happens(record, request.Refused(attempt, worker, None))

    def first_output(self, record: Record) -> None:
        if record.origin is None:
            record.origin = record.group.layout_id, record.group.checkpoint
            self.trace.event(record.request, "gateway.first_token", (time.monotonic() - record.received) * 1e3)
        self.happens(record, request.FirstOutput())

    @property
    def on_the_bus(self) -> bool:
        """Connected, and what we send comes somewhere, as far as is known."""
        return self.bus.connected and not self.pulse.silent

    # ------------------------------------------------------------ workers that die, and the bus itself

    def worker_died(self, instance: str, why: str) -> None:
        """The prober found it dead. What ran there goes on elsewhere."""
        self.counters["deaths"] += 1
        worker = self.router.workers.get(instance)
        role = worker.presence.role if worker else "decode"
        self.peers.forget(instance)
        for record in list(self.records.values()):
            self.happens(record, request.Died(instance, role, why))

    def _on_pong(self, pong: m.Pong) -> None:
        self.router.loaded(pong.instance, pong.load)

    def _on_disconnect(self) -> None:
        if self._grace is None:
            self._grace = self.loop.call_later(self.settings.bus_grace_seconds, self._on_grace_over)

    def _on_grace_over(self) -> None:
        self._grace = None
        if not self.on_the_bus:
            for record in list(self.records.values()):
                self.happens(record, request.Breaks(errors.bus_down()))

    def _on_reconnect(self) -> None:
        """Output may have been lost, and nothing would tell: ask for it."""
        if not self.on_the_bus:  # connected, and nothing has come back yet
            return
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        for instance in {record.state.decode for record in self.records.values()}:
            self.output.missing(instance)
