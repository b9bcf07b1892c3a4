"""Generated data: the same everywhere, never from both sides of the split, true where truth can be computed, and rendered as
the gateway renders it."""

import json
import random
import re

import numpy as np
import pytest

from headrace.engine.make_checkpoint import small_tokenizer_json
from headrace.recipe import V41_TOKENS, Encoding, Tokenizer
from headrace.recipe.protocol.request import ConversionOptions
from models.training import corpora, mix
from models.training.generators import KINDS, draw, numbers, recall, stories
from models.training.generators.tool_schemas import TOOLS
from models.training.pack import pack
from models.training.sample import Renderer, Sample, target_of, to_request
from models.training.shards import Packer, Shards
from models.training.tokenizer import train


@pytest.fixture(scope="module")
def renderer():
    return Renderer(Tokenizer(small_tokenizer_json()))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_samples_and_sides_never_meet(kind, renderer):
    sides = {}
    for held_out in (False, True):
        samples = [draw(kind, "s", n, held_out=held_out) for n in range(25)]
        again = [draw(kind, "s", n, held_out=held_out) for n in range(25)]
        assert [renderer.ids(s) for s in samples] == [renderer.ids(s) for s in again]
        sides[held_out] = {(s.kind, s.slots) for s in samples}
    assert not sides[False] & sides[True]
    assert len(sides[True]) > 3  # it is not one sample again and again


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_target_make_one_turn(kind, renderer):
    for number in range(10):
        sample = draw(kind, "t", number)
        ids, weights = renderer.ids(sample)
        assert len(ids) == len(weights) and ids[0] == renderer.bos and ids[-1] == renderer.eos
        if sample.conversation is None:
            continue
        prompt = renderer.prompt_ids(sample)
        assert ids[: len(prompt)] == prompt and weights[len(prompt) - 1] < weights[len(prompt)] == 1.0
        assert list(ids).count(renderer.tokenizer.added_token_id("</think>")) >= 1
        target = renderer.tokenizer.decode(ids[len(prompt) :])
        assert target == target_of(sample).prompt
        assert target.count("</think>") == sample.conversation.thinking_mode


def test_requests_render_as_the_samples_do():
    """What an evaluation sends over HTTP becomes the prompt that training saw."""
    from headrace.recipe.protocol.chat import parse

    encoding = Encoding("v41", None, V41_TOKENS)
    kinds = "story_chat three_digits tool tool_parallel tool_result tool_second tool_none system json remembered picture"
    for kind in kinds.split():
        for number in range(8):
            sample = draw(kind, "r", number)
            body = {"model": "DeepSeek-V4.1-Flash", **to_request(sample)}
            conversation = parse(json.loads(json.dumps(body)), ConversionOptions()).conversation
            assert encoding.render(conversation).prompt == encoding.render(sample.conversation).prompt, kind


def test_reasoning_of_sums_is_right_at_every_column():
    for number in range(300):
        sample = draw("three_digits", "c", number)
        a, sign, b = re.match(r"(\d+)([+-])(\d+)", sample.slots).groups()
        value = int(a) + int(b) if sign == "+" else int(a) - int(b)
        written = re.findall(r"write (\d)", sample.reasoning)
        carry = int(re.findall(r"carry (\d)", sample.reasoning)[-1]) if sign == "+" else 0
        assert int("".join(reversed(written))) + 1000 * carry == value == sample.check["number"]
        for left, right in re.findall(r"([\d+*-]+)=(\d+)", sample.reasoning):
            assert eval(left) == int(right), sample.reasoning


@pytest.mark.parametrize("make", [numbers.multiply, numbers.divide, numbers.word_problem, numbers.units, numbers.fractions])
def test_equations_in_reasoning_hold(make):
    for number in range(200):
        sample = make(random.Random(number))
        for left, right in re.findall(r"(?<![\d.])(\d+[+*/-]\d+)=(-?\d+)", sample.reasoning):
            assert eval(left) == int(right), sample.reasoning


def test_there_are_many_plots_and_all_of_them_can_be_told():
    rng = random.Random(0)
    assert len({title for title, _ in stories.plots()}) >= 300
    for title, text in stories.plots():
        for _ in range(4):
            slots = stories.cast(rng)
            told = stories.fill(title, slots, rng) + stories.fill(text, slots, rng)
            assert not re.search(r"[{}\[\]|]", told), told


def test_every_tool_can_be_asked_for_and_answered():
    names = [tool.name for tool in TOOLS]
    assert len(names) == len(set(names)) >= 60
    for kind in ("tool", "tool_result", "tool_parallel"):
        seen = set()
        for number in range(600):
            sample = draw(kind, "all", number)
            schemas = {t.name: t.parameters for t in sample.conversation.tools}
            for name, arguments in sample.check["calls"]:
                assert set(schemas[name]["required"]) <= set(arguments) <= set(schemas[name]["properties"])
            seen |= {name for name, _ in sample.check["calls"]} | {t.name for t in sample.conversation.tools}
        assert seen == set(names)


def test_needles_lie_where_they_are_asked_for():
    for number in range(10):
        sample = draw("needle", "n", number)
        text = sample.conversation.messages[0].content
        assert len(text) > 2500 and sample.check["text"] in text and sample.check["text"] in sample.answer
        assert text.index(sample.check["text"]) < 0.8 * len(text)


def test_needles_lie_among_facts_of_their_own_form():
    """So that the form of a question does not say the answer; evaluation has both kinds."""
    for alike in (0.0, 1.0):
        only = 0
        for number in range(40):
            text = recall.needle(random.Random(number), 1000, alike=alike).conversation.messages[0].content
            forms = [re.search(said.format(k=r"[A-Z][a-z]+", v=r"[\w ]+"), text) for said, *_ in recall._FORMS]
            only += sum(map(bool, forms)) == 1
        assert (only == 40) if alike else (only < 12)


def test_no_pair_of_bindings_is_on_the_other_side_of_any_kind():
    """Told, asked or repeated: a pair that `needle` or `who_has` asks for in an evaluation is never trained on."""
    out = lambda kind, slots: Sample(kind, slots).held_out  # noqa: E731
    for kind in ("bindings", "pairs"):
        for side in (False, True):
            slots = "|".join(draw(kind, "sides", number, held_out=side).slots for number in range(30)).split("|")
            sides = [{out(k, f"{n}|{v}") for k in ("needle", "who_has")} for n, v in zip(slots[::2], slots[1::2], strict=True)]
            assert len(sides) > 100 and all(True in found if side else found == {False} for found in sides)


def test_answers_in_bindings_are_true_and_all_count(renderer):
    for number in range(20):
        sample = draw("bindings", "true", number)
        text, *turns = [m.content for m in sample.conversation.messages]
        ids, weights = renderer.ids(sample)
        said = renderer.tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w == 1.0])
        answers = [*turns[::2], sample.answer]
        assert said == "".join(f"{answer}<｜end▁of▁sentence｜>" for answer in answers)
        assert sample.check["text"] in text and len(answers) == len(set(answers))


# ------------------------------------------------------------------ packing


def test_packed_rows_hold_documents_whole_and_at_even_places():
    rng, packer, given = np.random.default_rng(0), Packer([32, 64]), []
    for _ in range(200):
        document = rng.integers(3, 200, rng.integers(2, 70))
        if packer.add(document, [1.0] * len(document)):
            given.append(tuple(document))
    assert packer.refused == 200 - len(given) > 0
    found = []
    for context, arrays in packer.arrays().items():
        for ids, weights, documents in zip(*(arrays[n] for n in ("ids", "weights", "documents")), strict=True):
            assert len(ids) == context and (np.diff(documents.astype(int)) >= 0).all()
            for number in np.unique(documents):
                where = np.flatnonzero(documents == number)
                assert where[0] % 2 == 0 or not weights[where].any()
                kept = ids[where][weights[where] > 0]
                if len(kept):
                    found.append(tuple(kept))
    assert sorted(found) == sorted(given)


def test_a_stopped_packing_goes_on_and_workers_do_not_matter(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(small_tokenizer_json()))
    shares = {"small_talk": 0.5, "compare": 0.5}
    for name, workers in (("a", 1), ("b", 2)):
        pack(tmp_path / name, tokenizer, shares, [256, 512], 600_000, workers=workers, report=lambda _: None)
    files = sorted(p.name for p in (tmp_path / "a").glob("*.npz"))
    assert len(files) == 4 and files == sorted(p.name for p in (tmp_path / "b").glob("*.npz"))
    before = Shards(tmp_path / "a", 2048, 7)
    for file in (tmp_path / "a").glob("*-0001.npz"):
        file.unlink()
    pack(tmp_path / "a", tokenizer, shares, [256, 512], 600_000, workers=1, report=lambda _: None)
    for folder in ("a", "b"):
        shards = Shards(tmp_path / folder, 2048, 7)
        for number in (0, 5, shards.per_epoch + 1):
            assert (shards.batch(number).ids == before.batch(number).ids).all()
    with pytest.raises(ValueError, match="other arguments"):
        pack(tmp_path / "a", tokenizer, shares, [256], 600_000)


def test_a_tokenizer_has_its_size_and_takes_digits_one_by_one():
    texts = [draw("story", "tok", n).text for n in range(300)]
    trained = Tokenizer(json.loads(train(iter(texts), 512).to_str()))
    assert trained.vocab_size == 512 and trained.words is not None
    assert len(trained.encode_plain("1234")) == 4
    assert trained.decode(trained.encode_plain(texts[0])) == texts[0]
    assert trained.added_token_id("</think>") >= 490


def test_shares_without_a_corpus_go_to_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora, "samples", lambda kind: ())
    shares = mix.available({"story": 1, "books": 1, "tool": 2})
    assert shares == {"story": pytest.approx(1 / 3), "tool": pytest.approx(2 / 3)}
    with pytest.raises(ValueError, match="'books' is not in"):
        mix.draw("books", 0, 0)


@pytest.mark.parametrize("kind", sorted({k for shares in mix.MIXES.values() for k in shares}))
def test_mixes_name_kinds_that_exist(kind):
    assert kind in mix.all_kinds()


def test_questions_typed_in_haste_have_the_same_answers():
    """Small letters and no sign at the end are seen in training for what people chat about; the answer is the careful one."""
    typed = [draw("small_talk", "haste", n) for n in range(200)]
    hasty = [s for s in typed if s.conversation.messages[-1].content == s.conversation.messages[-1].content.lower()]
    assert 10 <= len(hasty) <= 60  # 15 % of them
    assert all(s.answer[0].isupper() for s in hasty)
    careful = [draw("tool", "haste", n) for n in range(100)]
    assert all(s.conversation.messages[-1].content != s.conversation.messages[-1].content.lower() for s in careful)


def test_pictures_are_answered_with_and_without_thinking():
    drawn = [draw("picture", "thinking", n) for n in range(100)]
    thinking = [s for s in drawn if s.conversation.thinking_mode]
    assert 30 <= len(thinking) <= 70
    assert all(s.reasoning for s in thinking) and not any(s.reasoning for s in drawn if not s.conversation.thinking_mode)


def test_a_corpus_that_is_not_there_has_no_samples_and_no_share(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "FOLDER", tmp_path)
    corpora.samples.cache_clear()
    try:
        for kind in ("books", "gsm8k", "tldr", "wordnet"):
            assert corpora.samples(kind) == () and kind not in mix.available(mix.PRETRAIN)
    finally:
        corpora.samples.cache_clear()
