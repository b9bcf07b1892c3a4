"""Words to the workers of an attempt: admit, run, resume, cancel, and when each of them is said again.

Knows the bus. Does not know what an answer means for a request.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.bus import Bus, BusError, BusTimeout, Disconnected
from headrace.bus import messages as m

from .record import Record
from .routing import Worker

REMEMBERED = 8192  # cancelled attempts whose late output is no surprise
CANCEL_TRIES = 3  # at least
WAIT_SECONDS = 0.05  # a cancel looks this often whether the bus is back

Heard = Callable[[Any], None]


class Legs:
    """One per gateway. Answers are told to callbacks, in the loop."""

    def __init__(self, bus: Bus, gateway: str, epoch: int, settings: Any):
        self._bus, self._gateway, self._epoch, self._settings = bus, gateway, epoch, settings
        self._loop = asyncio.get_running_loop()
        self._told: OrderedDict[tuple[str, int], None] = OrderedDict()  # attempts that decode was told to stop
        self.side: set[asyncio.Task] = set()  # cancels and whatever else waits for an answer in a task

    async def stop(self) -> None:
        if self.side:
            await asyncio.wait(self.side, timeout=1.0)
        for task in self.side:
            task.cancel()

    # ------------------------------------------------------------ admit, run, resume

    def admit(self, record: Record, decode: Worker, heard: Heard) -> None:
        prompt, settings = record.prompt, self._settings
        message = m.Admit(
            record.request, record.attempt, self._gateway, self._epoch, len(prompt.ids), b"".join(prompt.hashes),
            record.namespace, record.wanted, record.remaining(), record.priority, record.client_id, record.traceparent,
            record.images, prompt.output, record.first_choice,
        )  # fmt: skip
        seconds = settings.command_seconds if record.sampling.grammar is None else settings.grammar_seconds
        self._ask(record, decode, "admit", message, seconds, heard)

    def run(self, record: Record, prefill: Worker, decode: str, have: int, heard: Heard) -> None:
        prompt = record.prompt
        message = m.Run(
            record.request, record.attempt, self._gateway, decode, have, prompt.ids.tobytes(), b"".join(prompt.hashes),
            record.namespace, record.remaining(), record.priority, record.client_id, record.traceparent,
            record.images, record.seen.vision if record.seen else "",
            record.wanted.prompt_logprobs,
        )  # fmt: skip
        self._ask(record, prefill, "run", message, self._settings.command_seconds, heard)

    def _ask(self, record: Record, worker: Worker, verb: str, message: m.Message, seconds: float, heard: Heard) -> None:
        """`heard` gets the answer; None: there was none. Disconnected when it is us who are off the bus."""
        timeout = max(0.01, min(seconds, record.remaining()))
        future = self._bus.call(
            worker.presence.role, worker.instance, verb, message, timeout, record.request, record.traceparent
        )

        def answered(future: asyncio.Future) -> None:
            error = future.exception()
            if error is None:
                heard(future.result())
            elif isinstance(error, BusError) and not isinstance(error, Disconnected | BusTimeout):
                heard(m.Refused("closed", str(error)))
            else:
                heard(None if isinstance(error, BusTimeout) else error)

        future.add_done_callback(answered)

    def resume(self, record: Record, number: int, start: int, heard: Heard) -> None:
        """Ask decode for output from `start` on. `heard` gets the answer, or the BusError that came in its place."""
        resume = m.Resume(record.request, record.attempt, number, start)
        future = self._bus.call("decode", record.state.decode, "resume", resume, self._settings.command_seconds)
        future.add_done_callback(lambda future: heard(future.exception() or future.result()))

    # ------------------------------------------------------------ cancel

    def was_told(self, request: str, attempt: int) -> bool:
        """Whether decode was told to stop this attempt."""
        return (request, attempt) in self._told

    def cancel(self, role: str, worker: str, cancel: m.Cancel, until: float = 0.0) -> None:
        if role == "decode":
            self._told[cancel.request, cancel.attempt] = None
            if len(self._told) > REMEMBERED:
                self._told.popitem(last=False)
        self.aside(self._tell_cancel(role, worker, cancel, until))

    async def _tell_cancel(self, role: str, worker: str, cancel: m.Cancel, until: float) -> None:
        """Until it is acknowledged, or `until` the attempt's deadline ends it anyway; a worker that is gone needs none. While
        we are off the bus it waits: so may the worker be, and then it ends nothing of ours by itself."""
        for tries in itertools.count(1):
            try:
                await self._bus.request(role, worker, "cancel", cancel, self._settings.command_seconds)
                return
            except BusTimeout:
                if tries >= CANCEL_TRIES and time.monotonic() > until:
                    return
            except Disconnected:
                while not self._bus.connected:
                    if time.monotonic() > until:
                        return
                    await asyncio.sleep(WAIT_SECONDS)
            except BusError:
                return

    def aside(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task:
        """Run it beside everything else."""
        task = self._loop.create_task(coroutine)
        self.side.add(task)
        task.add_done_callback(self.side.discard)
        return task
