"""DeepSeek's protocol layer: requests to conversations, conversations to prompts and ids, token streams to events.

The public names live here; submodules hold the protocols (`protocol`), the output side (`stream`) and images.
"""

from .conversation import Conversation, ImageSource, Message, ToolCall, ToolDefinition
from .encoding import Encoding, MissingToken, SegmentCache
from .render import Rendered
from .replay import ReplayCache
from .tokenizer import Tokenizer, v41_tokenizer_json
from .tokens import DEFAULT_TOKENS, V41_TOKENS, SpecialTokens

__all__ = [
    "DEFAULT_TOKENS",
    "V41_TOKENS",
    "Conversation",
    "Encoding",
    "ImageSource",
    "Message",
    "MissingToken",
    "Rendered",
    "ReplayCache",
    "SegmentCache",
    "SpecialTokens",
    "Tokenizer",
    "ToolCall",
    "ToolDefinition",
    "v41_tokenizer_json",
]
