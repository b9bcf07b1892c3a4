"""Fields of the open dialect that bind an output or are refused: nothing that changes an answer is silently left out."""

import pytest

from headrace.recipe.errors import RecipeError
from headrace.recipe.protocol import chat, completions, messages, responses
from headrace.recipe.protocol.demands import INSTEAD, NOT_SERVED
from headrace.recipe.protocol.request import ConversionOptions

OPTIONS = ConversionOptions(models={"m": "v41"}, default_thinking_mode=False)
PROTOCOLS = {"chat": chat, "completions": completions, "messages": messages, "responses": responses}


def ask(name="chat", **body):
    asked = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(
        name, {"messages": [{"role": "user", "content": "x"}]}
    )
    return PROTOCOLS[name].parse({"model": "m", "max_tokens": 9, **asked, **body}, OPTIONS)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_refused_by_name(name, protocol):
    with pytest.raises(RecipeError, match=f"`{name}` is not served") as caught:
        ask(protocol, **{name: "something"})
    assert (caught.value.status, caught.value.param) == (400, name)
    assert INSTEAD.get(name, "") in caught.value.message
    for neutral in (None, *NOT_SERVED[name]):
        ask(protocol, **{name: neutral})


def test_echo_with_logprobs_asks_for_those_of_the_prompt_too():
    assert ask("completions", echo=True).extras == {"echo": True}
    parsed = ask("completions", echo=True, logprobs=0)
    assert parsed.extras == {"echo": True, "echo_logprobs": 0} and parsed.sampling.prompt_logprobs is None
    assert ask("chat", prompt_logprobs=3).sampling.prompt_logprobs == 3


def test_what_responses_alone_do_not_serve():
    for name, value in {"prompt": {"id": "p"}, "conversation": "c", "max_tool_calls": 3}.items():
        with pytest.raises(RecipeError, match=f"`{name}` is not served"):
            ask("responses", **{name: value})
        ask("responses", **{name: None})


def test_labels_pass():
    ask(user="u", metadata={"a": "b"}, store=True, service_tier="auto", safety_identifier="s", prompt_cache_key="k")


def test_best_of():
    ask(n=3, best_of=3)
    with pytest.raises(RecipeError, match="`best_of` is not served: it is 4, and n is 3"):
        ask(n=3, best_of=4)
    with pytest.raises(RecipeError, match="best_of"):
        ask("completions", best_of=2)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_logit_bias(protocol):
    assert ask(protocol, logit_bias={"5": 1, "128999": -100.0}).sampling.logit_bias == {5: 1.0, 128999: -100.0}
    assert ask(protocol, logit_bias=None).sampling.logit_bias == {}
    for wrong, why in [
        ([1], "must be an object"), ({"a": 1}, "'a', which is not a token id"), ({"-1": 1}, "not a token id"),
        ({"1": "x"}, "number from -100 to 100"), ({"1": 101}, "number from -100 to 100"), ({"1": True}, "number"),
        ({str(i): 0 for i in range(1025)}, "1025 tokens; at most 1024"), ({"9" * 12: 1}, "not a token id"),
    ]:  # fmt: skip
        with pytest.raises(RecipeError, match=why):
            ask(protocol, logit_bias=wrong)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_structured_outputs_in_every_protocol(protocol):
    for spelled in ({"structured_outputs": {"json": {"type": "null"}}}, {"guided_json": {"type": "null"}}):
        constraint = ask(protocol, **spelled).output_constraint
        assert (constraint.kind, constraint.original) == ("json", {"type": "null"})
    assert ask(protocol, structured_outputs={"regex": "a+"}).output_constraint.kind == "regex"
    assert ask(protocol, guided_choice=["a", "b"]).output_constraint.schema == 'start: CHOICE\nCHOICE: "a" | "b"'
    assert ask(protocol).output_constraint is None


@pytest.mark.parametrize(
    "body, why",
    [
        ({"structured_outputs": "json"}, "`structured_outputs` must be an object"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "`structured_outputs.json` and `structured_outputs.regex`"),
        ({"guided_json": {}, "structured_outputs": {"choice": ["a"]}}, "`guided_json` and `structured_outputs.choice` exclude"),
        ({"structured_outputs": {"words": 1}}, "`structured_outputs.words` is unknown; known are json, regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "`structured_outputs.structural_tag` is not served"),
        ({"structured_outputs": {"json": "{"}}, "`structured_outputs.json` is not JSON"),
        ({"structured_outputs": {"json": [1]}}, "`structured_outputs.json` must be a JSON schema"),
        ({"guided_regex": ""}, "`guided_regex` must be a text"),
        ({"guided_choice": []}, "`guided_choice` must be a list of texts"),
        ({"guided_choice": ["a", 1]}, "`guided_choice` must be a list of texts"),
        ({"guided_choice": ["a"] * 5000}, "at most 4096 texts; it has 5000"),
        ({"guided_grammar": "root ::= a"}, "`guided_grammar` is in EBNF"),
        ({"guided_json": {"type": "nul"}}, "Invalid json schema"),
        ({"guided_choice": ["a"], "tools": [{"type": "function", "function": {"name": "f"}}]}, "can't be combined with tools"),
    ],
)
def test_what_is_wrong_with_structured_outputs(body, why):
    with pytest.raises(RecipeError, match=why):
        ask(**body)


def test_a_response_format_comes_first():
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    assert ask(response_format=form, guided_json={"type": "integer"}).output_constraint.original == {"type": "null"}
    assert ask("completions", response_format=form).output_constraint.original == {"type": "null"}
    assert ask("completions", response_format={"type": "json_object"}).output_constraint.original == {"type": "object"}


def test_messages_take_the_open_fields_at_their_word():
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    form = {"type": "json_schema", "schema": schema}
    assert ask("messages", output_config={"format": form}).output_constraint.original == schema
    assert ask("messages", output_format=form).output_constraint.original == schema
    with pytest.raises(RecipeError, match=r"`output_format` must be \{\"type\": \"json_schema\""):
        ask("messages", output_format={"type": "text"})
    tools = [{"name": "f", "input_schema": schema, "strict": True}, {"name": "g", "input_schema": schema}]
    parsed = ask("messages", tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert [tool.enforced for tool in parsed.conversation.tools] == [schema, None]
    assert parsed.conversation.tool_choice == "required" and parsed.parsing.starts_in_tool_calls
    assert parsed.output_constraint.kind == "tool_call_required" and not parsed.parallel_tool_calls
    thinking = ask("messages", tools=tools, tool_choice={"type": "any"}, thinking={"type": "enabled", "budget_tokens": 9})
    assert thinking.conversation.tool_choice == "auto", "a model that thinks can't be made to call"
