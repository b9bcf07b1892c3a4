"""The GPU path of V4.1, its kernels run by Triton's interpreter in a process of their own (see tests/unit/kernels)."""

import json
import os
import subprocess
import sys

import pytest
import torch

from headrace.engine.config import ConfigError
from headrace.engine.loader import LoadOptions, load_model
from headrace.engine.make_checkpoint import make_checkpoint

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_are_those_of_the_cpu():
    """Class bounded: its chunks run on fewer rows in decoder layers, everything else is as in class exact."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    module = "headrace.engine.models.v41.gpu.check"
    command = [sys.executable, "-W", "ignore", "-m", module, "--device", "cpu", "--rows", "10", "--numerics", "bounded"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800, check=False)
    assert run.stdout, run.stderr
    assert json.loads(run.stdout)["ok"], run.stdout


def test_a_model_that_the_kernels_are_not_made_for_is_refused_by_name(tmp_path):
    from headrace.engine.checkpoint import Checkpoint
    from headrace.engine.config import read_config
    from headrace.engine.models.v41.gpu.loader import load

    path = make_checkpoint("w16", 1, tmp_path / "w16")
    options = LoadOptions("quantized", "exact", False, "cuda", None, None)
    with pytest.raises(ConfigError, match="head_dim is 32, the kernels are for 512; this model runs on device 'cpu'"):
        load(Checkpoint(path), read_config(path), options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_devices_that_are_not_here_are_named(tmp_path):
    with pytest.raises(ValueError, match="sees no CUDA device here; choose 'cpu'"):
        load_model(tmp_path, device="cuda")
    with pytest.raises(ValueError, match="device 'tpu' is not one that the engine runs on"):
        load_model(tmp_path, device="tpu")
