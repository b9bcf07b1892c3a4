"""The text-level state machine: which characters of an output are reasoning, content, tool-call markup or noise.

Fed text piece by piece, it answers with segments (action, length, label) that cover the text in order; the last
characters stay unresolved while they may begin a marker. Lengths may span pieces: `parser` cuts them. Knows neither
tokens nor protocols.

Markers are literal strings. In an output of token ids the control tokens are single characters that no text can hold
(lone surrogates), so text that merely spells a control token is text.
"""

from functools import lru_cache
from typing import NamedTuple

from ..tokens import SpecialTokens
from .options import ParsingOptions

# Actions of a segment.
CONTENT, SPACE, REASONING, SKIP, NAME, NAME_END, LABEL, STRING, VERBATIM, CALL_END, STOP, MARKUP = range(12)

THINK_END_MARK, DSML_MARK = "\ud801", "\ud802"  # control tokens in an output of token ids


class Segment(NamedTuple):
    """`length` characters to treat as `action`; `label` is text to emit for LABEL and CALL_END, the match for STOP.

    MARKUP is what SKIP is for text inside a tool block, when repairs want to see it.
    """

    action: int
    length: int
    label: str = ""


class Marker(NamedTuple):
    """A string to find: what it does (`action`, `label`) and the state after it."""

    text: str
    action: int
    target: str
    label: str = ""
    newlines: bool = False  # the newlines directly before belong to it


class State(NamedTuple):
    """Markers in order of priority, what other text is, and whether newlines at the very start are skipped."""

    name: str
    markers: tuple[Marker, ...]
    action: int
    skips_newlines: bool = False
    triggers: frozenset[str] = frozenset()
    reach: int = 0  # longest marker


class Machine:
    """One output's state. `feed` any cut of the text gives the same coverage."""

    def __init__(self, options: ParsingOptions, *, marks: bool):
        """`marks`: control tokens arrive as `THINK_END_MARK` and `DSML_MARK`, not as text."""
        self._states = _states(
            options.special_tokens,
            tuple(options.stop_sequences),
            options.parse_tool_calls,
            options.parse_json_output,
            options.repair,
            marks,
        )
        self.stops = True  # whether a stop sequence that is completed now ends the output
        self._enter(_initial(options))

    @property
    def name(self) -> str:
        """Name of the current state."""
        return self.state.name

    @property
    def idle(self) -> bool:
        """Whether text without trigger characters may be taken for `state.action` unseen."""
        return not self.held and not self._at_start

    def pass_plain(self) -> None:
        """Text without trigger characters went by while `idle`."""
        self._seen = ""

    def feed(self, text: str) -> list[Segment]:
        """Resolve what `text` decides."""
        segments: list[Segment] = []
        while True:
            state = self.state
            if not self.held and not self._at_start and state.triggers.isdisjoint(text):
                if text:
                    segments.append(Segment(state.action, len(text)))
                    self._seen = ""
                return segments
            if self._at_start and state.skips_newlines and text.startswith("\n") and not self._starts_stop(text):
                segments.append(Segment(SKIP, 1))
                self._enter(state.name)
                text = text[1:]
                if not text:
                    return segments
                continue
            found = self._find(text)
            if found is None:
                self._hold(text, segments)
                return segments
            marker, end, newlines = found
            length = len(marker.text) + newlines
            unmatched = self.held + end - length
            if unmatched:
                segments.append(Segment(state.action, unmatched))
            segments.append(Segment(marker.action, length, marker.label))
            self._enter(marker.target)
            text = text[end:]
            if not text:
                return segments

    def finish(self) -> list[Segment]:
        """The held text, which nothing can complete any more."""
        held, self.held = self.held, 0
        return [Segment(self.state.action, held)] if held else []

    def _enter(self, name: str) -> None:
        self.state = self._states[name]
        self.held = 0  # unresolved characters at the end of what was fed
        self._seen = ""  # the last characters since the state began, at least the held ones
        self._at_start = self.state.skips_newlines

    def _starts_stop(self, text: str) -> bool:
        """A one-character marker that is a newline wins over the skipping of leading newlines."""
        return self.stops and any(marker.text == "\n" for marker in self.state.markers)

    def _find(self, text: str) -> tuple[Marker, int, int] | None:
        """The first marker to complete in `text`: (marker, end in `text`, newlines before it that belong to it)."""
        seen, best, best_end = self._seen, None, len(text) + 1
        data = seen + text
        for marker in self.state.markers:
            if marker.action == STOP and not self.stops:
                continue
            start = max(0, len(seen) - len(marker.text) + 1)
            at = data.find(marker.text, start, len(seen) + best_end - 1)
            if at >= 0:
                best, best_end = marker, at + len(marker.text) - len(seen)
        if best is None:
            return None
        begin = len(seen) + best_end - len(best.text)
        return best, best_end, self._newlines(data, begin, best) if best.newlines else 0

    def _newlines(self, data: str, end: int, marker: Marker) -> int:
        """Newlines directly before `end` that a marker takes: not the one that broke an earlier partial match of it."""
        stripped = data[:end].rstrip("\n")
        count = end - len(stripped)
        if count and _partial(stripped, marker.text):
            count -= 1
        return count

    def _hold(self, text: str, segments: list[Segment]) -> None:
        """Nothing completed: release all but the longest beginning of a marker."""
        self._at_start = False
        data = self._seen + text
        available = self.held + len(text)
        held = 0
        for marker in self.state.markers:
            partial = _partial(data, marker.text)
            if marker.newlines:
                partial += self._newlines(data, len(data) - partial, marker)
            held = max(held, partial)
        if available > held:
            segments.append(Segment(self.state.action, available - held))
        self.held = held
        self._seen = data[-(held + self.state.reach) :]


def _partial(text: str, marker: str) -> int:
    """Length of the longest proper beginning of `marker` that `text` ends with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _initial(options: ParsingOptions) -> str:
    if options.raw:
        return "raw"
    if options.starts_in_tool_calls:
        return "tools"
    return {
        "reasoning_start": "reasoning_start",
        "reasoning_continuation": "reasoning",
        "content_continuation": "content",
        None: "content_start",
    }[options.thinking_initial_stage]


@lru_cache(maxsize=1024)  # few requests differ in these, and building the table costs more than reading a short output
def _states(
    tokens: SpecialTokens,
    stop_sequences: tuple[str, ...],
    parse_tool_calls: bool,
    parse_json_output: bool,
    repair: bool,
    marks: bool,
) -> dict[str, State]:
    think_end = THINK_END_MARK if marks else tokens.thinking_end
    dsml = DSML_MARK if marks else tokens.dsml
    close = f"</{dsml}"
    stops = [Marker(stop, STOP, "finished", stop) for stop in stop_sequences if stop]
    tools = [Marker(f"<{dsml}", MARKUP if repair else SKIP, "tools", newlines=True)] if parse_tool_calls else []
    fences = [Marker("```json\n", SKIP, "json"), Marker("```\n", SKIP, "json")]
    fences += [Marker(bracket, LABEL, "json", bracket) for bracket in "{["]
    content = [*(fences if parse_json_output else stops), *tools, Marker(think_end, SKIP, "content")]
    reasoning = [*tools, Marker(think_end, SKIP, "content_start", newlines=True)]
    markup = MARKUP if repair else SKIP
    other = SPACE if parse_json_output else CONTENT
    states = [
        State("content_start", tuple(content), other, True),
        State("content", tuple(content), other),
        State("reasoning_start", tuple(reasoning), REASONING, True),
        State("reasoning", tuple(reasoning), REASONING),
        State("json", (*stops, Marker("\n```", SKIP, "after_json")), CONTENT),
        State("after_json", tuple(tools), SPACE),
        State(
            "tools",
            (
                Marker('invoke name="', markup, "name"),
                Marker(f"{close}tool_calls>", markup, "finished"),
                Marker(f"{close} calls>", markup, "finished"),
            ),
            markup,
        ),
        State("name", (Marker('"', NAME_END, "first_argument"),), NAME),
        State("first_argument", (Marker("parameter name=", LABEL, "key", "{"), Marker(close, CALL_END, "tools", "{}")), markup),
        State("argument", (Marker("parameter name=", LABEL, "key", ", "), Marker(close, CALL_END, "tools", "}")), SKIP),
        State("key", (Marker(" ", LABEL, "type", ": "),), VERBATIM),
        State("type", (Marker('true">', LABEL, "string", '"'), Marker('false">', SKIP, "verbatim")), SKIP),
        State("string", (Marker(close, LABEL, "argument", '"'),), STRING),
        State("verbatim", (Marker(close, SKIP, "argument"),), VERBATIM),
        State("finished", (), SKIP),
        State("raw", tuple(stops), CONTENT),
    ]
    return {s.name: s._replace(triggers=_triggers(s), reach=max((len(m.text) for m in s.markers), default=0)) for s in states}


def _triggers(state: State) -> frozenset[str]:
    """Characters that may begin a marker of `state`."""
    firsts = {marker.text[0] for marker in state.markers}
    return frozenset(firsts | {"\n"} if any(m.newlines for m in state.markers) else firsts)
