"""Streams beside the one that a captured pass is recorded on: work that others do not wait for runs there, until it is joined.

A decode step is a chain of small launches that leave most of the card idle; coefficients, selection, cache writes and the
shared expert are needed only later in it. Knows streams, scratch and how long tensors must stay; what runs is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.kernels._triton import lane


class Beside:
    """One such stream; without a device everything runs where it is called.

    Memory that a stream gave back serves that stream alone. So what goes in stays until the join: the caller's stream may not
    write over it before. What comes out is this stream's; by the time that it is free, all that reads it has been issued, and
    the next `run` waits for that.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self.device, self.number = device, number
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.on, self.held = False, []

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), after all that the caller's stream has been told and beside what it is told next."""
        if not self.on or self.stream is None:
            return function(*args)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), lane(self.number):
            out = function(*args)
        self.held.append((args, out))
        return out

    def off(self) -> None:
        """From here on everything runs where it is called; nothing is waited for."""
        self.on = False
        self.held.clear()

    def join(self) -> None:
        """The caller's stream waits for all of it."""
        if self.held:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            self.held.clear()
