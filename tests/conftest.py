"""What holds for every test."""

import os
import sys

import pytest


@pytest.fixture(autouse=True)
def threads_as_before():
    """torch's thread count is the process's, and sums are cut by it: a test that sets it must not decide another's last bit."""
    before = _threads()
    yield
    if before is not None and _threads() != before:
        sys.modules["torch"].set_num_threads(before)


def _threads() -> int | None:
    """None before torch is there: then it will take what the environment says."""
    torch = sys.modules.get("torch")
    if torch is None:
        return int(os.environ.get("OMP_NUM_THREADS") or 0) or None
    return torch.get_num_threads()
