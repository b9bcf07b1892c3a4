"""How the output of one request is to be read."""

from typing import Literal

import msgspec

from ..tokens import DEFAULT_TOKENS, SpecialTokens

# Where output begins in thinking mode; None means thinking mode is off.
Stage = Literal["reasoning_start", "reasoning_continuation", "content_continuation"]


class ParsingOptions(msgspec.Struct):
    """Settings of a `StreamParser`.

    `stop_sequences` apply to content only, and only one that is completed behind the first `min_tokens` tokens ends an output.
    `parse_json_output` keeps the JSON document of an answer and turns the text around it to spaces. `starts_in_tool_calls`: the
    prompt has opened the block already.
    `repair` mends malformed tool calls and reports each repair; the official dialect never does.
    `raw`: a text completion, where only stop sequences mean anything.
    `lenient_end` keeps bytes that the referee drops when a stream ends inside a character.
    """

    parse_tool_calls: bool = True
    starts_in_tool_calls: bool = False
    parse_json_output: bool = False
    thinking_initial_stage: Stage | None = None
    stop_sequences: list[str] = []
    min_tokens: int = 0
    special_tokens: SpecialTokens = DEFAULT_TOKENS
    repair: bool = False
    raw: bool = False
    lenient_end: bool = False

    @property
    def thinking(self) -> bool:
        """Whether the reply has a reasoning part."""
        return self.thinking_initial_stage is not None
