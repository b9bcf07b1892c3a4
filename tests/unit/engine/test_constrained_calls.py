"""From a request's tools to calls that follow them: grammars of `headrace.recipe`, followed by the engine's matcher, read by
the stream parser, and judged by an independent validator."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest

from headrace.engine.api import Grammar
from headrace.recipe import Tokenizer
from headrace.recipe.grammar import constraint
from headrace.recipe.protocol import chat, messages, responses
from headrace.recipe.protocol.request import ConversionOptions
from headrace.recipe.stream import ChatStream, StreamParser

from .grammars import SCHEMAS, closed, draw, small_grammars

JSON_WORD = [{"role": "user", "content": "json"}]
CONTROL: dict[str, int] = {}
OPTIONS = ConversionOptions(models={"m": "v41", "m4": "v4"})
PERSON = closed({"name": {"type": "string", "minLength": 1, "maxLength": 4}, "age": {"type": "integer", "maximum": 9}})

PARAMETERS = {
    "many words": closed({"a": {"enum": [f"v{i}" for i in range(2500)]}}),
    "like control tokens": closed({"a": {"enum": ["</think>", "a｜DSML｜b", "</｜DSML｜"]}, "b": {"const": "</think>"}}),
    "texts": closed({"a": {"type": "string", "maxLength": 6}, "b": {"enum": ["x", "</y", 'q"\n']}, "c": {"const": "only"}}),
    "json": closed({"n": {"type": "integer", "minimum": 5}, "l": {"type": "array", "items": PERSON, "maxItems": 2}}),
    "mixed": closed({
        "v": {"enum": ["s", 1, None]}, "u": {"type": ["string", "null"]}, "w": {"anyOf": [{"type": "boolean"}, {"const": "t"}]},
    }),
    "rules": closed({"p": {"type": "string", "pattern": "^[a-c]{3}$"}, "d": {"type": "string", "format": "date"}}),
    "references": closed({"x": {"$ref": "#/$defs/k"}, "y": {"$ref": "#/$defs/o"}}, **{
        "$defs": {"k": {"enum": ["r", 2]}, "o": PERSON},
    }),
    "no parameters": closed({}),
}  # fmt: skip
STRICT = [
    closed({"s": {"type": "string", "enum": ["p", "q"]}, "n": {"type": ["string", "null"]}}),
    closed({"x": {"$ref": "#/$defs/k"}, "y": {"type": "array", "items": PERSON}}, **{"$defs": {"k": {"type": "integer"}}}),
    closed({"w": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]}}),
    closed({"p": {"type": "string", "pattern": "^a+$"}}),
]
OPEN = {
    "optional": {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": "z"}}, "required": ["b"]},
    "all optional": {"type": "object", "properties": {"a": {"const": 1}}},
    "never": {"type": "object", "properties": {"a": False, "b": {"const": 3}}, "additionalProperties": False},
    "anything": {"type": "object"},
    "more": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": True},
    "at the root": {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    out = small_grammars(tmp_path_factory.mktemp("tokenizer"), CONTROL)
    out.load()
    return out


@pytest.fixture(scope="module")
def tokenizer(grammars):
    return Tokenizer.from_file(grammars.path)


def tool(name: str, parameters, strict=None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | ({"strict": strict} if strict else {})}


def ask(protocol=chat, **body):
    body = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "thinking": {"type": "disabled"}} | body
    if protocol is responses:
        body["input"] = "Go."
    return protocol.parse(body, OPTIONS)


def bound(parsed) -> Grammar | None:
    found = constraint(parsed, CONTROL.get)
    return found and Grammar(found.kind, found.text, found.after, found.optional)


def calls_of(parsed, tokenizer, out: list[int]) -> tuple[str, list[tuple[str, object]], str]:
    """(content, calls with their arguments as values, finish reason)."""
    stream = ChatStream(StreamParser(parsed.parsing, tokenizer), "id", "m", 0, "open", False)
    stream.push(out)
    stream.finish("stop")
    choice = stream.accumulate()["choices"][0]
    message = choice["message"]
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]
    return message["content"] or "", calls, choice["finish_reason"]


@pytest.mark.parametrize("model", ["m", "m4"])
@pytest.mark.parametrize("name", [*PARAMETERS, *OPEN])
def test_a_call_that_must_come_follows_its_schema(grammars, tokenizer, name, model):
    schema = (PARAMETERS | OPEN)[name]
    parsed = ask(model=model, tools=[tool("f", schema), tool("g", schema)], tool_choice="required")
    grammar, rng, seen = bound(parsed), np.random.default_rng(3), set()
    assert (grammar.after, grammar.optional) == (-1, False)
    for _ in range(15):
        out, whole = draw(grammars.matcher(grammar), rng, 900)
        if whole:
            _, calls, finish = calls_of(parsed, tokenizer, out)
            assert calls and finish == "tool_calls"
            for called, arguments in calls:
                assert called in ("f", "g")
                if name != "at the root":
                    jsonschema.validate(arguments, schema)
                seen.add(called)
    assert seen, "no call came to an end"


def test_a_named_choice_allows_that_tool_alone(grammars, tokenizer):
    choice = {"type": "function", "function": {"name": "g"}}
    parsed = ask(tools=[tool("f", PARAMETERS["json"]), tool("g", PARAMETERS["texts"])], tool_choice=choice)
    out, whole = draw(grammars.matcher(bound(parsed)), np.random.default_rng(1), 2000)
    assert whole and {called for called, _ in calls_of(parsed, tokenizer, out)[1]} == {"g"}


def test_strict_tools_are_bound_when_the_model_calls_them_and_only_then(grammars, tokenizer):
    """The client's own keywords count (the prompt's rebuilt schema has lost `$defs` and `maxLength`), in thinking mode too."""
    for thinking in ("enabled", "disabled"):
        tools = [tool(f"t{i}", schema, True) for i, schema in enumerate(STRICT)]
        parsed = ask(tools=tools, thinking={"type": thinking})
        grammar = bound(parsed)
        assert (grammar.after, grammar.optional) == (CONTROL["｜DSML｜"], True)
        opening = tokenizer.encode(("why</think>" if thinking == "enabled" else "") + "Let me.\n\n<｜DSML｜")
        for seed in range(8):
            matcher = grammars.matcher(grammar)
            assert matcher.accept(opening) == len(opening)
            out, whole = draw(matcher, np.random.default_rng(seed), 2500)
            if whole:
                content, calls, _ = calls_of(parsed, tokenizer, opening + out)
                assert content == "Let me." and calls
                for called, arguments in calls:
                    jsonschema.validate(arguments, STRICT[int(called[1:])])


def test_what_strict_mode_can_not_enforce_is_refused(grammars):
    schema = closed({"a": {"type": "string"}}) | {"anyOf": [{"required": ["a"]}]}
    parsed = ask(messages, tools=[{"name": "f", "input_schema": schema, "strict": True}], max_tokens=9)
    with pytest.raises(Exception, match="strict tool 'f': `anyOf` at the top level of its parameters"):
        bound(parsed)
    parsed = ask(tools=[tool("f", closed({"a b": {"type": "string"}}))], tool_choice="required")
    with pytest.raises(Exception, match='call format can\'t hold the parameter name "a b"'):
        bound(parsed)
    parsed = ask(tools=[tool("f", {"type": "object", "properties": {"a": False}, "required": ["a"]})], tool_choice="required")
    with pytest.raises(Exception, match='its parameter "a" is required and can\'t be'):
        bound(parsed)


def test_one_call_at_most(grammars, tokenizer):
    parsed = ask(tools=[tool("f", PARAMETERS["no parameters"])], parallel_tool_calls=False)
    grammar = bound(parsed)
    assert grammar.optional
    for seed in range(5):
        matcher = grammars.matcher(grammar)
        opening = tokenizer.encode("\n\n<｜DSML｜")
        matcher.accept(opening)
        out, whole = draw(matcher, np.random.default_rng(seed), 3000)
        assert not whole or len(calls_of(parsed, tokenizer, opening + out)[1]) == 1
    assert bound(ask(tools=[tool("f", {"type": "object"})])) is None, "tools that bind nothing leave the output free"


def test_a_format_with_tools_is_an_answer_or_a_call(grammars, tokenizer):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["closed"]}}
    parsed, kinds = ask(tools=[tool("f", {"type": "object"})], response_format=form), set()
    for seed in range(30):
        out, whole = draw(grammars.matcher(bound(parsed)), np.random.default_rng(seed), 1500)
        if whole:
            content, calls, _ = calls_of(parsed, tokenizer, out)
            kinds.add(bool(calls))
            if not calls:
                jsonschema.validate(json.loads(content), SCHEMAS["closed"])
    assert kinds == {True, False}


@pytest.mark.parametrize("protocol", [chat, responses, messages])
def test_formats_of_every_protocol(grammars, protocol):
    """The schema's text is the client's, in its order; in thinking mode it begins after the thinking."""
    schema = {"type": "object", "properties": {"z": {"type": "null"}, "a": {"const": 1.0}}, "required": ["z"]}
    field = {
        chat: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        responses: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        messages: {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "max_tokens": 9},
    }[protocol]
    thinking = {} if protocol is responses else {"thinking": {"type": "enabled"}}
    grammar = bound(ask(protocol, **field, **thinking))
    assert grammar == Grammar("json_schema", json.dumps(schema, separators=(",", ":")), CONTROL["</think>"])
    off = {"reasoning": {"effort": "none"}} if protocol is responses else {"thinking": {"type": "disabled"}}
    assert bound(ask(protocol, **field, **off)).after == -1
    assert bound(ask(protocol, max_tokens=9)) is None


def test_strict_formats_are_closed(grammars):
    inner = {"type": "object", "properties": {"c": {"type": "null"}}}
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}}, "$defs": {"b": inner}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    text = json.loads(bound(ask(response_format=form)).text)
    assert text["required"] == ["a"] and text["additionalProperties"] is False
    assert text["$defs"]["b"] == closed({"c": {"type": "null"}})


@pytest.mark.parametrize(
    "body, kind, text",
    [
        ({"response_format": {"type": "json_object"}, "messages": JSON_WORD}, "json_schema", '{"type":"object"}'),
        ({"response_format": {"type": "regex", "regex": "a/b+"}}, "regex", "a/b+"),
        ({"structured_outputs": {"regex": "x"}}, "regex", "x"),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"choice": ["yes", 'n"o', "yes"]}}, "lark", 'start: CHOICE\nCHOICE: "yes" | "n\\"o"'),
        ({"structured_outputs": {"grammar": "start: /a+/"}}, "lark", "start: /a+/"),
        ({"guided_json": {}}, "json_schema", "{}"),
        ({"guided_choice": ["ü"]}, "lark", 'start: CHOICE\nCHOICE: "ü"'),
    ],
)  # fmt: skip
def test_other_spellings(grammars, body, kind, text):
    assert bound(ask(**body)) == Grammar(kind, text)
    grammars.compile(bound(ask(**body)))


def test_the_official_dialect_enforces_what_its_referee_hands_on(grammars):
    official = ConversionOptions(dialect="official", models={"m": "v41"})
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "thinking": {"type": "disabled"}}
    parsed = chat.parse(body | {"guided_json": {}, "logit_bias": {"5": 1}, "best_of": 3, "regex": "a"}, official)
    assert parsed.output_constraint is None and parsed.sampling.logit_bias == {}
    parsed = chat.parse(body | {"response_format": {"type": "regex", "regex": "a"}}, official)
    assert bound(parsed) == Grammar("regex", "a")
