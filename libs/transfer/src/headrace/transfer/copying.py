"""Copies between buffers that don't hold the interpreter lock, so that they can run beside the event loop.

A memoryview assignment is as fast but keeps the lock for its whole length; `memmove` through ctypes drops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import time
from collections.abc import Callable

SLICE = 1 << 20  # bytes between two looks at the clock and the fence
INLINE = 64 << 10  # up to here a copy is shorter than handing it to a thread


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer (stable since 3.11)."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)


def as_bytes(buffer) -> memoryview:
    """Any contiguous buffer as a flat view of bytes."""
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def copy(target: memoryview, source: memoryview) -> None:
    """target[:] = source, without the interpreter lock. Both flat, of equal length."""
    if len(target) != len(source) or target.readonly:
        raise ValueError(
            f"can't copy {len(source)} bytes into {len(target)} ({'read-only' if target.readonly else 'writable'})"
        )
    if not len(source):
        return
    to, of = _Buffer(), _Buffer()
    _get_buffer(target, ctypes.byref(to), 0)
    try:
        _get_buffer(source, ctypes.byref(of), 0)
        try:
            ctypes.memmove(to.buf, of.buf, len(source))
        finally:
            _release_buffer(ctypes.byref(of))
    finally:
        _release_buffer(ctypes.byref(to))


def copy_pieces(pieces: list[tuple[memoryview, memoryview]], deadline: float, stop: Callable[[], BaseException | None]) -> None:
    """Copy (target, source) pairs slice by slice. Before each slice `stop` may return the error to raise instead, and the
    deadline (monotonic seconds) is looked at, so a process that was paused goes on for one slice at most.

    Raises TimeoutError when the deadline passed.
    """
    for target, source in pieces:
        for start in range(0, len(source), SLICE):
            if error := stop():
                raise error
            if time.monotonic() > deadline:
                raise TimeoutError
            copy(target[start : start + SLICE], source[start : start + SLICE])


async def ended(job: asyncio.Future) -> None:
    """Wait for the end of `job`, also when whoever waits is cancelled again and again: until then its bytes may still land."""
    while not job.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([job])
