"""Everything that a client may be told went wrong, and how a worker's problem becomes one of them.

The shapes of error bodies are `headrace.recipe.errors`'; this file knows which situation is which status and code.
"""

from __future__ import annotations

import copy
import difflib

from headrace.bus import messages as m
from headrace.recipe.errors import RecipeError

HEAD, TAIL = 2000, 500  # characters of a message


class GatewayError(RecipeError):
    """An error with what HTTP wants beside its body. `retry_after`: seconds for the Retry-After header, 0 for none."""

    def __init__(self, message: str, *, retry_after: float = 0.0, **fields: object):
        super().__init__(message, **fields)  # type: ignore[arg-type]
        self.retry_after = retry_after


def brief(error: RecipeError) -> RecipeError:
    """The error with a message that can be read: values of a request that it repeats may be as long as the request."""
    message, left = error.message, len(error.message) - HEAD - TAIL
    if left <= 100:
        return error
    short = copy.copy(error)
    short.message = f"{message[:HEAD]} [{left:,} characters left out] {message[-TAIL:]}"
    return short


def body_too_large(size: int | None, limit: int) -> GatewayError:
    is_size = f"is {size:,} bytes" if size is not None else f"is longer than {limit:,} bytes"
    return GatewayError(f"the request body {is_size}; the limit is {limit:,} bytes (--max-body-bytes)", status=413,
                        code="body_too_large")  # fmt: skip


def body_too_slow(seconds: float) -> GatewayError:
    return GatewayError(f"the request body was not complete within {seconds:g} s", status=408, code="body_timeout")


def encoded_body(encoding: str, limit: int) -> GatewayError:
    return GatewayError(
        f"a body with Content-Encoding {encoding[:40]!r} is not taken; send it as it is (up to {limit:,} bytes)",
        status=415,
        code="unsupported_encoding",
    )


def unknown_model(name: str, known: list[str]) -> GatewayError:
    return GatewayError(
        f"The model `{name}` does not exist; served models: {', '.join(known) or 'none'}.",
        status=404,
        code="model_not_found",
        param="model",
    )


def invalid(message: str, param: str | None = None) -> GatewayError:
    return GatewayError(message, status=400, param=param)


def too_many_logprobs(tokens: int, most: int, limit: int) -> GatewayError:
    return invalid(
        f"log-probabilities of {tokens} prompt tokens (of all prompts, in every choice) with {most} others each are "
        f"{tokens * (most + 1)}; an answer has at most {limit}: ask for fewer, or for a shorter prompt's", "prompt_logprobs",
    )  # fmt: skip


def too_many_values(values: int, limit: int) -> GatewayError:
    """`values`: where counting stopped."""
    return GatewayError(
        f"the request body holds at least {values:,} JSON keys and values; the limit is {limit:,}: send fewer, or in several "
        "requests", status=413, code="body_too_large",
    )  # fmt: skip


def too_many_items(what: str, count: int, limit: int, param: str) -> GatewayError:
    return invalid(f"there are {count:,} {what}; the limit is {limit:,}: send fewer, or put several into one", param)


def too_many_tokens(count: int, limit: int) -> GatewayError:
    return invalid(f"`tokens` has {count:,} ids; the limit is {limit:,}: send them in several requests", "tokens")


def empty_prompt() -> GatewayError:
    return invalid("the prompt is empty: it must have at least one token", "prompt")


def too_much_text(characters: int, tokens: int, per_token: int, beside: str = "") -> GatewayError:
    """`beside`: a sentence on what of it is not messages."""
    return GatewayError(
        f"the prompt has {characters:,} characters; this model's maximum context length is {tokens:,} tokens, for which "
        f"at most {tokens * per_token:,} characters are read (--characters-per-token {per_token})" + (beside and f".{beside}"),
        status=400, param="prompt", code="context_length_exceeded",
    )  # fmt: skip


def starting() -> GatewayError:
    return GatewayError("this gateway is starting; try again", status=503, code="starting", retry_after=1.0)


def internal() -> GatewayError:
    return GatewayError("internal error; the gateway's log has it under this request's id", status=500, code="internal_error",
                        type="api_error")  # fmt: skip


def wrong_method(method: str, path: str, fits: list[str]) -> GatewayError:
    return GatewayError(
        f"{path[:200]} does not take {method}; it takes {' and '.join(fits)}",
        status=405, code="method_not_allowed", type="invalid_request_error",
    )  # fmt: skip


def no_route(method: str, path: str, routes: dict[str, str]) -> GatewayError:
    """`routes`: path -> the methods that it takes. The nearest path is named, or else all."""
    near = difflib.get_close_matches(path[:200], routes, n=1, cutoff=0.75)
    listed = near or sorted(name for name in routes if f"/v1{name}" not in routes)
    named = ", ".join(f"{routes[name]} {name}" for name in listed)
    hint = f"did you mean {named}?" if near else f"there are: {named}"
    return GatewayError(f"there is no {method} {path[:200]} here; {hint}", status=404, code="not_found", type="not_found_error")


def unauthorized() -> GatewayError:
    return GatewayError(
        "no valid API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`", status=401, code="invalid_api_key"
    )


def no_workers(what: str, waited: float = 0.0) -> GatewayError:
    since = f", and none came within {waited:g} s" if waited else ""
    return GatewayError(f"no {what} is ready{since}; try again", status=503, code="no_workers", retry_after=1.0)


def no_vision(lost: bool, waited: float = 0.0) -> GatewayError:
    """`lost`: there was one when the request came."""
    why = "the last one was lost while it read them" if lost else "none is there"
    why += f", and none came within {waited:g} s" if waited else ""
    return GatewayError(
        f"no vision worker is ready to read the images ({why}); requests without images are served, try again",
        status=503, code="no_vision", retry_after=1.0,
    )  # fmt: skip


def busy(message: str, retry_after: float = 1.0) -> GatewayError:
    return GatewayError(message, status=429, code="overloaded", type="rate_limit_error", retry_after=max(1.0, retry_after))


def no_response(message: str) -> GatewayError:
    return GatewayError(message, status=404, code="response_not_found", type="invalid_request_error")


def owner_silent(name: str) -> GatewayError:
    return GatewayError(f"the gateway that keeps response `{name}` does not answer now; try again", status=503,
                        code="owner_silent", retry_after=1.0)  # fmt: skip


def draining() -> GatewayError:
    return GatewayError("this gateway is shutting down; try another one", status=503, code="draining", retry_after=1.0)


def bus_down() -> GatewayError:
    return GatewayError("the message bus (NATS) is not reachable now; try again", status=503, code="bus_down", retry_after=1.0)


def deadline(seconds: float) -> GatewayError:
    return GatewayError(f"the request was not finished within {seconds:g} s", status=504, code="deadline_exceeded",
                        type="timeout_error")  # fmt: skip


def worker_died(role: str, why: str) -> GatewayError:
    return GatewayError(f"the {role} worker of this request died ({why}), as did those that went on with it; send it again",
                        status=503, code="worker_died", type="api_error", retry_after=1.0)  # fmt: skip


def worker_late(role: str, why: str) -> GatewayError:
    return GatewayError(f"the {role} worker of this request is overloaded or stopped ({why}); send it again", status=503,
                        code="overloaded", retry_after=1.0)  # fmt: skip


def not_continued(error: GatewayError, late: bool = False) -> GatewayError:
    """The worker died, or is `late`, and there is no other that could go on with it."""
    what, code, kind = ("is overloaded or stopped", "overloaded", None) if late else ("died", "worker_died", "api_error")
    return GatewayError(f"the worker of this request {what}, and no other could go on with it: {error.message}",
                        status=error.status, code=code, type=kind, retry_after=error.retry_after)  # fmt: skip


def from_problem(problem: m.Problem) -> GatewayError:
    """A worker's problem, as it is."""
    retry = 1.0 if problem.status in (429, 503) else 0.0
    return GatewayError(problem.message, status=problem.status, code=problem.code, retry_after=retry)


def from_refusal(refused: m.Refused, role: str) -> GatewayError:
    """A refusal that no other worker would answer differently."""
    if refused.code == "invalid":
        return GatewayError(refused.message, status=400, code="invalid_request")
    return GatewayError(f"{role}: {refused.message}", status=503, code=refused.code, retry_after=max(1.0, refused.retry_after))
