"""JSON as prompts, requests and constraints spell it.

`loads` accepts exactly what the referee's parser (serde_json) accepts: no NaN, no lone surrogates, no number beyond
binary64, at most 127 nested containers, the last of duplicate keys at the first one's place. `dumps` writes text with
", " and ": " and raw non-ASCII; V4 and V4.1 differ only in how small floats are spelled. `compact` writes the same
values without spaces.
"""

import json
import re
from typing import Any

import msgspec

MAX_DEPTH = 127  # nested containers; serde_json refuses the 128th
_U64, _I64 = 2**64 - 1, -(2**63)
_decode = msgspec.json.Decoder().decode
_spaced = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode
_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode
_quote = json.encoder.encode_basestring
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else byte for byte in range(256))
_LONG_NUMBER = b"0" * 19
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z|\\)', re.DOTALL)  # an open string reaches to the end
_MARKS = (b",", b":", b"[", b"{")
_SMALL_FLOAT = re.compile(r"\de-0")


class JSONError(ValueError):
    """The text is not JSON as the referee reads it."""


def loads(text: str | bytes) -> Any:
    """Parse JSON. Raises `JSONError` with the parser's reason."""
    try:
        data = text if isinstance(text, bytes) else text.encode()
        _check_depth(data)
        value = _decode(data)
        # Only a negative zero, or an integer that may not fit 64 bits, needs the slow parser.
        if b"-0" in data or _LONG_NUMBER in data.translate(_DIGITS):
            value = json.loads(data, parse_int=_parse_int)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise JSONError(str(error)) from None
    return value


def count_values(data: bytes, most: int) -> int:
    """Keys and values of a JSON text, give or take one a container. Counting stops above `most`."""
    marks = sum(map(data.count, _MARKS))
    if marks <= most:
        return marks
    found = at = 0  # texts may hold many marks, which cost nothing: count between them
    while found <= most and (text := _STRING.search(data, at)):
        found += sum(data.count(mark, at, text.start()) for mark in _MARKS)
        at = text.end()
    return found if found > most else found + sum(data.count(mark, at) for mark in _MARKS)


def dumps(value: Any, *, padded_exponents: bool = True) -> str:
    """Spaced JSON. `padded_exponents`: 1e-07 (V4.1) or 1e-7, fixed notation down to 1e-5 (V4)."""
    text = _spaced(value)
    if padded_exponents or not _SMALL_FLOAT.search(text):
        return text
    return _write(value)


def compact(value: Any) -> str:
    """JSON without spaces; small floats as V4 spells them."""
    text = _compact(value)
    return _write(value, ",", ":") if _SMALL_FLOAT.search(text) else text


def quote(text: str) -> str:
    """`text` as a JSON string with its quotes; non-ASCII stays raw."""
    return _quote(text)


def _check_depth(data: bytes) -> None:
    """Refuse more than MAX_DEPTH nested containers, in linear time; strings are skipped only when it matters."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in _STRING.sub(b"", data).translate(None, _NOT_BRACKETS):
        if bracket in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise JSONError(f"recursion limit exceeded: more than {MAX_DEPTH} nested containers")
        else:
            depth -= 1


def _parse_int(digits: str) -> int | float:
    """Integers outside 64 bits, and -0, are floats to serde_json."""
    if digits == "-0":
        return -0.0
    if len(digits) < 19 or (len(digits) < 25 and _I64 <= int(digits) <= _U64):
        return int(digits)
    result = float(digits)
    if result in (float("inf"), float("-inf")):
        raise JSONError("number out of range")
    return result


def _write(value: Any, comma: str = ", ", colon: str = ": ") -> str:
    if isinstance(value, float):
        return _unpadded(value)
    if isinstance(value, dict):
        return "{" + comma.join(f"{_quote(k)}{colon}{_write(v, comma, colon)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + comma.join(_write(v, comma, colon) for v in value) + "]"
    return _spaced(value)


def _unpadded(value: float) -> str:
    text = repr(value)
    mantissa, e, exponent = text.partition("e-")
    if not e:
        return text
    if int(exponent) > 5:
        return f"{mantissa}e-{int(exponent)}"
    sign, digits = ("-", mantissa[1:]) if mantissa.startswith("-") else ("", mantissa)
    return f"{sign}0.{'0' * (int(exponent) - 1)}{digits.replace('.', '')}"
