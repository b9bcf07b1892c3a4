"""JSON schemas of tools and response formats: is it a schema at all, and what strict mode makes of it.

`check` applies the 2020-12 meta-schema's rules for single keywords. `strict` rebuilds a schema as the referee does:
only the keywords that its constrained decoder knows survive, every object is closed and all its properties required.
"""

from collections.abc import Callable
from typing import Any

from ..jsontext import compact
from .shape import Misfit, misfit, text, unknown_variant

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_STRICT_TYPES = ("object", "string", "number", "integer", "boolean", "array", "null")
_LIST_TYPES = ("string", "number", "integer", "boolean", "null")
_NUMBER_KEYS = ("default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class SchemaError(ValueError):
    """The schema is not acceptable; the message says why."""


# --- validity --------------------------------------------------------------------------------------------------------


def check(schema: Any) -> None:
    """Raise SchemaError when `schema` is not a JSON schema."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaError(f'{compact(schema)} is not of types "boolean", "object"')
    try:
        for key, value in schema.items():
            rule = _RULES.get(key)
            if rule is not None:
                rule(value)
    except SchemaError:
        _first_error(schema)
        raise


def _first_error(schema: dict[str, Any]) -> None:
    """The error that the meta-schema's own order of keywords meets first."""
    for key, rule in _RULES.items():
        if key in schema:
            rule(schema[key])


def _of_type(name: str, kind: type) -> Callable[[Any], None]:
    def rule(value: Any) -> None:
        if not isinstance(value, kind):
            raise SchemaError(f'{compact(value)} is not of type "{name}"')

    return rule


_string, _array, _object, _boolean = (
    _of_type(name, kind) for name, kind in (("string", str), ("array", list), ("object", dict), ("boolean", bool))
)


def _number(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaError(f'{compact(value)} is not of type "number"')


def _positive(value: Any) -> None:
    _number(value)
    if value <= 0:
        raise SchemaError(f"{compact(value)} is less than or equal to the minimum of 0")


def _count(value: Any) -> None:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise SchemaError(f'{compact(value)} is not of type "integer"')
    if value < 0:
        raise SchemaError(f"{compact(value)} is less than the minimum of 0")


def _schemas(value: Any) -> None:
    _array(value)
    if not value:
        raise SchemaError("[] has less than 1 item")
    for item in value:
        check(item)


def _schema_map(value: Any) -> None:
    _object(value)
    for item in value.values():
        check(item)


def _strings(value: Any) -> None:
    _array(value)
    for item in value:
        _string(item)
    if len(set(value)) != len(value):
        raise SchemaError(f"{compact(value)} has non-unique elements")


def _string_lists(value: Any) -> None:
    _object(value)
    for names in value.values():
        _strings(names)


def _type(value: Any) -> None:
    names = [value] if isinstance(value, str) else value
    known = isinstance(names, list) and names and all(isinstance(n, str) and n in _TYPES for n in names)
    if not known or len(set(names)) != len(names):
        raise SchemaError(f"{compact(value)} is not valid under any of the schemas listed in the 'anyOf' keyword")


_KEYWORDS: list[dict[str, Callable[[Any], None]]] = [
    {
        "$id": _string,
        "$schema": _string,
        "$ref": _string,
        "$anchor": _string,
        "$dynamicRef": _string,
        "$dynamicAnchor": _string,
        "$vocabulary": _object,
        "$comment": _string,
        "$defs": _schema_map,
    },
    {
        "prefixItems": _schemas,
        "items": check,
        "contains": check,
        "additionalProperties": check,
        "properties": _schema_map,
        "patternProperties": _schema_map,
        "dependentSchemas": _schema_map,
        "propertyNames": check,
        "if": check,
        "then": check,
        "else": check,
        "allOf": _schemas,
        "anyOf": _schemas,
        "oneOf": _schemas,
        "not": check,
    },
    {"unevaluatedItems": check, "unevaluatedProperties": check},
    {
        "type": _type,
        "enum": _array,
        "multipleOf": _positive,
        "maximum": _number,
        "exclusiveMaximum": _number,
        "minimum": _number,
        "exclusiveMinimum": _number,
        "maxLength": _count,
        "minLength": _count,
        "pattern": _string,
        "maxItems": _count,
        "minItems": _count,
        "uniqueItems": _boolean,
        "maxContains": _count,
        "minContains": _count,
        "maxProperties": _count,
        "minProperties": _count,
        "required": _strings,
        "dependentRequired": _string_lists,
    },
    {
        "title": _string,
        "description": _string,
        "deprecated": _boolean,
        "readOnly": _boolean,
        "writeOnly": _boolean,
        "examples": _array,
    },
    {"format": _string},
    {"contentEncoding": _string, "contentMediaType": _string, "contentSchema": check},
    {"definitions": _schema_map},
]
_RULES = {key: rule for vocabulary in _KEYWORDS for key, rule in vocabulary.items()}


# --- strict mode -----------------------------------------------------------------------------------------------------


def strict(schema: Any) -> dict[str, Any]:
    """The keywords of `schema` that strict mode keeps. Raises SchemaError when it cannot be read so."""
    try:
        return _read(schema)
    except Misfit as error:
        raise SchemaError(error.reason) from None


def close(rebuilt: dict[str, Any], *, tool: bool) -> None:
    """Close every object of a schema from `strict`, in place. A tool may have no properties, a format may not."""
    if rebuilt.get("type") != "object":
        kind = "function parameters" if tool else "json"
        raise SchemaError(f"The top level of the {kind} schema must be an object.")
    _close(rebuilt, allow_empty=tool)


def _read(schema: Any) -> dict[str, Any]:
    """The keywords that strict mode keeps, in its order. Raises Misfit."""
    if not isinstance(schema, dict):
        raise Misfit("one of `type`, `anyOf`, `$ref` field is required")
    if "type" in schema:
        kind = schema["type"]
        if isinstance(kind, list):
            for name in kind:
                if name not in _LIST_TYPES:
                    reason = (
                        unknown_variant(name, _LIST_TYPES) if isinstance(name, str) else misfit(name, "string or map").reason
                    )
                    raise Misfit(f"field `type`: {reason}")
            return {"type": kind, **_optional(schema, description=text)}
        if not isinstance(kind, str):
            raise misfit(kind, "variant identifier")
        if kind not in _STRICT_TYPES:
            raise Misfit(unknown_variant(kind, _STRICT_TYPES))
        return {"type": kind, **_BY_TYPE[kind](schema)}
    if "anyOf" in schema:
        if not isinstance(schema["anyOf"], list):
            raise Misfit(f"field `anyOf`: {misfit(schema['anyOf'], 'a sequence').reason}")
        return {"anyOf": [_read(item) for item in schema["anyOf"]], **_optional(schema, description=text)}
    if "$ref" in schema:
        return {"$ref": text(schema["$ref"])}
    raise Misfit("one of `type`, `anyOf`, `$ref` field is required")


def _optional(schema: dict[str, Any], **readers: Callable[[Any], Any]) -> dict[str, Any]:
    """Known keywords in the order of `readers`; null is as good as absent. Errors come in the schema's own order."""
    found = {key: readers[key](value) for key, value in schema.items() if key in readers and value is not None}
    return {key: found[key] for key in readers if key in found}


def _read_object(schema: dict[str, Any]) -> dict[str, Any]:
    return _optional(
        schema,
        **{"properties": _read_map, "additionalProperties": _flag, "required": _texts, "description": text, "$def": _read_map},
    )


def _read_array(schema: dict[str, Any]) -> dict[str, Any]:
    found = _optional(schema, items=_read, description=text)
    if "items" not in found:
        raise Misfit("missing field `items`")
    return found


def _read_map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise misfit(value, "a map")
    return {key: _read(item) for key, item in value.items()}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise misfit(value, "a boolean")
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise misfit(value, "a sequence")
    return [text(item) for item in value]


def _any_number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise misfit(value, "a JSON number")
    return value


def _i64(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise misfit(value, "i64")
    return value


_BY_TYPE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "object": _read_object,
    "string": lambda s: _optional(s, description=text, enum=_texts, pattern=text, format=text),
    "number": lambda s: _optional(s, description=text, **dict.fromkeys(_NUMBER_KEYS, _any_number)),
    "integer": lambda s: _optional(s, description=text, **dict.fromkeys(_NUMBER_KEYS, _i64)),
    "boolean": lambda s: _optional(s, description=text),
    "array": _read_array,
    "null": lambda s: _optional(s, description=text),
}


def _close(schema: dict[str, Any], *, allow_empty: bool = False) -> None:
    """Close every object of a rebuilt schema in place."""
    if schema.get("type") == "object":
        _close_object(schema, allow_empty)
    elif schema.get("type") == "array":
        _close(schema["items"])
    for item in schema.get("anyOf", ()):
        _close(item)


def _close_object(schema: dict[str, Any], allow_empty: bool) -> None:
    properties = schema.get("properties", {})
    if not properties and not allow_empty:
        raise SchemaError("An object with no properties is not allowed.")
    if schema.get("additionalProperties"):
        raise SchemaError("additionalProperties should not be true")
    if "required" in schema:
        seen: set[str] = set()
        for name in schema["required"]:
            if name not in properties:
                raise SchemaError(f"Required property '{name}' not found in object")
            if name in seen:
                raise SchemaError(f"Duplicate required property '{name}'")
            seen.add(name)
        if len(seen) != len(properties):
            raise SchemaError("Required properties must match all properties in the object")
    for item in properties.values():
        _close(item)
    for item in schema.get("$def", {}).values():
        _close(item)
    rest = {key: schema[key] for key in ("description", "$def") if key in schema}
    schema.clear()
    schema.update(type="object", properties=properties, additionalProperties=False, required=list(properties), **rest)


# --- strict mode for a grammar ---------------------------------------------------------------------------------------

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "$def")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def closed(schema: Any) -> Any:
    """`schema` as strict mode means it: every object has all of its properties and no others. What the client wrote stays."""
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            out[key] = {name: closed(item) for name, item in value.items()}
        elif key in _LISTS and isinstance(value, list):
            out[key] = [closed(item) for item in value]
        else:
            out[key] = closed(value) if key in _SINGLE else value
    if "properties" in out or out.get("type") == "object":
        out |= {"additionalProperties": False, "required": list(out.get("properties", {}))}
    return out
