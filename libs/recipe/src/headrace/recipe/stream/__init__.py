"""The output side: sampled ids or text in, events of the three protocols out."""

from .chat import ChatStream
from .completions import CompletionStream
from .messages import MessagesStream
from .options import ParsingOptions
from .parser import Event, StreamParser, random_call_id
from .reply import ReplyStream, Usage
from .responses import ResponsesStream

__all__ = [
    "ChatStream",
    "CompletionStream",
    "Event",
    "MessagesStream",
    "ParsingOptions",
    "ReplyStream",
    "ResponsesStream",
    "StreamParser",
    "Usage",
    "random_call_id",
]
