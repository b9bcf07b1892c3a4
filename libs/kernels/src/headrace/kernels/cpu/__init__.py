"""Fused loops for a CPU, compiled by numba: the third implementation beside the torch reference and the Triton kernel.

On a small model a torch operator costs more to call than to carry out; a loop here does the work of dozens of them in one
call of about a microsecond. Rows are independent: no loop reduces across them, and a row's sum runs in the order that its
own length gives. Everything takes and returns numpy views of CPU tensors, releases the GIL and keeps its machine code on
disk (numba's cache, beside the source or in the user's cache folder), so only the first process on a machine compiles.

Importing this package needs nothing; `available()` says whether numba is here. Without it callers keep to torch.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache
def available() -> bool:
    """Whether the compiled loops can be used in this process."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True
