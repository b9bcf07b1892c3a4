"""The image encoder: spans, batches, what it refuses."""

import pytest
import torch

from headrace.engine.config import ConfigError, parse_config
from headrace.engine.make_checkpoint import PRESETS, VISION, config_json, make_checkpoint, small_tokenizer_json
from headrace.engine.models.vision.loader import load_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return load_encoder(make_checkpoint("nano-vision", 3, tmp_path_factory.mktemp("checkpoint")))


def pictures(*sizes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (height, width, 3), generator=draw, dtype=torch.uint8) for width, height in sizes]


def test_a_span_is_start_lines_and_end(encoder):
    image = pictures((98, 140))[0]  # 7 x 10 patches: 3 x 4 cells
    span = encoder.encode([image])[0]
    assert span.shape == (4 * (3 + 1) + 2, encoder.width)
    assert torch.equal(span[0], encoder.image_start) and torch.equal(span[-1], encoder.image_end)
    newline = [i for i, row in enumerate(span) if torch.equal(row, encoder.image_newline)]
    assert newline == [4, 8, 12, 16]


def test_an_image_has_the_same_bits_in_any_batch(encoder):
    images = pictures((84, 84), (14, 14), (126, 42), (84, 84), (28, 196))
    alone = [encoder.encode([image])[0] for image in images]
    assert not torch.equal(alone[0], alone[3])
    for order in ([0, 1, 2, 3, 4], [3, 4, 0, 2, 1], [2, 0]):
        for i, span in zip(order, encoder.encode([images[i] for i in order]), strict=True):
            assert torch.equal(span, alone[i])


def test_each_patch_counts_and_at_its_place(encoder):
    image = pictures((84, 84))[0]
    span = encoder.encode([image])[0]
    moved = image.roll(14, 1)
    assert not torch.allclose(encoder.encode([moved])[0], span, atol=1e-3)
    for y, x in ((0, 0), (5, 5), (2, 4)):
        changed = image.clone()
        changed[y * 14, x * 14, 1] ^= 128
        assert not torch.equal(encoder.encode([changed])[0], span)


def test_sizes_that_are_not_whole_patches(encoder):
    with pytest.raises(ValueError, match="multiples of 14 pixels before it is encoded; got 84 x 85"):
        encoder.encode(pictures((84, 85)))


def test_a_text_checkpoint_has_no_encoder(tmp_path):
    with pytest.raises(ConfigError, match="no vision_config"):
        load_encoder(make_checkpoint("nano", 0, tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("hidden_size", 36, "multiple of 4 x num_attention_heads"), ("patch_size", 0, "must be positive"),
     ("max_image_tokens", 3, "smallest image has 4 tokens")],
)  # fmt: skip
def test_contradictions_in_the_config(key, value, message):
    import json

    from tokenizers import Tokenizer

    data = config_json(PRESETS["nano"], Tokenizer.from_str(json.dumps(small_tokenizer_json())))
    with pytest.raises(ConfigError, match=message):
        parse_config(data | {"vision_config": VISION["nano-vision"] | {key: value}})


@pytest.mark.gpu
def test_a_gpu_sees_what_a_cpu_sees(encoder, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    path = make_checkpoint("nano-vision", 3, tmp_path)
    images = pictures((84, 84), (126, 42), (28, 196))
    wanted = encoder.encode(images)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        for got, want in zip(load_encoder(path, device="cuda", dtype=dtype).encode(images), wanted, strict=True):
            assert ((got.float().cpu() - want).abs().max() / want.abs().max()).item() < tolerance
