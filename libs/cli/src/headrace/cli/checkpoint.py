"""Which checkpoint a system serves when none is named: the bundled one of a clone, else a random one, made once and kept."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

from headrace.cli.console import Console
from headrace.cli.errors import CommandError
from headrace.cli.program import program
from headrace.cli.supervisor import die_with_parent

PRESETS = ("nano", "nano-vision", "tiny", "w16", "v4-w16")
MAKE_TIMEOUT = 300.0  # seconds
BUNDLED = ("headrace-tiny", "headrace-nano")  # under models/ of a clone, the better one first


def bundled_checkpoint() -> Path | None:
    """The trained model that lies in this clone; None in an installation without one."""
    home = os.environ.get("HEADRACE_HOME")
    for name in BUNDLED if home else ():
        path = Path(home) / "models" / name
        if (path / "config.json").exists():
            return path
    return None


async def random_checkpoint(folder: Path, preset: str, console: Console, seed: int = 0) -> Path:
    """Path of the random checkpoint `preset` under `folder`, made now if it is not there. Its words mean nothing."""
    path = folder / f"random-{preset}-{seed}"
    if (path / "config.json").exists():
        return path
    console.say(f"making a random checkpoint ({preset}), once, in {path}")
    for leftover in folder.glob("*.tmp*"):  # of an `up` that was killed meanwhile
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = path.with_suffix(f".tmp-{os.getpid()}")
    argv = ["-m", "headrace.cli", "make-checkpoint", "--preset", preset, "--seed", str(seed), str(unfinished)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=die_with_parent,
    )
    try:
        async with asyncio.timeout(MAKE_TIMEOUT):
            output, _ = await process.communicate()
    except (TimeoutError, asyncio.CancelledError):
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise CommandError(f"could not make a random checkpoint:\n{output.decode(errors='replace').strip()[-2000:]}")
    unfinished.rename(path)
    return path


def check_model(path: Path) -> Path:
    """`path` if it looks like a checkpoint at all; a CommandError that says what is missing. (The engine checks the rest.)"""
    if not path.is_dir():
        raise CommandError(
            f"there is no checkpoint at {path}; `{program()} make-checkpoint --preset nano {path}` writes a random one"
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).exists()]
    if missing:
        raise CommandError(f"{path} is not a checkpoint: it has no {' and no '.join(missing)}")
    return path


def has_vision(path: Path) -> bool:
    """Whether the checkpoint at `path` declares a vision encoder."""
    try:
        return bool(json.loads((path / "config.json").read_text()).get("vision_config"))
    except (OSError, ValueError, AttributeError):
        return False  # whoever loads it says what is wrong
