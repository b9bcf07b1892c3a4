"""A byte-level BPE tokenizer of V4's kind: its word pattern with single digits, V4.1's control tokens behind the merges."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.engine.make_checkpoint import BOS, CONTROL, EOS, PAD, small_tokenizer_json
from headrace.recipe import Tokenizer as RecipeTokenizer

from . import mix
from .sample import Renderer

# V4's pre-tokeniser, with one digit a word instead of up to three: carries can then be spelled out.
_WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
_SPLITS = ("\\p{N}", "[一-龥\u3040-ゟ゠-ヿ]+", _WORDS)
CHARACTERS = 12_000_000  # of text that merges are learnt from


def empty() -> Tokenizer:
    """The tokenizer without merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterator[str], size: int) -> Tokenizer:
    """A tokenizer of exactly `size` ids, control tokens included."""
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(CONTROL), special_tokens=[BOS, EOS, PAD], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer = empty()
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(CONTROL))
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the text gives {tokenizer.get_vocab_size()} tokens, not {size}; give more text (--characters)")
    return tokenizer


def texts(shares: dict[str, float], characters: int, seed: str) -> Iterator[str]:
    """Plain texts of the mix, about so many characters, each kind with its share."""
    renderer = Renderer(RecipeTokenizer(small_tokenizer_json()))
    for kind, share in mix.available(shares).items():
        left, number = share * characters, 0
        while left > 0:
            for text in renderer.texts(mix.draw(kind, f"tokenizer/{seed}", number)):
                left -= len(text)
                yield text
            number += 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="tokenizer.json to write")
    parser.add_argument("--size", type=int, default=8192, help="ids in all (default: 8192)")
    parser.add_argument("--mix", choices=mix.MIXES, default="pretrain", help="data mix to learn from (default: pretrain)")
    parser.add_argument("--characters", type=int, default=CHARACTERS, help=f"text to learn from (default: {CHARACTERS})")
    parser.add_argument("--seed", default="0")


def main(args: argparse.Namespace) -> None:
    """Train a tokenizer on the data mix. The same arguments give the same file."""
    shares = mix.MIXES[args.mix]
    tokenizer = train(texts(shares, args.characters, args.seed), args.size)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")), "utf-8")
    renderer = Renderer(RecipeTokenizer.from_file(args.out))
    print(f"{args.out}: {tokenizer.get_vocab_size()} ids, {args.out.stat().st_size / 1e6:.2f} MB, word cache: "
          f"{'yes' if renderer.tokenizer.words is not None else 'no'}")  # fmt: skip
    for kind in mix.available(shares):
        samples = [mix.draw(kind, "bytes", n) for n in range(20)]
        size = sum(len(text.encode()) for sample in samples for text in renderer.texts(sample))
        print(f"  {kind:14} {size / sum(len(renderer.ids(sample)[0]) for sample in samples):.2f} bytes a token")
