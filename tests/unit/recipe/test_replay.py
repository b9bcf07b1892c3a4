"""Exact replay of tool-calling turns: same ids after the client re-spells the arguments, and never a wrong turn."""

import json

import pytest

from headrace.recipe import Conversation, Encoding, Message, ReplayCache, ToolCall, ToolDefinition
from headrace.recipe.stream import ChatStream, ParsingOptions, StreamParser

OUTPUT = (
    'weigh it up</think>Looking.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get">\n'
    '<｜DSML｜ parameter name="city" string="true">Zürich</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">[1,2]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def answered(calls: list[ToolCall], *, content: str, reasoning: str | None) -> Conversation:
    return Conversation(
        [
            Message("user", "weather?"),
            Message("assistant", content, reasoning, calls),
            Message("tool", "rain", tool_call_id=calls[0].id),
        ],
        tools=[ToolDefinition("get", "", {"type": "object"})],
        thinking_mode=True,
    )


@pytest.fixture
def sampled(v41_tokenizer):
    """A turn as the engine produced it: split into tokens otherwise than the tokenizer would."""
    ids = [id for part in OUTPUT.split(" ") for id in v41_tokenizer.encode(part + " ")][:-1]
    parsing = ParsingOptions(thinking_initial_stage="reasoning_start", lenient_end=True)
    stream = ChatStream(StreamParser(parsing, v41_tokenizer), "id", "model", 0)
    stream.first()
    stream.push(ids)
    stream.finish("stop")
    message = stream.accumulate()["choices"][0]["message"]
    call = message["tool_calls"][0]
    return ids, stream, message, ToolCall(call["id"], "get", call["function"]["arguments"])


def respelled(call: ToolCall, **changes) -> ToolCall:
    fields = {"id": call.id, "name": call.name, "arguments": call.arguments, **changes}
    return ToolCall(**fields)


def contains(haystack, needle) -> bool:
    haystack, needle = list(haystack), list(needle)
    return any(haystack[i : i + len(needle)] == needle for i in range(len(haystack) - len(needle) + 1))


def test_respelled_arguments_give_the_sampled_ids(v41_tokenizer, sampled):
    ids, stream, message, call = sampled
    replay = ReplayCache()
    assert replay.remember(b"a", stream, ids)
    arguments = json.dumps(dict(reversed(json.loads(call.arguments).items())), indent=2)  # other order, spaces, escapes
    assert arguments != call.arguments
    conversation = answered([respelled(call, arguments=arguments)], content=message["content"], reasoning="weigh it up")
    encoding = Encoding("v41", v41_tokenizer)
    plain = encoding.encode(conversation, b"a")
    assert not contains(plain, ids)
    assert contains(encoding.encode(conversation, b"a", replay=replay), ids)
    assert list(encoding.encode(conversation, b"b", replay=replay)) == list(plain)  # another tenant
    assert list(encoding.encode(conversation, b"a")) == list(plain)  # and nothing stuck in the segment cache


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": '{"city": "Zürich", "days": [1, 2.0]}'},
        {"arguments": '{"city": "Zürich", "days": [1, true]}'},
        {"arguments": '{"city": "Zürich"}'},
        {"arguments": "not json"},
        {"name": "got"},
        {"id": "call_00_other"},
    ],
)
def test_another_call_is_not_replayed(v41_tokenizer, sampled, change):
    ids, stream, message, call = sampled
    replay = ReplayCache()
    replay.remember(b"", stream, ids)
    conversation = answered([respelled(call, **change)], content=message["content"], reasoning="weigh it up")
    encoding = Encoding("v41", v41_tokenizer)
    assert list(encoding.encode(conversation, replay=replay)) == list(encoding.encode(conversation))


@pytest.mark.parametrize(("content", "reasoning"), [("Looking!", "weigh it up"), (None, "weigh it"), (None, None)])
def test_another_text_is_not_replayed(v41_tokenizer, sampled, content, reasoning):
    ids, stream, message, call = sampled
    replay = ReplayCache()
    replay.remember(b"", stream, ids)
    conversation = answered([call], content=content or message["content"], reasoning=reasoning)
    assert not contains(Encoding("v41", v41_tokenizer).encode(conversation, replay=replay), ids)


def test_calls_in_another_order_are_not_replayed(v41_tokenizer):
    """Results are rendered in the order of the client's calls; replayed calls would stand in another one."""
    two = OUTPUT.replace("</｜DSML｜ calls>", OUTPUT[OUTPUT.index("<｜DSML｜ invoke") :])
    stream = ChatStream(StreamParser(ParsingOptions(thinking_initial_stage="reasoning_start"), v41_tokenizer), "id", "m", 0)
    ids = v41_tokenizer.encode(two)
    stream.push(ids)
    stream.finish("stop")
    calls = [ToolCall(call.id, call.name, call.text) for call in stream.calls]
    replay = ReplayCache()
    assert len(calls) == 2 and replay.remember(b"a", stream, ids)
    assert replay.find(b"a", Message("assistant", "Looking.", "weigh it up", calls)) is not None
    assert replay.find(b"a", Message("assistant", "Looking.", "weigh it up", calls[::-1])) is None


def test_absent_reasoning_is_restored(v41_tokenizer, sampled):
    ids, stream, message, call = sampled
    replay = ReplayCache()
    replay.remember(b"a", stream, ids)
    conversation = answered([call], content=message["content"], reasoning="")
    assert replay.restore(conversation, b"b", [1]) == 0
    assert replay.restore(conversation, b"a", [1]) == 1
    assert conversation.messages[1].reasoning_content == "weigh it up"
    assert contains(Encoding("v41", v41_tokenizer).encode(conversation, b"a", replay=replay), ids)


def test_it_is_bounded_and_keeps_what_is_used(v41_tokenizer):
    def turn(number: int) -> tuple[ChatStream, list[int]]:
        ids = v41_tokenizer.encode(OUTPUT)
        parsing = ParsingOptions(thinking_initial_stage="reasoning_start")
        stream = ChatStream(StreamParser(parsing, v41_tokenizer, call_id=lambda n: f"call_{number}"), "id", "model", 0)
        stream.first()
        stream.push(ids)
        stream.finish("stop")
        return stream, ids

    replay = ReplayCache(max_bytes=10_000)
    for number in range(50):
        assert replay.remember(b"", *turn(number))
        assert replay.bytes <= 10_000
        assert replay._get((b"", "call_0")) is not None  # used again and again
    assert 2 < len(replay) < 50


def test_a_cut_or_stopped_turn_is_not_remembered(v41_tokenizer):
    cases = [("length", [], OUTPUT[:-30]), ("stop", ["oking"], OUTPUT), ("stop", [], "x</think>no call")]
    for reason, stops, output in cases:
        ids = v41_tokenizer.encode(output)
        parsing = ParsingOptions(thinking_initial_stage="reasoning_start", stop_sequences=stops)
        stream = ChatStream(StreamParser(parsing, v41_tokenizer), "id", "model", 0)
        stream.first()
        stream.push(ids)
        stream.finish(reason)
        assert not ReplayCache().remember(b"", stream, ids)
