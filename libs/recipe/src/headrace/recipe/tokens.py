"""The special tokens of the V4 family and how they are spelled. Knows no ids: those belong to a tokenizer."""

import msgspec


class SpecialTokens(msgspec.Struct, frozen=True):
    """Spelling of every special token that a template writes or a model may emit (bars U+FF5C, blocks U+2581)."""

    bos: str = "<｜begin▁of▁sentence｜>"
    eos: str = "<｜end▁of▁sentence｜>"
    thinking_start: str = "<think>"
    thinking_end: str = "</think>"
    system: str = "<｜System｜>"
    user: str = "<｜User｜>"
    assistant: str = "<｜Assistant｜>"
    latest_reminder: str = "<｜latest_reminder｜>"
    dsml: str = "｜DSML｜"
    image: str = "<｜image｜>"
    ref: str = "<｜ref｜>"
    ref_end: str = "<｜/ref｜>"
    box: str = "<｜box｜>"
    box_end: str = "<｜/box｜>"
    point: str = "<｜point｜>"
    point_end: str = "<｜/point｜>"
    polygon: str = "<｜polygon｜>"
    polygon_end: str = "<｜/polygon｜>"


DEFAULT_TOKENS = SpecialTokens()
# V4.1 checkpoints call the image placeholder (id 129264) by another name than the referee's default.
V41_TOKENS = SpecialTokens(image="<｜deepseek_image｜>")
