"""The life of a request between the gateway and its workers.

Knows: admit -> run -> output, attempts, gaps, death, deadlines, cancelling, waiting for room. Does not know: HTTP,
protocols, text; what comes out goes to the record's `Sink`.

One `Record` per request and no task of its own: `Dispatcher.run` is awaited by whoever brought the request; output arrives in a
synchronous callback and goes straight through to the sink. An attempt is one (request, attempt) pair of legs. A request whose
attempt is lost gets another one elsewhere; one that has output already goes on behind it (`record.py`), each choice by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from bisect import insort
from collections import OrderedDict
from typing import Any

import structlog

from headrace.bus import Bus, BusError, BusTimeout, Disconnected, Peers, Prober, Trace, subjects
from headrace.bus import messages as m

from . import errors
from .errors import GatewayError
from .record import Choice, Record
from .routing import Group, Router, Worker

REMEMBERED = 8192  # cancelled attempts whose late output is no surprise
RETRY_CODES = frozenset({"busy", "full", "draining", "mismatch", "unknown", "stale", "closed", "failed"})
WAIT_CODES = frozenset({"closed", "draining", "stale"})  # of refusals: another worker, or the same one restarted, may take it
BLIND_CODES = frozenset({"prefill_vision_lost", "prefill_vision_unknown"})  # images must be identified again
CANCEL_TRIES = 3  # at least
NUDGE_SECONDS = 0.25
TICK_SECONDS = 0.05  # deadlines are noticed this much late
TAIL_SECONDS = 0.25  # after presence says more was sent than arrived, wait this long for it

log = structlog.get_logger("headrace.gateway")


class Dispatcher:
    """All requests of this gateway."""

    def __init__(self, bus: Bus, peers: Peers, gateway: str, epoch: int, router: Router, trace: Trace, settings: Any):
        self.bus, self.peers, self.gateway, self.epoch = bus, peers, gateway, epoch
        self.router, self.trace, self.settings = router, trace, settings
        self.records: dict[str, Record] = {}
        self.prober = Prober(bus, gateway, self.worker_died, self._on_pong)
        self.counters = dict.fromkeys(
            ("retries", "migrations", "gaps", "resumes", "unknown_outputs", "stale_outputs", "deaths", "deadlines", "cancels",
             "queued"), 0,
        )  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._told: OrderedDict[tuple[str, int], None] = OrderedDict()  # attempts that decode was told to stop
        self.queued = 0  # requests in the line
        self._trying = 0  # of them, those that were called up and look for room now
        self._waiting: list[tuple[tuple[int, int, int], asyncio.Future[None]]] = []  # the line, in order of service
        self._nudge: asyncio.TimerHandle | None = None
        self._ticking = False
        self._seq: dict[str, tuple[int, int]] = {}  # instance -> epoch, last Out.seq
        self._tails: dict[str, asyncio.TimerHandle] = {}
        self._side: set[asyncio.Task] = set()  # cancels and resumes under way
        self._grace: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._arrivals = itertools.count(1)

    async def start(self) -> None:
        await self.bus.subscribe(subjects.out(self.gateway), self.on_out)
        self.bus.on_disconnect.append(self._on_disconnect)
        self.bus.on_reconnect.append(self._on_reconnect)
        self.prober.start()

    async def stop(self) -> None:
        for record in list(self.records.values()):
            self._cancel_legs(record, "failed")
            self._fail(record, errors.draining())
        await self.prober.stop()
        if self._nudge is not None:
            self._nudge.cancel()
        for handle in self._tails.values():
            handle.cancel()
        if self._grace is not None:
            self._grace.cancel()
        if self._side:
            await asyncio.wait(self._side, timeout=1.0)
        for task in self._side:
            task.cancel()

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
        await self._carry(record)

    async def _carry(self, record: Record) -> None:
        self.records[record.request] = record
        self._idle.clear()
        if not self._ticking:
            self._ticking = True
            self._loop.call_later(TICK_SECONDS, self._tick)
        try:
            while not record.ended:
                if record.parts:
                    await asyncio.gather(*map(self._carry, record.parts))
                    continue
                await self._place(record)
                if not record.ended and not record.parts:
                    await record.outcome  # type: ignore[misc]
        except GatewayError as error:
            self._fail(record, errors.not_continued(error) if record.begun else error)
        finally:
            self.shed(record)  # cancelled, or something broke here; does nothing when it ended by itself
            self._forget(record)

    def _tick(self) -> None:
        """Deadlines and silent streams: one timer for all requests, which is cheaper than two for each."""
        now, silence = time.monotonic(), self.settings.keepalive_seconds
        for record in list(self.records.values()):
            if now >= record.deadline:
                self._on_deadline(record)
            elif record.settled and now >= record.settled:
                self._complete(record)
            else:
                record.sink.tick(now, silence)
        self._ticking = bool(self.records)
        if self._ticking:
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _forget(self, record: Record) -> None:
        self._leave_line(record)
        self.records.pop(record.request, None)
        if not self.records:
            self._idle.set()
        self.capacity()

    async def _place(self, record: Record) -> None:
        """Find a pair that takes the request and start it there. Raises GatewayError."""
        excluded: set[str] = set()
        refusal: m.Refused | None = None
        nobody = 0.0  # since when no worker is there, or none that would take anything
        if self._waiting:  # others came first
            await self._wait(record)
        if record.blind:
            record.blind = False
            await record.look_again(record.seen)  # type: ignore[misc, arg-type]
        while not record.ended and not record.parts:
            group = record.group = self._group(record)
            pair = self.router.choose(group, record.prompt.hashes, len(record.prompt.ids), excluded | record.shunned)
            if pair is None and record.shunned:
                record.shunned = frozenset()  # there is nobody else
                continue
            if pair is None:
                if refusal is not None and refusal.code in ("busy", "full"):
                    nobody = 0.0
                else:  # one that was killed or drained is replaced soon; a mismatch is not
                    nobody = nobody or time.monotonic()
                    self._check_patience(group, refusal, nobody)
                await self._wait(record, nobody)
                excluded, refusal = set(), None
                continue
            record.attempt += 1
            record.outcome = self._loop.create_future()
            try:
                refusal = await self._try(record, *pair, excluded) or refusal
            except Disconnected:
                if record.emitted:
                    break
                self._send_cancel("decode", pair[1].instance, record, "failed")  # before the wait: the client may leave in it
                if pair[0] is not pair[1]:
                    self._send_cancel("prefill", pair[0].instance, record, "failed")
                self._let_go(record)
                await self._wait_for_bus(record)
                continue
            if record.watching:
                break
        self._leave_line(record)
        self.capacity()  # where one found room, the next may too

    def _group(self, record: Record) -> Group:
        """The workers of its model now. Output of one checkpoint is not continued by another. Raises GatewayError."""
        group = self.router.group(record.group.model) or record.group
        if record.begun and (group.layout_id, group.checkpoint) != record.origin:
            raise errors.no_workers(f"worker with the checkpoint that began this output ({record.group.checkpoint})")
        return group

    def _check_patience(self, group: Group, refusal: m.Refused | None, nobody: float) -> None:
        """Raises what the client is told when waiting is no use, or no worker has come since `nobody`."""
        if refusal is not None and refusal.code not in WAIT_CODES:
            raise errors.from_refusal(refusal, "workers")
        if time.monotonic() >= nobody + self.settings.worker_seconds:
            missing = "" if group.prefills and group.decodes else "prefill " if group.decodes else "decode "
            raise errors.no_workers(f"{missing}worker for {group.model}", self.settings.worker_seconds)

    async def _try(self, record: Record, prefill: Worker, decode: Worker, excluded: set[str]) -> m.Refused | None:
        """One attempt at one pair: None when it runs, else what refused, which is then excluded."""
        settings, request, attempt, prompt = self.settings, record.request, record.attempt, record.prompt
        timeout = min(settings.command_seconds, record.remaining())
        patience = timeout if record.sampling.grammar is None else min(settings.grammar_seconds, record.remaining())
        started = time.monotonic()
        admit = m.Admit(
            request, attempt, self.gateway, self.epoch, len(prompt.ids), b"".join(prompt.hashes), record.namespace,
            record.sampling, record.remaining(), record.priority, record.client_id, record.traceparent,
            record.images, prompt.output, record.first_choice,
        )  # fmt: skip
        try:
            answer = await self._command(decode, "admit", admit, patience, record)
        except asyncio.CancelledError:  # the client left; decode may have admitted it
            self._send_cancel("decode", decode.instance, record, "client")
            raise
        if not isinstance(answer, m.Admitted):
            if answer is None or answer.code == "stale":
                self._send_cancel("decode", decode.instance, record, "failed")
            return self._refused(answer, decode.instance, excluded)
        self.router.loaded(decode.instance, answer.load)
        if record.ended or record.attempt != attempt:  # deadline, client or decode's own word, while we asked
            cancel = m.Cancel(request, attempt, "failed")
            self._side_task(self._tell_cancel("decode", decode.instance, cancel, record.deadline))
            return None
        now = time.monotonic()
        self.trace.event(
            request, "gateway.admitted", (now - started) * 1e3, decode=decode.instance, have=answer.have, attempt=attempt
        )

        record.prefill, record.decode = prefill, decode
        self.router.sent(prefill, decode, prompt.hashes, len(prompt.ids))
        record.watching = (decode.instance, prefill.instance)
        self.prober.watch("decode", decode.instance)
        self.prober.watch(prefill.presence.role, prefill.instance)
        accepted = await self._command(
            prefill, "run",
            m.Run(request, attempt, self.gateway, decode.instance, answer.have, prompt.ids.tobytes(), b"".join(prompt.hashes),
                  record.namespace, record.remaining(), record.priority, record.client_id, record.traceparent,
                  record.images, record.seen.vision if record.seen else ""),
            timeout, record,
        )  # fmt: skip
        if isinstance(accepted, m.Accepted):
            self.router.loaded(prefill.instance, accepted.load)
            self.trace.event(
                request, "gateway.accepted", (time.monotonic() - now) * 1e3, prefill=prefill.instance, attempt=attempt
            )
            return None
        if record.emitted or record.ended or record.attempt != attempt:  # output overtook the answer, or it was lost meanwhile
            return None
        self._cancel_legs(record, "failed", prefill=accepted is None)
        self._let_go(record)
        return self._refused(accepted, prefill.instance, excluded)

    async def _command(self, worker: Worker, verb: str, message: m.Message, timeout: float, record: Record) -> Any:
        """The answer; None when the worker gave none. Raises Disconnected when it is us who are off the bus."""
        try:
            return await self.bus.request(
                worker.presence.role, worker.instance, verb, message, max(0.01, timeout), record.request, record.traceparent
            )
        except Disconnected:
            raise
        except BusTimeout:
            return None
        except BusError as error:
            return m.Refused("closed", str(error))

    def _refused(self, answer: Any, instance: str, excluded: set[str]) -> m.Refused:
        excluded.add(instance)
        refused = answer if isinstance(answer, m.Refused) else m.Refused("busy", f"{instance} does not answer")
        if refused.code == "invalid":
            raise errors.from_refusal(refused, instance)
        if answer is None or refused.code not in ("busy", "full"):
            self.router.avoid(instance)
        self.router.loaded(instance, refused.load)
        log.debug("refused", instance=instance, code=refused.code, message=refused.message)
        return refused

    # ------------------------------------------------------------ waiting

    async def _wait(self, record: Record, nobody: float = 0.0) -> None:
        """Wait in line for room at a worker, or for one to come: nobody is there since `nobody`. Raises GatewayError when it
        takes too long or the line is too long."""
        turn = record.turn = self._loop.create_future()
        place = record.place, turn
        if record.queued:  # it was called up, and found no room
            self._trying -= 1
        else:
            if self.queued >= self.settings.max_queue and not record.begun:
                raise errors.busy(f"all workers are busy and {self.queued} requests wait already")
            record.queued = time.monotonic()
            self.queued += 1
            self.counters["queued"] += 1
            self.trace.event(record.request, "gateway.queued", None, waiting=self.queued)
            self._loop.call_soon(self.capacity)
        insort(self._waiting, place, key=_place)
        if self._nudge is None:
            self._nudge = self._loop.call_later(NUDGE_SECONDS, self._on_nudge)
        until = nobody + self.settings.worker_seconds if nobody else record.queued + self.settings.queue_seconds
        try:
            async with asyncio.timeout(min(until, record.deadline) - time.monotonic()):
                await turn
        except TimeoutError:
            if record.deadline <= until:
                self._on_deadline(record)
            elif not nobody:
                raise errors.busy(f"no worker had room within {self.settings.queue_seconds:g} s") from None
        finally:
            if place in self._waiting:  # not called up: its time is over, or its client gone
                self._waiting.remove(place)
                self._trying += 1

    def _leave_line(self, record: Record) -> None:
        if record.queued:
            record.queued = 0.0
            self.queued -= 1
            self._trying -= 1

    def _on_nudge(self) -> None:
        """Room is told, but words get lost: ask again now and then while somebody waits."""
        self._nudge = self._loop.call_later(NUDGE_SECONDS, self._on_nudge) if self._waiting else None
        self.capacity()

    def capacity(self) -> None:
        """There may be room: let as many try, in their order, as the workers' last words allow, and always one."""
        room = max(1, self.router.room()) - self._trying
        for _ in range(min(room, len(self._waiting))):
            _, turn = self._waiting.pop(0)
            self._trying += 1
            if not turn.done():
                turn.set_result(None)

    async def _wait_for_bus(self, record: Record) -> None:
        until = time.monotonic() + min(self.settings.bus_grace_seconds, record.remaining())
        while not self.bus.connected:
            if time.monotonic() > until or record.ended:
                raise errors.bus_down()
            await asyncio.sleep(0.02)

    # ------------------------------------------------------------ output

    def on_out(self, out: m.Message, subject: str) -> None:
        if not isinstance(out, m.Out):
            return
        epoch, seq = self._seq.get(out.instance, (out.epoch, 0))  # workers count what they send to this gateway from 1 on
        if epoch != out.epoch:
            seq = 0
        if out.seq > seq:
            self._seq[out.instance] = (out.epoch, out.seq)
        records = self.records
        for entry in out.entries:
            record = records.get(entry.request)
            if record is None:
                self._unknown(out.instance, entry)
            elif entry.attempt != record.attempt:
                self.counters["stale_outputs"] += 1
                self._unknown(out.instance, entry)
            elif not record.ended:
                try:
                    self._on_entry(record, entry, out.instance)
                except Exception:
                    self._defect(record)
        if out.seq > seq + 1:  # messages were lost: whoever had tokens in them is behind and may never learn otherwise
            self.counters["gaps"] += 1
            self._resume_all(out.instance)

    def _on_entry(self, record: Record, entry: m.OutEntry, instance: str) -> None:
        if entry.problem is not None:
            return self._leg_failed(record, instance, entry.problem)
        if entry.choice >= len(record.choices):
            return
        choice = record.choices[entry.choice]
        if choice.finished:
            return
        if entry.prompt is not None and record.prompt_usage is None:
            record.prompt_usage = entry.prompt
        if entry.usage is not None:
            record.usage = entry.usage
        if entry.finish:
            choice.sampled = entry.sampled
        if choice.kept >= 0:  # a text stop ended it; decode's last word brings the usage
            if entry.finish:
                self._choice_finished(record, choice)
            return
        ids = m.unpack_ids(entry.ids)
        logprobs = entry.logprobs
        if entry.index != choice.next:
            if entry.index > choice.next:
                return self._resume(record, entry.choice)
            behind = choice.next - entry.index
            if behind > len(ids) or (behind == len(ids) and not entry.finish):
                return
            ids, logprobs = ids[behind:], logprobs[behind:] if logprobs is not None else None
        if entry.finish == "abort":  # ended there, and nobody says why
            return self._leg_failed(record, instance, m.Problem(500, "aborted", "the decode worker ended this request"))
        if not ids and not entry.finish:
            return
        choice.ids += ids
        if not record.emitted:
            self._first_output(record)
        sink = record.sink
        choice.kept = sink.tokens(entry.choice, ids, logprobs)
        if choice.kept < 0 and not entry.finish:
            return sink.flush()
        record.left -= 1
        sink.finish(entry.choice, "stop" if choice.kept >= 0 else entry.finish, not record.left)
        if entry.finish:
            self._choice_finished(record, choice)
        if record.open:
            sink.flush()
            if not record.left:  # all that are open were ended by text stops, of which decode does not know yet
                self._cancel_legs(record, "stop", {n: c.kept for n, c in enumerate(record.choices) if c.kept >= 0})
                record.settled = time.monotonic() + self.settings.command_seconds

    def _choice_finished(self, record: Record, choice: Choice) -> None:
        choice.finished = True
        record.open -= 1
        if not record.open:
            self._complete(record)

    def _complete(self, record: Record) -> None:
        """The request is over and went well; without a last word from decode its usage is what is known here."""
        if record.ended:
            return
        usage = record.total_usage()
        self._end(record)
        self.trace.event(record.request, "gateway.finished", (time.monotonic() - record.received) * 1e3,
                         tokens=usage.completion_tokens, cached=usage.cached_tokens)  # fmt: skip
        record.sink.end(usage)

    def _first_output(self, record: Record) -> None:
        record.emitted, record.losses = True, 0
        if not record.begun:
            record.origin = record.group.layout_id, record.group.checkpoint
            self.trace.event(record.request, "gateway.first_token", (time.monotonic() - record.received) * 1e3)
        if len(record.watching) == 2:  # prefill's part is over
            self.prober.unwatch(record.watching[1])
            record.watching = record.watching[:1]

    def _unknown(self, instance: str, entry: m.OutEntry) -> None:
        """Output of an attempt that is not ours, or not any more (its worker was thought dead): make it stop, once."""
        if (entry.request, entry.attempt) in self._told or entry.finish or entry.problem is not None:
            return
        self.counters["unknown_outputs"] += 1
        self._cancel("decode", instance, m.Cancel(entry.request, entry.attempt, "failed"))

    # ------------------------------------------------------------ gaps

    def _resume_all(self, instance: str) -> None:
        for record in self.records.values():
            if record.decode is not None and record.decode.instance == instance and record.watching and not record.ended:
                for number, choice in enumerate(record.choices):
                    if not choice.finished:
                        self._resume(record, number)

    def _resume(self, record: Record, number: int) -> None:
        choice = record.choices[number]
        if choice.resuming:
            choice.behind = True  # the answer that is under way may be older than what makes us ask now
        elif record.decode is not None:
            choice.resuming = True
            self.counters["resumes"] += 1
            self._side_task(self._fetch_lost(record, number, record.attempt, record.decode.instance))

    async def _fetch_lost(self, record: Record, number: int, attempt: int, instance: str) -> None:
        """Ask decode for what a gap lost, again and again until nothing is missing: perhaps no later message comes that would
        show it. The prober finds a dead worker, and the deadline ends all."""
        choice = record.choices[number]
        try:
            choice.behind = True
            while choice.behind and not choice.finished:
                choice.behind = False
                resume = m.Resume(record.request, attempt, number, choice.next)
                try:
                    answer = await self.bus.request("decode", instance, "resume", resume, self.settings.command_seconds)
                except BusTimeout:
                    answer, choice.behind = None, True
                if record.ended or record.attempt != attempt:
                    return
                self._take_resumed(record, answer, instance)
        except BusError:
            return  # gone, or we are off the bus: a reconnect asks again
        finally:
            choice.resuming = False

    def _take_resumed(self, record: Record, answer: m.Message | None, instance: str) -> None:
        """What decode no longer has can't be had: this attempt is lost."""
        attempt = record.attempt
        if isinstance(answer, m.Resumed):
            for entry in answer.entries:
                if entry.attempt == attempt == record.attempt and not record.ended:
                    self._on_entry(record, entry, instance)
        elif isinstance(answer, m.Refused):
            self._lost(
                record, instance, errors.worker_died("decode", f"output was lost and can't be repeated: {answer.message}")
            )

    def sent_so_far(self, presence: m.Presence) -> None:
        """Presence tells how much a worker has sent us. If the last of it never comes, it was lost."""
        sent = presence.out_seq.get(self.gateway, 0)
        instance = presence.instance
        epoch, seq = self._seq.get(instance, (presence.epoch, 0))
        if sent and (epoch != presence.epoch or seq < sent) and instance not in self._tails:
            self._tails[instance] = self._loop.call_later(TAIL_SECONDS, self._check_tail, instance, presence.epoch, sent)

    def left(self, instance: str) -> None:
        """An instance is no longer known; if it comes back, it counts on, and all that it still has for us is asked for."""
        self._seq.pop(instance, None)

    def _check_tail(self, instance: str, epoch: int, sent: int) -> None:
        self._tails.pop(instance, None)
        known, seq = self._seq.get(instance, (epoch, 0))
        if known == epoch and seq < sent:
            self.counters["gaps"] += 1
            self._seq[instance] = (epoch, sent)
            self._resume_all(instance)

    # ------------------------------------------------------------ trouble

    def worker_died(self, instance: str, why: str) -> None:
        """The prober found it dead. What ran there goes on elsewhere."""
        self.counters["deaths"] += 1
        worker = self.router.workers.get(instance)
        role = worker.presence.role if worker else "decode"
        self.peers.forget(instance)
        for record in list(self.records.values()):
            if instance in record.watching and not record.ended:
                record.watching = tuple(name for name in record.watching if name != instance)
                self._send_cancel(role, instance, record, "failed")  # it may have been stopped or cut off, and hold a credit
                try:
                    self._lost(record, instance, errors.worker_died(role, why))
                except Exception:
                    self._defect(record)

    def _defect(self, record: Record) -> None:
        """Something broke here while one request was handled; the others go on."""
        log.exception("request failed", request=record.request)
        self._cancel_legs(record, "failed")
        self._fail(record, errors.internal())

    def _leg_failed(self, record: Record, instance: str, problem: m.Problem) -> None:
        """A worker says that this attempt is over."""
        error = errors.from_problem(problem)
        if problem.code in BLIND_CODES:
            record.blind = True
        if problem.status < 500 and problem.code not in RETRY_CODES:
            self._cancel_legs(record, "failed", but=instance)
            return self._fail(record, error)
        self._lost(record, instance, error)

    def _lost(self, record: Record, instance: str, error: GatewayError) -> None:
        """This attempt can't go on; the leg that is left is cancelled. Another one goes on with what was output, if any."""
        self._cancel_legs(record, "failed", but=instance)
        if not record.left:  # nothing but decode's last word is missing
            return self._complete(record)
        record.losses += 1
        if record.losses >= self.settings.max_attempts or (record.begun and record.migrations >= self.settings.max_migrations):
            return self._fail(record, error)
        record.expect()
        record.shunned |= {instance}
        tokens = sum(choice.next for choice in record.choices)
        told = {"attempt": record.attempt, "lost": instance, "why": error.message, "tokens": tokens}
        if record.begun:
            self.trace.event(record.request, "gateway.migrate", None, **told)
            record.migrations += 1
            self.counters["migrations"] += 1
        else:
            self.trace.event(record.request, "gateway.retry", None, **told)
            self.counters["retries"] += 1
        self._let_go(record)
        if record.begun and len(record.choices) > 1:
            record.parts = [
                record.split(_PartSink(self, record, number), number)
                for number, choice in enumerate(record.choices) if not choice.over
            ]  # fmt: skip
            record.open = len(record.parts)
        record.attempt += 1  # now: output of the lost attempt is stale from here on
        if record.outcome is not None and not record.outcome.done():
            record.outcome.set_result("retry")

    def part_done(self, record: Record, number: int, usage: m.Usage) -> None:
        """A choice that had to go on by itself is over."""
        choice = record.choices[number]
        choice.sampled = usage.completion_tokens
        record.prompt_usage = record.prompt_usage or usage
        self._choice_finished(record, choice)

    def part_failed(self, record: Record, error: GatewayError) -> None:
        self._fail(record, error)

    def _on_deadline(self, record: Record) -> None:
        if not record.ended:
            self.counters["deadlines"] += 1
            self._cancel_legs(record, "deadline")
            self._fail(record, errors.deadline(record.seconds))

    def shed(self, record: Record) -> None:
        """The client takes its output too slowly, or is gone."""
        if not record.ended:
            self._cancel_legs(record, "client")
            self._end(record)
            self.trace.event(record.request, "gateway.cancelled", (time.monotonic() - record.received) * 1e3)

    def _fail(self, record: Record, error: GatewayError) -> None:
        if record.ended:
            return
        self._end(record)
        self.trace.event(record.request, "gateway.failed", (time.monotonic() - record.received) * 1e3,
                         status=error.status, why=error.message)  # fmt: skip
        record.sink.fail(error)

    def _end(self, record: Record) -> None:
        record.ended = True
        for part in record.parts:
            if not part.ended:
                self._cancel_legs(part, "failed")
                self._end(part)
        if record.turn is not None and not record.turn.done():
            record.turn.set_result(None)
        self._let_go(record)
        if record.outcome is not None and not record.outcome.done():
            record.outcome.set_result("done")

    def _let_go(self, record: Record) -> None:
        for instance in record.watching:
            self.prober.unwatch(instance)
        record.watching = ()
        for worker in (record.prefill, record.decode):
            if worker is not None:
                self.router.done(worker)
        record.prefill = record.decode = None

    def _on_pong(self, pong: m.Pong) -> None:
        self.router.loaded(pong.instance, pong.load)

    # ------------------------------------------------------------ the bus itself

    def _on_disconnect(self) -> None:
        if self._grace is None:
            self._grace = self._loop.call_later(self.settings.bus_grace_seconds, self._on_grace_over)

    def _on_grace_over(self) -> None:
        self._grace = None
        if not self.bus.connected:
            for record in list(self.records.values()):
                self._cancel_legs(record, "failed")
                self._fail(record, errors.bus_down())

    def _on_reconnect(self) -> None:
        """Output may have been lost, and nothing would tell: ask for it."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        for instance in {r.decode.instance for r in self.records.values() if r.decode is not None}:
            self._resume_all(instance)

    # ------------------------------------------------------------ cancelling

    def _cancel_legs(
        self, record: Record, reason: str, keep: dict[int, int] | None = None, but: str = "", prefill: bool = True
    ) -> None:
        """Tell both legs of the running attempt to stop; `but` has stopped already."""
        self.counters["cancels"] += 1
        if record.decode is not None and record.decode.instance != but:
            self._send_cancel("decode", record.decode.instance, record, reason, keep)
        apart = record.prefill is not record.decode  # else there is one leg, and it was told
        if record.prefill is not None and apart and record.prefill.instance != but and prefill and not record.emitted:
            self._send_cancel("prefill", record.prefill.instance, record, reason)

    def _send_cancel(self, role: str, instance: str, record: Record, reason: str, keep: dict[int, int] | None = None) -> None:
        self._cancel(role, instance, m.Cancel(record.request, record.attempt, reason, keep or {}), record.deadline)

    def _cancel(self, role: str, instance: str, cancel: m.Cancel, until: float = 0.0) -> None:
        if role == "decode":
            self._told[cancel.request, cancel.attempt] = None
            if len(self._told) > REMEMBERED:
                self._told.popitem(last=False)
        self._side_task(self._tell_cancel(role, instance, cancel, until))

    async def _tell_cancel(self, role: str, instance: str, cancel: m.Cancel, until: float = 0.0) -> None:
        """Until it is acknowledged, or `until` the attempt's deadline ends it anyway; a worker that is gone needs none. While
        we are off the bus it waits: so may the worker be, and then it ends nothing of ours by itself."""
        for tries in itertools.count(1):
            try:
                await self.bus.request(role, instance, "cancel", cancel, self.settings.command_seconds)
                return
            except BusTimeout:
                if tries >= CANCEL_TRIES and time.monotonic() > until:
                    return
            except Disconnected:
                while not self.bus.connected:
                    if time.monotonic() > until:
                        return
                    await asyncio.sleep(TICK_SECONDS)
            except BusError:
                return

    def _side_task(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._side.add(task)
        task.add_done_callback(self._side.discard)


def _place(waiting: tuple[tuple[int, int, int], asyncio.Future[None]]) -> tuple[int, int, int]:
    return waiting[0]


class _PartSink:
    """Output of one choice that goes on by itself, as output of the request that it is of."""

    __slots__ = ("_dispatcher", "_number", "_record")

    def __init__(self, dispatcher: Dispatcher, record: Record, number: int):
        self._dispatcher, self._record, self._number = dispatcher, record, number

    def tokens(self, choice: int, ids: array, logprobs: list[m.TokenLogprob] | None) -> int:
        kept = self._record.sink.tokens(self._number, ids, logprobs)
        self._record.choices[self._number].kept = kept
        return kept

    def finish(self, choice: int, reason: str, last: bool) -> None:
        self._record.left -= 1
        self._record.sink.finish(self._number, reason, not self._record.left)

    def end(self, usage: m.Usage) -> None:
        self._dispatcher.part_done(self._record, self._number, usage)

    def tick(self, now: float, silence: float) -> None:
        """The request itself is told."""

    def flush(self) -> None:
        self._record.sink.flush()

    def fail(self, error: GatewayError) -> None:
        self._dispatcher.part_failed(self._record, error)
