"""Commands whose words belong to another program: they replace this process with it."""

from __future__ import annotations

import importlib.util
import os
import sys

from headrace.cli.errors import CommandError

PASS_THROUGH = True
BENCHES = ("gateway", "engine", "recipe", "kernels", "transfer", "bus", "kv", "kvstore")


def run(name: str, argv: list[str]) -> int:
    """Replace this process by the module behind `name`. Does not return, except to refuse."""
    if name == "bench":
        if not argv or argv[0] not in BENCHES:
            what = (
                f"{argv[0]!r} cannot be measured" if argv and not argv[0].startswith("-") else "what shall be measured?"
            )
            raise CommandError(f"{what} Choose one of: {', '.join(BENCHES)}. Each takes --help.")
        module, argv = f"headrace.{argv[0]}.bench", argv[1:]
    else:
        module = f"headrace.{name}"
    require(module)
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])


def require(module: str) -> None:
    """Raise CommandError when `module` is not installed here."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        room = module.split(".")[1]
        raise CommandError(f"{module} is not installed in this environment; install it: pip install headrace-{room}")
