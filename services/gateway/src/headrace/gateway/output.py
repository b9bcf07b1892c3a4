"""What workers send to a gateway, on its way to the sinks: which request it is for, what was lost of it, whose it is not.

Knows messages, their numbers, gaps. Does not know what a message means for a choice (`choice.py`) or for a request
(`request.py`); their machines are told, and what they want of output is done here.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from headrace.bus import BusError, BusTimeout
from headrace.bus import messages as m

from . import choice, request
from .errors import GatewayError
from .record import Record
from .request import Phase

if TYPE_CHECKING:
    from .dispatch import Dispatcher

TAIL_SECONDS = 0.25  # after presence says more was sent than arrived, wait this long for it
BEFORE_OUTPUT = (Phase.STARTING, Phase.RUNNING)
TAKES_OUTPUT = frozenset({*BEFORE_OUTPUT, Phase.STREAMING, Phase.SETTLING})


class Output:
    """Of all requests of a dispatcher. Called in the loop's reader: output goes straight through to the sink."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._counters, self._legs = dispatcher, dispatcher.counters, dispatcher.legs
        self._seq: dict[str, tuple[int, int]] = {}  # instance -> epoch, last Out.seq
        self._tails: dict[str, asyncio.TimerHandle] = {}

    def stop(self) -> None:
        for handle in self._tails.values():
            handle.cancel()

    def on_out(self, out: m.Message, subject: str) -> None:
        if not isinstance(out, m.Out):
            return
        epoch, seq = self._seq.get(out.instance, (out.epoch, 0))  # workers count what they send to this gateway from 1 on
        if epoch != out.epoch:
            seq = 0
        if out.seq > seq:
            self._seq[out.instance] = (out.epoch, out.seq)
        records = self._dispatcher.records
        for entry in out.entries:
            record = records.get(entry.request)
            if record is None:
                self._unknown(out.instance, entry)
            elif entry.attempt != record.state.attempt:
                self._counters["stale_outputs"] += 1
                self._unknown(out.instance, entry)
            else:
                try:
                    self.take(record, entry, out.instance)
                except Exception:
                    self._dispatcher.defect(record)
        if out.seq > seq + 1:  # messages were lost: whoever had tokens in them is behind and may never learn otherwise
            self._counters["gaps"] += 1
            self.missing(out.instance)

    def take(self, record: Record, entry: m.OutEntry, instance: str) -> None:
        """One entry of the attempt that runs."""
        if entry.problem is not None:
            return self._dispatcher.happens(record, request.Problem(entry.attempt, instance, entry.problem))
        number = entry.choice
        phase, choices = record.state.phase, record.choices
        if phase not in TAKES_OUTPUT or number >= len(choices) or choices[number].finished:
            return
        if entry.scores is not None:
            return record.add_scores(entry.scores)
        if phase in BEFORE_OUTPUT and record.lacks_scores:  # their message was lost, and nobody can repeat it
            lost = m.Problem(503, "failed", "log-probabilities of the prompt were lost on the way")
            return self._dispatcher.happens(record, request.Problem(entry.attempt, record.state.prefill, lost))
        if entry.prompt is not None and record.prompt_usage is None:
            record.prompt_usage = record.as_it_came(entry.prompt)
        if entry.usage is not None:
            record.usage = entry.usage
        ids = m.unpack_ids(entry.ids)
        came = choice.Came(entry.index, len(ids), entry.finish, entry.sampled)
        choices[number], effects = choice.step(choices[number], came)
        for effect in effects:
            if type(effect) is choice.Deliver:
                self._deliver(record, number, ids, entry.logprobs, effect.skip, effect.finish)
            else:
                self._do(record, number, effect, instance)

    def _deliver(
        self, record: Record, number: int, ids: array, logprobs: list[m.TokenLogprob] | None, skip: int, finish: str
    ) -> None:  # fmt: skip
        """New tokens to the client; a text stop may end the choice there."""
        if skip:
            ids, logprobs = ids[skip:], logprobs[skip:] if logprobs is not None else None
        record.outputs[number] += ids
        if record.state.phase in BEFORE_OUTPUT:
            if record.wants_scores:
                record.sink.scores(record.ids[0], record.scores)
            self._dispatcher.first_output(record)
        kept = record.sink.tokens(number, ids, logprobs)
        if kept < 0 and not finish:
            return record.sink.flush()
        self._tell(record, number, choice.Delivered(kept, finish))

    def _tell(self, record: Record, number: int, event: Any, instance: str = "") -> None:
        record.choices[number], effects = choice.step(record.choices[number], event)
        for effect in effects:
            self._do(record, number, effect, instance)

    def _do(self, record: Record, number: int, effect: Any, instance: str) -> None:
        match effect:
            case choice.Over(reason, finished):
                self._dispatcher.happens(record, request.ChoiceOver(number, reason, finished))
            case choice.LastWord():
                self._dispatcher.happens(record, request.ChoiceFinished())
            case choice.Ask(start):
                self._ask(record, number, start)
            case choice.Aborted():
                problem = m.Problem(500, "aborted", "the decode worker ended this request")
                self._dispatcher.happens(record, request.Problem(record.attempt, instance, problem))

    def _unknown(self, instance: str, entry: m.OutEntry) -> None:
        """Output of an attempt that is not ours, or not any more (its worker was thought dead): make it stop, once."""
        if self._legs.was_told(entry.request, entry.attempt) or entry.finish or entry.problem is not None:
            return
        if entry.scores is not None:  # perhaps from prefill, which is told by whoever ended the attempt
            return
        self._counters["unknown_outputs"] += 1
        self._legs.cancel("decode", instance, m.Cancel(entry.request, entry.attempt, "failed"))

    # ------------------------------------------------------------ gaps

    def missing(self, instance: str) -> None:
        """Messages of this worker were lost."""
        for record in list(self._dispatcher.records.values()):
            if record.state.decode == instance and record.state.phase in TAKES_OUTPUT:
                for number in range(len(record.choices)):
                    self._tell(record, number, choice.Missing(), instance)

    def _ask(self, record: Record, number: int, start: int) -> None:
        """For what a gap lost: perhaps no later message comes that would show it."""
        attempt, instance = record.attempt, record.state.decode
        self._counters["resumes"] += 1

        def heard(answer: Any) -> None:
            if not record.over and record.attempt == attempt:
                try:
                    self._answered(record, number, answer, instance)
                except Exception:
                    self._dispatcher.defect(record)

        self._legs.resume(record, number, start, heard)

    def _answered(self, record: Record, number: int, answer: Any, instance: str) -> None:
        attempt = record.attempt
        if isinstance(answer, BusError):  # the prober finds a dead worker, a reconnect asks again
            again = choice.Unanswered() if isinstance(answer, BusTimeout) else choice.Unreachable()
            return self._tell(record, number, again, instance)
        if isinstance(answer, m.Refused):
            return self._dispatcher.happens(record, request.Unrepeatable(attempt, answer.message))
        for entry in answer.entries if isinstance(answer, m.Resumed) else ():
            if entry.attempt == attempt == record.attempt and not record.over:
                self.take(record, entry, instance)
        if record.attempt == attempt and not record.over:
            self._tell(record, number, choice.Answered(), instance)

    def sent_so_far(self, presence: m.Presence) -> None:
        """Presence tells how much a worker has sent us. If the last of it never comes, it was lost."""
        sent = presence.out_seq.get(self._dispatcher.gateway, 0)
        instance = presence.instance
        epoch, seq = self._seq.get(instance, (presence.epoch, 0))
        if sent and (epoch != presence.epoch or seq < sent) and instance not in self._tails:
            loop = asyncio.get_running_loop()
            self._tails[instance] = loop.call_later(TAIL_SECONDS, self._check_tail, instance, presence.epoch, sent)

    def left(self, instance: str) -> None:
        """An instance is no longer known; if it comes back, it counts on, and all that it still has for us is asked for."""
        self._seq.pop(instance, None)

    def _check_tail(self, instance: str, epoch: int, sent: int) -> None:
        self._tails.pop(instance, None)
        known, seq = self._seq.get(instance, (epoch, 0))
        if known == epoch and seq < sent:
            self._counters["gaps"] += 1
            self._seq[instance] = (epoch, sent)
            self.missing(instance)


class PartSink:
    """Output of one choice that goes on by itself, as output of the request that it is of."""

    __slots__ = ("_dispatcher", "_number", "_record")

    def __init__(self, dispatcher: Dispatcher, record: Record, number: int):
        self._dispatcher, self._record, self._number = dispatcher, record, number

    def tokens(self, _: int, ids: array, logprobs: list[m.TokenLogprob] | None) -> int:
        return self._record.sink.tokens(self._number, ids, logprobs)

    def finish(self, _: int, reason: str, last: bool) -> None:
        self._dispatcher.happens(self._record, request.ChoiceOver(self._number, reason, False))

    def end(self, usage: m.Usage) -> None:
        record, number = self._record, self._number
        part = next(part for part in record.parts if part.first_choice == record.first_choice + number)
        record.choices[number] = replace(part.choices[0], finished=True, sampled=usage.completion_tokens)
        record.prompt_usage = record.prompt_usage or usage
        self._dispatcher.happens(record, request.ChoiceFinished())

    def tick(self, now: float, silence: float) -> None:
        """The request itself is told."""

    def flush(self) -> None:
        self._record.sink.flush()

    def fail(self, error: GatewayError) -> None:
        self._dispatcher.happens(self._record, request.Breaks(error))
