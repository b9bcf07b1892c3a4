"""How this program was called, for texts that say what to type next."""

from __future__ import annotations

import os
import sys

# From the launcher of a clone; taken out, since what this process starts was called by other words.
_LAUNCHER = os.environ.pop("HEADRACE_PROGRAM", "")


def program() -> str:
    """'./headrace' in a clone, 'headrace' where that is a command; as a shell reads it."""
    import shlex
    import shutil  # here, for this module is imported before Ctrl-C is harmless (see main.py)

    called = _LAUNCHER or sys.argv[0]
    if os.path.basename(called) != "headrace" or os.path.abspath(called) == shutil.which("headrace"):
        return "headrace"
    return shlex.quote(called)


def say(text: str) -> str:
    """`text` with the program's name for each {program}."""
    return text.replace("{program}", program())
