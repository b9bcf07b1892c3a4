"""OpenAI text completions, with DeepSeek's fill-in-the-middle `suffix`. The referee has no such protocol."""

from typing import Annotated, Any

import msgspec

from ..conversation import Conversation
from ..errors import RecipeError
from ..stream.options import ParsingOptions
from ..tokenizer import Tokenizer
from ..tokens import DEFAULT_TOKENS
from . import common, demands
from .chat import (
    JsonObjectFormat,
    JsonSchemaFormat,
    OpenStreamOptions,
    RegexFormat,
    ResponseFormat,
    _stop,
    apply_open,
    checked_seed,
    open_extras,
    read_open_fields,
)
from .request import OPEN, ConversionOptions, ParsedRequest, Sampling
from .schema import closed
from .shape import F32, U8, U32, U64, Check, Misfit, naming, reader

FIM_BEGIN, FIM_HOLE, FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"
MAX_PROMPTS = 128
_EXPECTED = "prompt should be a string, a list of strings, a list of token ids or a list of such lists"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**32 for item in value)


def _prompt(value: Any) -> list[str | list[int]]:
    """One prompt or several, each text or token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise Misfit(_EXPECTED)
    if all(isinstance(item, str) for item in value) or all(_is_ids(item) and item for item in value):
        return value
    if _is_ids(value):
        return [value]
    raise Misfit(_EXPECTED)


class CompletionRequest(msgspec.Struct):
    """A text completion request."""

    model: str
    prompt: Annotated[Any, Check(_prompt)]
    suffix: str | None = None
    max_tokens: U32 | None = None
    temperature: F32 | None = None
    top_p: F32 | None = None
    n: U8 | None = None
    stream: bool | None = None
    stream_options: OpenStreamOptions | None = None
    logprobs: U8 | None = None
    echo: bool | None = None
    stop: Annotated[Any, Check(_stop)] | None = None
    presence_penalty: F32 | None = None
    frequency_penalty: F32 | None = None
    seed: U64 | None = None
    response_format: ResponseFormat | None = None


_read = naming(reader(CompletionRequest))


@common.dialectal
def parse(body: bytes | str | dict[str, Any], options: ConversionOptions = OPEN) -> ParsedRequest:
    """A request body as prompts and settings; the conversation stays empty. Raises RecipeError."""
    value = common.parse_body(body)
    request = _read(value)
    fields = read_open_fields(value)
    version = common.model_version(request.model, options)
    if len(request.prompt) > MAX_PROMPTS:
        raise RecipeError(f"{len(request.prompt)} prompts in one request; at most {MAX_PROMPTS} are served", param="prompt")
    if request.suffix is not None and not all(isinstance(prompt, str) for prompt in request.prompt):
        raise RecipeError(
            "suffix needs a text prompt; token ids can spell the fill-in-the-middle tokens themselves", param="suffix"
        )
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    common.check_stops(stops, "stop", single=isinstance(request.stop, str))
    if request.stream_options is not None and not request.stream:
        raise RecipeError("stream_options should be set along with stream = true", place="stream_options")
    sampling = _sampling(request, stops, options)
    demands.check_served(value, sampling.n)
    sampling.logit_bias = demands.logit_bias(value)
    sampling.prompt_logprobs = demands.prompt_logprobs(value, request.stream)
    apply_open(sampling, fields)
    extras = open_extras(fields)
    if request.echo:
        extras["echo"] = True
        if request.logprobs is not None:  # those of the prompt are told too, as those of the output are
            extras["echo_logprobs"] = request.logprobs
        if request.max_tokens == 0:  # a worker samples one token all the same, which is not told
            extras["prompt_only"] = True
    if request.suffix is not None:
        extras["suffix"] = request.suffix
    if getattr(request.stream_options, "continuous_usage_stats", None):
        extras["continuous_usage_stats"] = True
    parsed = ParsedRequest(
        protocol="completions",
        model=request.model,
        version=version,
        conversation=Conversation(thinking_mode=False),
        sampling=sampling,
        parsing=ParsingOptions(
            parse_tool_calls=False, stop_sequences=stops, raw=True, lenient_end=True, special_tokens=options.special_tokens
        ),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        extras=extras,
        prompts=request.prompt,
    )
    demands.apply(parsed, _format(request.response_format) or demands.structured(value))
    return parsed


def _format(form: Any) -> demands.Wanted | None:
    """`response_format`, as Chat has it. There is no prompt of ours that could show it to the model."""
    if isinstance(form, JsonSchemaFormat):
        schema = form.json_schema.schema
        return demands.Wanted("json_schema", closed(schema) if form.json_schema.strict else schema, "response_format")
    if isinstance(form, JsonObjectFormat):
        return demands.Wanted("json_schema", {"type": "object"}, "response_format")
    return demands.Wanted("regex", form.regex, "response_format") if isinstance(form, RegexFormat) else None


def prompt_ids(prompt: str | list[int], tokenizer: Tokenizer, suffix: str | None = None) -> list[int]:
    """Token ids of one prompt. Text begins with BOS; it is the caller's own template, so it may spell control tokens.

    With `suffix` the model fills the middle between the two. Raises RecipeError for ids outside the vocabulary.
    """
    if isinstance(prompt, list):
        worst = max(prompt)
        if worst >= tokenizer.vocab_size:
            raise RecipeError(f"token id {worst} is outside the vocabulary of {tokenizer.vocab_size}", param="prompt")
        return prompt
    text = prompt if suffix is None else f"{FIM_BEGIN}{prompt}{FIM_HOLE}{suffix}{FIM_END}"
    if suffix is not None and tokenizer.added_token_id(FIM_HOLE) is None:
        raise RecipeError("this model has no fill-in-the-middle tokens; leave out suffix", param="suffix")
    ids = tokenizer.encode(text)
    bos = tokenizer.added_token_id(DEFAULT_TOKENS.bos)
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _sampling(request: CompletionRequest, stops: list[str], options: ConversionOptions) -> Sampling:
    n = 1 if request.n is None else request.n
    if not 1 <= n <= 128:
        raise RecipeError(f"Invalid n value {n}, the valid range of n is [1, 128]", param="n")
    common.in_range("presence_penalty", request.presence_penalty, -2, 2, "[-2, 2]")
    common.in_range("frequency_penalty", request.frequency_penalty, -2, 2, "[-2, 2]")
    common.in_range("temperature", request.temperature, 0, 2, "[0, 2]")
    common.in_range("top_p", request.top_p, 0, 1, "(0, 1.0]", open_low=True)
    common.in_range("logprobs", request.logprobs, 0, 20, "[0, 20]")
    bound = options.max_tokens_bound(False)
    if request.max_tokens == 0 and not request.echo:
        raise RecipeError(
            f"Invalid max_tokens value, the valid range of max_tokens is [1, {bound}]; 0 needs echo, for the prompt alone",
            param="max_tokens",
        )
    common.in_range("max_tokens", request.max_tokens, 0, bound, f"[1, {bound}]")
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=checked_seed(request.seed),
        max_tokens=16 if request.max_tokens is None else max(1, request.max_tokens),
        stop=stops,
        logprobs=request.logprobs is not None,
        top_logprobs=request.logprobs,
        n=n,
    )
