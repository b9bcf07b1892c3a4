"""Routing's index against a plain model: sets of hashes per worker."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.kv.prefix import PrefixIndex

WORKERS = [f"w{i}" for i in range(5)]


def h(number: int) -> bytes:
    return number.to_bytes(16, "big")


def chain(*numbers: int) -> list[bytes]:
    return [h(number) for number in numbers]


def test_leading_blocks_per_worker():
    index = PrefixIndex()
    index.add("a", chain(1, 2, 3))
    index.add("b", chain(1, 2))
    index.add("c", chain(2, 3))  # not the first: no prefix
    assert index.match(chain(1, 2, 3, 4)) == {"a": 3, "b": 2}
    assert index.match(chain(9)) == {} == index.match([])
    index.remove("a", chain(2))
    assert index.match(chain(1, 2, 3)) == {"a": 1, "b": 2}
    index.clear("b")
    assert index.match(chain(1, 2, 3)) == {"a": 1}


def test_a_cleared_worker_starts_from_nothing():
    index = PrefixIndex()
    index.add("a", chain(*range(2000)))
    index.clear("a")
    index.clear("a")
    index.add("a", chain(5))
    assert index.match(chain(*range(10))) == {} and index.match(chain(5)) == {"a": 1}
    for _ in range(20):  # other news clean up behind it
        index.add("b", [])
    assert len(index) == 1 and index.counts() == {"a": 1, "b": 0}


def test_workers_that_come_and_go_do_not_grow_it():
    index = PrefixIndex()
    for life in range(300):
        index.add(f"life-{life}", chain(1, 2, 3))
        index.clear(f"life-{life}")
    for _ in range(5):
        index.clear("nobody")
    assert len(index) == 0 and max(index._free).bit_length() < 12 and len(index._same) <= 1


class PrefixMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[str, set[bytes]] = {}

    @rule(worker=st.sampled_from(WORKERS), numbers=st.lists(st.integers(0, 12), max_size=8))
    def add(self, worker, numbers):
        self.index.add(worker, chain(*numbers))
        self.model.setdefault(worker, set()).update(chain(*numbers))

    @rule(worker=st.sampled_from(WORKERS), numbers=st.lists(st.integers(0, 12), max_size=8))
    def remove(self, worker, numbers):
        self.index.remove(worker, chain(*numbers))
        self.model.get(worker, set()).difference_update(chain(*numbers))

    @rule(worker=st.sampled_from(WORKERS))
    def clear(self, worker):
        self.index.clear(worker)
        self.model.pop(worker, None)

    @rule(numbers=st.lists(st.integers(0, 12), max_size=8))
    def match(self, numbers):
        expected = {}
        for worker, held in self.model.items():
            count = next((i for i, x in enumerate(chain(*numbers)) if x not in held), len(numbers))
            if count:
                expected[worker] = count
        assert self.index.match(chain(*numbers)) == expected

    @invariant()
    def same_sizes(self):
        assert self.index.counts() == {worker: len(held) for worker, held in self.model.items()}


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
