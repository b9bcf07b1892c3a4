"""Schemas, good and hostile, and outputs drawn at random under a grammar: what the tests of structured output share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from headrace.engine.grammar import Grammars, Matcher
from headrace.engine.make_checkpoint import small_tokenizer_json

EOS = 1


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more}


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


NODE = closed({"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
# What clients send, one for each thing that a schema can say. Every finished output must validate against it.
SCHEMAS: dict[str, Any] = {
    "empty": {},
    "true": True,
    "object": {"type": "object"},
    "closed": closed({"b": {"type": "boolean"}, "a": {"type": "null"}, "c": {"type": "integer"}}),
    "optional": {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "additionalProperties": False},
    "no properties": {"type": "object", "properties": {}, "additionalProperties": False},
    "additional": {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "integer"}},
    "nested": closed({"one": closed({"two": closed({"three": {"enum": [3, "three"]}})})}),
    "string": {"type": "string", "maxLength": 5},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 3},
    "unicode": closed({"naïve 😀": {"const": '\u2028 "\\ 漢字'}, "a/b~c": {"enum": ["ü", "\n"]}}),
    "enum": {"enum": [1, "a", None, True, {"x": [1, 2]}, 2.5]},
    "const object": {"const": {"a": [1, {"b": None}]}},
    "integer range": {"type": "integer", "minimum": -7, "maximum": 1234},
    "exclusive": {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1001},
    "number range": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 5000},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"enum": ["x"]}], "items": False, "minItems": 2},
    "array of objects": {"type": "array", "items": closed({"id": {"enum": [1, 2]}}), "maxItems": 3},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "null"}, closed({"k": {"const": "v"}})]},
    "one of, disjoint": {"oneOf": [closed({"kind": {"const": "a"}}), closed({"kind": {"const": "b"}, "x": {"type": "null"}})]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 50}]},
    "types": {"type": ["integer", "null", "boolean"], "minimum": 5, "maximum": 77},
    "ref": {"$defs": {"colour": {"enum": ["red", "green"]}}, **closed({"a": {"$ref": "#/$defs/colour"}})},
    "definitions": {"definitions": {"n": {"type": "null"}}, **closed({"a": {"$ref": "#/definitions/n"}})},
    "recursive": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "pattern": text(r"^[a-c]{2}-\d{1,3}$"),
    "pattern inside": {"type": "string", "pattern": "b[0-9]", "maxLength": 6},
    "pattern alternatives": text("^(?:yes|no)$"),
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "date-time": {"type": "string", "format": "date-time"},
    "pattern properties": {"patternProperties": {"^x\\d$": {"type": "null"}}, "additionalProperties": False, "type": "object"},
    "annotations": {"type": "integer", "title": "t", "description": "d", "default": 4, "examples": [1], "maximum": 9},
}  # fmt: skip


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def many(count: int, required: bool, prefix: str = "p") -> Any:
    names = [f"{prefix}{i}" for i in range(count)]
    schema = {"type": "object", "properties": {n: {"type": "string"} for n in names}, "additionalProperties": False}
    return schema | {"required": names} if required else schema


_CHOICES = [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(10)]} for i in range(8)]
_PAIR = {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}, "required": ["l", "r"]}
# Schemas made to hang, to blow up or to be misread: each must be refused or followed, never waited for.
HOSTILE: dict[str, str] = {
    name: schema if isinstance(schema, str) else json.dumps(schema)
    for name, schema in {
        "refers to itself": {"$ref": "#"},
        "refers in a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "a tree without leaves": {"$defs": {"n": _PAIR}, "$ref": "#/$defs/n"},
        "refers to the network": {"$ref": "http://127.0.0.1:1/schema.json"},
        "refers to a file": {"$ref": "file:///etc/passwd"},
        "dangling": {"$ref": "#/$defs/zz"},
        "deep": nested(100),
        "deeper": nested(300),
        "deepest": '{"items":' * 40_000 + "{}" + "}" * 40_000,
        "brackets": "[" * 100_000,
        "huge": json.dumps({"enum": [f"value {i}" for i in range(40_000)]}),
        "many words": {"enum": [f"v{i}" for i in range(10_000)]},
        "many optional properties": many(1500, False),
        "wide in the middle": {"anyOf": [closed({"a": many(30, False, f"{i}-")}) for i in range(30)]},
        "many required properties": many(3000, True),
        "many alternatives": {"anyOf": [closed({"a": {"const": i}, "b": {"type": "string"}}) for i in range(800)]},
        "products": {"allOf": _CHOICES},
        "many conjunctions": {"allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(150)]},
        "nested repetitions": text("^((a{1,100}){1,100}){1,100}$"),
        "long repetition": text("^a{1,100000}$"),
        "long repetitions": text("^(.{0,5000}x){0,5000}$"),
        "exponential alternation": text("^(a|a|a)*$"),
        "exponential nesting": text("^((a+)+)+b$"),
        "exponential states": text("^.*a.{40}$"),
        "counted suffix": text("(a|b)*a(a|b){30}"),
        "every letter": text(r"^\p{L}{1,3000}$"),
        "look ahead": text("^(?=a)b"),
        "back reference": text(r"^(a)\1$"),
        "broken pattern": text("(("),
        "large multiple": {"type": "integer", "multipleOf": 1_000_003},
        "multiples of two primes": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
        "small multiple": {"type": "number", "multipleOf": 1e-300},
        "endless number": '{"type":"number","minimum":1e400}',
        "long integer": {"type": "integer", "minimum": 10**400},
        "long array": {"type": "array", "minItems": 10**5, "items": {"type": "integer"}},
        "longer array": {"type": "array", "minItems": 10**30},
        "long string": {"type": "string", "minLength": 10**6},
        "longer string": {"type": "string", "minLength": 10**30},
        "contradiction": {"type": "integer", "minimum": 5, "maximum": 1},
        "nothing": False,
        "impossible property": {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "negation": {"not": {"type": "string"}},
        "condition": {"if": {"type": "string"}, "then": {"minLength": 2}},
        "unique": {"type": "array", "uniqueItems": True},
        "unknown type": {"type": "word"},
        "number for a type": {"type": 5},
        "list for properties": {"type": "object", "properties": []},
        "null": "null",
        "not JSON": "{",
        "duplicate keys": '{"type":"integer","type":"string"}',
        "lone surrogate": '{"const":"\\ud800"}',
        "nul in a name": {"type": "object", "properties": {"\0": {"const": "\0"}}, "required": ["\0"]},
        "options of the compiler": {"x-guidance": {"lenient": True, "whitespace_pattern": "("}, "type": "object"},
    }.items()
}  # fmt: skip


def small_grammars(folder: Path, control: dict[str, int] | None = None) -> Grammars:
    """Over the tokenizer of random checkpoints: one id a byte, then control tokens. `control` is filled with their ids."""
    definition = small_tokenizer_json()
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(definition))
    size = 1 + max(*definition["model"]["vocab"].values(), *(token["id"] for token in definition["added_tokens"]))
    if control is not None:
        control.update({token["content"]: token["id"] for token in definition["added_tokens"]})
    return Grammars(path, size, (EOS,))


def tokens_of(row: np.ndarray) -> np.ndarray:
    """Ids whose bit is set."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def draw(matcher: Matcher, rng: np.random.Generator, limit: int) -> tuple[list[int], bool]:
    """(ids, whether the output ended): tokens are drawn evenly from what is allowed, as if by a model that knows nothing."""
    out: list[int] = []
    while len(out) < limit:
        if matcher.ended:
            return out, True
        allowed = tokens_of(matcher.mask())
        token = int(allowed[rng.integers(len(allowed))])
        if token == EOS or (EOS in allowed[:2] and rng.random() < 0.5):
            return out, True
        assert matcher.accept([token]) == 1
        out.append(token)
    return out, False
