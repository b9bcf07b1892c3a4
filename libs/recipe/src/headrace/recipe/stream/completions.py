"""OpenAI text completions: chunks and the whole completion."""

import math
from typing import Any

from ..jsontext import compact
from .parser import Event, FinishReason, Logprob, StreamParser
from .reply import Detailed, Dialect, ReplyStream, float32, json_string, prompt_logprobs, token_text


class CompletionStream(ReplyStream):
    """Writes text_completion chunks. `echo`: the prompt's text, which the reply repeats first, with log-probabilities where
    `echo_logprobs` says how many; `prompt_logprobs`: of vLLM's field of that name, in each choice."""

    protocol = "completions"

    def __init__(
        self,
        parser: StreamParser,
        id: str,
        model: str,
        created: int = 0,
        dialect: Dialect = "open",
        include_usage: bool = False,
        *,
        index: int = 0,
        echo: str = "",
        echo_logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ):
        super().__init__(parser, id, model, created, dialect, include_usage)
        self.index = index
        self.echo = echo
        self.echo_logprobs, self.prompt_logprobs = echo_logprobs, prompt_logprobs
        self._offset = 0 if echo_logprobs is not None else len(echo)  # characters before the next token, for logprobs
        self._logprobs: dict[str, list[Any]] = {}
        head = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._base = b"data: " + compact(head)[:-1].encode()
        self._head = self._base + b',"choices":[{"index":%d,"text":' % index
        self._end = (b',"usage":null' if include_usage else b"") + b"}\n\n"

    def accumulate(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [self.choice()],
            "usage": self.usage_object(),
        }

    def choice(self) -> dict[str, Any]:
        """The one choice of this reply, for replies that gather several."""
        choice = {
            "index": self.index,
            "text": self.echo + "".join(self.content),
            "logprobs": self._logprobs or (self._legacy([]) if self.wants_logprobs else None),
            "finish_reason": self.finish_reason,
        }
        if self.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.prompt_scores, self.prompt_logprobs, self.parser.tokenizer)
        return choice

    def usage_object(self) -> dict[str, Any]:
        """Usage in OpenAI's words, with DeepSeek's cache counters."""
        prompt, cached, completion = self.usage.prompt_tokens, self.usage.cached_tokens, self.completion_tokens()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "prompt_cache_hit_tokens": cached,
            "prompt_cache_miss_tokens": max(prompt - cached, 0),
        }

    def error(self, error: Exception) -> bytes:
        from ..errors import as_recipe_error

        return b"data: " + as_recipe_error(error).body("completions") + b"\n\n"

    def _open(self) -> bytes:
        if self.echo_logprobs is None:
            return self._chunk(self.echo, None, None) if self.echo else b""
        lists = self._legacy([(token, logprob, top[: self.echo_logprobs]) for token, logprob, top in self.prompt_scores])
        self._offset = len(self.echo)
        return self._chunk(self.echo, lists, None)

    def _chunk(self, text: str, logprobs: dict[str, list[Any]] | None, reason: str | None) -> bytes:
        tail = compact({"logprobs": logprobs, "finish_reason": reason})[1:].encode()
        return self._head + json_string(text) + b"," + tail + b"]" + self._end

    def _plain_content(self, escaped: bytes) -> bytes:
        return b"".join((self._head, b'"', escaped, b'","logprobs":null,"finish_reason":null}]', self._end))

    def _content(self, event: Event) -> bytes:
        entries = None if event.logprobs is None else self._legacy(event.logprobs)
        return self._chunk(event.text, entries, None)

    def _legacy(self, logprobs: list[Logprob]) -> dict[str, list[Any]]:
        """Logprobs in the four parallel lists of the completions protocol."""
        tokenizer = self.parser.tokenizer
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprob, top in logprobs:
            spelled = tokenizer.token_bytes(token_id)
            text = token_text(spelled)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(float32(logprob))
            others = {token_text(tokenizer.token_bytes(i)): float32(value) for i, value in top}
            lists["top_logprobs"].append(None if math.isnan(logprob) else others)
            lists["text_offset"].append(self._offset)
            if not math.isnan(logprob) or self.echo.startswith(text):  # else the BOS before a prompt's text
                self._offset += sum(byte & 0xC0 != 0x80 for byte in spelled)  # characters that begin in it
        for key, values in lists.items():
            self._logprobs.setdefault(key, []).extend(values)
        return lists

    def _close(self, reason: FinishReason, done: bool) -> bytes:
        self.finish_reason = reason
        parts = [self._chunk("", None, reason)]
        if done:
            if self.include_usage:
                parts.append(self._base + b',"choices":[],"usage":' + compact(self.usage_object()).encode() + b"}\n\n")
            parts.append(b"data: [DONE]\n\n")
        return b"".join(parts)


class DetailedCompletionStream(Detailed, CompletionStream):
    """A CompletionStream that tells more."""

    prompt_in_choice = True
