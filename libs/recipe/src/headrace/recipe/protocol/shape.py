"""From parsed JSON to typed request structs, with the referee's wording for what does not fit.

A request is declared once, as a msgspec struct; `reader` compiles its annotations to a function that checks and builds
it. Unknown fields are ignored. A field without default is required; `T | None` takes null.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from ..errors import ShapeError
from ..jsontext import quote

Reader = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Check:
    """Annotation: read the value with this function."""

    read: Reader


@dataclass(frozen=True, eq=False)
class Tagged:
    """Annotation: one of several structs, named by the field `tag`; `other` takes unknown tags when given."""

    name: str
    tag: str
    variants: dict[str, type]
    other: type | None = None


class Misfit(ShapeError):
    """A value of the wrong type or form. `path`: field names and list positions from the value up to the body."""

    def __init__(self, message: str):
        super().__init__(f"invalid request body: {message}")
        self.reason = message
        self.path: list[str | int] = []

    def named(self) -> "ShapeError":
        """The same, naming the field; the referee's message does not."""
        field = ""
        for step in reversed(self.path):
            field += f"[{step}]" if isinstance(step, int) else f".{step}" if field else step
        if not field:
            return self
        return ShapeError(f"invalid request body: {field}: {self.reason}", param=field)


def misfit(value: Any, expected: str) -> Misfit:
    """The error for a value of another type than `expected`."""
    return Misfit(f"invalid type: {describe(value)}, expected {expected}")


def describe(value: Any) -> str:
    """A value as the referee names it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{'true' if value else 'false'}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value!r}`"
    if isinstance(value, str):
        return f"string {quote(value)}"
    return "sequence" if isinstance(value, list) else "map"


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise misfit(value, "a string")
    return value


def boolean(value: Any) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise misfit(value, "a boolean")
    return value


def unsigned(bits: int) -> Reader:
    """An integer of `bits` bits without sign."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise misfit(value, f"u{bits}")
        if not 0 <= value < 1 << bits:
            raise Misfit(f"invalid value: integer `{value}`, expected u{bits}")
        return value

    return read


def binary32(value: Any) -> float:
    """A number, rounded to binary32."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise misfit(value, "f32")
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


U8 = Annotated[int, Check(unsigned(8))]
U32 = Annotated[int, Check(unsigned(32))]
U64 = Annotated[int, Check(unsigned(64))]
F32 = Annotated[float, Check(binary32)]


def naming(read: Reader) -> Reader:
    """`read`, its errors naming the field: for the open dialect."""

    def named(value: Any) -> Any:
        try:
            return read(value)
        except Misfit as error:
            raise error.named() from None

    return named


@cache
def reader(annotation: Any) -> Reader:
    """The function that reads a value of `annotation`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(arguments[1], arguments[0])
    if origin in (Union, UnionType):
        inner = [a for a in arguments if a is not NoneType]
        assert len(inner) == 1 and len(arguments) == 2, f"only `T | None` is read: {annotation}"
        read = reader(inner[0])
        return lambda value: None if value is None else read(value)
    if origin is list:
        return sequence(reader(arguments[0]))
    if origin is Literal:
        return _choice(arguments)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return _struct(annotation)
    return {str: text, bool: boolean, Any: lambda value: value}[annotation]


def _annotated(mark: Any, annotation: Any) -> Reader:
    if isinstance(mark, Check):
        return mark.read
    if isinstance(mark, Tagged):
        return _tagged(mark)
    return reader(annotation)


def sequence(read: Reader) -> Reader:
    """The function that reads a list of what `read` reads."""

    def items(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise misfit(value, "a sequence")
        found: list[Any] = []
        try:
            for item in value:
                found.append(read(item))
        except Misfit as error:
            error.path.append(len(found))
            raise
        return found

    return items


def _choice(options: tuple[str, ...]) -> Reader:
    known = set(options)

    def choice(value: Any) -> str:
        if isinstance(value, dict):
            if len(value) != 1:
                raise Misfit("invalid value: map, expected map with a single key")
            value = next(iter(value))
            if value in known:
                raise Misfit("invalid type: map, expected a string")
        if not isinstance(value, str):
            raise misfit(value, "string or map")
        if value not in known:
            raise Misfit(unknown_variant(value, options))
        return value

    return choice


def unknown_variant(value: str, options: Any) -> str:
    """The message for a value outside an enumeration."""
    names = [f"`{option}`" for option in options]
    one_of = names[0] if len(names) == 1 else f"{names[0]} or {names[1]}" if len(names) == 2 else "one of " + ", ".join(names)
    return f"unknown variant `{value}`, expected {one_of}"


def _struct(cls: type) -> Reader:
    hints = get_type_hints(cls, include_extras=True)
    fields = msgspec.structs.fields(cls)
    readers = {field.encode_name: (field.name, reader(hints[field.name])) for field in fields}
    required = [field for field in fields if field.required]
    name = f"{getattr(cls, 'shape_kind', 'struct')} {getattr(cls, 'shape_name', cls.__name__)}"
    get = readers.get

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            raise misfit(value, name)
        found = {}
        for key, item in value.items():
            field = get(key)
            if field is not None:
                try:
                    found[field[0]] = field[1](item)
                except Misfit as error:
                    error.path.append(key)
                    raise
        for field in required:
            if field.name not in found:
                raise Misfit(f"missing field `{field.encode_name}`")
        return cls(**found)

    return build


def _tagged(mark: Tagged) -> Reader:
    variants: dict[str, Reader] = {tag: reader(cls) for tag, cls in mark.variants.items()}
    other = None if mark.other is None else reader(mark.other)

    def tagged(value: Any) -> Any:
        if not isinstance(value, dict):
            raise misfit(value, f"internally tagged enum {mark.name}")
        if mark.tag not in value:
            raise Misfit(f"missing field `{mark.tag}`")
        tag = value[mark.tag]
        if not isinstance(tag, str):
            raise misfit(tag, "variant identifier")
        read = variants.get(tag, other)
        if read is None:
            raise Misfit(unknown_variant(tag, mark.variants))
        return read(value)

    return tagged
