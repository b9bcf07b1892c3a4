"""Model families: which package runs which `architectures` of a config.json.

A family is a package with `config.parse_config(data) -> config` (a dataclass with a `family` attribute, no torch) and
`loader.load(checkpoint, config, options) -> headrace.engine.batch.Model`. Adding one is its package and its line here.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

FAMILIES = {
    "DeepseekV41ForCausalLM": "v41",
    "DeepseekV3ForCausalLM": "mla",
    "DeepseekV2ForCausalLM": "mla",
    "DeepseekV4ForCausalLM": "v4",
}
UNNAMED = "DeepseekV41ForCausalLM"  # the flat inference/config.json of V4.1 names no architecture


def family_of(architectures: Any) -> str | None:
    """The family of a config.json's `architectures`, a list of one name; None when no family runs it."""
    match architectures:
        case [str(name)]:
            return FAMILIES.get(name)
    return None


def module(family: str, name: str) -> ModuleType:
    """`config` or `loader` of a family."""
    return import_module(f"{__name__}.{family}.{name}")
