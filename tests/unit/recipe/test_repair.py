"""Mending of malformed tool calls."""

import pytest

from headrace.recipe.stream import ParsingOptions, StreamParser

OPEN = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
CLOSE = "</｜DSML｜ invoke>\n</｜DSML｜ calls>"


def parameter(name: str, string: str, value: str) -> str:
    return f'<｜DSML｜ parameter name="{name}" string="{string}">{value}</｜DSML｜ parameter>\n'


def read(tokenizer, text: str, *, size: int = 1000, reason: str = "stop", repair: bool = True):
    parser = StreamParser(ParsingOptions(repair=repair), tokenizer)
    ids = tokenizer.encode(text)
    events = [event for at in range(0, len(ids), size) for event in parser.push(ids[at : at + size])]
    events += parser.finish(reason)
    told = []
    for event in events:
        value = event.name if event.kind == "tool_start" else event.text
        if event.kind == "tool_end":
            continue
        if told and told[-1][0] == event.kind:
            told[-1] = (event.kind, told[-1][1] + value)
        else:
            told.append((event.kind, value))
    return told, parser.repairs


CASES = {
    "well formed": (OPEN + parameter("a", "true", "x") + CLOSE, "f", '{"a": "x"}', []),
    "no argument": (OPEN + CLOSE, "f", "{}", []),
    "wrapper": (OPEN + parameter("arguments", "false", '{"a": 1}') + CLOSE, "f", '{"a": 1}', ["wrapper_key"]),
    "wrapper as text": (OPEN + parameter("input", "true", '{"a": 1}') + CLOSE, "f", '{"a": 1}', ["wrapper_key"]),
    "wrapper of text": (OPEN + parameter("input", "true", "plain") + CLOSE, "f", '{"input": "plain"}', []),
    "json body": (OPEN + '{"city": "Paris"}\n' + CLOSE, "f", '{"city": "Paris"}', ["json_body"]),
    "open value": (OPEN + '<｜DSML｜ parameter name="a" string="true">abc', "f", '{"a": "abc"}', ["unterminated_invoke"]),
    "open body": (OPEN + '{"c": "P"}', "f", '{"c": "P"}', ["unterminated_invoke", "json_body"]),
    "open name": (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f>\n' + parameter("a", "true", "x") + CLOSE,
        "f",
        "{}",
        ["unterminated_name"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_mended(tokenizer, case):
    text, name, arguments, repairs = CASES[case]
    expected = ([("tool_start", name), ("tool_arguments", arguments)], repairs)
    assert read(tokenizer, text) == expected
    assert read(tokenizer, text, size=1) == expected


def test_a_block_without_a_call_is_text(tokenizer):
    text = "<｜DSML｜ calls>\n<junk>"
    assert read(tokenizer, text) == ([("content", text)], ["block_without_call"])


def test_an_output_cut_by_length_is_left_alone(tokenizer):
    text = CASES["open value"][0]
    assert read(tokenizer, text, reason="length") == ([("tool_start", "f"), ("tool_arguments", '{"a": "abc')], [])


@pytest.mark.parametrize("case", ["wrapper", "json body", "open value"])
def test_off_by_default(tokenizer, case):
    assert ParsingOptions().repair is False
    text, _, arguments, _ = CASES[case]
    told, repairs = read(tokenizer, text, repair=False)
    assert repairs == [] and told[-1] != ("tool_arguments", arguments)
