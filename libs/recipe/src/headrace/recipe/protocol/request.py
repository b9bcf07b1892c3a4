"""What every protocol's parser takes and gives: options in, a `ParsedRequest` out."""

from typing import Any, Literal

import msgspec

from ..conversation import Conversation
from ..errors import RecipeError
from ..jsontext import compact
from ..stream.options import ParsingOptions
from ..tokens import DEFAULT_TOKENS, SpecialTokens

Dialect = Literal["open", "official"]
DEFAULT_MODELS = {"DeepSeek-V4-Pro": "v4", "DeepSeek-V4.1-Flash": "v41"}


class ConversionOptions(msgspec.Struct, frozen=True):
    """How requests are read.

    `models`: accepted model names and the template version of each. `reasoning_content`: what happens when a client
    leaves out reasoning that the prompt needs. `web_search` per protocol: drop the tool or reject the request.
    """

    dialect: Dialect = "open"
    models: dict[str, str] = msgspec.field(default_factory=lambda: dict(DEFAULT_MODELS))
    default_thinking_mode: bool = True
    reasoning_content: Literal["fill_empty", "reject"] = "fill_empty"
    responses_web_search: Literal["drop", "reject"] = "drop"
    messages_web_search: Literal["drop", "reject"] = "reject"
    thinking_max_tokens: int = 393216
    non_thinking_max_tokens: int = 393216
    special_tokens: SpecialTokens = DEFAULT_TOKENS
    repair: bool = False

    def max_tokens_bound(self, thinking: bool) -> int:
        """Largest accepted max_tokens."""
        return self.thinking_max_tokens if thinking else self.non_thinking_max_tokens


OPEN = ConversionOptions()
OFFICIAL = ConversionOptions(dialect="official")


class OutputConstraint(msgspec.Struct):
    """What constrained decoding is to enforce: kind `json`, `regex`, `tool_call` or `tool_call_required`; in the open dialect
    also `lark`, a grammar. `recipe.grammar` makes of it what an engine enforces.

    `schema` is the constraint's text as the referee gives it; `original` the schema as the client wrote it, for a
    grammar compiler that keeps more keywords. `strict`: its objects are closed, all properties required.
    """

    kind: str
    schema: str
    original: Any = None
    strict: bool = False


class Sampling(msgspec.Struct):
    """Sampling and stopping, resolved. None: the request did not say and the engine's default holds."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    n: int = 1
    logit_bias: dict[int, float] = {}
    prompt_logprobs: int | None = None


class ParsedRequest(msgspec.Struct):
    """A request of any protocol, ready to be rendered, run and answered.

    `extras` holds what the gateway may act on (cache_salt, priority, user, session_id, return_token_ids, echo ...).
    `echo` is the part of a Responses request that its reply repeats. `prompt` is set for text completions, which have
    no conversation: text or token ids.
    """

    protocol: str
    model: str
    version: str
    conversation: Conversation
    sampling: Sampling
    parsing: ParsingOptions
    stream: bool = False
    include_usage: bool = False
    output_constraint: OutputConstraint | None = None
    extras: dict[str, Any] = {}
    echo: dict[str, Any] | None = None
    namespaces: dict[str, tuple[str, str]] = {}
    custom_tools: frozenset[str] = frozenset()
    prompts: list[str | list[int]] = []
    reasoning_absent: frozenset[int] = frozenset()
    parallel_tool_calls: bool = True  # one turn may call several times

    def __post_init__(self) -> None:
        self.parsing.min_tokens = self.sampling.min_tokens or 0

    @property
    def thinking(self) -> bool:
        """Whether the reply reasons first."""
        return self.conversation.thinking_mode

    def beside_messages(self) -> list[tuple[int, str]]:
        """What a prompt holds beside its messages, each with its characters (as compact JSON) and a way to have fewer."""
        conversation, found = self.conversation, []
        if self.prompts:  # of a text completion: nothing is written into it
            return found
        if conversation.response_format == "json_schema":
            found.append((len(compact(conversation.response_schema)), "the response format's schema (shorten it; or bind the "
                          "output without telling the model: structured_outputs.grammar, `start: %json {...}`)"))  # fmt: skip
        if conversation.tools_active:
            tools = [tool for tool in conversation.tools if not tool.defer_loading]
            size = sum(len(compact(tool.parameters)) + len(tool.description or "") for tool in tools)
            found.append((size, f"the definitions of {len(tools)} tool{'s' * (len(tools) != 1)} (send fewer, or shorten them)"))
        return found

    def told_beside(self) -> str:
        """The same as a sentence behind an error: "" when there is nothing but messages."""
        parts = [f"{size:,} characters of the prompt are {what}" for size, what in self.beside_messages()]
        return f" Not only messages count: {'; '.join(parts)}." if parts else ""

    def resolve_max_tokens(self, prompt_tokens: int, context_limit: int) -> int:
        """max_tokens for the engine: as requested, or a default that fits the context. Raises RecipeError (400)."""
        requested = self.sampling.max_tokens
        total = prompt_tokens + (requested or 0)
        if total > context_limit:
            raise RecipeError(
                f"This model's maximum context length is {context_limit} tokens. However, you requested {total} tokens "
                f"({prompt_tokens} in the messages, {requested or 0} in the completion). "
                "Please reduce the length of the messages or completion." + self.told_beside()
            )
        if requested is not None:
            return requested
        default = 8192
        if self.conversation.thinking_mode:
            default = 131072 if self.conversation.reasoning_effort == "max" else 65536
        return max(1, min(default, context_limit - prompt_tokens))
