"""What is said of a file that cannot be written.

Knows: that the error of a write, unlike that of an open, names no file. Does not know: who writes what.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block is one about `path`, if it names no other file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def trouble(error: OSError) -> str:
    """'FILE can't be written (why; so many bytes are free there); make room' of a full disk; else the error; 'mend that'."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not error.filename:
        return f"{error}; mend that"
    file = Path(error.filename)
    folder = next(path for path in file.parents if os.path.isdir(path))
    free = shutil.disk_usage(folder).free
    return f"{file} can't be written ({error.strerror}; {free} bytes are free there); make room"
