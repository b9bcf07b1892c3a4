"""What is installed where: distributions, images, compose files and the pages that describe them agree with each other."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from headrace.cli.checkpoint import BUNDLED

ROOT = Path(__file__).parents[2]
ROOMS = {path.parent.name: path.parent for kind in ("libs", "services") for path in (ROOT / kind).glob("*/pyproject.toml")}
IMAGES = {"gateway": ["gateway"], "kvstore": ["kvstore"], "worker": ["prefill", "decode", "vision"]}
SETTINGS = {
    "gateway": "headrace.gateway.settings:GatewaySettings",
    "prefill": "headrace.prefill.service:PrefillService",
    "decode": "headrace.decode.service:DecodeService",
    "kvstore": "headrace.kvstore.settings:KvStoreSettings",
    "vision": "headrace.vision.settings:VisionSettings",
}


def project(room: str) -> dict:
    return tomllib.loads((ROOMS[room] / "pyproject.toml").read_text())["project"]


def ours(room: str) -> set[str]:
    """`room` and all of our rooms that it depends on."""
    found = {room}
    for item in project(room).get("dependencies", []):
        if name := re.match(r"headrace-(\w+)", item):
            found |= ours(name[1])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_distribution_names_python_and_licence(room):
    data = project(room)
    assert data["name"] == f"headrace-{room}"
    assert data["requires-python"] == ">=3.11"
    assert data["license"] == "Apache-2.0"
    assert data["version"] == project("bus")["version"]


def test_one_command_installs_all_distributions():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = {Path(line.removeprefix("-e ")).name for line in lines if line.startswith("-e ")}
    assert listed == set(ROOMS)


@pytest.mark.parametrize("image", IMAGES)
def test_image_installs_exactly_what_its_services_need(image):
    text = (ROOT / "deploy" / "docker" / f"{image}.Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (?:libs|services)/(\w+) ", text, re.M))
    installed = set(re.findall(r"\./(?:libs|services)/(\w+)", text))
    needed = set().union(*(ours(service) for service in IMAGES[image]))
    tools = {"cli", "recipe"} if image == "worker" else set()  # the `headrace` command, for make-checkpoint and doctor
    assert copied == installed == needed | tools
    assert "USER 10001" in text
    assert "ARG BASE=" in text


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def test_compose_starts_every_service_checked_and_limited(compose):
    assert set(compose) == {"nats", "model", "gateway", "prefill", "decode", "kvstore", "vision"}
    for name, service in compose.items():
        assert {"mem_limit", "cpus", "pids_limit"} <= set(service), name
        assert service["cap_drop"] == ["ALL"] and service["read_only"], name
        assert "privileged" not in service and "ulimits" not in service, name
        if name != "model":
            assert "healthcheck" in service, name
            assert "container_name" not in service, "a fixed name would forbid --scale"


def test_compose_publishes_one_port_on_loopback(compose):
    published = [port for service in compose.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:${HEADRACE_PORT:-8000}:8000"]


def test_compose_gives_the_shared_memory_to_those_who_transfer(compose):
    mounting = {name for name, service in compose.items() if "shm:/shm" in service.get("volumes", [])}
    assert mounting == {"prefill", "decode", "kvstore", "vision"}


def test_compose_serves_what_a_clone_serves_unless_told_otherwise(compose):
    for name in ("gateway", "prefill", "decode", "vision"):
        bound = {
            "type": "bind", "source": f"${{HEADRACE_MODEL:-./models/{BUNDLED[0]}}}", "target": "/model", "read_only": True,
            "bind": {"create_host_path": False},
        }  # fmt: skip
        assert bound in compose[name]["volumes"] and "random:/model-random:ro" in compose[name]["volumes"], name
        assert compose[name]["environment"]["HEADRACE_MODEL"] == "/model${HEADRACE_PRESET:+-random}"
    assert (ROOT / "models" / BUNDLED[0] / "config.json").exists()
    assert compose["model"]["volumes"] == ["random:/model-random"]


def test_compose_holds_no_password(compose):
    for service in compose.values():
        password = (service.get("environment") or {}).get("HEADRACE_NATS_PASSWORD", "${HEADRACE_NATS_PASSWORD:?")
        assert password.startswith("${HEADRACE_NATS_PASSWORD:?")


def test_every_variable_that_compose_reads_is_told_at_its_top():
    text = (ROOT / "compose.yaml").read_text()
    told, _, rest = text.partition("name: headrace\n")
    assert set(re.findall(r"\$\{(HEADRACE_\w+)", rest)) == set(re.findall(r"^#     (HEADRACE_\w+) ", told, re.MULTILINE))


def test_a_container_computes_with_the_cores_that_it_may_use(compose):
    for name in ("prefill", "decode", "vision"):
        assert compose[name]["environment"]["HEADRACE_THREADS"] == compose[name]["cpus"] == "${HEADRACE_WORKER_CPUS:-2}"


def test_settings_on_the_configuration_page_exist():
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = page[page.index("## Settings that matter first") : page.index("## Variables of the launcher")]
    fields = {}
    for role, where in SETTINGS.items():
        module, _, name = where.partition(":")
        found = getattr(importlib.import_module(module), name)
        fields[role] = set(getattr(found, "Settings", found).__struct_fields__)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    for names, roles, _ in rows:
        for role in SETTINGS if roles == "all" else roles.split(", "):
            for name in re.findall(r"`(\w+)`", names):
                assert name in fields[role], f"{role} has no setting {name}"


def traced(path: Path, room: str) -> set[str]:
    """Names of the trace events that a source file makes: constants among the arguments, a choice of two included; the
    kvstore's helper adds the role itself."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and len(node.args) > 1]
    calls = [call for call in calls if getattr(call.func, "attr", "") in ("event", "_note", "_traced")]
    given = [argument for call in calls for argument in call.args[1:3]]
    given += [way for argument in given if isinstance(argument, ast.IfExp) for way in (argument.body, argument.orelse)]
    names = {argument.value for argument in given if isinstance(argument, ast.Constant)}
    return {name if "." in name else f"{room}.{name}" for name in names if isinstance(name, str)}


def test_every_trace_event_is_on_the_tracing_page_and_no_other():
    page = (ROOT / "docs" / "tracing.md").read_text()
    meanings = page[page.index("## What the events mean") :].splitlines()
    table = [line.split("|")[1] for line in meanings if line.startswith("| `")]
    listed = set(re.findall(r"`(\w+\.\w+)`", " ".join(table)))
    made = set().union(*(traced(path, room) for room, where in ROOMS.items() for path in (where / "src").rglob("*.py")))
    assert listed == made
