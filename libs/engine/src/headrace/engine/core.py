"""The engine: api.Engine over a scheduler, a runner, a postprocessor and the ledger that they share.

    plan = engine.plan()                  # owner's thread: schedule
    result = engine.execute(plan)         # model thread, or the same one: run
    events = engine.apply(plan, result)   # owner's thread: postprocess

Roles differ in one thing: PREFILL stops at the prompt's last hidden vector and hands it over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from headrace.kv.pool import BlockPool

from . import api
from .ahead import join
from .batch import Model
from .grammar import Grammars
from .images import check_embeddings, check_image_ids
from .ledger import Ledger
from .postprocess import Postprocessor
from .runner import Following, Runner
from .scheduler import Scheduler
from .sequence import Plan, Result
from .sequence import Sequence as OneOutput
from .snapshots import HEADER_BYTES, Snapshot
from .speculation import Costs, Options, Speculator, StepCurve, calibration_file, read_temperatures
from .stepcurve import measure

__all__ = ["EngineCore"]


class EngineCore:
    """`kv_buffer`: host memory of num_blocks * block_bytes bytes that becomes the KV pool, so that peers can write into it.
    `grammars`: of the model's tokenizer; without it requests with a grammar are refused."""

    def __init__(
        self,
        model: Model,
        config: api.EngineConfig | None = None,
        kv_buffer=None,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        config = config or api.EngineConfig()
        spec = model.spec
        config.check(spec.keep_rows if spec.numerics == "bounded" else 0)
        holds = config.num_blocks * spec.block_tokens  # tokens: one sequence alone can always finish
        max_model_len = min(config.max_model_len or model.max_model_len, model.max_model_len, holds)
        self.config, self.pool = config, BlockPool(config.num_blocks)
        self.ledger = Ledger(spec, config, self.pool, max_model_len)
        self.runner = Runner(model, config.num_blocks, config.max_num_seqs, kv_buffer, config.acceptance)
        self.speculator = _speculator(config, self.runner)
        self.scheduler = Scheduler(self.ledger, self.speculator)
        self.postprocessor = Postprocessor(self.ledger, model.eos_token_ids, self.speculator)
        self._clock, self.grammars = clock, grammars
        self._image_token = getattr(model, "image_token_id", None)  # of a model that sees
        self.info = api.EngineInfo(
            kind=getattr(model, "kind", "v41"),
            layout_id=spec.layout_id,
            checkpoint=model.checkpoint_digest,
            block_tokens=spec.block_tokens,
            block_bytes=spec.block_bytes,
            state_bytes=spec.state_bytes + HEADER_BYTES,  # a snapshot's record is the larger of what travels
            hidden_bytes=4 * model.hidden_size,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            model_name=config.model_name,
            extra=_sees(model) | {"numerics": spec.numerics, "keep_rows": spec.keep_rows, "replay_rows": spec.replay_rows},
        )
        self._reserved: dict[int, tuple[api.Reservation, list[int]]] = {}  # by slot: (reservation, resident blocks)
        self._plans: deque[Plan] = deque()  # made, and neither applied nor failed: at most `depth`
        self._eos = frozenset(model.eos_token_ids)
        self._meter = _Meter()
        self._host = 0.0  # seconds that applying the last step took, by the runner's clock

    def use(self, speculator: Speculator | None) -> None:
        """Another policy of speculative decoding, between two steps."""
        self.speculator = self.scheduler.speculator = self.postprocessor.speculator = speculator

    # ------------------------------------------------------------ requests

    def submit(self, request: api.EngineRequest) -> None:
        self._check_ids(request.ids, request.images)
        sequence = self._new_sequence(request, list(request.ids))
        check_embeddings(request.images, self.info.hidden_bytes // 4)
        self.ledger.enqueue(sequence)

    def reserve(self, request: str, hashes: Sequence[bytes], prompt_tokens: int) -> api.Reservation | None:
        ledger = self.ledger
        if not ledger.free_slots or ledger.waiting:  # what was preempted, and what came first, goes first
            return None
        block = self.info.block_tokens
        resident = self.pool.match(hashes[: prompt_tokens // block]) if self.config.prefix_caching else []
        needed = -(-prompt_tokens // block) - len(resident)
        blocks = self.pool.allocate(needed) if ledger.room(needed) else None
        if blocks is None:
            self.pool.release(resident)
            return None
        reservation = api.Reservation(request, len(resident), blocks, ledger.free_slots.pop())
        self._reserved[reservation.slot] = (reservation, resident)
        return reservation

    def admit(self, reservation: api.Reservation, handoff: api.Handoff, request: api.EngineRequest) -> None:
        """ValueError (a hand-off that can't be what was reserved) leaves the reservation as it was."""
        ids, resident = list(handoff.ids), self._reservation(reservation)
        self._check_ids(ids, request.images)
        blocks = resident + reservation.blocks
        if -(-len(ids) // self.info.block_tokens) != len(blocks):
            raise ValueError(
                f"request {request.request!r}: {len(blocks)} blocks were reserved; the hand-off has {len(ids)} tokens"
            )
        if len(handoff.hidden) != self.info.hidden_bytes:
            raise ValueError(
                f"request {request.request!r}: the hidden vector has {len(handoff.hidden)} bytes; this model's has "
                f"{self.info.hidden_bytes}"
            )
        if request.sampling.prompt_logprobs >= 0:
            raise ValueError(f"request {request.request!r}: log-probabilities of a prompt don't come with a hand-off")
        sequence = self._new_sequence(request, ids)
        del self._reserved[reservation.slot]
        self.ledger.admit(sequence, reservation.slot, blocks, len(resident), handoff)

    def abandon(self, reservation: api.Reservation) -> None:
        entry = self._reserved.get(reservation.slot)
        if entry is not None and entry[0] is reservation:
            del self._reserved[reservation.slot]
            self.pool.release(entry[1])
            self.ledger.free_slots.append(reservation.slot)

    def add_snapshot(self, key: bytes, position: int, state: bytes) -> None:
        """A record that is not one of this layout at this position is counted (`snapshots_rejected`) and dropped."""
        try:
            good = Snapshot.decode(state).position == position
        except ValueError:
            good = False
        if good:
            self.ledger.snapshots.add(key, bytes(state))
        else:
            self.ledger.counters["snapshots_rejected"] += 1

    def begun(self, request: str) -> bool:
        return self.ledger.begun(request)

    def would_restore(self, hashes: Sequence[bytes], prompt_tokens: int) -> bool:
        # In class `bounded` the snapshot that serves a prompt may lie below the hit.
        hit = min(len(hashes), (prompt_tokens - 1) // self.info.block_tokens) * self.info.block_tokens
        floor = self.ledger.decoder_floor(prompt_tokens)
        needless = hit == 0 or not self.ledger.keeps_state
        return needless or self.scheduler.restart_point(list(hashes), hit, floor)[1] is not None

    def first_row(self, resident: int, prompt_tokens: int) -> int:
        if not self.config.prefix_caching:
            return 0
        hit = min(resident, (prompt_tokens - 1) // self.info.block_tokens) * self.info.block_tokens
        return max(0, self.scheduler.replay_start(hit))  # a snapshot may be gone by then

    def release(self, request: str) -> None:
        self.ledger.release(request)

    def cancel(self, request: str) -> bool:
        return self.ledger.cancel(request)

    # ------------------------------------------------------------ steps

    def has_work(self) -> bool:
        return self.ledger.has_work()

    @property
    def depth(self) -> int:
        return 2 if self.config.async_scheduling else 1

    def plan(self) -> Plan | None:
        assert len(self._plans) < self.depth, f"{self.depth} plans are neither applied nor failed"
        began, clock = time.perf_counter(), self.runner.clock()
        plan = self.scheduler.schedule(self._clock(), self._plans[-1] if self._plans else None)
        if plan is not None:
            self._plans.append(plan)
            plan.seconds = self._meter.expected(plan)
            if plan.after is None:  # else the model does not wait for it
                plan.host = self.runner.clock() - clock + self._host
        self._meter.add("schedule", time.perf_counter() - began)
        return plan

    def execute(self, plan: Plan, meanwhile: Following | None = None) -> Result:
        began, clock = time.perf_counter(), self.runner.clock()
        gone = join(plan, self._eos, self.scheduler.windows, self.speculator)
        joined = time.perf_counter()
        plan.host += self.runner.clock() - clock
        result = plan.result = self.runner.execute(plan, gone, meanwhile or partial(self._behind, plan))
        result.seconds["join"] = joined - began
        result.seconds["execute"] = time.perf_counter() - began
        return result

    def _behind(self, plan: Plan, over: Callable[[], bool]) -> Plan | None:
        """The plan that another thread makes while this one runs, unless it runs no more. What is in the queue is whole."""
        while self.depth > 1:
            plans = list(self._plans)  # at once: the owner applies the step before meanwhile
            if len(plans) > 1 and plans[0] is plan:
                return plans[1]
            if over():
                return None
            time.sleep(1e-4)
        return None

    def apply(self, plan: Plan, result: Result) -> list[api.Event]:
        self._leave(plan)
        began, clock = time.perf_counter(), self.runner.clock()
        result.seconds["host"] = plan.host
        events = self.postprocessor.commit(plan, result)
        self._meter.step(plan, result, time.perf_counter() - began)
        self._host = self.runner.clock() - clock
        return events

    def fail(self, plan: Plan | None, error: BaseException) -> list[api.Event]:
        if plan in self._plans:  # not where `apply` broke
            self._leave(plan)
        return self.postprocessor.abort(plan, "internal", f"the engine's step failed: {error!r}")

    def step(self) -> list[api.Event] | None:
        """Plan, execute and apply in this thread. None when nothing can run."""
        plan = self.plan()
        if plan is None:
            return None
        try:
            result = self.execute(plan, lambda _: None)  # nobody plans meanwhile
        except BaseException as error:
            events = self.fail(plan, error)
            if not isinstance(error, Exception):  # interrupted by the user
                raise
            return events
        return self.apply(plan, result)

    def _leave(self, plan: Plan) -> None:
        assert self._plans and self._plans[0] is plan, "plans are applied, or failed, in the order in which they were made"
        self._plans.popleft()

    # ------------------------------------------------------------ what is known

    def owners(self) -> dict[int, int]:
        out = self.ledger.owners()
        for reservation, resident in self._reserved.values():
            for block in resident + reservation.blocks:
                out[block] = out.get(block, 0) + 1
        return out

    def stats(self) -> dict[str, float]:
        ledger = self.ledger
        waiting = sum(s.prompt_len for s in ledger.waiting if s.image is None)
        return {
            "running": len(ledger.running),
            "waiting": len(ledger.waiting),
            "pinned": len(ledger.pinned),
            "reserved": len(self._reserved),
            "queued_tokens": waiting + sum(max(0, s.prompt_len - s.computed) for s in ledger.running),
            "free_slots": len(ledger.free_slots),
            "snapshots": len(ledger.snapshots),
            "snapshot_bytes": ledger.snapshots.bytes,
            "swapped_bytes": ledger.swapped_bytes,
            **ledger.counters,
            **self._meter.read(),
            **(self.speculator.stats() if self.speculator else {}),
        }

    def _reservation(self, reservation: api.Reservation) -> list[int]:
        entry = self._reserved.get(reservation.slot)
        if entry is None or entry[0] is not reservation:
            raise ValueError(f"request {reservation.request!r}: this reservation is not open here")
        return entry[1]

    def _new_sequence(self, request: api.EngineRequest, ids: list[int]) -> OneOutput:
        """A checked sequence with the state of its grammar. ValueError says what can't be."""
        sequence, sampling = self.ledger.new_sequence(request, ids), request.sampling
        sampling.check(self.info.vocab_size)
        if sampling.grammar is not None and not sequence.prefill_only:
            if self.grammars is None:
                raise ValueError("this engine was made without a tokenizer, so no output of it can follow a grammar")
            sequence.matcher = self.grammars.matcher(sampling.grammar)
        return sequence

    def _check_ids(self, ids: Sequence[int], images: Sequence[api.ImageSpan]) -> None:
        if len(ids) and not 0 <= min(ids) <= max(ids) < self.info.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.info.vocab_size)
            raise ValueError(f"token ids are from 0 to {self.info.vocab_size - 1}; got {bad}")
        check_image_ids(ids, images, self._image_token)


def _speculator(config: api.EngineConfig, runner: Runner) -> Speculator | None:
    """The policy of speculative decoding, with this machine's step times where it decides by them."""
    if config.speculative == "off" or config.role == api.Role.PREFILL:
        return None
    model = runner.model
    block = getattr(model, "draft_block", 0)
    if not block and config.speculative == "auto":
        return None
    if not block:
        raise ValueError(f"speculative is {config.speculative!r}, but this checkpoint has no draft; set it to 'off'")
    file = calibration_file(config.draft_calibration, getattr(model, "folder", None))
    temperatures = read_temperatures(file, block) if file else ()
    if config.confidence_normed is not None:
        model.set_confidence_normed(config.confidence_normed)
    exact = config.acceptance == "exact"
    options = Options(block, config.draft_budget, temperatures, config.rollback_gate, exact, str(file or "none"))
    if config.draft_budget is not None:
        return Speculator(options)
    forward, draft = measure(runner, config.max_num_seqs, config.max_num_batched_tokens, block)
    return Speculator(options, Costs(StepCurve(forward), StepCurve(draft)))


def _sees(model: Model) -> dict[str, object]:
    """What a model that takes images says of them: the id of their tokens, and how their embeddings are wanted."""
    if getattr(model, "image_token_id", None) is None:
        return {}
    narrow = getattr(model, "dtype", torch.float32) == torch.bfloat16
    return {"image_token_id": model.image_token_id, "image_dtype": "bfloat16" if narrow else "float32"}


def _computes_prompts(plan: Plan) -> bool:
    return plan.rows_planned - plan.draft_rows > len(plan.rows)


class _Meter:
    """Where time goes: sums for benchmarks, decayed averages (last ~20 steps) for routing."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds: dict[str, float] = {}
        self.step_seconds = 0.0  # of a step that only decodes
        self._rows = self._rows_seconds = 0.0

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def expected(self, plan: Plan) -> float:
        """Seconds, by the steps before; 0 when there were none like it."""
        if not _computes_prompts(plan):
            return self.step_seconds
        return plan.rows_planned * self._rows_seconds / self._rows if self._rows else 0.0

    def step(self, plan: Plan, result: Result, post: float) -> None:
        self.steps += 1
        self.add("post", post)
        for name, seconds in result.seconds.items():
            self.add(name, seconds)
        took = result.seconds["execute"]
        if _computes_prompts(plan):
            self._rows = 0.95 * self._rows + plan.rows_planned
            self._rows_seconds = 0.95 * self._rows_seconds + took
        elif plan.rows:
            self.step_seconds += (took - self.step_seconds) * (0.05 if self.step_seconds else 1.0)

    def read(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "prefill_tokens_per_second": self._rows / self._rows_seconds if self._rows_seconds else 0.0,
            "step_seconds": self.step_seconds,
            **{f"seconds_{name}": value for name, value in self.seconds.items()},
        }
