"""From sampled ids or text to reasoning, content and tool-call events.

The machine says what each character is; this module keeps the pieces (one piece per fed chunk, control tokens apart)
and emits a piece's events when all of it is decided, so an event never mixes pieces and any cut of an output
accumulates to the same reply. Knows no protocol.
"""

import secrets
import string
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from ..jsontext import quote
from ..tokenizer import Tokenizer
from .machine import (
    CALL_END,
    CONTENT,
    DSML_MARK,
    MARKUP,
    NAME,
    NAME_END,
    REASONING,
    SKIP,
    SPACE,
    STOP,
    STRING,
    THINK_END_MARK,
    VERBATIM,
    Machine,
    Segment,
)
from .options import ParsingOptions
from .repair import Repair

FinishReason = Literal["stop", "length", "content_filter"]
# Logprob of a sampled token and its alternatives (id, logprob).
TokenLogprob = tuple[float, list[tuple[int, float]]]
Logprob = tuple[int, float, list[tuple[int, float]]]  # with the sampled id

_TEXT = {CONTENT, SPACE, REASONING, STRING, VERBATIM, NAME, MARKUP}
_MERGED = _TEXT | {SKIP}
MAX_PENDING = 1024  # ids that may wait for the end of a character
_ALPHANUMERIC = string.ascii_letters + string.digits


class Event(msgspec.Struct):
    """Something to tell the client.

    kind "reasoning" or "content": `text`. "tool_start": a call `name` with `id` at `index`. "tool_arguments": `text`
    is the next part of the arguments' JSON. "tool_end": the call is complete. "stop": the stop sequence `text` matched.
    `logprobs`: of the piece that the event came from.
    """

    kind: str
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""
    logprobs: list[Logprob] | None = None


class _Piece(msgspec.Struct):
    """A fed text. `run` is the action of the last decided characters, which begin at `begin` and are not yet told."""

    text: str
    tokens: int
    logprobs: list[Logprob] | None = None
    resolved: int = 0  # characters
    begin: int = 0
    run: int = SKIP
    label: str = ""
    ids: list[int] | None = None


class PlainTable(dict[int, tuple[bytes, str] | None]):
    """Tokens that are whole UTF-8 and hold no character of `triggers`: their JSON-escaped bytes and their text.

    Filled as ids are met. None for every other token.
    """

    def __init__(self, tokenizer: Tokenizer, triggers: frozenset[str]):
        super().__init__()
        self._tokenizer = tokenizer
        self._triggers = triggers

    def __missing__(self, token_id: int) -> tuple[bytes, str] | None:
        self[token_id] = entry = self._entry(token_id)
        return entry

    def _entry(self, token_id: int) -> tuple[bytes, str] | None:
        if self._tokenizer.added_token(token_id) is not None:
            return None
        try:
            text = self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None
        if not text or text.endswith("\ufffd") or not self._triggers.isdisjoint(text):
            return None
        return quote(text)[1:-1].encode(), text


class StreamParser:
    """Reads one output. Feed it ids or text, not both. `stopped` tells that a stop sequence ended it."""

    def __init__(
        self,
        parsing: ParsingOptions,
        tokenizer: Tokenizer | None = None,
        call_id: Callable[[int], str] | None = None,
    ):
        """`call_id`: makes the id of tool call n; the default is random."""
        self.parsing = parsing
        self.tokenizer = tokenizer
        self.completion_tokens = 0
        self.tool_calls = 0
        self.stopped: str | None = None
        self.kept_tokens = 0  # completion tokens up to and with the one that completed the stop sequence
        self.finished = False
        self.repairs: list[str] = []
        self._repair = Repair() if parsing.repair else None
        self.saw_ids = False
        self.reasoning_tokens = 0
        self._unstopped = parsing.min_tokens if parsing.stop_sequences else 0  # ids to come that no stop sequence may end with
        self._machine: Machine | None = None
        self._pieces: deque[_Piece] = deque()
        self._pending: list[tuple[int, TokenLogprob | None]] = []  # ids that end inside a character
        self._name: list[str] = []
        self._call_id = call_id or random_call_id
        self._plain_state: Any = None
        self._plain: PlainTable | None = None

    def push_plain(self, ids: list[int]) -> tuple[str, bytes, str] | None:
        """The fast path of `push`: (kind, JSON-escaped text, text) when `ids` are plain content or reasoning.

        None when they need a closer look; then nothing has happened and `push` takes them.
        """
        machine = self._machine
        if machine is None or machine.held or not machine.idle or self._pieces or self._pending or self.finished:
            return None
        if self._unstopped:
            return None
        state = machine.state
        if state is not self._plain_state:
            self._plain_state = state
            told = (state.action == CONTENT or state.action == REASONING) and self.saw_ids
            self._plain = self.tokenizer.plain_table(state.triggers, PlainTable) if told else None
        table = self._plain
        if table is None:
            return None
        if len(ids) == 1:
            entry = table[ids[0]]
            if entry is None:
                return None
            escaped, text = entry
        else:
            entries = [table[token_id] for token_id in ids]
            if not entries or None in entries:
                return None
            escaped = b"".join([entry[0] for entry in entries])
            text = "".join([entry[1] for entry in entries])
        machine.pass_plain()
        self.completion_tokens += len(ids)
        if state.action == CONTENT:
            return "content", escaped, text
        self.reasoning_tokens += len(ids)
        return "reasoning", escaped, text

    def push(self, ids: Iterable[int], logprobs: list[TokenLogprob] | None = None) -> list[Event]:
        """Events that `ids` decide. `logprobs`: one entry per id. Raises ValueError when their numbers differ."""
        ids = list(ids)
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(f"invalid log probabilities: {len(logprobs)} log probabilities for {len(ids)} token IDs")
        machine = self._start(ids=True)
        events: list[Event] = []
        if self._unstopped:
            early, ids = ids[: self._unstopped], ids[self._unstopped :]
            told, logprobs = (logprobs[: len(early)], logprobs[len(early) :]) if logprobs is not None else (None, None)
            self._unstopped -= len(early)
            machine.stops = False
            for piece in self._pieces_of(early, told):
                self._advance(machine, piece, events)
            machine.stops = not self._unstopped
        for piece in self._pieces_of(ids, logprobs):
            if self._advance(machine, piece, events):
                break
        return events

    def push_text(self, text: str, tokens: int = 0) -> list[Event]:
        """Events that `text` decides; `tokens` is what it counts in usage."""
        events: list[Event] = []
        self._advance(self._start(ids=False), _Piece(text, tokens), events)
        return events

    def finish(self, reason: FinishReason = "stop") -> list[Event]:
        """End of the output: events of the text that was held back."""
        events: list[Event] = []
        if self.finished:
            return events
        if self.parsing.lenient_end and self._pending:
            machine = self._start(ids=True)
            self._advance(machine, self._flush_pending(), events)
        if self._machine is not None:
            self._resolve(self._machine.finish(), events)
        if self._repair is not None:
            self._finish_repairs(reason, events)
        self.finished = True
        return events

    def _finish_repairs(self, reason: FinishReason, events: list[Event]) -> None:
        """Close what the model left open; only when it ended by itself, a cut output stays cut."""
        repair = self._repair
        if repair.open is not None:
            text = repair.end(complete=False, mend=reason == "stop")
            events.append(Event("tool_arguments", text, repair.open))
            events.append(Event("tool_end", index=repair.open))
            repair.open = None
        elif not self.tool_calls and repair.markup:
            repair.repairs.append("block_without_call")
            events.append(Event("content", "".join(repair.markup)))
        self.repairs = repair.repairs

    def _start(self, *, ids: bool) -> Machine:
        if self.finished:
            raise RuntimeError("stream processor has finished")
        if self._machine is None:
            if ids and self.tokenizer is None:
                raise RuntimeError("token chunk received without a tokenizer")
            self._machine = Machine(self.parsing, marks=ids)
            self.saw_ids = ids
        elif self.saw_ids != ids:
            raise ValueError("one output is fed either ids or text, not both")
        return self._machine

    def _pieces_of(self, ids: list[int], logprobs: list[TokenLogprob] | None) -> Iterable[_Piece]:
        """Cut a chunk at its added tokens; keep back the tail that ends inside a character."""
        tokenizer = self.tokenizer
        pending = self._pending
        for position, token_id in enumerate(ids):
            entry = None if logprobs is None else logprobs[position]
            mark = self._mark(token_id)
            if mark is None:
                pending.append((token_id, entry))
                continue
            before = self._flush_pending() if pending else _Piece("", 0)
            own = [] if entry is None else [(token_id, *entry)]
            if before.text:
                yield before
                yield _Piece(mark, 1, own or None)
            else:  # ids without text go with the token after them
                yield _Piece(mark, before.tokens + 1, [*(before.logprobs or []), *own] or None)
        if pending:
            data = b"".join([tokenizer.token_bytes(token_id) for token_id, _ in pending])
            text = data.decode("utf-8", "replace")
            broken = text.endswith("\ufffd") and (not self.parsing.lenient_end or _ends_inside_character(data))
            if (text and not broken) or len(pending) >= MAX_PENDING:
                yield self._flush_pending(text)

    def _flush_pending(self, text: str | None = None) -> _Piece:
        pending = self._pending
        if text is None:
            text = self.tokenizer.decode(token_id for token_id, _ in pending)
        logprobs = [(token_id, *entry) for token_id, entry in pending if entry is not None] or None
        piece = _Piece(text, len(pending), logprobs, ids=[token_id for token_id, _ in pending])
        pending.clear()
        return piece

    def _mark(self, token_id: int) -> str | None:
        """The text of an added token, or the mark that stands for it; None for an ordinary token."""
        text = self.tokenizer.added_token(token_id)
        if text is None:
            return None
        tokens = self.parsing.special_tokens
        return THINK_END_MARK if text == tokens.thinking_end else DSML_MARK if text == tokens.dsml else text

    def _advance(self, machine: Machine, piece: _Piece, events: list[Event]) -> bool:
        """Feed one piece; True when a stop sequence ended the output."""
        self.completion_tokens += piece.tokens
        if machine.state.action == REASONING:
            self.reasoning_tokens += piece.tokens  # the token that ends the reasoning is taken back
        if piece.text:
            self._pieces.append(piece)
            self._resolve(machine.feed(piece.text), events)
            if piece.text == THINK_END_MARK and machine.state.name == "content_start":
                self.reasoning_tokens -= piece.tokens
        if self.stopped is not None:
            self.finished = True
            self.kept_tokens = self.completion_tokens - self._unneeded(piece)
        return self.finished

    def _unneeded(self, piece: _Piece) -> int:
        """Ids of the last piece after the one that completed the stop sequence."""
        if not piece.ids:
            return 0
        data = b""
        for position, token_id in enumerate(piece.ids):
            data += self.tokenizer.token_bytes(token_id)
            if len(data.decode("utf-8", "ignore")) >= piece.resolved:
                return len(piece.ids) - position - 1
        return 0

    def _resolve(self, segments: list[Segment], events: list[Event]) -> None:
        """Lay segments over the waiting pieces.

        A run is the neighbours of one action within a piece, or the part of one marker. It is told when something
        else follows or the piece ends; a marker that spans pieces speaks for its first part.
        """
        pieces = self._pieces
        for action, length, label in segments:
            while length:
                piece = pieces[0]
                part = min(length, len(piece.text) - piece.resolved)
                length -= part
                if action != piece.run or action not in _MERGED:
                    self._tell(piece, events)
                    piece.run, piece.label, label = action, label, ""
                piece.resolved += part
                if piece.resolved == len(piece.text):
                    self._tell(piece, events)
                    pieces.popleft()
            if action == STOP:
                if pieces:
                    self._tell(pieces[0], events)
                pieces.clear()
                return

    def _tell(self, piece: _Piece, events: list[Event]) -> None:
        """The event of the run that ends at `resolved`."""
        begin, action, label = piece.begin, piece.run, piece.label
        piece.begin, piece.run, piece.label = piece.resolved, SKIP, ""
        if action == SKIP or begin == piece.resolved:
            return
        if action in _TEXT:
            self._tell_text(action, piece.text[begin : piece.resolved], piece.logprobs, events)
        elif action == NAME_END:
            self._begin_call(events)
        elif not label:
            return
        elif action == STOP:
            self.stopped = label
            events.append(Event("stop", label))
        elif not self.tool_calls:
            events.append(Event("content", label, logprobs=piece.logprobs))  # the bracket that opens a JSON answer
        else:
            self._argument(label, events)
            if action == CALL_END:
                self._end_call(events)

    def _tell_text(self, action: int, text: str, logprobs: list[Logprob] | None, events: list[Event]) -> None:
        if action == SPACE:
            text = " "
        elif self.saw_ids and not text.isascii():
            text = self._spell(text)  # marks in the text become the spelling of their tokens
        if action in (CONTENT, SPACE):
            events.append(Event("content", text, logprobs=logprobs))
        elif action == REASONING:
            events.append(Event("reasoning", text, logprobs=logprobs))
        elif action == NAME:
            self._name.append(text)
        elif action == MARKUP:
            self._repair.markup.append(text)
        else:
            self._argument(quote(text)[1:-1] if action == STRING else text, events)

    def _begin_call(self, events: list[Event]) -> None:
        index = self.tool_calls
        self.tool_calls += 1
        name = "".join(self._name)
        self._name.clear()
        if self._repair is not None:
            name = self._repair.begin(index, name)
        events.append(Event("tool_start", index=index, id=self._call_id(index), name=name))

    def _end_call(self, events: list[Event]) -> None:
        index = self.tool_calls - 1
        if self._repair is not None:
            events.append(Event("tool_arguments", self._repair.end(complete=True, mend=True), index))
            self._repair.open = None
        events.append(Event("tool_end", index=index))

    def _argument(self, text: str, events: list[Event]) -> None:
        if self._repair is not None:
            self._repair.arguments.append(text)
            return
        events.append(Event("tool_arguments", text, self.tool_calls - 1))

    def _spell(self, text: str) -> str:
        """Marks back to the spelling of their tokens."""
        tokens = self.parsing.special_tokens
        return text.replace(THINK_END_MARK, tokens.thinking_end).replace(DSML_MARK, tokens.dsml)


def _ends_inside_character(data: bytes) -> bool:
    """Whether `data` ends with the beginning of a UTF-8 character that more bytes could complete."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF8 else 0
            return back < need
        if byte < 0x80:
            return False
    return False


def random_call_id(index: int) -> str:
    """`call_NN_` and 20 letters or digits and 4 digits, as the referee makes them."""
    letters = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(20))
    return f"call_{index:02d}_{letters}{secrets.randbelow(10_000):04d}"


def event_data(event: Event) -> dict[str, Any]:
    """An event as a plain dict, for logs and tests."""
    return {k: v for k, v in msgspec.structs.asdict(event).items() if v not in ("", None)}
