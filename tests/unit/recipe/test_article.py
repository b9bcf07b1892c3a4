"""The seed article's small API, as its example uses it."""

import pytest

from headrace.recipe import Encoding
from headrace.recipe import conversation as core
from headrace.recipe.article import Conversation, StreamOutputParser, TokenizerModel

OUTPUT = (
    'hm</think>ok\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get">\n'
    '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


def built() -> Conversation:
    return (
        Conversation()
        .set_reasoning_mode("high")
        .register_tool("get", "Weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
        .add_system_message("Be brief.")
        .add_user_message("Weather in Paris?")
    )


def test_render(v41_tokenizer):
    model = TokenizerModel(v41_tokenizer)
    told = built().add_assistant_message("", "hm", [{"id": "c", "name": "get", "arguments": {"city": "Paris"}}])
    told.add_tool_result("c", "rain")
    rendered = told.render_for_engine(model)
    same = core.Conversation(
        [
            core.Message("system", "Be brief."),
            core.Message("user", "Weather in Paris?"),
            core.Message("assistant", "", "hm", [core.ToolCall("c", "get", '{"city": "Paris"}')]),
            core.Message("tool", "rain", tool_call_id="c"),
        ],
        tools=[core.ToolDefinition("get", "Weather.", {"type": "object", "properties": {"city": {"type": "string"}}})],
        thinking_mode=True,
        reasoning_effort="high",
    )
    assert rendered.token_ids == list(Encoding("v41", v41_tokenizer).encode(same))
    assert rendered.prompt.endswith("<｜Assistant｜><think>")
    bare = built().render_for_engine(model, add_generation_prompt=False)
    assert bare.prompt.endswith("<｜User｜>Weather in Paris?")
    assert bare.token_ids == v41_tokenizer.encode(bare.prompt)


def test_parse(v41_tokenizer):
    model = TokenizerModel(v41_tokenizer)
    parser = StreamOutputParser(model, built().parsing())
    events = [event for id in v41_tokenizer.encode(OUTPUT) for event in parser.step(id)] + parser.finish()
    assert "".join(e.text() for e in events if e.is_reasoning()) == "hm"
    assert "".join(e.text() for e in events if e.is_content()) == "ok"
    (call,) = [e.get_tool_call() for e in events if e.is_tool_call_completed()]
    assert (call.name, call.arguments) == ("get", '{"city": "Paris"}')
    with pytest.raises(ValueError, match="no tool call"):
        next(e for e in events if e.is_content()).get_tool_call()


def test_modes():
    with pytest.raises(ValueError, match="none, low, high"):
        Conversation().set_reasoning_mode("medium")
    assert Conversation().set_reasoning_mode("none").parsing().thinking_initial_stage is None
