"""How many ways a JSON schema leaves open at one place: the parser follows so many at a time and no more.

Knows what llguidance makes of a schema, in numbers: of objects that may stand in one place it keeps a way or more each once `{`
has come, and three to four for each property that may come next. Between these bounds the parser itself is asked. Does not
know what else a grammar may cost; places that are wide only together (a union of arrays of unions) are not found here, and
end their request in mid-answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llguidance import LLMatcher, LLTokenizer

MAX_WAYS = 2_000  # llguidance's max_items_in_row
_SINGLE = ("items", "additionalProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LONG_ROW = re.compile(r"Current row has (\d+) items; max is \d+")
FEWER = "use fewer, `enum` for fixed values, and `required` and `additionalProperties: false` in objects"
_OTHER = 12  # ways of an object that names no property, and of an array, at most


@dataclass(frozen=True, slots=True)
class Wide:
    """A place that may be too wide. `schema`: what is wide there, by itself. least, most: bounds of its ways."""

    place: str  # JSON pointer
    schema: dict[str, Any]
    what: str  # "3,000 alternatives"
    advice: str
    least: int
    most: int

    def reason(self, ways: int, more: bool) -> str:
        """`ways`: as many, or with `more` perhaps more than that."""
        found = f"{self.what} are {ways:,} ways to go on at once" + (" or more" if more else "")
        return f"{found}; at most {MAX_WAYS:,} are accepted: {self.advice}"


def wide_places(schema: dict[str, Any]) -> Iterator[Wide]:
    """Places of a schema with more than MAX_WAYS ways, by the upper bound."""
    counted = _Count(schema)
    todo = [("#", schema)]
    while todo:
        place, node = todo.pop()
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list) and len(node[key]) > 1:
                least, most = counted.ways(node)
                if most > MAX_WAYS:
                    yield Wide(f"{place}/{key}", node, f"{len(node[key]):,} alternatives", FEWER, least, most)
        run = _longest_run(node)
        if 4 * len(run) > MAX_WAYS:
            alone = {"type": "object", "properties": run, "additionalProperties": node.get("additionalProperties", True)}
            yield Wide(f"{place}/properties", alone, f"{len(run):,} properties in a row that may be left out",
                       "name more of them in `required`", 3 * len(run), 4 * len(run) + _OTHER)  # fmt: skip
        todo += children(place, node)


def children(place: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas inside a schema that are objects, each with its JSON pointer; definitions last."""
    for key in (*_SINGLE, *_LISTS, *_MAPS):
        value = node.get(key)
        if key in _SINGLE:
            inner = [("", value)]
        elif key in _LISTS:
            inner = [(f"/{i}", child) for i, child in enumerate(value)] if isinstance(value, list) else []
        else:
            inner = [(f"/{_escaped(name)}", child) for name, child in value.items()] if isinstance(value, dict) else []
        yield from ((f"{place}/{key}{step}", child) for step, child in inner if isinstance(child, dict))


def overflow(matcher: LLMatcher, tokenizer: LLTokenizer) -> int:
    """The ways at the beginning of what a matcher stands before, or behind the first `{` or `[` of it, where it follows no such
    number; else 0. The matcher is left as it is."""
    probe = matcher.deep_copy()
    while not probe.is_error() and (forced := probe.compute_ff_tokens()):
        if probe.try_consume_tokens(forced) < len(forced):
            break
    for opening in ("", "{", "["):
        behind = probe.deep_copy()
        behind.try_consume_tokens(tokenizer.tokenize_str(opening) if opening else [])
        if found := _LONG_ROW.search(behind.get_error() or ""):
            return int(found[1])
    return 0


def fragments(lark: str) -> Iterator[dict[str, Any]]:
    """The JSON schemas in a grammar."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"%json\s*(?=\{)", lark):
        try:
            value, _ = decoder.raw_decode(lark, found.end())
        except (ValueError, RecursionError):  # not a schema after all: the compiler says what it is
            continue
        yield value


def _escaped(name: str) -> str:
    """A name in a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _longest_run(node: dict[str, Any]) -> dict[str, Any]:
    """The properties, most in a row, between two that are required: any of them may come next."""
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict):
        return {}
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    runs = [list(names) for is_needed, names in groupby(properties, needed.__contains__) if not is_needed]
    return {name: properties[name] for name in max(runs, key=len, default=())}


class _Count:
    """(least, most) ways of a schema behind the first `{` or `[`."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[int, tuple[int, int]] = {}

    def ways(self, node: Any, depth: int = 0) -> tuple[int, int]:
        if not isinstance(node, dict):
            return 0, _OTHER
        if id(node) not in self._known:
            self._known[id(node)] = 0, _OTHER  # where it refers to itself
            if depth < 64:
                self._known[id(node)] = self._ways(node, depth + 1)
        return self._known[id(node)]

    def _ways(self, node: dict[str, Any], depth: int) -> tuple[int, int]:
        if "$ref" in node:
            return self.ways(self._target(node["$ref"]), depth)
        if "enum" in node or "const" in node:
            return 0, _OTHER
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(node.get(key), list):
                parts = [self.ways(child, depth) for child in node[key]]
                return (0 if key == "allOf" else sum(least for least, _ in parts)), sum(most for _, most in parts)
        properties, required = node.get("properties"), node.get("required")
        names = list(properties) if isinstance(properties, dict) else []
        if isinstance(required, list) and names and names[0] in required:
            names = []  # the first one has to come first
        return int(node.get("type") == "object"), 4 * len(names) + _OTHER

    def _target(self, ref: Any) -> Any:
        node: Any = self._root
        for step in ref[1:].split("/")[1:] if isinstance(ref, str) and ref.startswith("#") else ():
            node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return node
