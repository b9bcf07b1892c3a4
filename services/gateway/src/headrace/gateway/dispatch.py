"""All requests of a gateway: what happens to them is told to their machines, and what those want is done.

Knows the router, the line, timers and probes, and who is told what. Does not know what an event means for a request
(`request.py`), how workers are asked (`legs.py`), what becomes of their output (`output.py`), HTTP, protocols or text.

No request has a task of its own: `Dispatcher.run` is awaited by whoever brought it, and everything happens in callbacks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
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
        self.prober = Prober(bus, gateway, self.worker_died, self._on_pong, self.pulse.doubt, self._worker_late, self._alone)
        self.counters = dict.fromkeys(
            ("retries", "migrations", "gaps", "resumes", "unknown_outputs", "stale_outputs", "deaths", "late", "deadlines",
             "cancels", "queued"), 0,
        )  # fmt: skip
        self.output = Output(self)
        self._asking: dict[tuple[str, int], str] = {}  # (request, attempt) that waits for admission -> decode, probed
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
        ends = after.phase is Phase.OVER and record.state.phase is not Phase.OVER
        record.state = after  # now: what follows may bring further events
        try:
            for effect in effects:
                CARRIED_OUT[type(effect)](self, record, effect)
        except Exception:
            self.defect(record)
        if ends:
            self._forget(record)

    def _place(self, record: Record, _: request.Place) -> None:
        self.happens(record, request.Placed(bool(self.line.waiting)))

    def _leave_line(self, record: Record, _: request.LeaveLine) -> None:
        self.line.leave(record)
        self.capacity()

    def _look_again(self, record: Record, _: request.Look) -> None:
        record.look = self.legs.aside(self._look(record))

    def _hold(self, record: Record, effect: request.Hold) -> None:
        prefill, decode = record.pair
        if record.resident < 0:  # before `sent`, which counts this prompt itself
            record.resident = self.router.resident(record.group, record.prompt.hashes)
        self.router.sent(prefill, decode, record.prompt.hashes, len(record.prompt.ids))
        for leg in effect.watched:
            self.prober.watch((decode if leg == decode.instance else prefill).presence.role, leg)

    def _unwatch(self, record: Record, effect: request.Unwatch) -> None:
        self.prober.unwatch(effect.worker)

    def _let_go(self, record: Record, effect: request.LetGo) -> None:
        for leg in effect.watched:
            self.prober.unwatch(leg)
        for worker in record.pair:
            self.router.done(worker)

    def _cancel(self, record: Record, effect: request.Cancel) -> None:
        self.counters["cancels"] += 1
        kept = {n: c.kept for n, c in enumerate(record.choices) if c.kept >= 0} if effect.reason == "stop" else {}
        cancel = m.Cancel(record.request, effect.attempt, effect.reason, kept)
        self.legs.cancel(effect.role, effect.worker, cancel, record.deadline)

    def _retry(self, record: Record, effect: request.Retry) -> None:
        record.replay()
        record.repeated = True
        self.counters["migrations" if effect.migrates else "retries"] += 1
        self.trace.event(
            record.request, "gateway.migrate" if effect.migrates else "gateway.retry", None, attempt=effect.attempt,
            lost=effect.worker, why=effect.why, tokens=sum(c.next for c in record.choices),
        )  # fmt: skip

    def _split(self, record: Record, _: request.Split) -> None:
        record.parts = [
            record.split(PartSink(self, record, number), number)
            for number, choice in enumerate(record.choices) if not choice.over
        ]  # fmt: skip
        for part in record.parts:
            self._begin(part)

    def _end_parts(self, record: Record, _: request.EndParts) -> None:
        for part in record.parts:
            self.happens(part, request.Leaves("failed"))

    # ------------------------------------------------------------ what the client hears

    def _finish(self, record: Record, effect: request.Finish) -> None:
        record.sink.finish(effect.number, effect.reason, effect.last)

    def _flush(self, record: Record, _: request.Flush) -> None:
        record.sink.flush()

    def _end(self, record: Record, _: request.End) -> None:
        usage = record.total_usage()
        self.trace.event(
            record.request, "gateway.finished", _age(record), tokens=usage.completion_tokens, cached=usage.cached_tokens
        )
        record.sink.end(usage)

    def _fail(self, record: Record, effect: request.Fail) -> None:
        error = effect.error
        self.counters["deadlines"] += error.code == "deadline_exceeded"
        self.trace.event(record.request, "gateway.failed", _age(record), status=error.status, why=error.message)
        record.sink.fail(error)

    def _shed(self, record: Record, _: request.Shed) -> None:
        self.trace.event(record.request, "gateway.cancelled", _age(record))

    # ------------------------------------------------------------ the end of a record

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

    def _choose(self, record: Record, effect: request.Choose) -> None:
        """The best pair of its model's workers now. Output of one checkpoint is not continued by another."""
        self.line.step_out(record)
        group = self.router.group(record.group.model) or record.group
        if record.state.begun and (group.layout_id, group.checkpoint) != record.origin:
            missing = f"worker with the checkpoint that began this output ({record.group.checkpoint})"
            return self.happens(record, request.OtherOutput(missing))
        record.group = group
        record.pair = self.router.choose(group, record.prompt.hashes, len(record.prompt.ids), set(effect.without))
        if record.pair is None:
            missing = "" if group.prefills and group.decodes else "prefill " if group.decodes else "decode "
            return self.happens(record, request.NoPair(f"{missing}worker for {group.model}", self.router.coming(group)))
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

    def _join(self, record: Record, effect: request.Join) -> None:
        if not effect.always and self.line.queued >= self.settings.max_queue:
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

    def _admit(self, record: Record, effect: request.Admit) -> None:
        attempt = effect.attempt
        record.expect()  # here, not at a loss: one that was merely refused may have had questions open too
        if self.pulse.silent:
            return self.happens(record, request.Offline(attempt))
        decode = record.pair[1].instance
        record.asked = time.monotonic()
        self._asking[record.request, attempt] = decode
        self.prober.watch(record.pair[1].presence.role, decode)

        def heard(answer: Any) -> None:
            if self._asking.pop((record.request, attempt), None) is None:
                return  # it died meanwhile, which was told
            self.prober.unwatch(decode)
            if isinstance(answer, m.Admitted):
                self.router.loaded(decode, answer.load)
                self._traced(record, attempt, "gateway.admitted", decode=decode, have=answer.have)
                return self.happens(record, request.Admitted(attempt, answer.have))
            self._not_taken(record, attempt, decode, answer)

        self.legs.admit(record, record.pair[1], heard)

    def _run(self, record: Record, effect: request.Run) -> None:
        attempt, (prefill, decode) = effect.attempt, record.pair
        record.asked = time.monotonic()

        def heard(answer: Any) -> None:
            if isinstance(answer, m.Accepted):
                self.router.loaded(prefill.instance, answer.load)
                self._traced(record, attempt, "gateway.accepted", prefill=prefill.instance)
                return self.happens(record, request.Accepted(attempt))
            self._not_taken(record, attempt, prefill.instance, answer)

        self.legs.run(record, prefill, decode.instance, effect.have, heard)

    def _traced(self, record: Record, attempt: int, name: str, **fields: Any) -> None:
        if attempt == record.attempt and not record.over:
            self.trace.event(record.request, name, (time.monotonic() - record.asked) * 1e3, **fields, attempt=attempt)

    def _not_taken(self, record: Record, attempt: int, worker: str, answer: Any) -> None:
        """Refused, or nothing was heard, or we are off the bus."""
        record.repeated |= not isinstance(answer, m.Refused)
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

    def _alone(self, instance: str) -> bool:
        """Whether its work could go nowhere else now: to begin it again would only add to its load."""
        worker = self.router.workers.get(instance)
        return worker is not None and not self.router.elsewhere(worker.presence.model, {instance, *self.prober.doubted})

    def _worker_late(self, instance: str, why: str) -> None:
        self.worker_died(instance, why, late=True)

    def worker_died(self, instance: str, why: str, late: bool = False) -> None:
        """The prober found it dead, or it does not answer. What ran there goes on elsewhere."""
        self.counters["late" if late else "deaths"] += 1
        worker = self.router.workers.get(instance)
        role = worker.presence.role if worker else "decode"
        self.peers.forget(instance)
        asked = [key for key, decode in self._asking.items() if decode == instance]
        for key in asked:
            del self._asking[key]
        for record in list(self.records.values()):
            self.happens(record, request.Died(instance, role, why, late))
        for name, attempt in asked:  # its word won't come: that is known now, not when patience ends
            if name in self.records:
                self._unanswered(self.records[name], attempt, instance, True)

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


def _age(record: Record) -> float:
    """Milliseconds since it came."""
    return (time.monotonic() - record.received) * 1e3


CARRIED_OUT: dict[type, Callable[[Dispatcher, Record, Any], None]] = {  # how; a chain of tests costs more than most effects
    request.Place: Dispatcher._place, request.Choose: Dispatcher._choose, request.Join: Dispatcher._join,
    request.LeaveLine: Dispatcher._leave_line, request.Look: Dispatcher._look_again, request.Admit: Dispatcher._admit,
    request.Hold: Dispatcher._hold, request.Run: Dispatcher._run, request.Unwatch: Dispatcher._unwatch,
    request.LetGo: Dispatcher._let_go, request.Cancel: Dispatcher._cancel, request.Retry: Dispatcher._retry,
    request.Split: Dispatcher._split, request.EndParts: Dispatcher._end_parts, request.Finish: Dispatcher._finish,
    request.Flush: Dispatcher._flush, request.End: Dispatcher._end, request.Fail: Dispatcher._fail,
    request.Shed: Dispatcher._shed,
}  # fmt: skip
