"""Who may import whom: docs/architecture.md, held by reading every source file.

Knows: the table of rooms, and what may not be loaded by the rooms that run without torch. A new room must be added to ROOMS.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# room -> rooms that it may import. LAZY: only inside functions, i.e. when the feature is really used.
ROOMS: dict[str, set[str]] = {
    "bus": set(),
    "kv": set(),
    "transfer": set(),
    "recipe": set(),
    "kernels": set(),
    "engine": {"kernels", "kv"},
    "worker": {"bus", "kv", "transfer"},
    "cli": {"bus"},
    "gateway": {"bus", "recipe", "kv", "transfer"},
    "prefill": {"worker", "bus", "kv", "transfer", "engine"},
    "decode": {"worker", "bus", "kv", "transfer", "engine"},
    "kvstore": {"bus", "kv", "transfer"},
    "vision": {"worker", "bus", "kv", "transfer", "engine", "recipe"},
}
LAZY: dict[str, set[str]] = {"worker": {"engine"}, "cli": {"engine", "recipe"}}
# What a worker may know of the engine before it has chosen one: the contract that every engine keeps. It loads no torch.
CONTRACTS: dict[str, set[str]] = {"worker": {"headrace.engine", "headrace.engine.api"}}
TORCH_FREE = ("bus", "kv", "transfer", "recipe", "gateway", "kvstore", "cli")
HEAVY = {"torch", "triton", "transformers", "safetensors"}

# import name -> distribution, where they differ
DISTRIBUTIONS = {"yaml": "pyyaml", "nats": "nats-py", "prometheus_client": "prometheus-client", "PIL": "pillow"}


def folder(room: str) -> Path:
    return next(path for kind in ("libs", "services") if (path := ROOT / kind / room).is_dir())


def sources(room: str) -> list[Path]:
    return sorted((folder(room) / "src" / "headrace" / room).rglob("*.py"))


def pyproject(room: str) -> dict:
    return tomllib.loads((folder(room) / "pyproject.toml").read_text())["project"]


def normal(requirement: str) -> str:
    """'PyYAML>=6,<7' -> 'pyyaml'."""
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-").replace(".", "-")


def imports(path: Path, room: str) -> Iterator[tuple[str, bool, int]]:
    """(absolute module, only inside a function, line) of every import; TYPE_CHECKING blocks count as lazy."""
    parts = path.relative_to(folder(room) / "src").with_suffix("").parts
    package = parts[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inside = True
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, lazy, child.lineno
            elif isinstance(child, ast.ImportFrom):
                base = ".".join(package[: len(package) - child.level + 1]) if child.level else ""
                module = ".".join(filter(None, (base, child.module)))
                yield module, lazy, child.lineno
                if module == "headrace":  # `from headrace import bus`
                    for alias in child.names:
                        yield f"headrace.{alias.name}", lazy, child.lineno
            else:
                yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text(), str(path)), False)


def test_every_room_is_in_the_table():
    found = {path.parent.name for kind in ("libs", "services") for path in (ROOT / kind).glob("*/pyproject.toml")}
    assert found == set(ROOMS)


def test_no_file_at_the_root_of_the_namespace():
    """`headrace` is a PEP 420 namespace: one __init__.py there would hide every other distribution."""
    assert not list(ROOT.glob("*/*/src/headrace/__init__.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_rooms_that_it_may(room):
    wrong = []
    for path in sources(room):
        for module, lazy, line in imports(path, room):
            if not module.startswith("headrace."):
                continue
            other = module.split(".")[1]
            allowed = {room} | ROOMS[room] | (LAZY.get(room, set()) if lazy else set())
            if other not in allowed and module not in CONTRACTS.get(room, ()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def declared(room: str) -> set[str]:
    """What `pip install headrace-<room>` asks for itself or through our other distributions, extras included."""
    project = pyproject(room)
    extras = [item for items in project.get("optional-dependencies", {}).values() for item in items]
    names = {normal(item) for item in [*project.get("dependencies", []), *extras]}
    ours = [name.removeprefix("headrace-") for name in names if name.startswith("headrace-")]
    return names.union(*(declared(other) for other in ours))


@pytest.mark.parametrize("room", ROOMS)
def test_room_declares_what_it_imports(room):
    """Every import is the standard library, the room itself, or comes with what the room declares. Benchmarks excepted."""
    available = declared(room)
    for other in LAZY.get(room, ()):
        available |= {f"headrace-{other}"} | declared(other)
    wrong = []
    for path in sources(room):
        if path.name == "bench.py":
            continue
        for module, _, line in imports(path, room):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or module in CONTRACTS.get(room, ()):
                continue
            name = f"headrace-{module.split('.')[1]}" if module.startswith("headrace.") else DISTRIBUTIONS.get(top, top)
            if name.lower().replace("_", "-") not in available | {"headrace", f"headrace-{room}"}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}, but {name} is not declared")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", TORCH_FREE)
def test_dependencies_of_a_torch_free_room_hold_no_torch(room):
    """Walks what is declared, ours from pyproject.toml, others' from their installed metadata."""
    seen: set[str] = set()
    todo = [f"headrace-{room}"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name.startswith("headrace-"):
            needs = pyproject(name.removeprefix("headrace-")).get("dependencies", [])
        else:
            try:
                needs = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # for another platform or Python
                continue
        todo += [normal(item) for item in needs if "extra ==" not in item]
    assert not seen & HEAVY, f"headrace-{room} would install {seen & HEAVY}"


@pytest.mark.parametrize("room", (*TORCH_FREE, "worker"))
def test_importing_a_room_loads_no_torch(room):
    """Imports every module of the room in a fresh interpreter and looks at what got loaded. (A worker loads torch only with the
    engine that needs it; the simulated one runs without.)"""
    modules = []
    for path in sources(room):
        parts = path.relative_to(folder(room) / "src").with_suffix("").parts
        if parts[-1] not in ("__main__", "bench"):
            modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
