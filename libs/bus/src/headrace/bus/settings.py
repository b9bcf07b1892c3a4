"""Settings: one typed struct per service, filled from a YAML file, HEADRACE_* variables and flags, in rising precedence.

Knows: where a value came from, how to say what is wrong with it. Does not know: what any setting does.

A field is declared once, with its help:  max_num_seqs: Annotated[int, Meta(ge=1, description="...")] = 64
and is then `max_num_seqs:` in YAML (at the top, or under the role's name), HEADRACE_MAX_NUM_SEQS, and --max-num-seqs.
"""

from __future__ import annotations

import argparse
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta

from .connection import without_secrets
from .names import OTHERS, SETTINGS, nearest

ENV_PREFIX = "HEADRACE_"
SECRET = ("password", "secret", "api_key", "_token")  # endings of names whose values are never shown

LARGEST = 2**53  # of whole numbers: what JSON and msgpack carry everywhere
ROLES = ("gateway", "prefill", "decode", "kvstore", "vision")


class SettingsError(ValueError):
    """A setting is wrong; the text names it, its source and what would be right."""


class TwiceError(Exception):
    """A key stands twice in a mapping."""


class Once(yaml.SafeLoader):
    """YAML wants keys to be unique; the parser by itself lets the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                name, line = self.construct_object(key), key.start_mark.line + 1
                if name in lines:
                    raise TwiceError(f"`{name}` stands twice in one mapping, in lines {lines[name]} and {line}; keep one")
                lines[name] = line
        return super().construct_mapping(node, deep)


class Settings(msgspec.Struct, kw_only=True):
    """What every service has. Services subclass it."""

    nats_url: Annotated[str, Meta(description="NATS servers, comma separated")] = "nats://127.0.0.1:4222"
    nats_user: Annotated[str, Meta(description="user name at NATS")] = ""
    nats_password: Annotated[str, Meta(description="password at NATS; better given as a variable than as a flag")] = ""
    nats_nkey: Annotated[str, Meta(description="file that holds an nkey seed for NATS")] = ""
    nats_connect_seconds: Annotated[float, Meta(gt=0, description="how long a start waits for NATS")] = 30.0
    name: Annotated[str, Meta(description="a label for people; the instance id is made at each start")] = ""
    host: Annotated[str, Meta(description="address that this service listens on")] = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="port of /health, /ready and /metrics; 0: a free one")] = 0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="what is logged")] = "info"
    log_format: Annotated[Literal["auto", "console", "json"], Meta(description="auto: JSON unless on a terminal")] = "auto"
    shm_dir: Annotated[str, Meta(description="folder for memory shared between processes of one host")] = "/dev/shm/headrace"
    transports: Annotated[list[Literal["shm", "tcp"]], Meta(description="ways to move tensors, best first")] = msgspec.field(
        default_factory=lambda: ["shm", "tcp"]
    )
    drain_seconds: Annotated[float, Meta(ge=0, description="how long SIGTERM waits for work in flight")] = 30.0
    stall_seconds: Annotated[
        float, Meta(gt=0, description="work without progress for this long, or four of its longest steps, is `stalled`")
    ] = 10.0
    trace: Annotated[bool, Meta(description="publish trace events (they are always remembered)")] = True
    test_faults: Annotated[str, Meta(description="fault points for tests, as kill=EVENT; see docs/operations.md")] = ""

    @classmethod
    def load(cls, argv: Sequence[str] | None = None, role: str = "", description: str = "") -> Self:
        """Read all sources, check once. Raises SettingsError; --help and --print-config print and exit with 0."""
        values, sources, layers, flags = _collect(cls, sys.argv[1:] if argv is None else list(argv), role, description)
        try:
            for source, layer in layers:  # also what a later source replaces: it would count again when that is taken away
                _checked(cls, layer, dict.fromkeys(layer, source))
            settings = _convert(cls, values, sources)
        except SettingsError:
            if flags.print_config:  # settings that lack something are those one wants to see
                print(_as_yaml(_defaults(cls) | _checked(cls, values, sources), sources), end="", flush=True)
            raise
        if flags.print_config:
            print(settings.describe(sources), end="")
            raise SystemExit(0)
        return settings

    def describe(self, sources: dict[str, str] | None = None) -> str:
        """As YAML, each value with its source; secrets are hidden."""
        return _as_yaml({name: getattr(self, name) for name in self.__struct_fields__}, sources or {})


def _as_yaml(values: dict[str, Any], sources: dict[str, str]) -> str:
    lines = []
    for name, value in values.items():
        if value and name.endswith(SECRET):
            value = "(hidden)"
        elif name == "nats_url":
            value = without_secrets(value)
        text = yaml.safe_dump({name: msgspec.to_builtins(value)}, default_flow_style=True, width=10_000).strip()[1:-1]
        lines.append(f"{text}  # {sources.get(name, 'default')}\n")
    return "".join(lines)


def _defaults(cls: type[Settings]) -> dict[str, Any]:
    """Of every setting, in order; None where it has none."""
    values = {}
    for field in msgspec.structs.fields(cls):
        made = field.default_factory is not msgspec.NODEFAULT
        default = field.default_factory() if made else field.default
        values[field.name] = None if default is msgspec.NODEFAULT else default
    return values


Layer = tuple[str, dict[str, Any]]  # a source as errors name it, and what it says


def _collect(
    cls: type[Settings], argv: list[str], role: str, description: str
) -> tuple[dict[str, Any], dict[str, str], list[Layer], Any]:
    """(values that hold, the source of each, all that every source says in rising precedence, flags)."""
    hints = typing.get_type_hints(cls, include_extras=True)
    flags = _parser(cls, hints, role, description).parse_args(argv)
    _warn_of_unknown_variables(hints)

    path = flags.config or os.environ.get(ENV_PREFIX + "CONFIG", "")
    layers = [(path, section) for section in _read_yaml(path, role, hints)] if path else []
    for name in hints:
        variable = ENV_PREFIX + name.upper()
        if variable in os.environ:
            layers.append((variable, {name: _split(os.environ[variable], hints[name])}))
    for name in hints:
        if hasattr(flags, name):
            layers.append(("--" + name.replace("_", "-"), {name: _split(getattr(flags, name), hints[name])}))
    values = {name: value for _, layer in layers for name, value in layer.items()}
    sources = {name: source for source, layer in layers for name in layer}
    return values, sources, layers, flags


def _read_yaml(path: str, role: str, hints: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file says at its top and under the role's name, as far as this service has such settings."""
    try:
        loaded = yaml.load(Path(path).read_text(), Once) or {}
    except TwiceError as error:
        raise SettingsError(f"{path}: {error}") from error
    except OSError as error:
        raise SettingsError(f"can't read the configuration file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{path} is nested too deeply to be read") from error
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path} must hold a mapping of settings, not {type(loaded).__name__}")
    shared = {k: v for k, v in loaded.items() if k not in ROLES}
    own = loaded.get(role) or {}
    if not isinstance(own, dict):
        raise SettingsError(f"{path}: `{role}` must hold a mapping of settings, not {type(own).__name__}")
    # At the top a setting may belong to another service.
    for section, where, known in ((shared, "at the top", {*SETTINGS, *hints, *ROLES}), (own, f"under `{role}`", set(hints))):
        for name in section:
            if name not in known:
                raise SettingsError(f"{path}: unknown setting `{name}` {where}{nearest(str(name), known)}")
    return tuple({k: _word(v, hints[k]) for k, v in section.items() if k in hints} for section in (shared, own))


def _word(value: Any, hint: Any) -> Any:
    """YAML 1.1 reads a bare `off` or `on` as a truth value; where a setting is one of some words, the word was meant."""
    if isinstance(value, bool) and get_origin(_base(hint)) is Literal:
        return "on" if value else "off"
    return value


def _warn_of_unknown_variables(hints: dict[str, Any]) -> None:
    """A misspelt variable is told and not refused: the environment may be another program's as well."""
    known = {*OTHERS, *(name.upper() for name in {*SETTINGS, *hints})}
    for variable in sorted(os.environ):
        if variable.startswith(ENV_PREFIX) and variable.removeprefix(ENV_PREFIX) not in known:
            hint = nearest(variable, [ENV_PREFIX + name for name in known])
            print(f"warning: no setting is called {variable}, it changes nothing{hint}", file=sys.stderr)


def _checked(cls: type[Settings], values: dict[str, Any], sources: dict[str, str]) -> dict[str, Any]:
    """`values` as their types; each by itself, not how they fit together."""
    hints = typing.get_type_hints(cls, include_extras=True)
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = msgspec.convert(value, hints[name], strict=False)
            if isinstance(checked[name], int) and abs(checked[name]) > LARGEST:
                raise msgspec.ValidationError(f"Expected `int` <= {LARGEST}")
        except msgspec.ValidationError as error:
            shown = "(hidden)" if name.endswith(SECRET) else repr(value)
            words = _base(hints[name])
            right = f"; one of {', '.join(map(str, get_args(words)))}" if get_origin(words) is Literal else ""
            raise SettingsError(f"{sources[name]}: {name} = {shown}: {error}{right}") from error
    return checked


def _convert(cls: type[Settings], values: dict[str, Any], sources: dict[str, str]) -> Any:
    try:
        return cls(**_checked(cls, values, sources))
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error


def _parser(cls: type[Settings], hints: dict[str, Any], role: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"headrace {role}".strip(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every setting can also be given in a YAML file (--config, at its top or under the role's name) or as a\n"
        "variable HEADRACE_<NAME>; a flag beats a variable, a variable beats the file. --print-config shows what came of it.\n"
        f"  example: HEADRACE_LOG_LEVEL=debug headrace {role or 'decode'} --nats-url nats://127.0.0.1:4222 --print-config",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--config", default="", metavar="FILE", help="YAML file with settings (variable: HEADRACE_CONFIG)")
    parser.add_argument("--print-config", action="store_true", help="print all settings and their sources, then exit")
    own = parser.add_argument_group(f"settings of {role}" if role else "settings")
    shared = parser.add_argument_group("settings of every service")
    defaults = _defaults(cls)
    for name, hint in hints.items():
        group = shared if name in Settings.__struct_fields__ else own
        text = f"{_description(hint)} (default: {_shown(defaults[name])})".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if _base(hint) is bool:
            group.add_argument(flag, dest=name, default=argparse.SUPPRESS, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(flag, dest=name, default=argparse.SUPPRESS, metavar=_metavar(hint), help=text)
    return parser


def _base(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _description(hint: Any) -> str:
    metas = [a for a in get_args(hint) if isinstance(a, Meta)] if get_origin(hint) is Annotated else []
    return next((meta.description for meta in metas if meta.description), "")


def _metavar(hint: Any) -> str:
    base = _base(hint)
    if get_origin(base) is Literal:
        return "{" + ",".join(map(str, get_args(base))) + "}"
    if get_origin(base) in (list, tuple):
        return "A,B"
    return {int: "N", float: "X"}.get(base, "TEXT")


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value in ("", None) else str(value)


def _split(value: Any, hint: Any) -> Any:
    """Lists are comma separated in variables and flags."""
    if get_origin(_base(hint)) in (list, tuple) and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value
