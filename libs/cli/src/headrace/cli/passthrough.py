"""Commands whose words belong to another program: this process becomes it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from headrace.cli.errors import CommandError
from headrace.cli.program import program

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
    """Run the module behind `name` in this process. Raises CommandError: there is none."""
    called = f"{program()} {name}"
    if name == "bench":
        if argv and argv[0] in ("-h", "--help"):
            print(bench_help())
            return 0
        if not argv or argv[0] not in BENCHES:
            what = f"{argv[0]!r} cannot be measured." if argv and not argv[0].startswith("-") else "what shall be measured?"
            raise CommandError(f"{what} Choose one of: {', '.join(BENCHES)}. Each takes --help.")
        module, called, argv = f"headrace.{argv[0]}.bench", f"{called} {argv[0]}", argv[1:]
    else:
        module = f"headrace.{name}.__main__"
    require(module)
    become(module, called, argv)
    return 0


def become(name: str, called: str, argv: list[str]) -> None:
    """What `python -m name` does, here, with its interrupts caught; `called`: how its help names it."""
    spec = importlib.util.find_spec(name)
    module = ModuleType("__main__")
    module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent  # processes that it starts import it
    sys.modules["__main__"] = module
    sys.argv = [called, *argv]
    exec(spec.loader.get_code(name), module.__dict__)  # as runpy does


def bench_help() -> str:
    """The page that `headrace bench --help` prints."""
    lines = [f"usage: {program()} bench WHAT [arguments]", "", "Each takes --help, and --json for figures to keep:"]
    return "\n".join([*lines, *(f"  {name:<9} {what} ({took})" for name, (what, took) in BENCHES.items())])


def require(module: str) -> None:
    """Raise CommandError when `module` is not installed here."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        room = module.split(".")[1]
        raise CommandError(f"headrace.{room} is not installed in this environment; install it: pip install headrace-{room}")
