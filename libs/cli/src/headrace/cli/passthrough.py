"""Commands whose words belong to another program: they replace this process with it."""

from __future__ import annotations

import importlib.util
import os
import sys

from headrace.cli.errors import CommandError

PASS_THROUGH = True
BENCHES = {  # name -> what it measures, and about how long that takes on two cores
    "gateway": ("requests/s, latency and CPU time of each process, workers simulated", "2 min"),
    "engine": ("prefill and decode tokens/s, and where a step's time goes", "1 min"),
    "recipe": ("rendering, tokenizing and streaming, beside the official wheel", "10 s"),
    "kernels": ("each kernel beside its peers and ceilings; needs a GPU", "minutes"),
    "transfer": ("bytes between two processes, by shm and tcp", "10 s"),
    "bus": ("a command over NATS, beside plain nats-py", "10 s"),
    "kv": ("block identity and bookkeeping", "2 s"),
    "vision": ("what images cost requests without any, and what the encoder does", "2 min"),
    "kvstore": ("lookup, write and read through the store", "10 s"),
}


def run(name: str, argv: list[str]) -> int:
    """Replace this process by the module behind `name`. Does not return, except after help or to refuse."""
    if name == "bench":
        if argv and argv[0] in ("-h", "--help"):
            print(bench_help())
            return 0
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


def bench_help() -> str:
    """The page that `headrace bench --help` prints."""
    lines = ["usage: headrace bench WHAT [arguments]", "", "Each takes --help, and --json for figures to keep:"]
    return "\n".join([*lines, *(f"  {name:<9} {what} ({took})" for name, (what, took) in BENCHES.items())])


def require(module: str) -> None:
    """Raise CommandError when `module` is not installed here."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        room = module.split(".")[1]
        raise CommandError(f"{module} is not installed in this environment; install it: pip install headrace-{room}")
