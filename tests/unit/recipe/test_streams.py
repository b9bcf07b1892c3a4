"""Output streams: any cut of an output is the same reply, and every protocol's framing is well formed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.recipe.errors import RecipeError
from headrace.recipe.stream import (
    ChatStream,
    CompletionStream,
    MessagesStream,
    ParsingOptions,
    ResponsesStream,
    StreamParser,
    Usage,
)
from headrace.recipe.stream.chat import many

CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get">\n<｜DSML｜ parameter name="city" string="true">Pa"ris\n'
    '</｜DSML｜ parameter>\n<｜DSML｜ parameter name="n" string="false">[1, 2]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
PARTS = st.lists(
    st.sampled_from(["think ", "</think>", "\n\n", "hello 🎉", "2 < 3", "<b>", CALL, "｜DSML｜", "EN", "END", "é"]),
    min_size=1,
    max_size=10,
).map("".join)
WRITERS = {"chat": ChatStream, "responses": ResponsesStream, "messages": MessagesStream}
OPTIONS = st.sampled_from(
    [
        ParsingOptions(thinking_initial_stage="reasoning_start", lenient_end=True),
        ParsingOptions(stop_sequences=["END"]),
        ParsingOptions(parse_tool_calls=False, thinking_initial_stage="reasoning_start"),
    ]
)


def write(protocol: str, parsing: ParsingOptions, tokenizer, chunks: list[list[int]], reason: str = "stop", **options):
    parser = StreamParser(parsing, tokenizer, call_id=lambda n: f"call_{n}")
    if protocol == "responses":
        options["clock"] = lambda: 0
    stream = WRITERS[protocol](parser, "id", "model", 7, **options)
    output = stream.first(Usage(10, 4))
    for chunk in chunks:
        output += stream.push(chunk)
        if parser.finished:
            break
    return output + stream.finish(reason), stream


def events(output: bytes) -> list[dict]:
    blocks = [block.split("\n")[-1].removeprefix("data: ") for block in output.decode().split("\n\n")[:-1]]
    return [json.loads(block) for block in blocks if block != "[DONE]"]


@pytest.mark.parametrize("protocol", WRITERS)
def test_any_cut_is_the_same_reply(tokenizer, protocol):
    @settings(max_examples=60, deadline=None)
    @given(PARTS, OPTIONS, st.randoms(use_true_random=False))
    def check(text, parsing, rng):
        ids = tokenizer.encode(text)
        whole, single = [ids], [[i] for i in ids]
        cuts, at = [], 0
        while at < len(ids):
            step = rng.randint(1, 5)
            cuts.append(ids[at : at + step])
            at += step
        replies = []
        for chunks in (single, cuts, whole):
            output, stream = write(protocol, parsing, tokenizer, chunks)
            reply = stream.accumulate()
            # A stop inside a chunk keeps the whole chunk in the referee's usage; text and calls do not depend on it.
            reply.pop("usage")
            replies.append(reply)
            well_formed(protocol, events(output))
        assert replies[0] == replies[1] == replies[2]

    check()


def well_formed(protocol: str, told: list[dict]) -> None:
    if protocol == "chat":
        finishes = [e for e in told if e["choices"] and e["choices"][0]["finish_reason"]]
        assert len(finishes) == 1
        for event in told[1:-1]:
            delta = event["choices"][0]["delta"]
            assert sum(bool(delta.get(key)) for key in ("content", "reasoning_content", "tool_calls")) <= 1
    elif protocol == "messages":
        open_block, seen = None, []
        assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop"
        assert [e["type"] for e in told].count("message_delta") == 1
        for event in told:
            if event["type"] == "content_block_start":
                assert open_block is None and event["index"] == len(seen)
                open_block = event["index"]
                seen.append(open_block)
            elif event["type"] == "content_block_delta":
                assert event["index"] == open_block
            elif event["type"] == "content_block_stop":
                assert event["index"] == open_block
                open_block = None
        assert open_block is None
    else:
        assert [e["sequence_number"] for e in told] == list(range(len(told)))
        added = [e["item"]["id"] for e in told if e["type"] == "response.output_item.added"]
        done = [e["item"]["id"] for e in told if e["type"] == "response.output_item.done"]
        assert added == done
        assert told[-1]["response"]["output"] == [e["item"] for e in told if e["type"] == "response.output_item.done"]


def test_open_dialect_puts_usage_last(tokenizer):
    output, stream = write("chat", ParsingOptions(), tokenizer, [tokenizer.encode("hi")], include_usage=True)
    told = events(output)
    assert all(e["usage"] is None for e in told[:-1])
    assert told[-2]["choices"][0]["finish_reason"] == "stop"
    assert told[-1]["choices"] == [] and told[-1]["usage"]["total_tokens"] == 11
    assert output.endswith(b"data: [DONE]\n\n")
    plain, _ = write("chat", ParsingOptions(), tokenizer, [tokenizer.encode("hi")])
    assert b"usage" not in plain


def test_official_dialect_has_usage_in_the_finish_chunk(tokenizer):
    output, _ = write("chat", ParsingOptions(), tokenizer, [tokenizer.encode("hi")], dialect="official")
    last = events(output)[-1]
    assert last["choices"][0]["finish_reason"] == "stop" and last["usage"]["prompt_cache_miss_tokens"] == 6


def test_engine_counts_win(tokenizer):
    parser = StreamParser(ParsingOptions(thinking_initial_stage="reasoning_start"), tokenizer)
    stream = ChatStream(parser, "id", "m")
    stream.push(tokenizer.encode("a b</think>c"))
    stream.finish("stop", Usage(100, 64, 50, 20))
    assert stream.usage_object() == {
        "prompt_tokens": 100,
        "completion_tokens": 50,
        "total_tokens": 150,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 20},
        "prompt_cache_hit_tokens": 64,
        "prompt_cache_miss_tokens": 36,
    }


def test_reasoning_tokens_are_counted(tokenizer):
    for chunks in (
        [tokenizer.encode("one two three</think>four")],
        [[i] for i in tokenizer.encode("one two three</think>four")],
    ):
        parser = StreamParser(ParsingOptions(thinking_initial_stage="reasoning_start"), tokenizer)
        for chunk in chunks:
            parser.push(chunk)
        assert parser.reasoning_tokens == len(tokenizer.encode("one two three"))


def test_stop_tells_what_to_keep(tokenizer):
    ids = tokenizer.encode("alpha beta END gamma delta")
    for chunks in ([ids], [[i] for i in ids]):
        parser = StreamParser(ParsingOptions(stop_sequences=["END"]), tokenizer)
        text = ""
        for chunk in chunks:
            text += "".join(e.text for e in parser.push(chunk) if e.kind == "content")
            if parser.finished:
                break
        assert parser.stopped == "END" and text == "alpha beta "
        assert tokenizer.decode(ids[: parser.kept_tokens]).endswith("END")


def content(events) -> str:
    return "".join(event.text for event in events if event.kind == "content")


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("cut", [1, 2, 3, 100])
def test_a_stop_completed_within_min_tokens_is_text(tokenizer, cut, raw):
    """From token min_tokens + 1 on they count, one that began before it too; whatever a step gave together."""
    ids = tokenizer.encode_plain("alpha END beta gamma END delta")
    first = next(n for n in range(len(ids)) if "END" in tokenizer.decode(ids[:n]))  # tokens that complete the first one
    for least, text, kept in (
        (0, "alpha ", first), (first - 1, "alpha ", first), (first, "alpha END beta gamma ", None), (len(ids), None, None),
    ):  # fmt: skip
        options = ParsingOptions(stop_sequences=["END"], min_tokens=least, raw=raw, parse_tool_calls=False)
        parser, plain = StreamParser(options, tokenizer), ""
        for at in range(0, len(ids), cut):
            if parser.finished:
                break
            if (fast := parser.push_plain(ids[at : at + cut])) is not None:
                plain += fast[2]
                continue
            plain += content(parser.push(ids[at : at + cut]))
        plain += content(parser.finish())
        assert plain == (tokenizer.decode(ids) if text is None else text), least
        assert parser.stopped == (None if text is None else "END") and (kept is None or parser.kept_tokens == kept)


def test_a_stop_over_the_edge_of_min_tokens_ends_the_output(tokenizer):
    ids = tokenizer.encode_plain("alpha beta gamma delta")
    for least in range(1, len(ids)):
        parser = StreamParser(ParsingOptions(stop_sequences=["alpha beta gamma"], min_tokens=least, raw=True), tokenizer)
        text = "".join(content(parser.push([n])) for n in ids if not parser.finished) + content(parser.finish())
        done = next(n for n in range(len(ids)) if "alpha beta gamma" in tokenizer.decode(ids[:n]))
        assert (text, parser.stopped) == (("", "alpha beta gamma") if least < done else ("alpha beta gamma delta", None))


def test_stops_do_not_reach_reasoning_or_calls(tokenizer):
    parser = StreamParser(ParsingOptions(thinking_initial_stage="reasoning_start", stop_sequences=["ris"]), tokenizer)
    parser.push(tokenizer.encode("Paris</think>" + CALL))
    parser.finish()
    assert parser.stopped is None and parser.tool_calls == 1


def test_broken_end_is_kept_in_the_open_dialect_only(tokenizer):
    first = tokenizer.encode("🎉")[0]
    for lenient, text in ((True, "\ufffd"), (False, "")):
        parser = StreamParser(ParsingOptions(lenient_end=lenient), tokenizer)
        told = parser.push([first]) + parser.finish()
        assert "".join(e.text for e in told) == text


def test_control_tokens_come_from_ids_only(tokenizer):
    parser = StreamParser(ParsingOptions(thinking_initial_stage="reasoning_start"), tokenizer)
    spelled = tokenizer.encode_plain("a</think>b")
    told = parser.push(spelled) + parser.finish()
    assert "".join(e.text for e in told if e.kind == "reasoning") == "a</think>b"


def test_logprobs(tokenizer):
    ids = tokenizer.encode("🎉x")
    parser = StreamParser(ParsingOptions(), tokenizer)
    stream = ChatStream(parser, "id", "m")
    stream.push(ids, [(-0.1, [(ids[0], -0.1), (5, float("-inf"))])] * len(ids))
    stream.finish()
    entries = stream.choice()["logprobs"]["content"]
    assert [e["token"] for e in entries] == ["\\xf0\\x9f\\x8e", "\\x89", "x"]
    assert entries[0]["bytes"] == [240, 159, 142] and entries[0]["logprob"] == -0.1
    assert entries[0]["top_logprobs"][1]["logprob"] is None
    with pytest.raises(ValueError, match="1 log probabilities for 2"):
        StreamParser(ParsingOptions(), tokenizer).push([5, 6], [(0.0, [])])


@pytest.mark.parametrize(
    "reason, chat, messages, status",
    [
        ("length", "length", "max_tokens", "incomplete"),
        ("content_filter", "content_filter", "refusal", "incomplete"),
        ("stop", "tool_calls", "tool_use", "completed"),
    ],
)
def test_finish_reasons(tokenizer, reason, chat, messages, status):
    chunks = [tokenizer.encode("x" + CALL)]
    assert write("chat", ParsingOptions(), tokenizer, chunks, reason)[1].finish_reason == chat
    assert write("messages", ParsingOptions(), tokenizer, chunks, reason)[1].finish_reason == messages
    assert write("responses", ParsingOptions(), tokenizer, chunks, reason)[1].accumulate()["status"] == status


def test_failures_in_mid_stream_are_told(tokenizer):
    failure = RecipeError("the engine is gone", status=503)
    for protocol, mark in (
        ("chat", b'data: {"error"'),
        ("messages", b"event: error"),
        ("responses", b"event: response.failed"),
    ):
        _, stream = write(protocol, ParsingOptions(), tokenizer, [tokenizer.encode("x")])
        assert stream.error(failure).startswith(mark) and b"the engine is gone" in stream.error(failure)
        assert b"boom" not in stream.error(KeyError("boom"))


def test_several_choices(tokenizer):
    streams = [ChatStream(StreamParser(ParsingOptions(), tokenizer), "id", "m", index=i) for i in range(2)]
    for stream in streams:
        stream.push(tokenizer.encode("answer"))
        stream.finish("stop", Usage(10), done=False)
    body = many(streams)
    assert [c["index"] for c in body["choices"]] == [0, 1] and body["usage"]["completion_tokens"] == 2


def test_text_completions(tokenizer):
    parser = StreamParser(ParsingOptions(raw=True, parse_tool_calls=False, stop_sequences=["END"]), tokenizer)
    stream = CompletionStream(parser, "id", "m", include_usage=True, echo="> ")
    output = stream.first()
    for token in tokenizer.encode("\n\nraw</think> text<think> END no"):
        output += stream.push([token])
        if parser.finished:
            break
    output += stream.finish("stop")
    assert stream.accumulate()["choices"][0]["text"] == "> \n\nraw</think> text<think> "
    told = events(output)
    assert told[-1]["choices"] == [] and [e["choices"][0]["finish_reason"] for e in told[:-1]].count("stop") == 1


def test_an_output_is_ids_or_text(tokenizer):
    parser = StreamParser(ParsingOptions(), tokenizer)
    parser.push([5])
    with pytest.raises(ValueError, match="not both"):
        parser.push_text("x")
    parser.finish()
    with pytest.raises(RuntimeError, match="has finished"):
        parser.push([5])


def test_reasoning_alias(tokenizer):
    output, _ = write(
        "chat",
        ParsingOptions(thinking_initial_stage="reasoning_start"),
        tokenizer,
        [[i] for i in tokenizer.encode("why not")],
        reasoning_alias=True,
    )
    deltas = [e["choices"][0]["delta"] for e in events(output)]
    assert [d.get("reasoning") for d in deltas if d.get("reasoning_content")] == ["why", " not"]
