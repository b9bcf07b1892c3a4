"""The output side: sampled ids or text in, events of the three protocols out."""

from .chat import ChatStream
from .options import ParsingOptions
from .parser import Event, StreamParser, random_call_id
from .reply import Usage

__all__ = ["ChatStream", "Event", "ParsingOptions", "StreamParser", "Usage", "random_call_id"]
