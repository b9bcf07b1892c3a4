"""The input side: request bodies of each protocol to a `ParsedRequest`."""

from . import chat, completions, messages, responses
from .request import OFFICIAL, OPEN, ConversionOptions, OutputConstraint, ParsedRequest, Sampling

__all__ = [
    "OFFICIAL",
    "OPEN",
    "ConversionOptions",
    "OutputConstraint",
    "ParsedRequest",
    "Sampling",
    "chat",
    "completions",
    "messages",
    "responses",
]
