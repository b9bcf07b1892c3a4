"""The generation endpoints as data: how each reads a request, renders prompts, and writes its reply. All of it is recipe's."""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from headrace.bus import messages as m
from headrace.recipe import Encoding, Tokenizer
from headrace.recipe.protocol import ConversionOptions, ParsedRequest, chat
from headrace.recipe.stream import ChatStream, StreamParser
from headrace.recipe.stream.chat import many
from headrace.recipe.stream.reply import ReplyStream

from .settings import GatewaySettings

Streams = Callable[[ParsedRequest, Tokenizer, str, int, GatewaySettings], list[ReplyStream]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`streams` makes one writer per prompt and choice (prompt-major); `collect` the body of an answer that is not streamed."""

    name: str
    protocol: str
    parse: Callable[[dict[str, Any], ConversionOptions], ParsedRequest]
    encode: Callable[[Encoding, ParsedRequest, bytes], Awaitable[list[array]]]
    streams: Streams
    collect: Callable[[list[ReplyStream], m.Usage], dict[str, Any]]


async def _encode_conversation(encoding: Encoding, parsed: ParsedRequest, namespace: bytes) -> list[array]:
    return [await encoding.encode_async(parsed.conversation, namespace)]


def _chat_streams(parsed: ParsedRequest, tokenizer: Tokenizer, request_id: str, prompts: int, settings: GatewaySettings) -> list:
    created, alias = int(time.time()), parsed.extras.get("reasoning_alias", settings.reasoning_alias)
    return [
        ChatStream(StreamParser(parsed.parsing, tokenizer), f"chatcmpl-{request_id}", parsed.model, created, settings.dialect,
                   parsed.include_usage, index=index, reasoning_alias=bool(alias))
        for index in range(parsed.sampling.n)
    ]  # fmt: skip


def _collect_chat(streams: list[Any], usage: m.Usage) -> dict[str, Any]:
    if len(streams) == 1:
        return streams[0].accumulate()
    body = many(streams)
    body["usage"]["completion_tokens"] = usage.completion_tokens
    body["usage"]["total_tokens"] = usage.prompt_tokens + usage.completion_tokens
    return body


CHAT = Endpoint("chat", "chat", chat.parse, _encode_conversation, _chat_streams, _collect_chat)

ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": CHAT, "/chat/completions": CHAT}
