"""The engine: models, KV memory, scheduler, sampler. No bus, no HTTP, no asyncio.

    from headrace.engine import LLM, SamplingParams
    LLM(path).generate(["a prompt"], SamplingParams(max_tokens=32))

Loads no torch by itself: the contract in `api` is also that of the simulated engine, which has none.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .api import EngineConfig, EngineRequest, Grammar, Role, SamplingParams

# Read when torch is loaded. Threads that wait for the next operator by spinning take the cores that others need: beside one
# busy process on two cores steps took many times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from .core import EngineCore
    from .llm import LLM

__all__ = ["LLM", "EngineConfig", "EngineCore", "EngineRequest", "Grammar", "Role", "SamplingParams"]


def __getattr__(name: str):
    if name == "LLM":
        from .llm import LLM

        return LLM
    if name == "EngineCore":
        from .core import EngineCore

        return EngineCore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
