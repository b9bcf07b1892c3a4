"""Structured logs: JSON lines for machines, one readable line for people. Request ids are fields, never part of the text."""

from __future__ import annotations

import contextlib
import logging
import sys

import structlog


class _Stderr:
    """Standard error that never fails: a full disk or a closed pipe costs lines, not the work that wrote them."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def _clients_fault(record: logging.LogRecord) -> bool:
    """What is no HTTP at all is its sender's fault: one line that says what was wrong, instead of aiohttp's traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__module__ == "aiohttp.http_exceptions":
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
        text = " ".join(str(error).split())
        record.msg, record.args = "%s; answered with 400: %s", (record.getMessage(), text[:200])
    return True


def configure(level: str = "info", fmt: str = "auto") -> None:
    """Set up structlog and send the standard library's loggers (aiohttp, nats) through it."""
    threshold = getattr(logging, level.upper())
    as_json = fmt == "json" or (fmt == "auto" and not sys.stderr.isatty())
    shared = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        final = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        final = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(_Stderr()),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(_Stderr())
    drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.addFilter(_clients_fault)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[drop, *final], foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.WARNING))
