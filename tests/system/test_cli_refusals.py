"""A system that cannot start says why in one sentence, at once, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.shared_memory import folder_of


def up(state: Path, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", "up", "--port", "0", "--state-dir", str(state), *flags],
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("refusals") / "nano"
    argv = [sys.executable, "-m", "headrace.cli", "make-checkpoint", "--tokenizer", "small", str(out)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    return out


def test_missing_checkpoint_names_the_folder_and_the_way_out(tmp_path):
    done = up(tmp_path, "--model", "/no/such/model")
    assert done.returncode == 1
    assert "there is no checkpoint at /no/such/model; `headrace make-checkpoint" in done.stderr
    assert "Traceback" not in done.stderr


def test_folder_that_is_no_checkpoint_names_what_is_missing(tmp_path):
    (tmp_path / "model").mkdir()
    done = up(tmp_path / "state", "--model", str(tmp_path / "model"))
    assert done.returncode == 1
    assert "is not a checkpoint: it has no config.json and no tokenizer.json" in done.stderr


def tampered_config(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] += 1
    (model / "config.json").write_text(json.dumps(config))
    return "compress_ratios"  # one per layer: the config contradicts itself


def missing_shard(model: Path) -> str:
    shard = sorted(model.glob("*.safetensors"))[0]
    shard.unlink()
    return shard.name


def truncated_shard(model: Path) -> str:
    shard = sorted(model.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return shard.name


@pytest.mark.parametrize("tamper", [tampered_config, missing_shard, truncated_shard])
def test_tampered_checkpoint_is_refused_by_name(checkpoint, tmp_path, tamper):
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    named = tamper(model)
    done = up(tmp_path / "state", "--model", str(model))
    assert done.returncode == 1
    assert named in done.stderr
    assert "while starting. The end of" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "state" / "running.json").exists()


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1", "::1::"])
def test_a_host_that_is_no_address_here_is_named(tmp_path, host):
    done = up(tmp_path, "--engine", "sim", "--host", host)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert f"--host {host!r} is no address to listen on" in done.stderr and "--state-dir" not in done.stderr


@pytest.mark.parametrize("file", ["nats.conf", "running.tmp", "nats.tmp"])
def test_a_full_disk_is_one_sentence(tmp_path, file):
    """Before NATS, and when all is ready."""
    (tmp_path / file).symlink_to("/dev/full")
    done = up(tmp_path, "--engine", "sim")
    assert done.returncode == 1 and "Headrace is ready" not in done.stdout
    said = f"headrace up: cannot start from {tmp_path}: {tmp_path / file} can't be written (No space left on device; "
    (line,) = (line for line in done.stderr.splitlines() if line.startswith(said))
    free, way_out = line.removeprefix(said).split(" ", 1)
    assert int(free) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    assert way_out == "bytes are free there); make room, or use --state-dir"
    assert "Traceback" not in done.stderr and not folder_of(tmp_path).exists()


def test_settings_file_that_does_not_exist_is_named(tmp_path):
    done = up(tmp_path, "--config", "/no/such.yaml")
    assert done.returncode == 1
    assert "there is no settings file /no/such.yaml" in done.stderr


def test_wrong_setting_is_named_by_the_service_that_refuses_it(tmp_path, checkpoint):
    settings = tmp_path / "settings.yaml"
    settings.write_text("decode:\n  max_num_sequences: 4\n")
    done = up(tmp_path / "state", "--config", str(settings), "--model", str(checkpoint))
    assert done.returncode == 1
    assert "decode-1 ended with status 2" in done.stderr
    assert "unknown setting `max_num_sequences` under `decode`; did you mean" in done.stderr


def test_too_little_shared_memory_is_one_sentence_with_both_sizes(tmp_path, checkpoint):
    settings = tmp_path / "settings.yaml"
    settings.write_text("decode:\n  slab_slots: 100000000\n")
    done = up(tmp_path / "state", "--engine", "sim", "--config", str(settings), "--model", str(checkpoint))
    assert done.returncode == 1
    assert "region 'slab'" in done.stderr and "bytes of shared memory" in done.stderr and "Enlarge it" in done.stderr
    assert "Traceback" not in done.stderr
