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


def test_decode_drafts_where_the_checkpoint_has_a_draft_unless_told_not_to(tmp_path):
    path = make_checkpoint("w16-draft", 1, tmp_path / "draft")
    plain = make_checkpoint("w16", 1, tmp_path / "plain")

    def drafts(role: str, model=path, **more) -> bool:
        settings = WorkerSettings(model=str(model), num_blocks=16, max_num_seqs=2, draft_budget=4, **more)
        return build(settings, role, lambda name, size: bytearray(size)).speculator is not None

    assert drafts("decode") and not drafts("decode", speculative="off")
    assert not drafts("prefill") and not drafts("decode", plain)
