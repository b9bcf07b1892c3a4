"""What lies under models/: loads, keeps to its limits, and says what its card promises."""

import json
from pathlib import Path

import pytest

from headrace.engine import LLM, SamplingParams
from headrace.recipe import Tokenizer
from models.training import mix
from models.training.sample import Renderer

ROOT = Path(__file__).resolve().parents[3] / "models"
MODELS = sorted(path.parent for path in ROOT.glob("headrace-*/config.json"))
EXPORT_KL = 0.02  # nats


@pytest.fixture(scope="module", params=MODELS, ids=lambda path: path.name)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def answered(path):
    """(sample, text of the greedy answer, how it ended) of held-out questions."""
    renderer = Renderer(Tokenizer.from_file(path / "tokenizer.json"))
    samples = [mix.draw(kind, "bundled", n, held_out=True) for kind in ("why", "story_chat", "tool_simple") for n in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=220)
    answers = LLM(path).generate([list(renderer.prompt_ids(s)) for s in samples], params)
    return [
        (sample, renderer.tokenizer.decode(a.choices[0].ids), a.choices[0].finish)
        for sample, a in zip(samples, answers, strict=True)
    ]


def test_there_is_one():
    assert MODELS


def test_files_are_small_and_complete(path):
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    assert {"README.md", "ATTRIBUTION.md", "losses.svg", "tokenizer.json", "measured.json"} <= set(sizes)
    assert max(sizes.values()) < 16e6
    assert sum(sizes.values()) < (12e6 if path.name == "headrace-nano" else 30e6)
    card = (path / "README.md").read_text()
    assert "Apache-2.0" in card and "Limits" in card and "not selected" in card
    assert json.loads((path / "measured.json").read_text())["export_kl"] < EXPORT_KL


def test_it_answers_in_the_template_and_comes_to_an_end(answered):
    """Most answers: single ones may differ on another machine, where sums have another order."""
    ended = [reason == "stop" for _, _, reason in answered]
    assert sum(ended) >= 0.9 * len(ended)
    for sample, text, _ in answered:
        assert text.count("</think>") <= sample.conversation.thinking_mode, text


def test_it_knows_why(answered):
    right = [sample.answer in text for sample, text, _ in answered if sample.kind == "why"]
    assert sum(right) >= 6, [text for _, text, _ in answered]


def test_it_tells_stories(answered):
    stories = [text for sample, text, reason in answered if sample.kind == "story_chat" and reason == "stop"]
    assert sum(len(text.split()) > 30 for text in stories) >= 6, stories


def test_it_calls_declared_tools(answered):
    named = [sample.check["calls"][0][0] in text for sample, text, _ in answered if sample.kind == "tool_simple"]
    assert sum(named) >= 6
