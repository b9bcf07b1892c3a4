"""Tools that the model searches for, Responses: the client's answer shows their schemas from there on."""

import json

import pytest

from headrace.recipe import Encoding
from headrace.recipe.protocol import OFFICIAL, OPEN, responses
from headrace.recipe.stream import ParsingOptions, ResponsesStream, StreamParser

SEARCH = {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": {"type": "object"}}
FUNCTION = {"type": "function", "name": "rain", "description": "Rain?", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "home", "description": "House.", "tools": [{**FUNCTION, "name": "light"}]}


def body(model: str = "DeepSeek-V4.1-Flash", **fields) -> dict:
    return {
        "model": model,
        "tools": [SEARCH],
        "input": [
            {"role": "user", "content": "weather?"},
            {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "rain"}},
            {"type": "tool_search_output", "call_id": "c", "tools": [FUNCTION, SPACE]},
            {"role": "user", "content": "go on"},
        ],
        **fields,
    }


def test_found_tools_take_effect_where_they_were_found(v41_tokenizer):
    parsed = responses.parse(body(), OFFICIAL)
    assert [tool.name for tool in parsed.conversation.tools] == ["tool_search", "rain", "home::light"]
    assert [tool.defer_loading for tool in parsed.conversation.tools] == [False, True, True]
    before, _, after = Encoding("v41", v41_tokenizer).render(parsed.conversation).prompt.partition("### Updated Tool Schemas")
    assert '<｜DSML｜ invoke name="tool_search">' in before and "home::light" not in before
    assert '{"name": "home::light", "description": "House.\\nRain?", "parameters": {"type": "object"}}' in after
    assert parsed.custom_tools == {"tool_search"}


def test_calls_of_found_namespaces_are_mapped_back_in_open_only():
    assert responses.parse(body(), OPEN).namespaces == {"home::light": ("home", "light")}
    assert responses.parse(body(), OFFICIAL).namespaces == {}


def test_v4_and_no_tools_leave_the_schemas_out():
    assert len(responses.parse(body("DeepSeek-V4-Pro")).conversation.messages) == 2
    messages = responses.parse(body(tool_choice="none")).conversation.messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize(
    ("value", "arguments", "status"),
    [("[1.50]", {"q": "a", "n": [1.5]}, "completed"), ("nonsense", {}, "incomplete")],
)
def test_a_search_is_told_whole(tokenizer, value, arguments, status):
    output = (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="tool_search">\n'
        '<｜DSML｜ parameter name="q" string="true">a</｜DSML｜ parameter>\n'
        f'<｜DSML｜ parameter name="n" string="false">{value}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )
    parser = StreamParser(ParsingOptions(), tokenizer)
    stream = ResponsesStream(parser, "r", "m", custom_tools=frozenset(["tool_search"]))
    sent = stream.first()
    for token in tokenizer.encode(output):
        sent += stream.push([token])
    sent += stream.finish("stop")
    assert b"delta" not in sent
    events = [json.loads(block.split("data: ")[1]) for block in sent.decode().split("\n\n")[:-1]]
    assert [e["type"] for e in events[2:]] == ["response.output_item.added", "response.output_item.done", "response.completed"]
    (item,) = stream.accumulate()["output"]
    assert (item["type"], item["arguments"], item["status"]) == ("tool_search_call", arguments, status)
