"""Every subject that Headrace uses, and the names that may stand in one.

Knows: how subjects are spelled. Names in subjects are Headrace's own (`nuid`, roles, verbs); text of a client never gets here.
"""

from __future__ import annotations

import itertools
import os
import secrets
import string

PREFIX = "headrace"
HELLO = f"{PREFIX}.hello"  # "who is there?": every service answers by publishing its presence
PRESENCE = f"{PREFIX}.presence.>"
KV_EVENTS = f"{PREFIX}.kv.events.*"
TRACE = f"{PREFIX}.trace.>"

_ALPHABET = string.ascii_letters + string.digits


def _prefix() -> str:
    """12 characters that no other process has: 71 random bits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(12))


def _restart() -> None:
    global _next, _own
    _own, _next = _prefix(), itertools.count(secrets.randbelow(1 << 36)).__next__


_restart()
os.register_at_fork(after_in_child=_restart)


def nuid() -> str:
    """A new name, 22 letters and digits: this process's 12, then a counter. Unique, ordered within a process, safe in a
    subject."""
    return f"{_own}{_next():010x}"


def command(role: str, instance: str, verb: str) -> str:
    """Request/reply with one instance."""
    return f"{PREFIX}.{role}.{instance}.{verb}"


def out(gateway: str) -> str:
    """Output of all workers for one gateway."""
    return f"{PREFIX}.out.{gateway}"


def presence(role: str, instance: str) -> str:
    return f"{PREFIX}.presence.{role}.{instance}"


def kv_events(instance: str) -> str:
    return f"{PREFIX}.kv.events.{instance}"


def trace(request: str, event: str) -> str:
    return f"{PREFIX}.trace.{request}.{event}"
