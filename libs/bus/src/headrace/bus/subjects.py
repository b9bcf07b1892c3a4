"""Every subject that Headrace uses, and the names that may stand in one.

Knows: how subjects are spelled. Names in subjects are Headrace's own (`nuid`, roles, verbs); text of a client never gets here.
"""

from __future__ import annotations

from nats.nuid import NUID

PREFIX = "headrace"
HELLO = f"{PREFIX}.hello"  # "who is there?": every service answers by publishing its presence
PRESENCE = f"{PREFIX}.presence.>"
KV_EVENTS = f"{PREFIX}.kv.events.*"
TRACE = f"{PREFIX}.trace.>"

_nuid = NUID()


def nuid() -> str:
    """A new name, 22 characters of base 62: unique, ordered within a process, safe in a subject."""
    return _nuid.next().decode()


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
