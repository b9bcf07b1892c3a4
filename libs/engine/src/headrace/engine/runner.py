"""Carries out a plan: states in, rows through the model, states out, tokens chosen. Policy is the scheduler's.

The only file between `Plan` (positions, slots, block numbers) and tensors. A step is these things in a fixed order:

    save preempted sequences -> restore states and blocks -> forward -> logits, accept drafts, sample
    -> forget rejected rows -> pack states and hidden vectors -> propose new drafts
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor

import torch

from .batch import Model
from .cache import KVPool
from .grammar import GrammarError, Rule, Walk
from .sampler import Draw, choose, choose_there, score
from .sequence import Chosen, Image, Plan, Proposal, Result, Row, Sample, Sequence
from .verify import Window, accept, drafting, window_draws

# Asked once a step when the device has been told: the next plan, if it is made while this one runs. Its argument says whether
# the device is done.
Following = Callable[[Callable[[], bool]], Plan | None]
SCORED_ROWS = 64  # logits of a prompt that are in memory at a time


class Runner:
    """Owns the model's memory. `execute` is the one method that runs in the model's thread."""

    clock = staticmethod(time.perf_counter)  # of the times in `Result.seconds`, by which speculation decides what pays

    def __init__(self, model: Model, num_blocks: int, slots: int, kv_buffer=None, acceptance: str = "exact") -> None:
        self.model, self.acceptance = model, acceptance
        self._drafted_from: dict[int, torch.Tensor] = {}  # slot -> logits fp32 [block, V] of its newest drafts (`standard`)
        self.kv = KVPool(model.spec, num_blocks, kv_buffer, device=str(getattr(model, "device", "cpu")))
        self.states = model.new_states(slots)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # its thread begins with the first grammar

    @torch.inference_mode()
    def execute(self, plan: Plan, gone: set[Sequence] = frozenset(), following: Following | None = None) -> Result:
        """`gone`: whose part of the plan is not run. `following`: see there."""
        result, clock = Result(gone=gone), _Laps(self.clock)
        for sequence in plan.preempt:
            if sequence not in gone:
                result.images[sequence] = self._save(sequence)
        self._restore(plan, result)
        clock.lap(result, "restore")
        lost = result.failed.keys() | gone
        ruled = [s for s in plan.samples if s.sequence.matcher is not None and s.sequence not in lost]
        masks = self._beside.submit(_rules, ruled) if ruled else None  # they need the ids alone: the forward pass hides them
        rows = [(i, row) for i, row in enumerate(plan.rows) if row.sequence not in lost]
        hidden, place = None, {}
        if rows:
            segments = [row.segment for _, row in rows]
            hidden = self.model.forward(segments, self.kv, self.states)
            at = 0
            for i, row in rows:
                place[i] = at + len(row.segment.outputs) - 1 - row.drafts  # of the output that a token is sampled from
                if row.segment.start < row.sequence.prompt_len and row.sequence.scored:
                    result.scores[i] = self._score(row, hidden[at : at + len(row.segment.outputs)])
                at += len(row.segment.outputs)
        clock.lap(result, "forward")
        rules, result.astray = masks.result() if masks else ({}, {})
        clock.lap(result, "grammar")
        self._sample(plan, result, hidden, place, rules, clock, following)
        cut = self._forget_rejected(plan, result)
        for i, row in rows:
            if row.pack and i not in cut:
                result.packed[i] = self.states.pack(row.segment.slot, row.segment.stop)
            if row.hidden:
                result.hidden[i] = _to_bytes(hidden[place[i]])
        for sequence in plan.fork:
            if sequence not in lost:
                result.images[sequence] = self._save(sequence, sequence.prompt_len)
        clock.lap(result, "pack")
        self._propose(plan, result)
        clock.lap(result, "draft")
        return result

    def wait(self) -> None:
        """Until the device has done what it was told: a clock before that would tell the host's time alone."""
        if self.kv.data.device.type == "cuda":
            torch.cuda.current_stream(self.kv.data.device).synchronize()

    def _meanwhile(self, plan: Plan, following: Following) -> None:
        """While the device works: what the next step's rows need besides their tokens. Not where drafts say where rows begin,
        or states are restored first."""
        device = self.kv.data.device
        over = torch.cuda.Event() if device.type == "cuda" else None
        if over is not None:
            over.record(torch.cuda.current_stream(device))
        coming = following(over.query if over is not None else lambda: True)
        if coming is None or not coming.rows or not hasattr(self.model, "prepare"):
            return
        if not (plan.draft_rows or coming.budget or coming.draft_rows or coming.restore or coming.preempt):
            self.model.prepare([row.segment for row in coming.rows], self.kv, self.states)

    # ------------------------------------------------------------ states and blocks

    def _save(self, sequence: Sequence, position: int | None = None) -> Image:
        """A sequence's memory as host bytes."""
        position = sequence.computed if position is None else position
        state = sequence.state if sequence.state is not None else self.states.pack(sequence.slot, position)
        rows = max(position, sequence.write_floor)
        filled = -(-rows // self.kv.spec.block_tokens)
        blocks = [bytes(self.kv.data[block].cpu().numpy()) for block in sequence.block_table[:filled]]
        return Image(position, state, blocks + [b""] * (len(sequence.block_table) - filled))

    def _restore(self, plan: Plan, result: Result) -> None:
        for restore in plan.restore:
            slot = restore.sequence.slot
            for block, data in restore.blocks:
                self.kv.data[block] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.states.reset(slot)
            if restore.state is not None:
                try:
                    self.states.unpack(slot, restore.position, memoryview(restore.state))
                except ValueError as error:
                    result.failed[restore.sequence] = str(error)

    # ------------------------------------------------------------ tokens

    def _score(self, row: Row, hidden: torch.Tensor) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """Log-probabilities of the prompt tokens behind a chunk's rows, hidden [rows, H]. Logits are made for few at a time."""
        sequence, segment, out = row.sequence, row.segment, []
        tokens = sequence.ids[segment.start + 1 : min(segment.stop + 1, sequence.prompt_len)]
        for i in range(0, len(tokens), SCORED_ROWS):
            few = tokens[i : i + SCORED_ROWS]
            logits = self.model.logits(hidden[i : i + len(few)])
            out += score(logits, few, sequence.request.sampling.prompt_logprobs)
        return out

    def _sample(
        self,
        plan: Plan,
        result: Result,
        hidden: torch.Tensor | None,
        place: dict[int, int],
        rules: Rules,
        clock: _Laps,
        following: Following | None,
    ) -> None:
        """One batch for all: rows of this step and vectors handed over from another node go through the same logits call."""
        result.tokens = [[] for _ in plan.samples]
        lost = result.failed.keys() | result.astray.keys() | result.gone
        wanted = [i for i, s in enumerate(plan.samples) if s.sequence not in lost]
        if not wanted:
            return
        samples = [plan.samples[i] for i in wanted]
        logits = self.model.logits(self._gather(samples, hidden, place))
        windows = [self._window(s, rules.get(s.sequence, ())) for s in samples]
        told = self._tell(logits, windows)
        if following is not None:
            self._meanwhile(plan, following)
        self.wait()
        clock.lap(result, "logits")
        for i, chosen in zip(wanted, self.accept(logits, windows, told), strict=True):
            sequence = plan.samples[i].sequence
            if sequence.matcher is None or self._follow(sequence, chosen, result):
                result.tokens[i] = chosen
        clock.lap(result, "sample")

    def _tell(self, logits: torch.Tensor, windows: list[Window]) -> torch.Tensor | None:
        """A device is told to draw while it still works on what is drawn from, where nothing but the logits has a say."""
        if logits.device.type == "cpu" or not all(not w.drafts and w.draws[0].free for w in windows):
            return None
        return choose_there(logits, [window.draws[0] for window in windows])

    def accept(self, logits: torch.Tensor, windows: list[Window], told: torch.Tensor | None = None) -> list[list[Chosen]]:
        """See `verify.accept`. (A benchmark may put a coin in its place.)"""
        return accept(self.acceptance, logits, windows, self.model.eos_token_ids, told)

    def _window(self, s: Sample, rules: Several[Rule]) -> Window:
        """`rules`: of the grammar, for the first rows; a draft that it refuses is the last of them that can be looked at."""
        drawn_from = self._drafted_from[s.sequence.slot][: len(s.drafts)] if s.drafts and self._drafted_from else None
        draws = window_draws(_draw(s), s.drafts)
        for i, (allowed, held) in enumerate(rules):
            draws[i].allowed, draws[i].held = allowed, held
        return Window(draws, s.drafts, drawn_from)

    def _follow(self, sequence: Sequence, chosen: list[Chosen], result: Result) -> bool:
        """A sequence's grammar takes its tokens; False: it can't be followed any further."""
        matcher = sequence.matcher
        try:
            for one in chosen:
                if not matcher.ended:
                    matcher.accept([one.token])
                one.ended = matcher.ended
        except GrammarError as error:
            result.astray[sequence] = str(error)
            return False
        return True

    def _forget_rejected(self, plan: Plan, result: Result) -> set[int]:
        """Rows behind the accepted drafts never were. Returns which of the plan's rows were cut."""
        cut = set()
        for s, chosen in zip(plan.samples, result.tokens, strict=True):
            if s.drafts and len(chosen) <= len(s.drafts):
                self.states.rewind(s.sequence.slot, s.position + len(chosen) - 1)
                cut.add(s.row)
        return cut

    def _propose(self, plan: Plan, result: Result) -> None:
        """A block of drafts behind the newest token of each sequence that is to have one."""
        self._drafted_from, wanted = {}, set(plan.propose)
        entries = [(s, c) for s, c in zip(plan.samples, result.tokens, strict=True) if c and s.sequence in wanted]
        if not entries:
            return
        behind = [[*s.late, *(one.token for one in chosen)] for s, chosen in entries]
        draws = [_draw(s).behind(more, s.position + len(chosen)) for (s, chosen), more in zip(entries, behind, strict=True)]
        for draw in draws:
            draw.purpose = drafting(self.acceptance, draw)
        walks = [s.sequence.matcher and Walk(s.sequence.matcher) for s, _ in entries]
        free = all(walk is None for walk in walks) and all(draw.free for draw in draws)

        def take(place: int, logits: torch.Tensor) -> torch.Tensor:
            if free:  # of the tokens before, only their number counts: the device need not tell them
                tokens = choose_there(logits, draws)
            else:
                for draw, walk in zip(draws, walks, strict=True):
                    if walk is not None:
                        draw.allowed, draw.held = walk.rule
                said = choose(logits, draws, self.model.eos_token_ids)
                for more, walk, token in zip(behind, walks, said, strict=True):
                    more.append(token)
                    if walk is not None:
                        walk.take(token)
                tokens = torch.tensor(said, device=logits.device)
            for draw in draws:
                draw.position += 1
            return tokens

        slots = [s.sequence.slot for s, _ in entries]
        anchors = [chosen[-1].token for _, chosen in entries]
        positions = [s.position + len(chosen) - 1 for s, chosen in entries]
        drafts = self.model.draft(slots, anchors, positions, self.states, take)
        for walk in walks:
            if walk is not None:
                walk.back()
        tokens, confidence = drafts.tokens.tolist(), drafts.confidence_logits.tolist()
        for row, (s, _) in enumerate(entries):
            result.proposals[s.sequence] = Proposal(tokens[row], confidence[row])
        if self.acceptance == "standard":
            self._drafted_from = {slot: drafts.logits[row] for row, slot in enumerate(slots)}

    def _gather(self, samples: list[Sample], hidden: torch.Tensor | None, place: dict[int, int]) -> torch.Tensor:
        """[outputs of all samples, hidden_size] in the order of `samples`."""
        rows = [range(place[s.row], place[s.row] + 1 + len(s.drafts)) if s.row is not None else None for s in samples]
        if None not in rows:
            wanted = [at for part in rows for at in part]
            return hidden if wanted == list(range(len(hidden))) else hidden[wanted]
        parts = []
        for s, part in zip(samples, rows, strict=True):
            parts.append(self._from_bytes(s.sequence.hidden, hidden)[None] if part is None else hidden[part.start : part.stop])
        return torch.cat(parts)

    def _from_bytes(self, data: bytes, like: torch.Tensor | None) -> torch.Tensor:
        """A handed hidden vector in the compute dtype: fp32 holds every value of a narrower one, so nothing is lost."""
        dtype = like.dtype if like is not None else getattr(self.model, "dtype", torch.float32)
        return torch.frombuffer(bytearray(data), dtype=torch.float32).to(device=self.kv.data.device, dtype=dtype)


class _Laps:
    """Adds the seconds since the last lap to a name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last = clock, clock()

    def lap(self, result: Result, name: str) -> None:
        now = self._clock()
        result.seconds[name] = result.seconds.get(name, 0.0) + now - self._last
        self._last = now


Rules = dict[Sequence, list[Rule]]  # of a sequence's rows, as far as its grammar allows the drafts


def _rules(samples: list[Sample]) -> tuple[Rules, dict[Sequence, str]]:
    """What grammars allow next, and why some can't be followed any further."""
    rules, astray = {}, {}
    for s in samples:
        sequence = s.sequence
        try:
            sequence.matcher.sync([*sequence.ids[sequence.output_start : s.position - len(s.late)], *s.late])
            rules[sequence] = sequence.matcher.block(s.drafts)
        except GrammarError as error:
            astray[sequence] = str(error)
    return rules, astray


def _draw(s: Sample) -> Draw:
    sequence = s.sequence
    choice = sequence.request.first_choice + sequence.choice
    return Draw(sequence.request.sampling, choice, s.position, sequence.ids, sequence.output_start, s.late)


def _to_bytes(vector: torch.Tensor) -> bytes:
    """fp32 little-endian."""
    return array("f", vector.float().tolist()).tobytes()
