"""The model card: data, licences, losses, limits, what was measured, ten unselected samples. Written from the run's log, from
`measured.json` and `evaluation.json` beside the weights; what was not measured is not claimed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .runs import STAGES, Run

SOURCES = {
    "generated": ("generators of this repository (`models/training/generators`)", "Apache-2.0"),
    "books": ("public-domain books (children's and adventure books, from mlschmitt/classic-books-markdown)", "public domain"),
    "gsm8k": ("GSM8K, grade-school math problems, copyright 2021 OpenAI (https://github.com/openai/grade-school-math)", "MIT"),
    "tldr": (
        "tldr pages, by the tldr-pages team and contributors (https://github.com/tldr-pages/tldr), examples shown as questions "
        "and answers", "CC-BY-4.0 (https://creativecommons.org/licenses/by/4.0/)",
    ),
    "wordnet": ("WordNet 3.1, Princeton University", "WordNet licence, below"),
    "code": ("the standard library of Python", "PSF-2.0"),
    "gym": ("tasks of reasoning-gym", "Apache-2.0"),
}  # fmt: skip
EVALUATED, LIMITS = "## Evaluated through the running system", "## Limits"  # what `refresh` puts anew lies between them
WORDNET_LICENCE = Path(__file__).with_name("wordnet_licence.txt")  # must go with whatever is made of it


def write(run: Run, out: Path, notes: Sequence[str] = ()) -> None:
    """README.md, ATTRIBUTION.md and losses.svg in the checkpoint folder."""
    history = run.history()
    shares = sources(run)
    (out / "losses.svg").write_text(plot(history))
    (out / "ATTRIBUTION.md").write_text(attribution(shares | run.earlier()["shares"]))
    (out / "README.md").write_text(text(run, out, history, shares, notes))


def sources(run: Run) -> dict[str, float]:
    """Shares of the data that the run has seen, newest stage's mix, by kind; from the copies of index.json that stages kept."""
    seen: dict[str, float] = {}
    for file in sorted(run.folder.glob("data-*.json")):
        for kind, share in json.loads(file.read_text())["shares"].items():
            seen[kind] = max(seen.get(kind, 0.0), share)
    return seen


def attribution(shares: dict[str, float]) -> str:
    """Whose texts the model has learnt from."""
    used = ["generated", *(name for name in SOURCES if name in shares)]
    lines = [f"- {SOURCES[name][0]}: {SOURCES[name][1]}" for name in used]
    if "wordnet" in used:
        lines += ["", "## WordNet licence", "", "```", WORDNET_LICENCE.read_text().strip(), "```"]
    return "\n".join(["# Attribution", "", "These weights (Apache-2.0) were trained on:", "", *lines, ""])


_REPORTED = ("loss", "target_loss", "index_loss", "confidence_loss", "accepted")


def _stage_lines(history: list[dict[str, Any]], earlier: Sequence[str] = ()) -> list[str]:
    """A row of each stage, behind the rows of the runs that this one went on from."""
    lines, again = list(earlier), "continued: " if earlier else ""
    for stage in STAGES:
        last = next((h for h in reversed(history) if h["stage"] == stage), None)
        if last:
            shown = ", ".join(f"{k} {last[k]:.3f}" for k in _REPORTED if k in last)
            size = f"{last['tokens'] / 1e6:.1f} M | {last['seconds'] / 60:.0f}"
            lines.append(f"| {again}{stage} | {last['step']:,} | {size} | {shown} |")
    return lines


def _data_lines(shares: dict[str, float], earlier: dict[str, Any]) -> list[str]:
    """What was seen by this run, and by those before it."""
    said = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items() if share >= 0.005)
    if not earlier["rows"]:
        return [f"Data, shares of tokens: {said}.", ""]
    before = ", ".join(f"{kind} {share}%" for kind, share in earlier["shares"].items())
    return [
        "Stages marked `continued` went on from the weights of the rows above them, as stored; the plot shows them alone.", "",
        f"Data of the newest stages, shares of tokens: {said}.", "",
        f"Data of the stages before (of each kind its largest share in any), shares of tokens: {before}.", "",
    ]  # fmt: skip


def text(run: Run, out: Path, history: list[dict[str, Any]], shares: dict[str, float], notes: Sequence[str] = ()) -> str:
    """The card; notes are limits that only a person knows."""
    c = run.config
    earlier = run.earlier()
    measured, evaluation = (_read(out / name) for name in ("measured.json", "evaluation.json"))
    size = sum(f.stat().st_size for f in out.glob("model*.safetensors"))
    count = f"{measured['parameters'] / 1e6:.1f} M parameters, " if measured else ""
    top = sorted(shares.items(), key=lambda item: -item[1])
    lines = [
        f"# {out.name}", "",
        f"A DeepSeek-V4.1 model in small, trained from nothing for Headrace: {c.num_hidden_layers} layers of width "
        f"{c.hidden_size}, {c.n_routed_experts} routed experts (top {c.num_experts_per_tok}) and a shared one, CSA2 with "
        f"{len(c.kv_source_layer_ids)} KV sources, Engram, mHC, a DSpark draft of {c.num_nextn_predict_layers} stages; "
        f"a vocabulary of {c.vocab_size:,}. {count}{size / 1e6:.1f} MB as FP8 and FP4.", "",
        "It shows what the system does. It is no assistant: it knows the small world of its training data and says false "
        "things about everything else, fluently.", "",
        "Licence: Apache-2.0; sources in [ATTRIBUTION.md](ATTRIBUTION.md). Made by `python -m models.training` "
        "([how](../training/README.md)).", "",
        "## Training", "",
        "| stage | steps | tokens | minutes | last reported |", "|---|---|---|---|---|",
        *_stage_lines(history, earlier["rows"]), "",
        "![losses](losses.svg)", "",
        *_data_lines(dict(top), earlier),
    ]  # fmt: skip
    if measured:
        lines += ["## Measured offline", "",
                  "`python -m models.training measure CHECKPOINT --run RUN` (rows `export` and `unrounded` compare with that "
                  "run's weights), on held-out data; losses and KL in nats a token, accepted drafts of five:", ""]
        lines += [*_table(measured), ""]
    lines += _evaluated(evaluation)
    longest = max((json.loads(f.read_text())["contexts"][-1] for f in run.folder.glob("data-*.json")), default=0)
    lines += [LIMITS, "", f"- Trained on contexts of up to {longest:,} tokens; longer ones are untried.",
              *(["- Pictures were 126 x 126 pixels: it misreads others."] if c.vision else []),
              "- Sums were trained, and are evaluated, with thinking; without it they are often wrong.",
              "- Facts beyond the tables in `models/training/generators/facts.py` are made up.",
              "- Refusals were trained with a few sentences only; they protect from nothing.",
              *(f"- {note}" for note in notes), ""]  # fmt: skip
    return "\n".join(lines)


def _evaluated(evaluation: dict[str, Any]) -> list[str]:
    """The sections that `evaluate` fills."""
    if not evaluation:
        return []
    lines = [EVALUATED, "", "`python -m models.training evaluate`, over HTTP, on held-out slots, temperature "
             f"{evaluation.get('temperature')}, 95 % Wilson intervals:", "", *_results(evaluation), ""]  # fmt: skip
    if evaluation.get("samples"):
        lines += ["## Ten samples, not selected", ""]
        for sample in evaluation["samples"]:
            lines += [f"> **{_line(sample['asked'])}**", ">", f"> {_line(sample['answer'])}", ""]
    return lines


def refresh(out: Path) -> None:
    """Put what evaluation.json says into the card that is there; all else in it stays. ValueError if it is no card of ours."""
    card, evaluation = out / "README.md", _read(out / "evaluation.json")
    if not evaluation:
        raise ValueError(f"{out} has no evaluation.json; `evaluate --json {out}/evaluation.json` writes it")
    lines = card.read_text().split("\n")
    if LIMITS not in lines:
        raise ValueError(f"{card} has no line {LIMITS!r}: `export` did not write it")
    limits = lines.index(LIMITS)
    begin = lines.index(EVALUATED) if EVALUATED in lines[:limits] else limits
    card.write_text("\n".join([*lines[:begin], *_evaluated(evaluation), *lines[limits:]]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="an exported checkpoint's folder, with README.md and evaluation.json")


def main(args: argparse.Namespace) -> None:
    """Put newer results of `evaluate` into a checkpoint's card, without the run that it was exported from."""
    refresh(args.checkpoint)


def _table(values: dict[str, Any]) -> list[str]:
    rows = [f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in values.items() if isinstance(value, (int, float))]
    return ["| | |", "|---|---|", *rows]


def _results(evaluation: dict[str, Any]) -> list[str]:
    rows = ["| | share | 95 % interval | n |", "|---|---|---|---|"]
    for name, result in evaluation["results"].items():
        low, high = result["interval"]
        rows.append(f"| {name} | {result['share']:.1%} | {low:.1%} to {high:.1%} | {result['n']} |")
    rows += [""] + [f"- {key}: {value:.4g}" for key, value in evaluation.get("numbers", {}).items()]
    return rows


def _line(text: str) -> str:
    return " / ".join(part for part in text.split("\n") if part.strip())[:600]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


# ------------------------------------------------------------------ plot

_COLOURS = {"target_loss": "#1f77b4", "index_loss": "#2ca02c", "confidence_loss": "#d62728", "accepted": "#9467bd"}


def plot(history: list[dict[str, Any]], width: int = 720, height: int = 300) -> str:
    """Reported values over training time as SVG, stages one behind the other."""
    begins, total = {}, 0.0
    for stage in STAGES:
        seconds = [h["seconds"] for h in history if h["stage"] == stage]
        if seconds:
            begins[stage], total = total, total + max(seconds)
    top = max([h[k] for h in history for k in _COLOURS if k in h] or [1.0])
    x = lambda h: 50 + (begins[h["stage"]] + h["seconds"]) / max(total, 1e-9) * (width - 70)  # noqa: E731
    y = lambda value: height - 30 - value / top * (height - 60)  # noqa: E731
    size = f'width="{width}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
             f'<rect width="{width}" height="{height}" fill="white"/>']  # fmt: skip
    for value in range(int(top) + 1):
        parts.append(f'<line x1="50" x2="{width - 20}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="20" y="{y(value) + 4:.1f}">{value}</text>')
    for stage, begin in begins.items():
        at = 50 + begin / max(total, 1e-9) * (width - 70)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="20" y2="{height - 30}" stroke="#999"/>')
        parts.append(f'<text x="{at + 4:.1f}" y="{height - 12}">{stage}</text>')
    for place, (name, colour) in enumerate(_COLOURS.items()):
        for stage in begins:
            points = " ".join(f"{x(h):.1f},{y(h[name]):.1f}" for h in history if h["stage"] == stage and name in h)
            if points:
                parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{60 + 130 * place}" y="14" fill="{colour}">{name.replace("_", " ")}</text>')
    return "\n".join([*parts, "</svg>", ""])
