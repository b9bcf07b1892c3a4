"""Which commands there are, and how the words on the command line reach them.

Knows: names, one line of help each, the module behind each. Does not know: what a command does. A module is imported
only when its command runs, so that `headrace --help` comes in an instant; and nothing that takes time is imported before
`main` has said what Ctrl-C does meanwhile.
"""

from __future__ import annotations

import _signal  # what is below `signal`, which imports much; Ctrl-C may come at any time
import os
import sys

from headrace.cli.errors import CommandError
from headrace.cli.program import program, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from types import ModuleType

INTERRUPTED = 130  # exit status, as shells have it

# name -> (module, help). A module has `add_arguments(parser)` and `run(args) -> exit status`; or, when the words after the
# command belong to another program, `PASS_THROUGH = True` and `run(name, argv)`.
COMMANDS = {
    "up": ("up", "start a whole system here: NATS and every service as processes; Ctrl-C drains it"),
    "demo": ("demo", "start everything, send one request twice, show what was computed and where the time went, stop"),
    "chat": ("chat", "ask the running system something and stream its answer"),
    "trace": ("trace", "the life of one request, also after it ended: who did what when"),
    "doctor": ("doctor", "check this machine and the running system, problems with a way out; free what killed systems left"),
    "drill": ("drill", "kill, stop, cut off and disturb every part of a system, and show what comes of it"),
    "bench": ("passthrough", "measure one part: gateway, engine, recipe, kernels, transfer, bus, kv, kvstore, vision"),
    "make-checkpoint": ("make_checkpoint", "write a random checkpoint in the released layout"),
    "test": ("testing", "run all tests"),
    "gateway": ("passthrough", "run one gateway in the foreground"),
    "prefill": ("passthrough", "run one prefill worker in the foreground"),
    "decode": ("passthrough", "run one decode worker in the foreground"),
    "kvstore": ("passthrough", "run one KV store in the foreground"),
    "vision": ("passthrough", "run one vision worker in the foreground"),
}
GROUPS = {
    "A system on this machine": ("up", "demo"),
    "Talking to it, looking into it": ("chat", "trace", "doctor"),
    "Measuring, making, testing": ("drill", "bench", "make-checkpoint", "test"),
    "One service by itself (each takes --help)": ("gateway", "prefill", "decode", "kvstore", "vision"),
}
EXAMPLES = """\
First steps:
  {program} up                                  until it says `ready`; leave it running, then in another terminal:
  {program} chat "Why is the sky blue?"
  {program} trace REQUEST_ID                    the id is the `id` of any answer, or the X-Request-Id that you sent
  {program} COMMAND --help                      what else a command can do"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 fine, 1 it failed (one sentence on stderr), 2 misused, 130 interrupted."""
    before = _signal.getsignal(_signal.SIGINT)
    if before is _signal.default_int_handler:  # else somebody wants it otherwise, `nohup` for one
        _signal.signal(_signal.SIGINT, _end_at_once)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT])  # the launcher kept it back until now
    try:
        return _main(sys.argv[1:] if argv is None else argv, lambda: _signal.signal(_signal.SIGINT, before))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _signal.signal(_signal.SIGINT, before)


def _end_at_once(number: int, frame: object) -> None:
    """Ctrl-C while modules are imported: nothing has begun that would have to end in order, and an exception in the middle of
    an import may be swallowed there or printed."""
    os._exit(INTERRUPTED)


def _main(argv: list[str], interruptible: Callable[[], object]) -> int:
    """`interruptible()` is called when all is imported: from there on Ctrl-C raises KeyboardInterrupt, as usual."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, rest = argv[0], argv[1:]
    if name in ("--version", "version"):
        from importlib.metadata import version

        print(f"headrace {version('headrace-cli')}")
        return 0
    if name not in COMMANDS:
        print(f"headrace: {unknown(name)}", file=sys.stderr)
        return 2
    import importlib

    from headrace.bus import BusError, StartError  # not needed by the pages above, which should come at once

    module = importlib.import_module(f"headrace.cli.{COMMANDS[name][0]}")
    try:
        if getattr(module, "PASS_THROUGH", False):
            interruptible()
            return module.run(name, rest)
        args = _arguments(name, module).parse_args(rest)
        interruptible()
        return module.run(args)
    except (CommandError, BusError, StartError) as error:
        print(f"headrace {name}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output went away, e.g. `| head`
        sys.stderr.close()
        return 1


def _arguments(name: str, module: ModuleType) -> argparse.ArgumentParser:
    import argparse

    summary = COMMANDS[name][1]
    parser = argparse.ArgumentParser(
        prog=f"{program()} {name}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=say(getattr(module, "EPILOG", "")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def overview() -> str:
    """The page that `headrace --help` prints."""
    lines = [
        f"usage: {program()} COMMAND [arguments]",
        "",
        "Serves DeepSeek-family models with separate prefill and decode processes.",
    ]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<16} {COMMANDS[name][1]}" for name in names]
    return "\n".join([*lines, "", say(EXAMPLES)])


def unknown(name: str) -> str:
    """What to say about a command that does not exist."""
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean `{program()} {near[0]}`?" if near else f"`{program()} --help` lists what there is."
    return f"there is no command {name!r}; {hint}"
