"""Parts of a long measurement: none is done twice, and what other code has done doesn't count."""

import pytest

from headrace.engine import parts


class Doubler:
    def __init__(self, argument: str) -> None:
        self.refuses = argument

    def __call__(self, part: parts.Part) -> list[int]:
        if part.of == self.refuses:
            raise RuntimeError(f"{part.of} is refused")
        return [2 * number for number in part.numbers]


TODO = [*parts.cut("double", "a", 7, 3), *parts.cut("double", "b", 2, 3)]


def test_every_number_is_in_one_part():
    assert [list(part.numbers) for part in TODO] == [[0, 1, 2], [3, 4, 5], [6], [0, 1]]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_done_before_an_error_is_not_done_again(tmp_path, workers):
    journal = parts.Journal(tmp_path / "journal", "code")
    with pytest.raises(RuntimeError, match="b is refused"):
        parts.work(TODO, Doubler, "b", workers, journal)
    assert all(value == [2 * n for n in part.numbers] for part, value in journal.read().items())
    before = journal.path.read_text()
    done = parts.work(TODO, Doubler, "", workers, journal)
    assert done == {part: [2 * n for n in part.numbers] for part in TODO}
    assert journal.path.read_text().startswith(before)
    assert parts.work(TODO, Doubler, "a", workers, journal) == done  # nothing is left that could be refused


def test_a_journal_of_other_code_does_not_count(tmp_path):
    parts.work(TODO, Doubler, "", 1, parts.Journal(tmp_path / "journal", "old"))
    assert parts.Journal(tmp_path / "journal", "new").read() == {}
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("a = 1")
    first = parts.digest_of(tmp_path / "code", "model")
    assert first != parts.digest_of(tmp_path / "code", "another model")
    (tmp_path / "code/a.py").write_text("a = 2")
    assert first != parts.digest_of(tmp_path / "code", "model")
