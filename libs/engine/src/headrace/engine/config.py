"""config.json: which family it belongs to, and the typing that all families share.

Knows how JSON values become fields of a family's config dataclass. What the fields are and which values contradict
each other is the family's own (`models/<family>/config.py`). Every error names the key, the value and what would be
right.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from . import models


class ConfigError(ValueError):
    """config.json is not one this engine can run; the message names the key."""


def read_config(path: str | Path) -> Any:
    """`path`: a checkpoint directory or a JSON file -> the family's config. Raises ConfigError."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; a checkpoint directory holds config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    try:
        return parse_config(data)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def parse_config(data: dict[str, Any]) -> Any:
    """A decoded config.json -> checked config of the family that its `architectures` names. Raises ConfigError."""
    if not isinstance(data, dict):
        raise ConfigError(f"the top level is a {type(data).__name__}, not an object")
    architectures = data.get("architectures", [models.UNNAMED])
    family = models.family_of(architectures)
    if family is None:
        raise ConfigError(f"architectures is {architectures!r}; this engine runs {', '.join(models.FAMILIES)}")
    return models.module(family, "config").parse_config(data)


# ------------------------------------------------------------------ typing


def token_ids(value: Any) -> tuple[int, ...]:
    """One id or a list of ids -> ids."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def child(data: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`."""
    if not isinstance(data[key], dict):
        raise ConfigError(f"{key} is {data[key]!r}, not an object")
    return data[key]


def names(cls: type) -> list[str]:
    """Fields of a config dataclass."""
    return [f.name for f in fields(cls)]


def build(cls: type, values: dict[str, Any]) -> Any:
    """Make a config dataclass from JSON values; lists become tuples; numbers are type-checked against the
    annotation."""
    known = {}
    for field in fields(cls):
        if field.name not in values:
            if field.default is MISSING:
                raise ConfigError(f"{field.name} is missing")
            continue
        known[field.name] = _typed(field.name, str(field.type), values[field.name])
    return cls(**known)


def _typed(name: str, annotation: str, value: Any) -> Any:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if annotation == "int" and not integer:
        raise ConfigError(f"{name} is {value!r}, not an integer")
    if annotation == "int | None" and not (integer or value is None):
        raise ConfigError(f"{name} is {value!r}, not an integer or null")
    if annotation == "float | None" and value is None:
        return None
    if annotation in ("float", "float | None"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"{name} is {value!r}, not a finite number")
        return float(value)
    if annotation == "bool" and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, not true or false")
    if annotation == "str" and not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}, not a string")
    if annotation == "tuple[int, ...]":
        if not isinstance(value, (list, tuple)) or any(not isinstance(v, int) or isinstance(v, bool) for v in value):
            raise ConfigError(f"{name} is {value!r}, not a list of integers")
        return tuple(value)
    return value
