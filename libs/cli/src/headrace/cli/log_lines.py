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
_CHATTER = re.compile(r"\[\d+\] \S+ \S+ \[(INF|DBG|TRC)\]")


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
        return [line.rstrip()] if line.strip() and not _CHATTER.match(line) else []
    if level not in SERIOUS or ended - at.timestamp() > RECENT:
        return []
    fields = "".join(f" {key}={value}" for key, value in said.items() if key not in COMMON)
    return [f"{at:%H:%M:%S} {level}: {said.get('event', '')}{fields}", *said.get("exception", "").splitlines()]
