"""What a command prints while it works: lines that stay, and on a terminal one line that is rewritten.

Everything goes to stderr, so that stdout holds only the result (`--json`)."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TextIO

DIM, BOLD, RED, GREEN, RESET = "\033[2m", "\033[1m", "\033[31m", "\033[32m", "\033[0m"


def paint(text: str, colour: str, out: TextIO) -> str:
    """`text` in a colour where `out` is a terminal."""
    return f"{colour}{text}{RESET}" if out.isatty() else text


class Console:
    """Progress for people. `quiet` drops progress, never errors."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.began = time.monotonic()
        self._tty = sys.stderr.isatty()
        self._status = ""

    def say(self, text: str) -> None:
        """A line that stays, with the seconds since the command began."""
        if not self.quiet:
            self._print(f"{paint(f'[{time.monotonic() - self.began:5.1f} s]', DIM, sys.stderr)} {text}")

    def alert(self, text: str) -> None:
        """A line that stays and must be seen."""
        self._print(paint(text, RED, sys.stderr))

    def show(self, text: str) -> None:
        """A line that stays, as it is."""
        self._print(text)

    def status(self, text: str) -> None:
        """What is being waited for; rewritten in place, and only on a terminal."""
        if self._tty and not self.quiet and text != self._status:
            self._status = text
            _write(f"\r\033[K{text[:110]}")

    def clear(self) -> None:
        if self._status:
            self._status = ""
            _write("\r\033[K")

    def _print(self, text: str) -> None:
        self.clear()
        _write(f"{text}\n")


def _write(text: str) -> None:
    """A full disk or a closed pipe behind stderr costs the line, not the system that it is about."""
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)
