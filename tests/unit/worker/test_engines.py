"""What a worker's engine is when it is handed over: ready, with nothing left that would hold the interpreter up."""

from headrace.engine.make_checkpoint import make_checkpoint
from headrace.worker.engines import build
from headrace.worker.settings import WorkerSettings


def test_a_decode_engine_comes_with_its_vocabulary_read(tmp_path):
    path = make_checkpoint("w16", 1, tmp_path / "w16")
    settings = WorkerSettings(model=str(path), num_blocks=16, max_num_seqs=2, numerics="exact")
    decode = build(settings, "decode", lambda name, size: bytearray(size))
    assert decode.grammars is not None and decode.grammars.loaded
    assert build(settings, "prefill", lambda name, size: bytearray(size)).grammars is None
