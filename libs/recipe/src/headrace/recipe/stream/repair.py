"""Mending of malformed tool calls: an opt-in beyond the referee, which passes them on or loses them.

Models sometimes put all arguments under one wrapper key, write a JSON object where parameter tags belong, or stop
before a call is closed. A call under repair is told whole, when it ends, so nothing already sent has to be taken back.
Every repair is named in `StreamParser.repairs`.
"""

from typing import Any

from ..jsontext import JSONError, dumps, loads

WRAPPERS = ("arguments", "input", "parameters")


class Repair:
    """The call in the making and what was mended so far."""

    def __init__(self) -> None:
        self.repairs: list[str] = []
        self.open: int | None = None  # index of the call whose arguments are being gathered
        self.arguments: list[str] = []
        self.markup: list[str] = []  # text of the block that belongs to no name or argument

    def begin(self, index: int, name: str) -> str:
        """A call begins; its name without the markup that an unclosed quote swallowed."""
        self.open = index
        self.arguments.clear()
        self.markup.clear()
        clean = name.split("\n")[0].split(">")[0].strip()
        if clean != name and clean:
            self.repairs.append("unterminated_name")
            return clean
        return name

    def end(self, *, complete: bool, mend: bool) -> str:
        """The arguments of the call. `complete`: its close tag came. `mend`: repairs may be made."""
        text, body = "".join(self.arguments), "".join(self.markup)
        self.arguments.clear()
        self.markup.clear()
        if not mend:
            return text
        if text in ("", "{}"):
            return self._json_body(body, complete)
        value = _object(text)
        if value is None and not complete:
            text, value = self._terminate(text)
        if value is None:
            return text
        inner = _unwrap(value)
        if inner is None:
            return text
        self.repairs.append("wrapper_key")
        return dumps(inner)

    def _json_body(self, body: str, complete: bool) -> str:
        """An object between the invoke tags, or no argument at all."""
        start, end = body.find("{"), body.rfind("}")
        value = _object(body[start : end + 1]) if 0 <= start < end else None
        if not complete:
            self.repairs.append("unterminated_invoke")
        if value is None:
            return "{}"
        self.repairs.append("json_body")
        return dumps(_unwrap(value) or value)

    def _terminate(self, text: str) -> tuple[str, dict[str, Any] | None]:
        """Close an object that ends inside a string or between values."""
        for tail in ("}", '"}', "null}", '\\"}'):
            value = _object(text + tail)
            if value is not None:
                self.repairs.append("unterminated_invoke")
                return text + tail, value
        return text, None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = loads(text)
    except JSONError:
        return None
    return value if isinstance(value, dict) else None


def _unwrap(value: dict[str, Any]) -> dict[str, Any] | None:
    """The object under a lone wrapper key, given as an object or as its text."""
    if len(value) != 1:
        return None
    key, inner = next(iter(value.items()))
    if key not in WRAPPERS:
        return None
    if isinstance(inner, str):
        inner = _object(inner)
    return inner if isinstance(inner, dict) else None
