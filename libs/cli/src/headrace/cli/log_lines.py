"""What the log of a process that ended says about its end, for people.

Knows: the lines of services (one JSON object each), of NATS (`[pid] date time [INF] text`), and all else that a program may
print (a traceback, the last words of the kernel's loader). Does not know: which process, or what is done about it.
"""

from __future__ import annotations

import json
import re
from datetime import datetime

RECENT = 30.0  # seconds before the end; an older warning explains nothing
SERIOUS = ("warning", "error", "critical")
COMMON = ("timestamp", "level", "event", "instance", "exception")  # shown in a place of their own, or not at all
CHATTER = ("INF", "DBG", "TRC")  # of NATS
_NATS = re.compile(r"\[\d+\] (\d+/\d+/\d+ \d+:\d+:\d+)\.\d+ \[([A-Z]+)\]")  # local time


def telling(lines: list[str], ended: float, most: int = 6) -> list[str]:
    """Of a log, the last `most` lines that may explain an end at `ended` (seconds of the epoch), readable; often none."""
    shown = []
    for line in lines:
        shown += _readable(line, ended)
    return shown[-most:]


def _readable(line: str, ended: float) -> list[str]:
    """A line as it is shown: none where it explains nothing, more where it holds a traceback."""
    try:
        said = json.loads(line)
        level, at = said["level"], datetime.fromisoformat(said["timestamp"])
    except (ValueError, TypeError, KeyError):  # not of our making
        return [line.rstrip()] if line.strip() and not _explains_nothing(line, ended) else []
    if level not in SERIOUS or ended - at.timestamp() > RECENT:
        return []
    fields = "".join(f" {key}={value}" for key, value in said.items() if key not in COMMON)
    return [f"{at:%H:%M:%S} {level}: {said.get('event', '')}{fields}", *said.get("exception", "").splitlines()]


def _explains_nothing(line: str, ended: float) -> bool:
    """Whether NATS wrote it, as chatter or long before the end."""
    found = _NATS.match(line)
    if not found:
        return False
    try:
        at = datetime.strptime(found[1], "%Y/%m/%d %H:%M:%S").timestamp()
    except ValueError:
        return False
    return found[2] in CHATTER or ended - at > RECENT
