"""`headrace test`: what failed beside others runs again alone, is named, and a real defect stays a failure."""

import pytest

from headrace.cli import testing

ONCE = """
from pathlib import Path
def test_once(tmp=Path(__file__).with_suffix(".seen")):
    seen = tmp.exists()
    tmp.touch()
    assert seen
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "tests/test_fine.py").write_text("def test_fine(): pass\n")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return tmp_path


def test_a_test_that_passes_alone_is_named(root, capfd):
    (root / "tests/test_once.py").write_text(ONCE)
    assert testing.run("test", []) == 0
    assert "all 2 tests passed, but these only alone: tests/test_once.py::test_once in " in capfd.readouterr().out


def test_a_defect_fails_twice(root, capfd):
    (root / "tests/test_defect.py").write_text("def test_defect(): assert 1 + 1 == 3\n")
    assert testing.run("test", []) == 1
    out = capfd.readouterr().out
    assert "running them again, alone" in out and "pytest ended with status 1" in out


def test_many_failures_are_no_accident(root, capfd):
    lines = [f"def test_{i}(): assert False\n" for i in range(testing.FEW + 1)]
    (root / "tests/test_many.py").write_text("".join(lines))
    assert testing.run("test", []) == 1
    assert "again" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 0, "all 3 tests passed, 1 skipped, in "),
        (["tests/test_more.py", "-k", "one or skip"], 0, "all 1 chosen tests passed, 1 skipped, in "),
        (["tests/test_fine.py"], 0, "all 1 chosen tests passed in "),
        (["-k", "nowhere"], 5, "no test ran in "),
        (["--collect-only"], 0, "no test ran in "),
        (["--version"], 0, "no test ran in "),
    ],
)
def test_the_last_line_says_what_ran(root, capfd, words, status, said):
    more = "import pytest\ndef test_one(): pass\ndef test_two(): pass\n"
    (root / "tests/test_more.py").write_text(more + "@pytest.mark.skip\ndef test_skip(): pass\n")
    assert testing.run("test", words) == status
    assert capfd.readouterr().out.splitlines()[-1].startswith(f"headrace test: {said}")
