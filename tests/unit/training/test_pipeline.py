"""Every stage on the smallest model, in seconds: tokenizer, shards, three stages with a stop between, export, measures, card;
and the pieces that stages are made of."""

import argparse
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Tokenizers

from headrace.engine.config import parse_config
from headrace.engine.loader import load_model
from headrace.engine.models.v41.cache import codecs
from headrace.engine.models.v41.schema import checkpoint_schema
from headrace.engine.models.v41.training import TrainingModel
from headrace.engine.models.vision.loader import load_encoder
from headrace.recipe import Tokenizer
from models.training import card, carry, losses, own, probe
from models.training import train as train_module
from models.training.__main__ import main
from models.training.begin import begin
from models.training.configs import root_config
from models.training.evaluate import begun, wilson
from models.training.export import export
from models.training.measure import measure, temperatures
from models.training.optimizer import Optimizer, orthogonal, schedule
from models.training.pack import pack
from models.training.rounding import Rounded, rules
from models.training.runs import Run
from models.training.shards import Shards
from models.training.tokenizer import texts, train
from models.training.train import Trainer

ROOT = Path(__file__).resolve().parents[3]
SHARES = {"small_talk": 2, "compare": 2, "table": 2, "short_needle": 2, "picture": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer and packed data."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "tokenizer.json").write_text(train(texts(SHARES, 150_000, "0"), 512).to_str())
    pack(folder / "data", folder / "tokenizer.json", SHARES, [128, 512], 30_000, workers=1, report=lambda _: None)
    return folder


def options(**values):
    defaults = {
        "seed": 0, "device": "cpu", "bf16": False, "recompute": False, "compile": False, "minutes": None, "steps": 4,
        "micro_tokens": 0, "rate": 4e-3, "index_every": 1, "limit_minutes": None, "save_seconds": 1e9, "report_seconds": 0.0,
        "growing": False, "probe_seconds": 0.0, "probe_count": 2,
    }  # fmt: skip
    return argparse.Namespace(**defaults | values)


def trainer(folder, made, stage, tokens=512, **values):
    run = Run.create(folder, "micro", made / "tokenizer.json")
    return Trainer(run, stage, Shards(made / "data", tokens, 0), options(**values))


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory):
    """A run that went through all stages."""
    folder = tmp_path_factory.mktemp("run")
    for stage, steps in (("pretrain", 5), ("anneal", 3), ("draft", 4)):
        one = trainer(folder, made, stage, steps=steps)
        one.work()
        assert one.step == steps
        (folder / f"data-{stage}.json").write_text((made / "data" / "index.json").read_text())
    return Run(folder)


def test_a_stopped_stage_goes_on_exactly(made, tmp_path):
    whole = trainer(tmp_path / "a", made, "anneal", steps=2)
    whole.work()
    for limit in (1, 2):
        part = trainer(tmp_path / "b", made, "anneal", steps=2)
        assert part.step == limit - 1
        while part.step < limit:
            part.one_step()
        part.save()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, part.model.state_dict()[name]), name


def test_pieces_of_a_batch_give_the_gradients_of_the_whole(made, tmp_path):
    """Up to the weighting of pieces that hold fewer targets: with equal weights it is exact but for the order of sums. The
    router's biases move behind the last piece."""
    steps = []
    for name, tokens in (("a", 0), ("b", 128)):
        one = trainer(tmp_path / name, made, "pretrain", 256, micro_tokens=tokens)
        # A sum in another order may round a cached value to its neighbour; that is not what is asked here.
        one.model.codecs = codecs(one.model.config, "fp32")
        one.shards.rows = {128: {k: v.copy() for k, v in one.shards.rows[128].items()}}
        one.shards.rows[128]["weights"][:], one.shards.rows[128]["documents"][:] = 100, 0
        one.shards.batch_rows, one.shards.pictures, one.shards.per_epoch = {128: 2}, {128: {}}, 1
        one.optimizer.step = lambda rate: None  # keep the gradients
        one.one_step()
        steps.append(one)
    moved = 0
    for (name, a), (_, b) in zip(*(s.model.named_parameters() for s in steps), strict=True):
        if a.grad is not None and ".indexer." not in name:
            assert float((a.grad - b.grad).norm()) <= 1e-5 * float(a.grad.norm()), name
        if name.endswith("gate.bias"):
            assert torch.equal(a, b), name
            moved += int(a.count_nonzero())
    assert moved


def test_a_draft_learns_from_the_rounded_target(trained, made, tmp_path):
    """As it will be stored and served; the run keeps the unrounded one."""
    shutil.copytree(trained.folder, tmp_path / "run")
    one = trainer(tmp_path / "run", made, "draft", steps=5)  # four are done
    kept = {name: value.clone() for name, value in one.model.named_parameters()}
    with Rounded(one.model, r"^(?!mtp\.)")():
        rounded = {name: value.clone() for name, value in one.model.named_parameters() if not name.startswith("mtp.")}
    compute, seen = one.losses, []

    def spy(*batch):
        seen.append({name: torch.equal(one.model.get_parameter(name), value) for name, value in rounded.items()})
        return compute(*batch)

    one.losses = spy
    one.one_step()
    assert seen and all(all(equal.values()) for equal in seen)
    assert not all(torch.equal(kept[name], value) for name, value in rounded.items())
    assert all(torch.equal(kept[name], one.model.get_parameter(name)) for name in rounded)


def test_all_stages_lead_to_a_checkpoint_that_is_served(trained, tmp_path):
    history = trained.history()
    assert {h["stage"] for h in history} == {"pretrain", "anneal", "draft"}
    assert all(np.isfinite(v) for h in history for v in h.values() if isinstance(v, float))
    sizes = export(trained, tmp_path / "micro")
    assert max(sizes.values()) < 16e6
    numbers = measure(tmp_path / "micro", trained, 2, ("small_talk",))
    # Trained with rounded weights or not, KL of so untrained a model is small; what matters is that it is computed.
    assert 0 <= numbers["export_kl"] < 0.5 and 0 < numbers["loss_small_talk"] < 8
    (tmp_path / "micro" / "measured.json").write_text(json.dumps(numbers))
    card.write(trained, tmp_path / "micro")
    text = (tmp_path / "micro" / "README.md").read_text()
    assert "| draft | 4 |" in text and "export kl" in text and "Evaluated" not in text
    assert "<polyline" in (tmp_path / "micro" / "losses.svg").read_text()
    with pytest.raises(ValueError, match="which no export wrote"):
        (tmp_path / "micro" / "mine.txt").write_text("")
        export(trained, tmp_path / "micro")


def test_newer_results_come_into_the_card_and_leave_the_rest(trained, tmp_path):
    export(trained, tmp_path / "one")
    result = {"share": 0.5, "interval": [0.4, 0.6], "n": 80}
    report = {"temperature": 0.0, "results": {"sums": result}, "numbers": {"speed": 12.5}}
    with pytest.raises(ValueError, match=r"has no evaluation\.json"):
        card.refresh(tmp_path / "one")
    cards = []
    for results in ({"sums": result}, {"sums": result, "tools": result | {"n": 500}}):
        (tmp_path / "one" / "evaluation.json").write_text(json.dumps(report | {"results": results}))
        card.write(trained, tmp_path / "one", ["A note that a person wrote."])
        cards.append((tmp_path / "one" / "README.md").read_text())
    assert "| tools | 50.0% | 40.0% to 60.0% | 500 |" in cards[1] and cards[0] != cards[1]
    for text in (cards[0], cards[0].replace("## Evaluated through", "## Once evaluated through")):
        (tmp_path / "one" / "README.md").write_text(text)
        assert main(["card", str(tmp_path / "one")]) == 0
        if text == cards[0]:
            assert (tmp_path / "one" / "README.md").read_text() == cards[1]
        assert "| tools |" in (tmp_path / "one" / "README.md").read_text()
    (tmp_path / "one" / "README.md").write_text("mine")
    with pytest.raises(ValueError, match="has no line '## Limits'"):
        card.refresh(tmp_path / "one")


def test_a_run_that_begins_from_an_export_has_its_weights_and_its_story(trained, made, tmp_path):
    """Stored again, every value is what was stored: of the target, the draft and the image side; and it can be trained on."""
    export(trained, tmp_path / "one")
    card.write(trained, tmp_path / "one")
    run = begin(tmp_path / "one", tmp_path / "run")
    export(run, tmp_path / "two")
    one, two = (TrainingModel.of(load_model(tmp_path / n), load_encoder(tmp_path / n)) for n in ("one", "two"))
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert any(name.startswith("mtp.") for name, _ in one.named_parameters())
    with pytest.raises(ValueError, match="is a run already"):
        begin(tmp_path / "one", tmp_path / "run")

    again = trainer(tmp_path / "run", made, "anneal", steps=2)
    for (name, a), (_, b) in zip(one.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    again.work()
    (tmp_path / "run" / "data-anneal.json").write_text((made / "data" / "index.json").read_text())
    card.write(run, tmp_path / "two")
    text = (tmp_path / "two" / "README.md").read_text()
    stages = [line.split(" | ")[0] for line in text.splitlines() if line.startswith(("| pre", "| ann", "| dra", "| cont"))]
    assert stages == ["| pretrain", "| anneal", "| draft", "| continued: anneal"]
    third = begin(tmp_path / "two", tmp_path / "third").earlier()  # and so on
    assert [row.split(" | ")[0] for row in third["rows"]] == stages and third["shares"]["picture"] == 20


def test_a_probe_counts_answers_with_every_token_right(made, tmp_path, monkeypatch):
    """A model that always says what follows gets all of them; one wrong token costs its answer alone."""
    arrays = probe.rows(made / "tokenizer.json", ["bindings"], 2)["bindings"]
    ids, numbers = arrays["ids"].astype(np.int64), probe.answers(arrays["weights"], arrays["documents"])

    class Knows:
        def __call__(self, rows, **_):
            at = next(r for r in range(len(ids)) if (ids[r, : rows.shape[1]] == rows[0].numpy()).all())
            following = np.roll(self.said, -1, 1)[at : at + len(rows), : rows.shape[1]]
            return argparse.Namespace(logits=torch.nn.functional.one_hot(torch.from_numpy(following), 512))

    model = Knows()
    model.said = ids.copy()
    right, count = probe.share(model, arrays, torch.device("cpu"))
    assert right == 1.0 and count >= 4
    model.said[numbers == 2] += 1
    assert probe.share(model, arrays, torch.device("cpu")) == (pytest.approx(1 - 1 / count), count)
    monkeypatch.setattr(train_module, "KINDS", ("who_has", "picture"))
    one = trainer(tmp_path, made, "anneal", steps=1, probe_seconds=1e9)
    one.work()
    lines = [json.loads(x) for x in (tmp_path / "probe.jsonl").read_text().splitlines()]
    assert [x["attention"] for x in lines] == ["selected"] and 0 <= lines[0]["who_has"] <= 1 and "picture" in lines[0]


def test_data_that_grows_is_taken_in(made, tmp_path):
    pack(tmp_path, made / "tokenizer.json", {"compare": 1.0}, [128, 512], 1_600_000, workers=1, report=lambda _: None)
    late = [f for f in tmp_path.glob("*.npz") if not f.name.endswith("-0000.npz")]
    for file in late:
        file.rename(file.with_suffix(".later"))
    shards = Shards(tmp_path, 512, 0)
    assert shards.grown() is shards
    for file in late:
        file.with_suffix(".later").rename(file)
    assert shards.grown().per_epoch > 3 * shards.per_epoch


def test_the_draft_stage_leaves_the_target_alone(trained):
    before, after = trained.state("anneal")["model"], trained.state("draft")["model"]
    for name in before:
        moved = name.startswith("mtp.") and not name.endswith(("bias", "bias_vl"))
        assert torch.equal(before[name], after[name]) != moved, name


def test_every_part_has_moved(trained):
    start, end = trained.model().state_dict(), trained.state("draft")["model"]
    still = {name for name in start if torch.equal(start[name], end[name])}
    # A draft stage's gate has no bias to balance; nothing else keeps its initial value.
    assert all(n.startswith("mtp.") and n.endswith(("gate.bias", "gate.bias_vl")) for n in still), still


def test_a_run_keeps_to_its_model(made, tmp_path):
    Run.create(tmp_path, "micro", made / "tokenizer.json")
    with pytest.raises(ValueError, match="trains another model than 'nano'"):
        Run.create(tmp_path, "nano", made / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match="is no run"):
        Run(tmp_path / "none")
    assert main(["train", str(tmp_path), "--stage", "draft", "--data", str(made / "data"), "--steps", "1"]) == 1


# ------------------------------------------------------------------ pieces


def test_rounded_weights_are_those_that_are_stored(trained, tmp_path):
    export(trained, tmp_path / "out")
    stored = TrainingModel.of(load_model(tmp_path / "out"))
    model = trained.model()
    model.load_state_dict(trained.state("draft")["model"])
    kept = {name: p.clone() for name, p in model.named_parameters()}
    with Rounded(model)():
        for name, parameter in model.named_parameters():
            if name.startswith("image_encoder."):
                continue  # a text model has none
            assert torch.equal(parameter, stored.get_parameter(name)), name
    assert all(torch.equal(kept[name], p) for name, p in model.named_parameters())
    assert {name for name, _ in model.named_parameters()} - set(rules(model)) <= {
        n for n in kept if n.endswith(("attn_sink", "gate.bias", "gate.bias_vl")) or ".hc_" in n
    }


@pytest.mark.parametrize("shape", [(32, 64), (64, 32), (3, 5, 40, 40)])
def test_newton_schulz_makes_singular_values_nearly_equal(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) @ torch.diag(torch.linspace(0.05, 3, shape[-1]))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.max() < 1.3 and values.median() > 0.6


def test_the_optimizer_finds_a_minimum_of_matrices_and_vectors():
    draw = torch.Generator().manual_seed(0)
    names = ("layers.0.attn.wq_a.weight", "layers.0.ffn.w_out", "layers.0.attn_norm.weight", "embed.weight")
    shapes = ((16, 8), (16, 3, 8), (16,), (10, 4))
    parameters = [(n, torch.nn.Parameter(torch.randn(s, generator=draw))) for n, s in zip(names, shapes, strict=True)]
    goals = [torch.randn(s, generator=draw) for s in shapes]
    optimizer = Optimizer(parameters, decay=0.0)
    for step in range(400):
        sum((p - g).square().sum() for (_, p), g in zip(parameters, goals, strict=True)).backward()
        optimizer.step(0.05 * schedule(step / 400, warmup=0.05, decay=0.5))
    for (name, p), goal in zip(parameters, goals, strict=True):
        assert (p - goal).abs().max() < 0.15, name


def test_the_schedule_rises_stays_and_falls():
    rates = [schedule(x / 100, warmup=0.1, decay=0.4) for x in range(101)]
    assert rates[0] < 0.05 and rates[10:60] == [1.0] * 50 and rates[100] == pytest.approx(0.02)
    assert all(a >= b for a, b in zip(rates[60:], rates[61:], strict=False))


def test_a_draft_that_is_the_target_has_nothing_to_learn_from_it():
    from headrace.engine.models.v41.draft import Drafts

    draw = torch.Generator().manual_seed(0)
    target, ids = torch.randn(1, 12, 30, generator=draw), torch.randint(3, 30, (1, 12), generator=draw)
    anchors, documents = torch.tensor([[2, 5]]), torch.zeros(1, 12, dtype=torch.int64)
    logits = torch.stack([target[0, a : a + 5] for a in (2, 5)])
    tokens = torch.stack([ids[0, a + 1 : a + 6] for a in (2, 5)])
    same = losses.draft_loss(Drafts(tokens, logits, logits, torch.full((2, 5), 9.0)), target, anchors, documents)
    other = losses.draft_loss(Drafts(tokens, -logits, -logits, torch.full((2, 5), 9.0)), target, anchors, documents)
    assert same.accepted == pytest.approx(5.0, abs=1e-4) and same.confidence < 1e-3 < other.confidence
    assert other.accepted < 1.0 and other.distance > same.distance
    documents[0, 4:] = 1  # behind the end of a document nothing counts
    cut = losses.draft_loss(Drafts(tokens, -logits, -logits, torch.zeros(2, 5)), target, torch.tensor([[2, 2]]), documents)
    assert cut.accepted == 0


def test_anchors_lie_in_answers():
    weights = torch.full((2, 60), 0.1)
    weights[:, 30:40] = 1.0
    documents = torch.zeros(2, 60, dtype=torch.int64)
    anchors = losses.draw_anchors(weights, documents, 5, 400, torch.Generator().manual_seed(0))
    assert anchors.min() >= 0 and anchors.max() + 5 < 60
    assert ((anchors >= 29) & (anchors < 40)).float().mean() > 0.5


def test_intervals_hold_the_share():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(495, 500)
    assert low == pytest.approx(0.9768, abs=1e-3) and high == pytest.approx(0.9957, abs=1e-3)
    assert wilson(500, 500)[1] == pytest.approx(1.0) and wilson(0, 500)[0] == pytest.approx(0.0)


def test_an_evaluation_adds_to_one_of_the_same_model_only(tmp_path):
    file = tmp_path / "evaluation.json"
    one = begun(file, "m", 0.0, "s")
    one["results"]["sums"], one["tags"]["sums"] = {"share": 1.0}, [4, 4]
    file.write_text(json.dumps(one))
    assert begun(file, "m", 0.0, "s") == one
    for other in (("n", 0.0, "s"), ("m", 0.5, "s"), ("m", 0.0, "t")):
        assert not begun(file, *other)["results"]


def test_a_table_of_temperatures_mends_an_overconfident_head():
    draw = torch.Generator().manual_seed(3)
    truth = torch.rand(4000, 5, generator=draw)
    hits = torch.rand(4000, 5, generator=draw) < truth
    table = temperatures(hits, torch.logit(truth, 1e-4) * 3)
    assert table[0] == pytest.approx(3.0, rel=0.15) and len(table) == 5


def test_pictures_reach_the_model(made):
    shards = Shards(made / "data", 1024, 0)
    image = Tokenizer.from_file(made / "tokenizer.json").added_token_id("<｜deepseek_image｜>")
    seen = 0
    for number in range(shards.per_epoch):
        batch = shards.batch(number)
        for ids, pixels in zip(batch.ids, batch.images, strict=True):
            assert (ids == image).sum() == 14 * len(pixels)
            seen += len(pixels)
    assert seen > 3


def test_weights_are_carried_in_pieces_and_the_next_stage_goes_on(trained, made, tmp_path, monkeypatch):
    monkeypatch.setattr(carry, "PIECE", 100_000)
    pieces = carry.split(trained, tmp_path / "pieces")
    assert len(pieces) > 2 and all(p.stat().st_size <= 100_000 for p in pieces)
    assert carry.join(tmp_path / "pieces", tmp_path / "run") == "draft"
    assert Run(tmp_path / "run").history() == trained.history()
    again, before = Run(tmp_path / "run").newest()[1]["model"], trained.state("draft")["model"]
    assert again.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(again[name], value, rtol=4e-3, atol=1e-6)
    with pytest.raises(ValueError, match="without its optimiser"):
        trainer(tmp_path / "run", made, "draft")
    pieces[-1].write_bytes(pieces[-1].read_bytes()[:500])
    with pytest.raises(ValueError, match="do not fit together"):
        carry.join(tmp_path / "pieces", tmp_path / "other")
    pieces[1].unlink()
    with pytest.raises(ValueError, match="are needed"):
        carry.join(tmp_path / "pieces", tmp_path / "other")


def test_the_target_says_what_its_draft_learns_from(trained, made, tmp_path, monkeypatch):
    export(trained, tmp_path / "micro")
    (tmp_path / "own").mkdir()
    kinds = {"small_talk": 0.5, "compare": 0.5}
    monkeypatch.setattr(own, "BATCH", 6)
    monkeypatch.setattr(own, "MOST", 12)
    assert own.make_part(tmp_path / "own", tmp_path / "micro", kinds, 0, 0.0) > 0
    (tmp_path / "own" / "index.json").write_text(json.dumps({"contexts": [own.CONTEXT], "shares": kinds}))
    shards = Shards([made / "data", tmp_path / "own"], 512, 0)
    assert set(shards.rows) == {128, 512, own.CONTEXT}
    assert (shards.rows[own.CONTEXT]["weights"] == 100).sum() > 12


@pytest.mark.parametrize(("name", "most"), [("nano", 12e6), ("tiny", 29.5e6)])
def test_weights_stay_within_their_size(name, most):
    """Of the checkpoint as it is stored, with the tokenizer that it is meant for."""
    size = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
    tokenizer = Tokenizers.from_file(str(ROOT / "models/training/tokenizer.json"))
    config = parse_config(root_config(name, tokenizer))
    stored = [part for n, spec in checkpoint_schema(config).items() for part in spec.stored(n, True)]
    assert sum(size[dtypes[0]] * math.prod(shape) for _, dtypes, shape in stored) < most


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_no_step_is_bound_to_a_device(made, trained):
    """Tensors without values, on a device of their own: a tensor of the CPU among them, or asking one for its value, fails."""
    for stage in ("pretrain", "anneal", "draft"):
        for step in (0, 3):  # dense and selected, rounded or not
            one = Trainer(trained, stage, Shards(made / "data", 512, 0), options(device="meta", bf16=True))
            one.step = step
            assert all(value.is_meta for value in one.one_step().values() if isinstance(value, torch.Tensor))


def test_compiled_parts_compute_the_same(made, tmp_path, monkeypatch):
    """What a compiler is given instead, checked without compiling: plain sums and real rotations."""
    ids = torch.from_numpy(Shards(made / "data", 512, 0).batch(0).ids)
    run = Run.create(tmp_path, "micro", made / "tokenizer.json")
    results = []
    for compiled in (False, True):
        model = run.model()
        model.parts.compiled = compiled
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)  # noqa: B023
        out = model(ids, extras=("index",))
        out.logits.square().mean().backward()
        results.append((out.logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    for one, two in zip(*results, strict=True):
        assert (one - two).norm() < 0.02 * one.norm()
