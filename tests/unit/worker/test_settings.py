"""Flags of workers: what other systems call them, and what is refused with the reason."""

from __future__ import annotations

import pytest

from headrace.bus import SettingsError
from headrace.worker.engines import build
from headrace.worker.settings import WorkerSettings


def load(*argv: str) -> WorkerSettings:
    return WorkerSettings.load(list(argv), "prefill")


def test_aliases():
    settings = load("--model-path", "m", "--kv-transfer-protocol", "tcp", "--max-num-seqs", "3")
    assert (settings.model, settings.transports, settings.max_num_seqs) == ("m", ["tcp"], 3)


def test_the_simulated_engine_has_room_by_default():
    assert load("--engine", "sim").num_blocks > load("--model", "m").num_blocks


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((), "needs a checkpoint \\(of any family\\): --model FOLDER"),
        (("--model", "a", "--model-path", "b"), "differ"),
        (("--model", "a", "--tensor-parallel-size", "8"), "one KV head"),
        (("--model", "a", "--kv-transfer-protocol", "rdma"), "use shm"),
        (("--model", "a", "--max-num-seqs", "0"), "max_num_seqs"),
        (("--engine", "vllm"), "engine"),
    ],
)
def test_what_can_not_apply_is_refused_with_the_reason(argv, text):
    with pytest.raises(SettingsError, match=text):
        load(*argv)


def test_a_broken_script_is_named(tmp_path):
    path = tmp_path / "answers"
    path.write_text("[1, 2]\nnot json\n")
    with pytest.raises(ValueError, match="answers:2"):
        build(load("--engine", "sim", "--sim-script", str(path)), "decode", lambda name, nbytes: memoryview(bytearray(nbytes)))
