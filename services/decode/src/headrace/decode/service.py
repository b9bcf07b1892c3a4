"""The decode service: grants memory, admits hand-offs, samples every token of a request. With `--both` it computes prompts too.

Reads in the order of a request's life: admit, bind, commit, tokens, finish; then what ends it early (cancel, fail, expiry,
a dead gateway or writer); then the sweeps. Each handler runs to its end on the loop, so a request's events are consumed in
order.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Annotated, Any
from zlib import crc32

from headrace.bus import Meta
from headrace.bus import messages as m
from headrace.bus.cores import usable_cores
from headrace.bus.errors import BusError
from headrace.engine import api
from headrace.kv.grants import effects, events
from headrace.kv.hashing import content_binding
from headrace.worker import slab
from headrace.worker.service import WorkerService
from headrace.worker.settings import WorkerSettings
from headrace.worker.sight import Sight

from . import attempt
from .attempt import Phase
from .compiling import Compiling
from .landing import Landed, Landing
from .prompts import Prompts
from .request import Choice, Request, sampling_params

FINISHED_SECONDS = 30.0  # a finished output can be asked for again
FINISHED_BYTES = 64 << 20
ASK_SECONDS = 0.5  # patience with a question to a writer
DEATH_SECONDS = 0.2  # between checks whether writers live
STATUS = {"deadline": 504, "overloaded": 503, "preempted": 503, "grammar": 400}  # of the engine's failures; others are 500
HAND_OVER_SECONDS = 3.0  # of a drain's budget are left for what comes after the last request
INLINE_BYTES = 64 << 10  # more than this is checked in a thread


class DecodeSettings(WorkerSettings):
    slab_slots: Annotated[int, Meta(ge=0, description="hand-offs in flight; 0: as many as sequences, at most 64")] = 0
    ticket_seconds: Annotated[float, Meta(gt=0, description="lease of a hand-off; its writer renews it")] = 5.0
    growth_tokens: Annotated[int, Meta(ge=0, description="room per choice that admission keeps for output")] = 256
    grammar_seconds: Annotated[float, Meta(gt=0, description="longest compilation of a grammar (structured output)")] = 2.0
    both: Annotated[bool, Meta(description="compute prompts here too: one process needs no prefill worker")] = False

    @property
    def compute_threads(self) -> int:
        """All cores where no prefill worker wants its half."""
        return self.threads or (usable_cores() if self.both else super().compute_threads)


@dataclass(slots=True)
class Gateway:
    """A gateway with work here: its requests live as long as it does."""

    epoch: int
    requests: set[str]


class DecodeService(WorkerService):
    role = "decode"
    description = "Grants memory to prefill workers, admits hand-offs, samples every token."
    Settings = DecodeSettings
    settings: DecodeSettings

    def __init__(self, settings: DecodeSettings) -> None:
        super().__init__(settings)
        self.landing: Landing = None  # type: ignore[assignment]  # set by prepare()
        self.compiling: Compiling = None  # type: ignore[assignment]  # set by prepare()
        self.requests: dict[str, Request] = {}  # live, by key
        self.attempts: dict[str, int] = {}  # request -> its live attempt
        self.finished: OrderedDict[str, Request] = OrderedDict()
        self.finished_bytes = 0
        self.gateways: dict[str, Gateway] = {}
        self.credits_used = 0  # choices of live requests
        self.promised = 0  # blocks that admitted requests will take when they bind
        self.counters = dict.fromkeys(
            ("admitted", "refused", "finished", "cancelled", "failed", "expired", "corrupt", "resumed"), 0
        )
        self.prompts = Prompts(self) if settings.both else None
        self.sight: Sight | None = None  # with `both`, of a model that takes images
        self._looked = 0.0  # when writers' lives were last checked
        self._asking: set[asyncio.Future] = set()

    def verbs(self) -> dict[str, Any]:
        return {
            "admit": self.admit,
            "bind": self.bind,
            "commit": self.commit,
            "cancel": self.cancel,
            "resume": self.resume,
            "fail": self.fail_attempt,
            "writer_done": self.writer_done,
            "grant": self.grant_status,
            "blocks": self.blocks,
            "audit": self.audit,
            **({"run": self.prompts.run} if self.prompts is not None else {}),
        }

    def prepare(self) -> None:
        slots = self.settings.slab_slots or min(self.engine.info.max_num_seqs, 64)
        self.compiling = Compiling(self.engine.grammars, self.settings.grammar_seconds)
        self.landing = Landing(self.memory, self.kv, self.engine, slots, self.settings.ticket_seconds, self._landing_says)
        if self.settings.both:
            self.sight = Sight.of(self, self.settings.image_bytes)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"both": self.settings.both}

    def load(self) -> m.Load:
        load = super().load()
        if self.engine is not None:
            load.credits = max(0, self.engine.info.max_num_seqs - self.credits_used)
            load.waiting = max(0, len(self.requests) - load.running)  # admitted, their prompts elsewhere
        return load

    # ------------------------------------------------------------ admit

    def admit(self, message: m.Admit) -> m.Admitted | m.Refused | Coroutine[Any, Any, m.Admitted | m.Refused]:
        """Take a credit and pin what is resident of the prompt. An output's grammar is compiled before that, off the loop."""
        grammar = sampling_params(message.sampling).grammar
        if grammar is None or self.compiling.knows(grammar) or self.not_ready():
            return self._admit(message)
        return self.compiling.refuses(grammar) or self._admit_compiled(message, grammar)

    async def _admit_compiled(self, message: m.Admit, grammar: api.Grammar) -> m.Admitted | m.Refused:
        began = time.monotonic()
        refusal = await self.compiling.compile(grammar)
        if refusal is not None:
            self.counters["refused"] += 1
            return refusal
        self.trace.event(message.request, "decode.grammar", ms=(time.monotonic() - began) * 1e3, kind=grammar.kind)
        return self._admit(message)

    def _admit(self, message: m.Admit) -> m.Admitted | m.Refused:
        key = f"{message.request}/{message.attempt}"
        if self.happens(key, attempt.Admit()) is None:  # to be judged
            return self._judge(key, message)
        if key in self.requests:
            return m.Admitted(self._resident(self.requests[key]), self.load())
        self.counters["refused"] += 1
        return m.Refused("stale", f"attempt {message.attempt} of {message.request} is over")

    def _judge(self, key: str, message: m.Admit) -> m.Admitted | m.Refused:
        packed = message.block_hashes
        hashes = [packed[i : i + m.HASH_BYTES] for i in range(0, len(packed), m.HASH_BYTES)]
        pins: list[int] = []
        refusal = self._stale(message)
        if refusal is None:
            self._supersede(message)
            refusal = self.not_ready() or self._invalid(message)
        if refusal is None:
            pins = self.engine.pool.match(hashes) if hashes else []
            refusal = self._full(message, len(pins))
        if refusal is not None:
            self.engine.pool.release(pins)
            self.counters["refused"] += 1
            self.happens(key, attempt.Judged(refusal.code))
            return refusal
        self.happens(key, attempt.Judged(), message=message, hashes=hashes, pins=pins)
        return m.Admitted(len(pins), self.load())

    def _supersede(self, newer: m.Admit) -> None:
        """The gateway runs one attempt at a time. The older one ends first: it may hold the room that this one asks for."""
        older = self.attempts.get(newer.request)
        if older is not None:
            self.happens(f"{newer.request}/{older}", attempt.Superseded(), why="superseded")

    def _take_credit(self, key: str, message: m.Admit, hashes: list[bytes], pins: list[int]) -> None:
        now = time.monotonic()
        request = Request(
            key=key,
            admit=message,
            hashes=hashes,
            sampling=sampling_params(message.sampling),
            deadline=now + message.deadline,
            began=now,
            promised=self._need(message) - len(pins),
            pins=pins,
            choices=[Choice(message.output_tokens, sampled=message.output_tokens) for _ in range(message.sampling.n)],
        )
        self.requests[key] = request
        self.attempts[message.request] = message.attempt
        self.credits_used += message.sampling.n
        self.promised += request.promised
        gateway = self.gateways.get(message.gateway)
        if gateway is None:
            gateway = self.gateways[message.gateway] = Gateway(message.gateway_epoch, set())
            self.depend("gateway", message.gateway)
        gateway.requests.add(key)
        self.counters["admitted"] += 1
        self.trace.event(message.request, "decode.admit", have=len(pins), attempt=message.attempt, client_id=message.client_id)

    def _stale(self, message: m.Admit) -> m.Refused | None:
        if self.attempts.get(message.request, -1) > message.attempt:
            return m.Refused("stale", f"attempt {message.attempt} of {message.request} is over")
        peer = self.peers.get(message.gateway)
        if peer is not None and peer.epoch != message.gateway_epoch:
            return m.Refused("stale", f"gateway {message.gateway} is of epoch {peer.epoch}, not {message.gateway_epoch}")
        return None

    def _invalid(self, message: m.Admit) -> m.Refused | None:
        info, n, tokens = self.engine.info, message.sampling.n, message.prompt_tokens
        if not 1 <= tokens < info.max_model_len:
            return m.Refused("invalid", f"the prompt has {tokens} tokens; 1 to {info.max_model_len - 1} fit")
        if n < 1 or n > info.max_num_seqs:
            return m.Refused("invalid", f"n is {n}; 1 to {info.max_num_seqs} choices fit")
        if len(message.block_hashes) != tokens // info.block_tokens * m.HASH_BYTES:
            return m.Refused(
                "invalid", f"{tokens} prompt tokens have {tokens // info.block_tokens} full blocks; "
                f"{len(message.block_hashes) // m.HASH_BYTES} hashes came"
            )  # fmt: skip
        try:
            params = sampling_params(message.sampling)
            params.check(info.vocab_size)
            api.check_output(tokens, message.output_tokens, message.first_choice, params)
            if params.grammar is not None:
                self.engine.grammars.compile(params.grammar)  # it is compiled: this only says what is wrong with it
        except ValueError as error:
            return m.Refused("invalid", str(error))
        if (need := -(-tokens // info.block_tokens) + n) > info.num_blocks:
            return m.Refused("invalid", f"the request needs {need} blocks; this instance has {info.num_blocks}")
        return None

    def _full(self, message: m.Admit, resident: int) -> m.Refused | None:
        """No credit, or no room for what is not resident. `resident` blocks are pinned already."""
        info, pool, need = self.engine.info, self.engine.pool, self._need(message) - resident
        if self.credits_used + message.sampling.n > info.max_num_seqs:
            why = f"{self.credits_used} of {info.max_num_seqs} sequences are taken"
        elif need + self.promised > pool.available:
            why = f"{need} blocks are needed; {pool.available} of {pool.total} are free, {self.promised} of them promised"
        else:
            return None
        return m.Refused("full", why, self.load(), max(0.01, 4 * self.engine.stats().get("step_seconds", 0.0)))

    def _need(self, message: m.Admit) -> int:
        """Blocks that the request will take soon: prompt and some room to grow; never more than there are in all."""
        info, sampling = self.engine.info, message.sampling
        grow = min(sampling.max_tokens - message.output_tokens, self.settings.growth_tokens)
        need = -(-(message.prompt_tokens + grow) // info.block_tokens)
        if sampling.n > 1:
            need += (sampling.n - 1) * (1 + grow // info.block_tokens)
        return min(need, info.num_blocks)

    @staticmethod
    def _resident(request: Request) -> int:
        return request.landed.reservation.have if request.landed is not None else len(request.pins)

    # ------------------------------------------------------------ bind

    def bind(self, message: m.Bind) -> m.Bound | m.Refused:
        """Compute starts: memory for everything, or nothing. Repeated by the same writer it renews the ticket's lease."""
        key = f"{message.request}/{message.attempt}"
        answer = self.happens(key, attempt.Bind(message.writer))
        if answer is None:
            return self._judge_bind(self.requests[key], message)
        request = self.requests.get(key)
        if answer.name == "Bound":
            return m.Bound(request.landed.wire, self.address)
        if request is not None and request.phase is Phase.BOUND:
            held = request.landed.wire.writer
            return m.Refused("stale", f"{message.request} is bound to {held}, not to {message.writer}")
        where = f"is {request.phase.value} already" if request is not None else "is not here"
        return m.Refused(answer.code, f"attempt {message.attempt} of {message.request} {where}")

    def _judge_bind(self, request: Request, message: m.Bind) -> m.Bound | m.Refused:
        """Memory and a ticket for an attempt that has its credit, or why not."""
        refusal = self.mismatch(message.layout_id, message.checkpoint, message.draft, message.prefill)
        if refusal is None and message.prompt_tokens != request.admit.prompt_tokens:
            refusal = m.Refused(
                "mismatch", f"{message.request}: prefill has {message.prompt_tokens} prompt tokens, decode admitted "
                f"{request.admit.prompt_tokens}"
            )  # fmt: skip
        landed = self._take_memory(request, message) if refusal is None else None
        if isinstance(landed, m.Refused):
            refusal = landed
        if refusal is not None:
            judged = attempt.BindJudged(message.writer, refusal.code)
            self.happens(request.key, judged, status=500, code=refusal.code, text=refusal.message)
            return refusal
        self.unpin(request)
        request.landed = landed
        self.happens(request.key, attempt.BindJudged(message.writer))
        reservation = landed.reservation
        self.trace.event(message.request, "decode.bound", blocks=len(reservation.blocks), have=reservation.have)
        return m.Bound(landed.wire, self.address)

    def _take_memory(self, request: Request, message: m.Bind) -> Landed | m.Refused:
        """Everything, or nothing."""
        reservation = self.engine.reserve(request.key, request.hashes, message.prompt_tokens)
        if reservation is None:
            return m.Refused("full", f"no memory for {message.prompt_tokens} tokens now", self.load(), 0.02)
        verify = self.settings.checksums or 4 * message.prompt_tokens > INLINE_BYTES
        landed = self.landing.mint(message, reservation, request, verify, time.monotonic())
        if landed is None:
            self.engine.abandon(reservation)
            self.engine.pool.release(reservation.blocks)
            return m.Refused("full", "all slab slots are taken", self.load(), 0.02)
        return landed

    def unpin(self, request: Request) -> None:
        self.engine.pool.release(request.pins)
        request.pins = []
        self.promised -= request.promised
        request.promised = 0

    # ------------------------------------------------------------ commit

    def commit(self, message: m.Commit) -> m.Verdict:
        """The record; with the flag in the mailbox it opens the gate."""
        now = time.monotonic()
        if message.ticket in self.landing.ledger.live:
            self.landing.look(message.ticket, now)
        return m.Verdict(self.landing.feed(message.ticket, events.Committed(message.generation, message.nbytes, message), now))

    def _landing_says(self, landed: Landed, effect: Any) -> None:
        """What a ticket's machine wants and memory alone can't give."""
        match effect:
            case effects.Admit(record):
                self._run(landed, record)
            case effects.Verify(record):
                self._keep(asyncio.ensure_future(self._verify(landed, record)))
            case effects.FailRequest(code, text):
                status = 504 if code == "expired" else 502
                self.counters["expired"] += code == "expired"
                self.problem(landed.request, status, f"handoff_{code}", f"the hand-off from {landed.prefill} failed: {text}")
            case effects.AskStatus():
                self._keep(asyncio.ensure_future(self._ask_status(landed)))

    async def _verify(self, landed: Landed, record: m.Commit) -> None:
        """Compare what needs time to compare, off the loop when there is much to read."""
        small = record.nbytes + record.slab_bytes <= INLINE_BYTES
        good = self._is_whole(landed, record) if small else await asyncio.to_thread(self._is_whole, landed, record)
        self.landing.feed(landed.wire.ticket, events.Verified(good), time.monotonic())

    def _is_whole(self, landed: Landed, record: m.Commit) -> bool:
        """Every checksum, if the writer gave them; and the content binding."""
        if record.checksums:
            want = array("I")
            want.frombytes(record.checksums)
            parts = [*self.landing.blocks_of(landed), self.landing.slab_of(landed, record.slab_bytes)]
            if want.tolist() != [crc32(part) for part in parts]:
                return False
        try:
            handoff = slab.unpack(self.landing.slab_of(landed, record.slab_bytes))
        except ValueError:
            return False
        landed.checked = self._binds(landed, handoff.ids)
        return landed.checked

    def _binds(self, landed: Landed, ids: Any) -> bool:
        """These are the ids that the ticket was bound to."""
        info, admit = self.engine.info, landed.request.admit
        content = content_binding(info.layout_id, admit.namespace, ids, m.image_starts(admit.images), info.checkpoint)
        return content == landed.wire.content

    def _run(self, landed: Landed, record: m.Commit) -> None:
        """The gate is open: everything is in our memory. What is not what was bound is an error, never an answer."""
        request: Request = landed.request
        admit, now = request.admit, time.monotonic()
        try:
            if not 0 < record.slab_bytes <= landed.wire.slab_bytes:
                raise ValueError(f"the slab has room for {landed.wire.slab_bytes} bytes; the commit says {record.slab_bytes}")
            handoff = slab.unpack(self.landing.slab_of(landed, record.slab_bytes))
            if len(handoff.ids) != admit.prompt_tokens:
                raise ValueError(f"the slab has {len(handoff.ids)} ids; {admit.prompt_tokens} were admitted")
            if not landed.checked and not self._binds(landed, handoff.ids):
                raise ValueError("the slab's ids are not those that the ticket was bound to")
            handoff.state, handoff.hidden = bytes(handoff.state), bytes(handoff.hidden)  # the slot is free after this
            wanted = api.EngineRequest(
                request=request.key,
                ids=handoff.ids,
                hashes=request.hashes,
                sampling=replace(request.sampling, prompt_logprobs=-1),  # prefill told them
                namespace=admit.namespace,
                priority=admit.priority,
                deadline=request.deadline,
                images=[api.ImageSpan(i.start, i.tokens, i.digest) for i in admit.images],
                output_tokens=admit.output_tokens,
                first_choice=admit.first_choice,
            )
            self.engine.admit(landed.reservation, handoff, wanted)
        except ValueError as error:
            self.engine.abandon(landed.reservation)
            self.engine.pool.release(landed.reservation.blocks)
            request.landed = None
            status, code, text = 503, "full", str(error)
            if not isinstance(error, api.NoRoom):
                self.counters["corrupt"] += 1
                self.log.error("hand-off refused", request=admit.request, prefill=landed.prefill, why=str(error))
                status, code, text = 502, "handoff_corrupt", f"the hand-off from {landed.prefill} was refused: {error}"
            self.happens(request.key, attempt.HandedOver(False), status=status, code=code, text=text)
        else:
            request.landed, request.usage, request.admitted = None, record.usage, now
            self.happens(request.key, attempt.HandedOver())
            self.host.wake()
            nbytes = record.nbytes + record.slab_bytes
            self.trace.event(admit.request, "decode.admitted", ms=(now - request.began) * 1e3, bytes=nbytes)
        self.landing.feed(landed.wire.ticket, events.SlabTaken(), now)

    # ------------------------------------------------------------ tokens

    def handle_events(self, events: list[api.Event]) -> None:
        """One step's events; everything for one gateway leaves in one message."""
        for event in events:
            kind = type(event)
            if kind is api.Tokens:
                request = self.requests.get(event.request)
                if request is not None:
                    self._tokens(request, event)
            elif kind is api.PromptScores:
                if (request := self.requests.get(event.request)) is not None:
                    self.outbox.scores(request.admit.gateway, request.admit.request, request.admit.attempt, event)
            elif kind is api.PromptDone:
                request = self.requests.get(event.request)
                if request is not None and request.computing:
                    self.prompts.done(request, event)
            elif kind is api.Failed:
                request = self.requests.get(event.request)
                if request is not None:
                    status = STATUS.get(event.code, 500)
                    self.happens(request.key, attempt.EngineFailed(), status=status, code=event.code, text=event.message)
            elif kind is api.BlocksFilled:
                request = self.requests.get(event.request) or self.finished.get(event.request)
                # a prompt's own blocks are for who computed it to store
                if request is not None and (request.computing or event.blocks[0][0] not in request.hashes):
                    self.store.fill(event, request.admit.namespace, request.admit.request)
            elif kind is api.SnapshotTaken:
                request = self.requests.get(event.request) or self.finished.get(event.request)
                if request is not None:
                    self.store.snapshot(event, request.admit.namespace, request.admit.request)
        self.outbox.flush()

    def _tokens(self, request: Request, event: api.Tokens) -> None:
        choice, admit = request.choices[event.choice], request.admit
        logprobs = None
        if event.logprobs is not None:
            logprobs = [m.TokenLogprob(*entry) for entry in event.logprobs]
            if choice.logprobs is None:
                choice.logprobs = []
            choice.logprobs += logprobs
        choice.ids.extend(event.ids)
        choice.sampled += len(event.ids) + (event.stop_id >= 0 and event.stop_id not in event.ids[-1:])
        first = not request.first_token
        if first:
            request.first_token = time.monotonic()
            self.trace.event(admit.request, "decode.first_token", ms=(request.first_token - request.admitted) * 1e3)
        usage = None
        if event.finish:
            choice.finish = event.finish
            if not request.open_choices:
                usage = request.total_usage()
        entry = m.OutEntry(
            admit.request, admit.attempt, event.choice, event.index, m.pack_ids(event.ids), logprobs, event.finish, usage, None,
            choice.sampled if event.finish else 0, request.prompt_usage() if first else None,
        )  # fmt: skip
        self.outbox.add(admit.gateway, entry)
        if usage is not None:
            self.counters["finished"] += 1
            self.happens(request.key, attempt.LastToken(), why="finished", tokens=usage.completion_tokens)

    # ------------------------------------------------------------ early ends

    def cancel(self, message: m.Cancel) -> m.Done:
        """Stop within one step. A text stop (`reason` stop) gets its last entry with the usage that counts."""
        key, why = f"{message.request}/{message.attempt}", message.reason or "cancelled"
        answer = self.happens(key, attempt.Cancel(message.reason == "stop"), why=why, keep=message.keep)
        self.counters["cancelled"] += answer.code == "cancelled"
        return m.Done(answer.code)

    def fail_attempt(self, message: m.Fail) -> m.Done:
        """Prefill's leg failed: nothing more comes. Its memory waits for `writer_done` all the same."""
        key, problem = f"{message.request}/{message.attempt}", message.problem
        answer = self.happens(key, attempt.Fail(), status=problem.status, code=problem.code, text=problem.message)
        return m.Done(answer.code)

    def writer_done(self, message: m.WriterDone) -> m.Done:
        self.landing.feed(message.ticket, events.WriterDone(message.generation), time.monotonic())
        self.host.wake()
        return m.Done()

    def problem(self, request: Request, status: int, code: str, text: str) -> None:
        """The attempt ends with an error that its gateway hears at once."""
        self.happens(request.key, attempt.Ends(), status=status, code=code, text=text)

    # ------------------------------------------------------------ the attempt's machine

    def happens(self, key: str, event: Any, **facts: Any) -> attempt.Answer | None:
        """One event of an attempt: its machine says what follows, which is done. `facts`: what the effects need. -> the answer
        to whoever sent a message; None when it must be judged first, or nobody waits."""
        request = self.requests.get(key) or self.finished.get(key)
        after, wanted = attempt.step(self._attempt(key, request), event, time.monotonic())
        if request is not None:
            request.phase = after.phase  # now: what follows may bring further events
        answer = None
        for effect in wanted:
            if isinstance(effect, attempt.Answer):
                answer = effect
            else:
                self._carry_out(key, request, effect, facts)
        return answer

    def _attempt(self, key: str, request: Request | None) -> attempt.Attempt:
        if request is not None:
            return attempt.Attempt(request.phase, request.landed.wire.writer if request.landed is not None else "")
        return attempt.Attempt(Phase.TOMBSTONE if key in self.tombstones else Phase.UNKNOWN)

    def _carry_out(self, key: str, request: Request | None, effect: Any, facts: dict[str, Any]) -> None:
        match effect:
            case attempt.TakeCredit():
                self._take_credit(key, **facts)
            case attempt.RenewTicket():
                now = time.monotonic()
                self.landing.feed(request.landed.wire.ticket, events.Renewed(now + self.landing.ttl), now)
            case attempt.CancelTicket():
                landed, request.landed = request.landed, None
                self.landing.feed(landed.wire.ticket, events.Cancelled(_why(facts)), time.monotonic())
                self._cancel_writer(landed)
            case attempt.CancelEngine():
                self.engine.cancel(key)
            case attempt.Tell():
                self._tell(request, m.Problem(facts["status"], facts["code"], facts["text"]))
            case attempt.TellStop():
                self._tell_stop(request, facts["keep"])
            case attempt.GiveBack():
                self.unpin(request)
                self.host.wake()
                self._forget(request, _why(facts), **({"tokens": facts["tokens"]} if "tokens" in facts else {}))
            case attempt.Entomb():
                self.tombstones.add(key, time.monotonic())

    def _tell(self, request: Request, problem: m.Problem) -> None:
        request.problem = problem
        self.counters["failed"] += 1
        admit = request.admit
        entry = m.OutEntry(admit.request, admit.attempt, 0, request.choices[0].end, b"", finish="abort", problem=problem)
        self.outbox.add_soon(admit.gateway, entry)

    def _tell_stop(self, request: Request, keep: dict[int, int]) -> None:
        """Last entries of the choices that a text stop ended; the very last has the usage that counts."""
        request.keep = keep
        admit, usage = request.admit, request.total_usage()
        for index, choice in enumerate(request.choices):
            if not choice.finish:
                choice.finish = "stop"
                last = request.open_choices == 0
                entry = m.OutEntry(
                    admit.request, admit.attempt, index, choice.end, b"", None, "stop", usage if last else None, None,
                    request.counted(index),
                )  # fmt: skip
                self.outbox.add_soon(admit.gateway, entry)

    def _forget(self, request: Request, why: str, **data: Any) -> None:
        """From live to finished; its output stays for a while."""
        admit, now = request.admit, time.monotonic()
        del self.requests[request.key]
        if self.attempts.get(admit.request) == admit.attempt:
            del self.attempts[admit.request]
        self.credits_used -= admit.sampling.n
        gateway = self.gateways.get(admit.gateway)
        if gateway is not None:
            gateway.requests.discard(request.key)
            if not gateway.requests:
                del self.gateways[admit.gateway]
                self.undepend(admit.gateway)
        request.forget_at, request.hashes = now + FINISHED_SECONDS, []
        self.finished[request.key] = request
        self.finished_bytes += request.nbytes()
        while self.finished_bytes > FINISHED_BYTES:
            self._drop_oldest()
        self.trace.event(admit.request, "decode.finished", ms=(now - request.began) * 1e3, why=why, **data)

    def _drop_oldest(self) -> None:
        _, request = self.finished.popitem(last=False)
        self.finished_bytes -= request.nbytes()

    # ------------------------------------------------------------ resume

    def resume(self, message: m.Resume) -> m.Resumed | m.Refused:
        key = f"{message.request}/{message.attempt}"
        request = self.requests.get(key) or self.finished.get(key)
        if self.happens(key, attempt.Resume()).name == "Refused":
            return m.Refused("unknown", f"attempt {message.attempt} of {message.request} is not here")
        if not 0 <= message.choice < len(request.choices):
            return m.Refused("invalid", f"choice {message.choice}; the request has {len(request.choices)}")
        choice = request.choices[message.choice]
        start = max(choice.base, message.start)
        lost = start - choice.base  # index into what this attempt gave
        self.counters["resumed"] += 1
        over = request.phase is Phase.OVER
        entry = m.OutEntry(
            message.request,
            message.attempt,
            message.choice,
            start,
            choice.ids[lost:].tobytes(),
            choice.logprobs[lost:] if choice.logprobs is not None else None,
            choice.finish or ("abort" if over else ""),
            request.total_usage() if over and request.problem is None else None,
            request.problem,
            request.counted(message.choice) if choice.finish else 0,
            request.prompt_usage() if request.admitted else None,
        )
        return m.Resumed([entry])

    # ------------------------------------------------------------ sweeps

    def tick(self, now: float) -> None:
        """Gates whose flag came late, leases, deadlines, dead writers; every 20 ms, with work or without."""
        self.landing.tick(now)
        if self.sight is not None:
            self.sight.tick(now)
        if now - self._looked < DEATH_SECONDS:
            return
        self._looked = now
        self.landing.check_writers(now)
        for request in [r for r in self.requests.values() if r.deadline <= now]:
            self.problem(request, 504, "deadline", f"not finished within its deadline of {request.admit.deadline:g} s")
        while self.finished and next(iter(self.finished.values())).forget_at <= now:
            self._drop_oldest()
        self.tombstones.tick(now)

    async def _ask_status(self, landed: Landed) -> None:
        """A flag without its record (the commit was lost or is late), or memory in quarantine."""
        try:
            answer = await self.bus.ask(
                f"headrace.prefill.{landed.prefill}.status", m.TicketStatus(landed.wire.ticket), ASK_SECONDS
            )
        except BusError:
            return  # asked again by the tick
        if isinstance(answer, m.Commit):
            self.commit(answer)
        elif isinstance(answer, m.Done):
            self.landing.feed(landed.wire.ticket, events.WriterStatus(answer.state), time.monotonic())
        self.host.wake()

    def _cancel_writer(self, landed: Landed) -> None:
        """Spare prefill work that nobody wants. Nothing depends on it: the ticket's machine asks for itself."""
        wire = landed.wire
        cancel = m.Cancel(wire.request, wire.attempt, "failed")
        future = self.bus.ask(f"headrace.prefill.{landed.prefill}.cancel", cancel, ASK_SECONDS)
        future.add_done_callback(lambda f: f.cancelled() or f.exception())

    def _keep(self, future: asyncio.Future) -> None:
        self._asking.add(future)
        future.add_done_callback(self._asking.discard)

    def peer_died(self, instance: str, why: str) -> None:
        """A gateway is gone: nobody reads its streams. It is told all the same: it may have been stopped or cut off, and come
        back, and wait for them. (A vision worker's images are waited for no more.)"""
        if self.sight is not None:
            self.sight.peer_died(instance, why)
        gateway = self.gateways.get(instance)
        if gateway is None:
            return
        self.log.warning("gateway died; its requests end", gateway=instance, why=why, requests=len(gateway.requests))
        for key in list(gateway.requests):
            text = f"{self.instance} heard nothing of {instance} for a lease and ended its requests"
            self.problem(self.requests[key], 503, "gateway_died", text)

    async def stop(self) -> None:
        if self.compiling is not None:
            self.compiling.stop()
        if self.requests:
            self._hand_over()
            await asyncio.sleep(0)  # their last words go out in this turn
        if self.sight is not None:
            await self.sight.stop()
        await super().stop()

    async def drain(self) -> None:
        """What runs may finish; what would take too long goes on elsewhere while there is time to say so."""
        budget = self.settings.drain_seconds
        hand_over = time.monotonic() + max(budget / 2, budget - HAND_OVER_SECONDS)
        while self.requests and time.monotonic() < hand_over:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        self._hand_over()
        await self.store.drain(5.0)

    def _hand_over(self) -> None:
        """End all requests here; their gateways have what was output, and go on with it elsewhere."""
        for request in list(self.requests.values()):
            self.problem(request, 503, "draining", f"{self.instance} stops before this request is done")

    # ------------------------------------------------------------ memory that this service holds

    def owners(self) -> dict[int, int]:
        out: dict[int, int] = {}
        for request in self.requests.values():
            for block in request.pins:
                out[block] = out.get(block, 0) + 1
        return out

    def debts(self) -> dict[str, int]:
        return {
            "live": len(self.requests),
            "tickets": len(self.landing.ledger),
            "credits_used": self.credits_used,
            "promised": self.promised,
            "slots_out": self.landing.slots - len(self.landing.free_slots),
            "deliveries": len(self.sight.staging) if self.sight is not None else 0,
        }


def _why(facts: dict[str, Any]) -> str:
    return facts.get("why") or facts.get("code", "")
