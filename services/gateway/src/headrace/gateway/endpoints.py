"""The generation endpoints as data: how each reads a request, renders prompts, and writes its reply. All of it is recipe's."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from headrace.bus import messages as m
from headrace.recipe import Encoding, MissingToken, Tokenizer
from headrace.recipe.protocol import ConversionOptions, ParsedRequest, chat, completions, messages, responses
from headrace.recipe.replay import ReplayCache
from headrace.recipe.stream import ChatStream, CompletionStream, MessagesStream, ReplyStream, ResponsesStream, StreamParser
from headrace.recipe.stream.chat import DetailedChatStream, many
from headrace.recipe.stream.completions import DetailedCompletionStream

from . import errors
from .responses import response_id
from .settings import GatewaySettings

LONG_TEXT = 8192  # characters above which a prompt is tokenised in a thread
_DETAILS = {"continuous_usage_stats", "return_token_ids"}


@dataclass(frozen=True, slots=True)
class Context:
    """What writers need beside the request. `prompts`: rendered ids, one entry per prompt; `gateway`: this instance."""

    tokenizer: Tokenizer
    request_id: str
    gateway: str
    created: int
    prompts: list[array]
    settings: GatewaySettings


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`streams` makes one writer per prompt and choice (prompt-major); `collect` the body of an answer that is not streamed."""

    name: str
    protocol: str
    parse: Callable[[dict[str, Any], ConversionOptions], ParsedRequest]
    encode: Callable[[Encoding, ParsedRequest, bytes, ReplayCache | None], Awaitable[list[array]]]
    streams: Callable[[ParsedRequest, Context], list[ReplyStream]]
    collect: Callable[[list[Any], m.Usage], dict[str, Any]]


# ---------------------------------------------------------------- prompts


async def _encode_conversation(
    encoding: Encoding, parsed: ParsedRequest, namespace: bytes, replay: ReplayCache | None
) -> list[array]:
    if replay is not None and parsed.reasoning_absent:
        replay.restore(parsed.conversation, namespace, parsed.reasoning_absent)
    try:
        return [await encoding.encode_async(parsed.conversation, namespace, replay)]
    except MissingToken as error:
        raise errors.invalid(
            f"this model can't hold conversations with template {encoding.version}: {error}; use /v1/completions, or start the "
            "gateway with the --template of this model",
            "messages",
        ) from error


async def _encode_prompts(
    encoding: Encoding, parsed: ParsedRequest, namespace: bytes, replay: ReplayCache | None
) -> list[array]:
    tokenizer, suffix = encoding.tokenizer, parsed.extras.get("suffix")
    out = []
    for prompt in parsed.prompts:
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            out.append(array("I", await asyncio.to_thread(completions.prompt_ids, prompt, tokenizer, suffix)))
        else:
            out.append(array("I", completions.prompt_ids(prompt, tokenizer, suffix)))
        if (token := encoding.image_token) is not None and token in out[-1]:
            raise errors.invalid(f"token id {token} stands for images; a prompt of ids or plain text can't hold it", "prompt")
    return out


# ---------------------------------------------------------------- replies


def _chat(parsed: ParsedRequest, context: Context) -> list[ReplyStream]:
    settings, alias = context.settings, parsed.extras.get("reasoning_alias", context.settings.reasoning_alias)
    writer = DetailedChatStream if _DETAILS & parsed.extras.keys() else ChatStream
    streams = [
        writer(
            StreamParser(parsed.parsing, context.tokenizer), f"chatcmpl-{context.request_id}", parsed.model, context.created,
            settings.dialect, parsed.include_usage, index=index, reasoning_alias=bool(alias),
            prompt_logprobs=parsed.sampling.prompt_logprobs,
        )
        for index in range(parsed.sampling.n)
    ]  # fmt: skip
    return _detailed(streams, parsed, context)


def _completions(parsed: ParsedRequest, context: Context) -> list[ReplyStream]:
    n, out = parsed.sampling.n, []
    writer = DetailedCompletionStream if _DETAILS & parsed.extras.keys() else CompletionStream
    for number, (prompt, ids) in enumerate(zip(parsed.prompts, context.prompts, strict=True)):
        echo = ""
        if parsed.extras.get("echo"):
            echo = prompt if isinstance(prompt, str) else context.tokenizer.decode(ids)
        out += [
            writer(
                StreamParser(parsed.parsing, context.tokenizer), f"cmpl-{context.request_id}", parsed.model, context.created,
                "open", parsed.include_usage, index=number * n + choice, echo=echo,
                echo_logprobs=parsed.extras.get("echo_logprobs"), prompt_logprobs=parsed.sampling.prompt_logprobs,
            )
            for choice in range(n)
        ]  # fmt: skip
    return _detailed(out, parsed, context)


def _detailed(streams: list[Any], parsed: ParsedRequest, context: Context) -> list[Any]:
    """Writers get to know what else was asked for."""
    for stream in streams:
        stream.wants_logprobs = parsed.sampling.logprobs
        stream.prompt_only = bool(parsed.extras.get("prompt_only"))
    if _DETAILS & parsed.extras.keys():
        for number, stream in enumerate(streams):
            stream.running_usage = bool(parsed.extras.get("continuous_usage_stats"))
            if parsed.extras.get("return_token_ids"):
                stream.prompt_ids = context.prompts[number // parsed.sampling.n]
    return streams


def _messages(parsed: ParsedRequest, context: Context) -> list[ReplyStream]:
    parser = StreamParser(parsed.parsing, context.tokenizer)
    return [MessagesStream(parser, f"msg_{context.request_id}", parsed.model, context.created, context.settings.dialect)]


def _responses(parsed: ParsedRequest, context: Context) -> list[ReplyStream]:
    settings, extras = context.settings, parsed.extras
    if settings.dialect == "open":
        if extras.get("background"):
            raise errors.invalid("`background` is not served: a request ends with its connection; use `stream`", "background")
        for name, kind, what in (("store", bool, "a boolean"), ("metadata", dict, "an object")):
            if not isinstance(extras.get(name, kind()), kind):
                raise errors.invalid(f"`{name}` must be {what}", name)
        parsed.echo = (parsed.echo or {}) | {
            "store": extras.get("store", True) and settings.response_bytes > 0, "metadata": extras.get("metadata", {}),
            "previous_response_id": extras.get("previous_response_id"),
        }  # fmt: skip
    parser = StreamParser(parsed.parsing, context.tokenizer)
    return [
        ResponsesStream(
            parser, response_id(context.request_id, context.gateway), parsed.model, context.created, settings.dialect,
            echo=parsed.echo, namespaces=parsed.namespaces, custom_tools=parsed.custom_tools,
        )
    ]  # fmt: skip


def _collect_one(streams: list[Any], usage: m.Usage) -> dict[str, Any]:
    return streams[0].accumulate()


def _collect_choices(streams: list[Any], usage: m.Usage) -> dict[str, Any]:
    if len(streams) == 1:
        return streams[0].accumulate()
    body = many(streams)
    body["usage"] |= {  # choices count their own tokens; prompts and the end tokens are the workers' figures
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }  # fmt: skip
    return body


CHAT = Endpoint("chat", "chat", chat.parse, _encode_conversation, _chat, _collect_choices)
COMPLETIONS = Endpoint("completions", "completions", completions.parse, _encode_prompts, _completions, _collect_choices)
MESSAGES = Endpoint("messages", "messages", messages.parse, _encode_conversation, _messages, _collect_one)
RESPONSES = Endpoint("responses", "responses", responses.parse, _encode_conversation, _responses, _collect_one)

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/completions": COMPLETIONS,
    "/beta/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
