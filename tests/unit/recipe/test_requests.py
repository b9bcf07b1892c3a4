"""Requests of the open dialect, and what no body may do: crash, or cost much."""

import json
import random

import pytest

from headrace.recipe.errors import RecipeError
from headrace.recipe.jsontext import count_values
from headrace.recipe.protocol import OFFICIAL, OPEN, ConversionOptions, chat, completions, messages, responses

MODEL = "DeepSeek-V4.1-Flash"
PARSERS = {"chat": chat.parse, "completions": completions.parse, "messages": messages.parse, "responses": responses.parse}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def body(**fields) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def test_open_honours_sampling_in_thinking_mode():
    parsed = chat.parse(
        body(
            temperature=0.25,
            top_p=0.5,
            presence_penalty=1,
            top_k=40,
            min_p=0.5,
            repetition_penalty=1.5,
            min_tokens=2,
            stop_token_ids=[7],
            ignore_eos=True,
            n=3,
            seed=5,
            max_completion_tokens=9,
        )
    )
    s = parsed.sampling
    assert parsed.thinking
    assert (s.temperature, s.top_p, s.presence_penalty, s.top_k, s.min_p, s.repetition_penalty) == (0.25, 0.5, 1, 40, 0.5, 1.5)
    assert (s.min_tokens, s.stop_token_ids, s.ignore_eos, s.n, s.seed, s.max_tokens) == (2, [7], True, 3, 5, 9)


@pytest.mark.parametrize("protocol", [chat, completions, messages, responses])
def test_stop_token_ids_are_taken_once_each_up_to_a_number(protocol):
    name = protocol.__name__.rsplit(".", 1)[1]
    parsed = protocol.parse(REQUESTS[name] | {"stop_token_ids": [*range(512), *range(512)], "priority": -(2**63)})
    assert parsed.sampling.stop_token_ids == [*range(512)] and parsed.extras["priority"] == -(2**63)


@pytest.mark.parametrize(
    "text, number",
    [
        ("1", 0), ('"a,b:[{"', 0), ("[1,2,3]", 3), ('{"a":1,"b":[]}', 5), (r'["\",",",",{}]', 4), (r'[",\\\",1]', 1),
        ('["a,b', 1), ("[[],[]]", 4), (r'["\\",1,"\\\",",2]', 4),
    ],
)  # fmt: skip
def test_keys_and_values_are_counted_outside_texts(text, number):
    assert count_values(text.encode(), number) == number, "marks inside texts are none"
    assert number == 0 or count_values(text.encode(), number - 1) > number - 1, "too many is told"
    assert count_values(text.encode(), 1000) <= len(text)


REQUESTS = {
    "chat": body(), "messages": body(max_tokens=9), "responses": {"model": MODEL, "input": "hi"},
    "completions": {"model": MODEL, "prompt": "hi"},
}  # fmt: skip


@pytest.mark.parametrize("protocol", PARSERS)
def test_open_takes_a_seed_in_every_protocol(protocol):
    parse, request = PARSERS[protocol], REQUESTS[protocol]
    assert parse(request | {"seed": 5}).sampling.seed == 5 and parse(request).sampling.seed is None
    with pytest.raises(RecipeError, match="seed"):
        parse(request | {"seed": 2**63})
    with pytest.raises(RecipeError, match="seed"):
        parse(request | {"seed": "five"})


def test_official_forces_sampling_and_ignores_extras():
    parsed = chat.parse(body(temperature=0.25, top_p=0.5, presence_penalty=1, top_k=40, max_completion_tokens=9), OFFICIAL)
    s = parsed.sampling
    assert (s.temperature, s.top_p, s.presence_penalty, s.top_k, s.max_tokens) == (1.0, 0.949999988079071, None, None, None)


def test_developer_is_system_in_open_only():
    request = {"model": MODEL, "messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]}
    assert chat.parse(request).conversation.messages[0].role == "system"
    with pytest.raises(RecipeError, match="unknown variant `developer`"):
        chat.parse(request, OFFICIAL)


def test_inbound_reasoning_alias_and_template_switches():
    request = body(chat_template_kwargs={"thinking": False})
    assert not chat.parse(request).thinking
    history = body(
        messages=[
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", "reasoning": "because"},
            {"role": "user", "content": "v"},
        ]
    )
    assert chat.parse(history).conversation.messages[1].reasoning_content == "because"
    assert chat.parse(body(guided_json={"type": "object"})).conversation.response_format == "json_schema"
    assert chat.parse(body(structured_outputs={"regex": "a+"})).output_constraint.schema == "a+"


def test_extras_reach_the_gateway():
    parsed = chat.parse(
        body(
            cache_salt="s",
            priority=3,
            session_id="x",
            return_token_ids=True,
            user="u",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    assert parsed.extras == {
        "cache_salt": "s",
        "priority": 3,
        "session_id": "x",
        "return_token_ids": True,
        "user": "u",
        "continuous_usage_stats": True,
    }
    assert parsed.include_usage and parsed.stream


@pytest.mark.parametrize(
    "fields, status, message",
    [
        ({"n": 0}, 400, "range of n"),
        ({"n": 129}, 400, "range of n"),
        ({"min_p": 2}, 400, "min_p"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"top_k": -5}, 400, "integer from -1"),
        ({"min_tokens": 5, "max_tokens": 2}, 400, r"min_tokens \(5\) must not exceed max_tokens \(2\)"),
        ({"model": "gpt"}, 404, "served models"),
        ({"stop_token_ids": ["x"]}, 400, r"stop_token_ids\[0\]: .*u32"),
        ({"stop_token_ids": 7}, 400, "stop_token_ids: .*expected a sequence"),
        ({"stop_token_ids": ["x"] * 1025}, 400, "names 1025 tokens; at most 1024"),
        ({"priority": 1.5}, 400, "priority: .*floating point `1.5`, expected an integer"),
        ({"priority": True}, 400, "priority: .*boolean `true`"),
        ({"priority": -(2**63) - 1}, 400, "priority: .*of 64 bits"),
    ],
)
def test_open_refusals_are_clear(fields, status, message):
    with pytest.raises(RecipeError, match=message) as caught:
        chat.parse(body(**fields))
    assert caught.value.status == status


def _part(part: dict, role: str = "user") -> dict:
    return {"messages": [{"role": role, "content": [{"type": "text", "text": "see"}, part]}]}


def _calls(*results: str) -> dict:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ("a", "b")]
    answers = [{"role": "tool", "tool_call_id": i, "content": "r"} for i in results]
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}, *answers]}


STRICT = {"type": "function", "function": {"name": "g", "strict": True, "parameters": {"type": "object", "properties": {}}}}
SEARCH = {"type": "web_search_20250305", "name": "s"}
RANGE = "Invalid {0} value, the valid range of {0} is {1}"
IN_TWO_DIALECTS = [  # protocol, fields, the referee's words, the open dialect's, the field that this names
    ("chat", {"temperature": 2.1}, RANGE.format("temperature", "[0, 2]"), "* (got 2.1)", "temperature"),
    ("responses", {"top_p": 0}, RANGE.format("top_p", "(0, 1.0]"), "* (got 0)", "top_p"),
    ("responses", {"max_output_tokens": 0}, RANGE.format("max_tokens", "[1, 393216]"), "* (got 0)", "max_output_tokens"),
    ("messages", {"max_tokens": 0}, RANGE.format("max_tokens", "[1, 393216]"), "* (got 0)", None),
    ("chat", {"seed": 2**63}, RANGE.format("seed", "[0, 2^63)"), "* (got 9223372036854775808)", "seed"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, RANGE.format("top_logprobs", "[0, 20]."), "* (got 21)", "top_logprobs"),
    ("chat", {"stop": ["x"] * 17}, "Stop string array too long: 17", "* (at most 16 are taken)", "stop"),
    ("chat", {"tools": [TOOL, TOOL]}, "Tool names must be unique.", "* ('f' is there twice)", "tools"),
    (
        "chat", {"tools": [TOOL, STRICT]}, "Cannot use strict tool with non-strict tool in the same request",
        "* ('g' is strict and 'f' is not: make all strict, or none)", "tools",
    ),
    (
        "chat", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}},
        "Invalid value for 'tool_call': no function named 'h' was specified in the 'tools' parameter.", "* (there: 'f')",
        "tool_choice",
    ),
    (
        "chat", {"tools": [TOOL], "tool_choice": "required", "thinking": {"type": "enabled"}},
        "Thinking mode does not support this tool_choice",
        '* (it is required: leave the choice to the model (auto), or send "thinking": {"type": "disabled"})', "tool_choice",
    ),
    (
        "chat", _calls("a"),
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        "(insufficient tool messages following tool_calls message)", "* (messages[1]; no result of b)", "messages[1]",
    ),
    (
        "chat", _part({"type": "image_url", "image_url": {"url": "ftp://a"}}), ".messages[0]: Unsupported image_url format",
        "messages[0].content[1].image_url: Unsupported image_url format; an http://, https:// or data:image/ URL is taken, and "
        "this begins with 'ftp://a'", "messages[0].content[1].image_url",
    ),
    (
        "chat", _part({"type": "file", "file_id": "x"}),
        ".messages[0]: file_id is not supported. Pass the image as a base64 data url instead.",
        "messages[0].content[1]: file_id is not supported. Pass the image as a base64 data url instead.",
        "messages[0].content[1]",
    ),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0]: Unsupported image_url format",
        "input[0].content[0].image_url: Unsupported image_url format; an http://, https:// or data:image/ URL is taken, and "
        "this begins with 'x'", "input[0].content[0].image_url",
    ),
    (
        "messages", {"tools": [SEARCH]}, "tools[0]: server tools are not supported",
        "* (its type is 'web_search_20250305'; a tool of the client's own has none, or `custom`)", None,
    ),
    (
        "chat", {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {"enum": [1]}}}},
        "Invalid json schema: one of `type`, `anyOf`, `$ref` field is required", "* (response_format.json_schema.schema)",
        "response_format.json_schema.schema",
    ),
    ("responses", {"input": []}, "Input items array must not be empty", "*", "input"),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "fields", "official", "open_words", "place"), IN_TWO_DIALECTS)
def test_what_is_wrong_has_its_value_and_place_in_the_open_dialect_and_only_the_referees_words_in_its_own(
    protocol, fields, official, open_words, place
):
    request = REQUESTS[protocol] | fields
    said = {}
    for options in (OFFICIAL, OPEN):
        with pytest.raises(RecipeError) as caught:
            PARSERS[protocol](request, options)
        error = json.loads(caught.value.body("chat", options.dialect))["error"]
        said[options.dialect] = error["message"], error["param"]
        assert str(caught.value) == error["message"]
    assert said == {"official": (official, None), "open": (open_words.replace("*", official), place)}


def test_bodies_of_errors():
    error = RecipeError("no", status=429, param="p", code="c")
    assert json.loads(error.body("chat")) == {"error": {"message": "no", "type": "rate_limit_error", "param": "p", "code": "c"}}
    assert json.loads(error.body("messages", request_id="r")) == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "no"},
        "request_id": "r",
    }
    assert "type" not in json.loads(error.body("messages", "official"))


def test_strict_constraint_keeps_the_original_schema():
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}}
    parsed = chat.parse(body(response_format={"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}))
    assert '"$defs"' not in parsed.output_constraint.schema and parsed.output_constraint.original == schema


def test_max_tokens_resolution():
    parsed = chat.parse(body())
    assert parsed.resolve_max_tokens(100, 1_000_000) == 65536
    assert parsed.resolve_max_tokens(100, 1000) == 900
    assert chat.parse(body(thinking={"type": "disabled"})).resolve_max_tokens(100, 100_000) == 8192
    with pytest.raises(RecipeError, match="maximum context length is 50 tokens. However, you requested 107 tokens"):
        chat.parse(body(max_tokens=7)).resolve_max_tokens(100, 50)


def test_what_is_too_long_beside_the_messages_is_named_with_its_size():
    schema = {"type": "object", "properties": {"a": {"description": "x" * 1000}}}
    text = json.dumps(schema, separators=(",", ":"))
    parsed = chat.parse(body(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}))
    named = rf"{len(text):,} characters of the prompt are the response format's schema .*structured_outputs\.grammar, `start"
    with pytest.raises(RecipeError, match=named):
        parsed.resolve_max_tokens(100, 50)
    tool = {"type": "function", "function": {"name": "f", "description": "yyy", "parameters": schema}}
    parsed = chat.parse(body(tools=[tool, {**tool, "function": {**tool["function"], "name": "g"}}]))
    with pytest.raises(RecipeError, match=f"{2 * len(text) + 6:,} characters of the prompt are the definitions of 2 tools"):
        parsed.resolve_max_tokens(100, 50)
    assert parsed.resolve_max_tokens(100, 1000) == 900
    assert chat.parse(body()).told_beside() == ""
    text_only = completions.parse({"model": MODEL, "prompt": "x", "response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": schema}}})  # fmt: skip
    assert text_only.output_constraint is not None and text_only.told_beside() == ""


def test_completions(tokenizer):
    parsed = completions.parse({"model": MODEL, "prompt": "def f(", "suffix": "\n", "logprobs": 2, "stop": "x"})
    ids = completions.prompt_ids(parsed.prompts[0], tokenizer, parsed.extras["suffix"])
    assert ids[0] == 0 and tokenizer.added_token_id("<｜fim▁hole｜>") in ids
    assert parsed.sampling.top_logprobs == 2 and parsed.sampling.max_tokens == 16 and parsed.parsing.raw
    for prompt, count in (([1, 2], 1), ([[1], [2]], 2), (["a", "b", "c"], 3)):
        assert len(completions.parse({"model": MODEL, "prompt": prompt}).prompts) == count
    for prompt in ([], [[]], [1, "a"], 5, None, [True], [-1], ["a"] * 200):
        with pytest.raises(RecipeError):
            completions.parse({"model": MODEL, "prompt": prompt})
    with pytest.raises(RecipeError, match="outside the vocabulary"):
        completions.prompt_ids([10**7], tokenizer)


def test_dropped_searches():
    options = ConversionOptions(messages_web_search="drop")
    search = {"type": "web_search_20250305", "name": "web_search"}
    parsed = messages.parse({"model": MODEL, "messages": [{"role": "user", "content": "u"}], "tools": [search]}, options)
    assert parsed.conversation.tools == []
    with pytest.raises(RecipeError, match="Server tools are not supported"):
        responses.parse(
            {"model": MODEL, "input": "x", "tools": [{"type": "web_search"}]}, ConversionOptions(responses_web_search="reject")
        )


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SEEDS = [
    json.dumps(
        body(tools=[TOOL], tool_choice="auto", stop=["a"], stream=True, stream_options={"include_usage": True})
    ).encode(),
    json.dumps(
        {
            "model": MODEL,
            "max_tokens": 9,
            "system": "s",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}],
        }
    ).encode(),
    json.dumps(
        {
            "model": MODEL,
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "o"},
            ],
        }
    ).encode(),
    json.dumps(
        {
            "model": MODEL,
            "tools": [{"type": "tool_search", "execution": "client"}, {"type": "namespace", "name": "n", "tools": [FUNCTION]}],
            "input": [
                {"type": "tool_search_call", "call_id": "a", "arguments": {"q": 1}},
                {"type": "tool_search_output", "call_id": "a", "tools": [{**FUNCTION, "name": "g"}, {"type": "web_search"}]},
            ],
        }
    ).encode(),
    json.dumps({"model": MODEL, "prompt": ["a", "b"], "max_tokens": 3}).encode(),
]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, doubled or put in."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        kind = rng.random()
        if kind < 0.4:
            out[at : at + 1] = bytes([rng.choice(b'"{}[]:,0-eE.\\tnul\xff\x00 \xed\xa0')])
        elif kind < 0.6:
            del out[at : at + rng.randint(1, 20)]
        elif kind < 0.8:
            out[at:at] = out[at : at + rng.randint(1, 30)]
        else:
            out[at:at] = rng.choice([b"null", b"1e999", b"\\ud800", b"[[[[", b'{"":', b"-0", b"99999999999999999999"])
    return bytes(out)


@pytest.mark.parametrize("options", [OPEN, OFFICIAL], ids=["open", "official"])
def test_fuzzed_bodies_are_refused_cleanly(options):
    rng = random.Random(7)
    accepted = refused = 0
    for _ in range(3000):
        data = mutate(rng, rng.choice(SEEDS)) if rng.random() < 0.95 else rng.randbytes(rng.randint(0, 60))
        parse = PARSERS[rng.choice(list(PARSERS))]
        try:
            parse(data, options)
            accepted += 1
        except RecipeError as error:
            refused += 1
            assert 400 <= error.status < 500
            json.loads(error.body("chat"))
    assert accepted > 10 and refused > 1000
