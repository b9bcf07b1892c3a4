"""The list of names that any service may be given is what the services declare."""

import re
from pathlib import Path

import pytest

from headrace.bus.names import OTHERS, SETTINGS, nearest
from headrace.decode.service import DecodeSettings
from headrace.gateway.settings import GatewaySettings
from headrace.kvstore.settings import KvStoreSettings
from headrace.vision.settings import VisionSettings
from headrace.worker.settings import WorkerSettings

ROOT = Path(__file__).parents[3]
SERVICES = (GatewaySettings, WorkerSettings, DecodeSettings, KvStoreSettings, VisionSettings)


def test_settings_are_those_of_the_services():
    assert {name for service in SERVICES for name in service.__struct_fields__} == SETTINGS


@pytest.mark.parametrize(
    "file", ["headrace", "compose.yaml", "docs/configuration.md", "docs/operations.md"]
)
def test_variables_that_the_project_itself_uses_are_known(file):
    used = set(re.findall(r"HEADRACE_([A-Z0-9_]+[A-Z0-9])\b", (ROOT / file).read_text()))
    assert used and used <= OTHERS | {name.upper() for name in SETTINGS}


def test_the_nearest_name_is_named():
    assert nearest("max_num_sqs", SETTINGS) == "; did you mean `max_num_seqs`?"
    assert nearest("zzzzzz", SETTINGS) == ""
