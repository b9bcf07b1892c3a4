"""The image encoder, and the text model around images, against NeMo-AutoModel 0.7.0 in fp32.

Weights travel from NeMo through its own adapter, under the released names, as in test_v41.py.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.engine.api import ImageSpan
from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.images import rows_of, without_images
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import PRESETS, small_tokenizer_json
from headrace.engine.models.vision.loader import load_encoder

sys.path.insert(0, str(Path(__file__).parent))  # the oracle is shared
from nemo_oracle import build_oracle

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # transformers and NeMo warn a lot

TOLERANCE = 1e-4
SIZES = [(84, 84), (14, 14), (126, 42), (70, 98), (84, 84), (42, 140)]  # width, height: whole cells and cut ones, two equal


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(the oracle, the path of a checkpoint with its weights)."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    pytest.importorskip("nemo_automodel.components.models.deepseek_v41", reason="the oracle is not installed")
    oracle, data = build_oracle(dict(PRESETS["w16"]))
    path = tmp_path_factory.mktemp("vision")
    exported = oracle.state_dict_adapter.to_hf(oracle.state_dict())
    save_file({name: value.contiguous() for name, value in exported.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(data))
    (path / "tokenizer.json").write_text(json.dumps(small_tokenizer_json()))
    return oracle, path


def pictures(seed, sizes=SIZES):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (height, width, 3), generator=draw, dtype=torch.uint8) for width, height in sizes]


def patches_of(image):
    """[patches, 3, 14, 14], by slicing."""
    values = (image.float() / 255 - 0.5) / 0.5
    corners = [(y, x) for y in range(0, image.shape[0], 14) for x in range(0, image.shape[1], 14)]
    return torch.stack([values[y : y + 14, x : x + 14].permute(2, 0, 1) for y, x in corners])


@torch.no_grad()
def oracle_span(oracle, image):
    model = oracle.model
    rows, columns = image.shape[0] // 14, image.shape[1] // 14
    cells = model.aligner(model.vision(patches_of(image), rows, columns), rows, columns)
    wide = -(-columns // 3)
    lines = [torch.cat([cells[i : i + wide], model.image_newline[None]]) for i in range(0, len(cells), wide)]
    return torch.cat([model.image_start[None], *lines, model.image_end[None]])


def test_tower_and_aligner(pair):
    """Images of different sizes in one batch, each as the oracle sees it alone."""
    oracle, path = pair
    encoder = load_encoder(path)
    for seed in range(3):
        images = pictures(seed)
        for image, got in zip(images, encoder.encode(images), strict=True):
            want = oracle_span(oracle, image)
            assert got.shape == want.shape == (encoder.tokens(encoder.grid(image.shape[1], image.shape[0])), encoder.width)
            assert ((got - want).abs().max() / want.abs().max()).item() <= TOLERANCE


def prompt(encoder, images, between=7, seed=0):
    """Text, image, text, image ... -> (ids, spans, types as the oracle wants them)."""
    draw = torch.Generator().manual_seed(seed)
    ids, spans, types = [], [], []

    def text(count):
        ids.extend(torch.randint(3, 259, (count,), generator=draw).tolist())
        types.extend([-1] * count)

    text(between)
    for number, (image, rows) in enumerate(zip(images, encoder.encode(images), strict=True)):
        grid = encoder.grid(image.shape[1], image.shape[0])
        lines, wide = -(-grid.rows // 3), -(-grid.columns // 3)
        spans.append(ImageSpan(len(ids), len(rows), bytes([number + 1]), rows.numpy().tobytes()))
        ids.extend([encoder.image_token_id] * len(rows))
        types.extend([0, *([1] * wide + [2]) * lines, 3])
        text(between + number)
    return ids, spans, types


@torch.no_grad()
def oracle_logits(oracle, ids, images, types):
    return oracle(
        torch.tensor([ids]),
        pixel_values=torch.cat([patches_of(image) for image in images]),
        image_grid_hws=torch.tensor([[image.shape[0] // 14, image.shape[1] // 14] for image in images]),
        vision_token_types=torch.tensor([types]),
    ).logits[0].float()


def run(model, ids, spans, cuts):
    """Logits of all rows, computed in chunks that end at `cuts`."""
    kv, states = KVPool(model.spec, 8), model.new_states(2)
    states.reset(1)
    out, start = [], 0
    for stop in [*cuts, len(ids)]:
        segment = Segment(
            1, start, ids[start:stop], without_images(ids[max(0, start - 3) : start], start, spans), [3, 1, 2],
            outputs=range(start, stop), images=rows_of(spans, start, stop),
        )  # fmt: skip
        out.append(model.logits(model.forward([segment], kv, states)))
        start = stop
    return torch.cat(out)


@pytest.mark.parametrize("cuts", [(), (13, 30, 31, 75), (7, 8, 33, 100), (1, 64, 111)])
def test_text_model_around_images(pair, cuts):
    """Engram is dead and shut over images, `bias_vl` routes them, and chunks may cut a span anywhere."""
    oracle, path = pair
    encoder, model = load_encoder(path), load_model(path, kv_store="fp32", numerics="exact")
    images = pictures(5, [(84, 84), (42, 140), (126, 42), (70, 98)])
    ids, spans, types = prompt(encoder, images, between=17)
    got, want = run(model, ids, spans, cuts), oracle_logits(oracle, ids, images, types)
    assert len(ids) > 100
    assert ((got - want).abs().max() / want.abs().max()).item() <= TOLERANCE
