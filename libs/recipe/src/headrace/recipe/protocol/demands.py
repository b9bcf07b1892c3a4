"""What the open dialect lets any protocol demand of an output: structured output, biases; and what it refuses.

Reads fields of the body's JSON object that serving clients send and the referee doesn't know. A field that would change the
output and is not served is refused by name: nothing that a client asks for is silently left out. What only labels a request
(user, metadata, store, service_tier ...) is let pass.
"""

import json
import math
from typing import Any

import msgspec

from ..errors import RecipeError
from ..jsontext import JSONError, loads
from . import common
from .request import OutputConstraint, ParsedRequest
from .shape import U32, reader

MAX_BIASES = MAX_STOP_TOKENS = 1024
MAX_CHOICES = 4096
MAX_LOGPROBS = 20

# Fields that would change what is generated, with the values that ask for nothing. null always does.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "mcp_servers": ([],),
    "modalities": (["text"], []),
    "no_stop_trim": (False,),
    "prediction": (),
    "prompt_embeds": (),
    "regex": (),
    "skip_special_tokens": (True,),
    "stop_regex": ([],),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": (),
}
MESSAGES_NOT_SERVED: dict[str, tuple[Any, ...]] = {"prompt_logprobs": ()}
RESPONSES_NOT_SERVED = {"conversation": (), "max_tool_calls": (), "prompt": (), "prompt_logprobs": ()}
INSTEAD = {
    "conversation": "use previous_response_id", "prompt": "send the prompt's text in input",
    "ebnf": "use structured_outputs.grammar", "regex": "use structured_outputs.regex",
    "json_schema": "use response_format or structured_outputs.json", "functions": "use tools",
    "function_call": "use tool_choice",
    "continue_final_message": "use prefix: true in the last message", "allowed_token_ids": "use structured_outputs",
    "bad_words": "use logit_bias",
}  # fmt: skip
_OPTIONS = (
    "disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag"
)  # fmt: skip
_read_ids = reader(list[U32])
_WAYS = ("json", "regex", "choice", "grammar", "json_object")


class Wanted(msgspec.Struct):
    """Structured output, whatever its spelling. kind: json_schema | regex | lark; `place` names the field."""

    kind: str
    value: Any
    place: str


def check_served(body: dict[str, Any], n: int, more: dict[str, tuple[Any, ...]] | None = None) -> None:
    """Raise for fields that ask for something that is not served. `more`: fields of one protocol."""
    for name, neutral in (NOT_SERVED | (more or {})).items():
        value = body.get(name)
        if value is not None and value not in neutral:
            instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
            raise RecipeError(f"`{name}` is not served{instead}", param=name)
    best = body.get("best_of")
    if best is not None and best != n:
        raise RecipeError(f"`best_of` is not served: it is {best!r}, and n is {n}; ask for n choices", param="best_of")


def logit_bias(body: dict[str, Any]) -> dict[int, float]:
    """Token id -> what is added to its logit. Raises RecipeError."""
    value = body.get("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecipeError(f"`logit_bias` must be an object of token ids and numbers; got {_brief(value)}", param="logit_bias")
    if len(value) > MAX_BIASES:
        raise RecipeError(f"`logit_bias` names {len(value)} tokens; at most {MAX_BIASES} may be named", param="logit_bias")
    out = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise RecipeError(f"`logit_bias` names {token!r}, which is not a token id", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not (math.isfinite(bias) and -100 <= bias <= 100):
            raise RecipeError(
                f"`logit_bias` of token {token} must be a number from -100 to 100; got {_brief(bias)}", param="logit_bias"
            )
        out[int(token)] = float(bias)
    return out


def stop_token_ids(value: Any) -> list[int]:
    """The ids that end an output, each once. Raises RecipeError."""
    if isinstance(value, list) and len(value) > MAX_STOP_TOKENS:
        raise RecipeError(
            f"`stop_token_ids` names {len(value)} tokens; at most {MAX_STOP_TOKENS} may be named", param="stop_token_ids"
        )
    return list(dict.fromkeys(_read_ids(value)))


def prompt_logprobs(body: dict[str, Any], stream: bool | None) -> int | None:
    """How many of the likeliest tokens are told beside each prompt token (vLLM's field); None: none, nor its own. Raises
    RecipeError."""
    value = body.get("prompt_logprobs")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LOGPROBS:
        raise RecipeError(f"`prompt_logprobs` must be from 0 to {MAX_LOGPROBS}; got {value!r}", param="prompt_logprobs")
    if stream:
        raise RecipeError("`prompt_logprobs` are not told in a stream; leave out `stream`", param="prompt_logprobs")
    return value


def structured(body: dict[str, Any]) -> Wanted | None:
    """vLLM's fields for structured output: `structured_outputs` or the older `guided_*`. Raises RecipeError."""
    found = [(f"guided_{way}", way, body.get(f"guided_{way}")) for way in ("json", "regex", "choice", "grammar", "json_object")]
    options = body.get("structured_outputs")
    if options is not None:
        if not isinstance(options, dict):
            raise RecipeError(f"`structured_outputs` must be an object; got {_brief(options)}", param="structured_outputs")
        for name, value in options.items():
            if name in _OPTIONS and value not in (None, False):
                raise RecipeError(f"`structured_outputs.{name}` is not served", param="structured_outputs")
            if name not in _OPTIONS and name not in _WAYS and not name.startswith("_"):
                known = ", ".join(_WAYS)
                raise RecipeError(f"`structured_outputs.{name}` is unknown; known are {known}", param="structured_outputs")
        found += [(f"structured_outputs.{way}", way, options.get(way)) for way in _WAYS]
    given = [(place, way, value) for place, way, value in found if value is not None and value is not False]
    if len(given) > 1:
        places = " and ".join(f"`{place}`" for place, _, _ in given)
        raise RecipeError(f"{places} exclude each other; give one", param=given[0][0])
    return _wanted(*given[0]) if given else None


def _wanted(place: str, way: str, value: Any) -> Wanted:
    def wrong(what: str) -> RecipeError:
        return RecipeError(f"`{place}` must be {what}; got {_brief(value)}", param=place)

    if way == "json":
        try:
            value = loads(value) if isinstance(value, str) else value
        except JSONError as error:
            raise RecipeError(f"`{place}` is not JSON: {error}", param=place) from None
        if not isinstance(value, dict | bool):
            raise wrong("a JSON schema")
        return Wanted("json_schema", value, place)
    if way == "json_object":
        if value is not True:
            raise wrong("a boolean")
        return Wanted("json_schema", {"type": "object"}, place)
    if way == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise wrong("a list of texts, none of them empty")
        if len(value) > MAX_CHOICES:
            raise RecipeError(f"`{place}` must be a list of at most {MAX_CHOICES} texts; it has {len(value)}", param=place)
        texts = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(value))
        return Wanted("lark", f"start: CHOICE\nCHOICE: {' | '.join(texts)}", place)  # a terminal: any number at once
    if not isinstance(value, str) or not value:
        raise wrong("a text")
    if way == "grammar" and "::=" in value:
        raise RecipeError(f"`{place}` is in EBNF (`::=`); grammars are read as Lark (`start: ...`)", param=place)
    return Wanted("regex" if way == "regex" else "lark", value, place)


def _brief(value: Any) -> str:
    """A value as JSON, its beginning."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}..."


def messages_format(body: dict[str, Any]) -> Wanted | None:
    """Anthropic's structured output: `output_config.format`, and `output_format` of its beta. Raises RecipeError."""
    config = body.get("output_config")
    places = {"output_config.format": config.get("format") if isinstance(config, dict) else None}
    places["output_format"] = body.get("output_format")
    for place, form in places.items():
        if form is None:
            continue
        kind = form.get("type") if isinstance(form, dict) else None
        if kind != "json_schema" or not isinstance(form.get("schema"), dict | bool):
            raise RecipeError(f'`{place}` must be {{"type": "json_schema", "schema": {{...}}}}', param=place)
        return Wanted("json_schema", form["schema"], place)
    return None


def apply(parsed: ParsedRequest, wanted: Wanted | None, *, strict: bool = False) -> None:
    """Make structured output part of a request that has no format of its own. Raises RecipeError."""
    conversation = parsed.conversation
    if wanted is None or conversation.response_format != "text":
        return
    if wanted.kind == "lark":
        if conversation.tools_active:
            raise RecipeError(f"`{wanted.place}` can't be combined with tools", param=wanted.place)
        parsed.output_constraint = OutputConstraint("lark", wanted.value)
        return
    schema = None
    if wanted.kind == "regex":
        conversation.response_format, conversation.response_regex = "regex", wanted.value
    else:
        schema = common.schema_format(wanted.value, strict, wanted.place)
        conversation.response_format, conversation.response_schema = "json_schema", wanted.value
    common.check_strict(conversation, True)
    parsed.output_constraint = common.output_constraint(conversation, schema, strict)
