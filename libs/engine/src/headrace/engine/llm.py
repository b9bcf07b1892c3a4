"""The offline API: prompts in, answers out, in this process and this thread.

    llm = LLM("checkpoint")
    for answer in llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, seed=7, max_tokens=64)):
        print(answer.choices[0].text)

Knows the step loop and the tokenizer. Does not know chat templates, text stops or HTTP: those are the gateway's.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from . import api
from .core import EngineCore
from .pipeline import OneThread

__all__ = ["LLM", "Answer", "Choice", "collect"]


@dataclass(slots=True)
class Choice:
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""  # "stop" | "length"
    stop_id: int = -1
    logprobs: list[tuple[int, float, list[tuple[int, float]]]] = field(default_factory=list)  # (id, logprob, most likely)


@dataclass(slots=True)
class Answer:
    """What became of one prompt. cached_tokens + computed_rows = prompt tokens; replayed rows come on top."""

    request: str
    prompt_ids: list[int]
    choices: list[Choice]
    cached_tokens: int = 0
    computed_rows: int = 0
    replay_rows: int = 0
    snapshot_hit: bool = False
    # With SamplingParams.prompt_logprobs: of each prompt token (id, logprob, most likely); the first has none.
    prompt_logprobs: list[tuple[int, float, list[tuple[int, float]]] | None] = field(default_factory=list)
    error: str = ""  # this prompt failed; the others are not touched by it


def collect(
    engine: EngineCore,
    requests: Sequence[api.EngineRequest],
    progress: bool = False,
    step: Callable[[], list[api.Event] | None] | None = None,
) -> list[Answer]:
    """Run requests to their end, in the order given. A request that can't be run is answered with its error. `step`: instead of
    the engine's own, which plans no step ahead (`pipeline.Pipeline.step` does)."""
    step = step or engine.step
    answers = {r.request: Answer(r.request, list(r.ids), [Choice() for _ in range(r.sampling.n)]) for r in requests}
    bar = _Progress(sum(r.sampling.n for r in requests)) if progress else None
    with _between_steps() as interrupted:
        for request in requests:
            try:
                engine.submit(request)
            except ValueError as error:
                answers[request.request].error = str(error)
        try:
            while engine.has_work():
                interrupted()
                events = step()
                assert events is not None, f"nothing can run, and nobody else holds memory: {engine.stats()}"
                for event in events:
                    if event.request in answers:
                        _note(answers[event.request], event)
                if bar:
                    bar.show(answers.values())
        finally:  # interrupted: nothing of this call stays behind
            for request in requests:
                engine.cancel(request.request)
            if bar:
                bar.end(answers.values())
    return list(answers.values())


@contextmanager
def _between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C takes effect where the given function is called, and a second one at once: an engine's books are whole between two
    steps only, and it is to serve other calls. Handlers that are not Python's own are left alone."""
    came = []

    def note(number: int, _: object) -> None:
        interrupted()
        came.append(number)

    def interrupted() -> None:
        if came:
            raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    own = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if own:
        signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        if own:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted()


def _note(answer: Answer, event: api.Event) -> None:
    if isinstance(event, api.Tokens):
        choice = answer.choices[event.choice]
        choice.ids += event.ids
        choice.logprobs += event.logprobs or ()
        choice.finish, choice.stop_id = event.finish, event.stop_id
    elif isinstance(event, api.PromptDone):
        answer.cached_tokens, answer.computed_rows = event.cached_tokens, event.computed_rows
        answer.replay_rows, answer.snapshot_hit = event.replay_rows, event.snapshot_hit
    elif isinstance(event, api.PromptScores):
        answer.prompt_logprobs = answer.prompt_logprobs or [None]
        answer.prompt_logprobs += event.logprobs
    elif isinstance(event, api.Failed):
        answer.error = f"{event.code}: {event.message}"


class LLM:
    """A checkpoint and an engine in role BOTH.

    numerics, kv_store, batch_invariant, keep_rows, device: see `headrace.engine.loader.load_model`. Every field of
    `EngineConfig` may be given by name, for example num_blocks=2048 or max_num_seqs=64.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        numerics: str = "bounded",
        kv_store: str = "quantized",
        batch_invariant: bool = False,
        keep_rows: int | None = None,
        device: str = "cpu",
        **config,
    ) -> None:
        from tokenizers import Tokenizer

        from .grammar import Grammars
        from .loader import load_model

        path = Path(path)
        model = load_model(
            path, kv_store=kv_store, numerics=numerics, batch_invariant=batch_invariant, device=device, keep_rows=keep_rows
        )
        file = path / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(file)) if file.exists() else None
        grammars = Grammars(file, model.vocab_size, model.eos_token_ids) if self.tokenizer else None
        self.engine = EngineCore(model, api.EngineConfig(**{"model_name": path.name, **config}), grammars=grammars)
        self._ahead = device != "cpu"  # which works while steps are planned
        self._requests = 0

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: api.SamplingParams | Sequence[api.SamplingParams] | None = None,
        *,
        namespace: bytes = b"",
        progress: bool = False,
    ) -> list[Answer]:
        """Answers in the order of the prompts. A prompt is text (its tokens as they are, no BOS is added) or token ids.

        ValueError when prompts and params differ in number, or when there is text and the checkpoint has no tokenizer.
        """
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
            prompts = [prompts]
        if params is None or isinstance(params, api.SamplingParams):
            params = [params or api.SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling parameters: give one for all, or one each")
        requests = []
        for prompt, sampling in zip(prompts, params, strict=True):
            self._requests += 1
            ids = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
            requests.append(api.EngineRequest(f"offline-{self._requests}", ids, [], sampling, namespace))
        with OneThread(self.engine) if self._ahead else nullcontext(self.engine) as steps:
            answers = collect(self.engine, requests, progress, steps.step)
        if self.tokenizer:
            for choice in (choice for answer in answers for choice in answer.choices):
                choice.text = self.tokenizer.decode(choice.ids)
        return answers

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer.json; give prompts as token ids")
        return self.tokenizer.encode(text, add_special_tokens=False).ids


class _Progress:
    """One line on stderr, at most five times a second."""

    def __init__(self, total: int) -> None:
        self._total, self._began, self._shown = total, time.monotonic(), 0.0

    def show(self, answers: Iterable[Answer]) -> None:
        now = time.monotonic()
        if now - self._shown >= 0.2:
            self._shown = now
            rate = sum(len(c.ids) for a in answers for c in a.choices) / max(now - self._began, 1e-9)
            self._print(answers, f", {rate:.0f} tokens/s ")

    def end(self, answers: Iterable[Answer]) -> None:
        self._print(answers, "\n")

    def _print(self, answers: Iterable[Answer], tail: str) -> None:
        choices = [choice for answer in answers for choice in answer.choices]
        done, tokens = sum(bool(choice.finish) for choice in choices), sum(len(choice.ids) for choice in choices)
        print(f"\r{done}/{self._total} answers, {tokens} tokens", end=tail, file=sys.stderr, flush=True)
