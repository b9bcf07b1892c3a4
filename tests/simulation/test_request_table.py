"""docs/handoff.md, section 6: each row of decode's and prefill's tables happens to the service itself, in a simulated world.

A request is asked for at a gateway and stopped on its way, so that the attempt is really in the row's phase; then the row's
event comes. What the row says must follow.
"""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from schedule import Plan, Request
from simulated import installed
from table import DOC, request_rows
from test_found import config
from world import World

from headrace.bus import messages as m
from headrace.kv.grants import writer
from headrace.kvstore.service import KvStoreService
from headrace.prefill.attempt import TICKET, WORKING

ASKED = 3  # number of the request: its answer has 23 tokens
PROMPT = Request(0.0, 300, 0, max_tokens=32, deadline=30.0, stream=False)


class Stage:
    """A world in which one attempt is in the wanted phase, and the worker that is looked at."""

    def __init__(self, role: str, phase: str) -> None:
        sizes = config(ticket_seconds=5.0, slab_slots=1, max_num_seqs=2, prefill_blocks=6, decode_blocks=8,
                       prefill_seconds=0.001, step_seconds=0.03)  # fmt: skip
        self.world = World(Plan(1, sizes, (), ()))
        for place, count in sizes.counts.items():
            for index in range(count):
                self.world.spawn(place, index)
        assert self.world.run_until(self.world.now + 5.0, self.world._served)
        self.role = role
        self.process = self.world.places[role, 0]
        self.other = self.world.places["prefill" if role == "decode" else "decode", 0]
        self.gateway = self.world.places["gateway", 0].service
        self.service = self.process.service
        self.told: list[m.OutEntry] = []
        for name in ("add", "add_soon"):
            self._listen(self.service.outbox, name)
        self.seen = 0
        getattr(self, f"_{role}_{phase}")()
        self.told.clear()
        self.before = dict(self.world.network.counts)

    def _listen(self, outbox, name: str) -> None:
        original = getattr(outbox, name)

        def heard(gateway: str, entry: m.OutEntry) -> None:
            if entry.finish or entry.problem is not None:
                self.told.append(entry)
            original(gateway, entry)

        setattr(outbox, name, heard)

    # ------------------------------------------------------------ phases

    def _ask(self) -> None:
        self.world.ask(ASKED, PROMPT)

    def _until(self, condition) -> None:
        assert self.world.run_until(self.world.now + 8.0, condition, every=0.001)

    def _messages(self) -> None:
        """Those of the attempt that is under way, whether or not it was ever sent."""
        record = next(iter(self.gateway.dispatcher.records.values()))
        decode, prefill = self.world.places["decode", 0].service, self.world.places["prefill", 0].service
        info = decode.engine.info
        self.admit = m.Admit(record.request, record.attempt, self.gateway.instance, self.gateway.epoch, len(record.ids),
                             b"".join(record.hashes), record.namespace, record.sampling, 30.0)  # fmt: skip
        self.run = m.Run(record.request, record.attempt, self.gateway.instance, decode.instance, 0, record.ids.tobytes(),
                         b"".join(record.hashes), record.namespace, 30.0)  # fmt: skip
        self.bind = m.Bind(record.request, record.attempt, prefill.instance, prefill.memory.incarnation, len(record.ids),
                           bytes(16), info.layout_id, info.checkpoint, decode.draft)  # fmt: skip
        self.key = f"{record.request}/{record.attempt}"

    def _unknown(self) -> None:
        """The gateway's message has not arrived yet; then its sender is stopped, and it never does."""
        self.world.cut(self.process, "lose")
        self._ask()
        self._until(lambda: any(r.attempt for r in self.gateway.dispatcher.records.values()))
        self._messages()
        self.world.pause(self.world.places["gateway", 0])
        self.world.run_until(self.world.now + 0.02)
        self.world.cut(self.process, "")

    def _decode_unknown(self) -> None:
        self._unknown()

    def _decode_tombstone(self) -> None:
        self._unknown()
        self._do(lambda: self.service.cancel(m.Cancel(self.admit.request, self.admit.attempt, "client")))

    def _decode_credit(self) -> None:
        self.world.pause(self.other)
        self._ask()
        self._until(lambda: self.service.requests)
        self._messages()

    def _live(self, phase: str) -> bool:
        return any(request.phase.value == phase for request in self.service.requests.values())

    def _decode_bound(self) -> None:
        self._ask()
        self._until(lambda: self._live("bound"))
        self._messages()

    def _decode_running(self) -> None:
        self._ask()
        self._until(lambda: self._live("running"))
        self._messages()

    def _decode_over(self) -> None:
        self._decode_running()
        self._until(lambda: not self.service.requests)

    def _prefill_unknown(self) -> None:
        self._ask()
        self._until(lambda: any(r.attempt for r in self.gateway.dispatcher.records.values()))
        self._messages()
        self.world.pause(self.world.places["gateway", 0])
        self.world.run_until(self.world.now + 0.02)
        self.world.pause(self.other)

    def _prefill_working(self) -> None:
        """Decode is stopped when it has admitted: its answer to the bind does not come."""
        self._ask()
        self._until(lambda: any(r.state.watched for r in self.gateway.dispatcher.records.values()))
        self.world.pause(self.other)
        self._until(lambda: self.service.jobs)
        self._messages()

    def _prefill_ticket(self) -> None:
        self._ask()
        self._until(lambda: any(job.ticket is not None for job in self.service.jobs.values()))
        self._messages()

    def _prefill_over(self) -> None:
        self._prefill_ticket()
        self._until(lambda: not self.service.jobs)

    # ------------------------------------------------------------ events

    def _do(self, what):
        self.world.schedule.enter(self.process.loop)
        return what()

    def happen(self, event: str):
        """-> the answer, where there is one."""
        words, service = event.replace(",", ""), self.service
        name, attempt = self.admit.request, self.admit.attempt
        match words:
            case "admit":
                return self._do(lambda: service.admit(self.admit))
            case "admit no room":
                two = replace_(self.admit, sampling=replace_(self.admit.sampling, n=2))
                assert isinstance(self._do(lambda: service.admit(replace_(self.admit, request="another"))), m.Admitted)
                return self._do(lambda: service.admit(two))
            case "admit too long":
                return self._do(lambda: service.admit(replace_(self.admit, prompt_tokens=5000)))
            case "admit draining" | "run draining":
                service.state = "draining"
                return self._do(lambda: service.admit(self.admit) if self.role == "decode" else service.run(self.run))
            case "admit of an older attempt":
                return self._do(lambda: service.admit(replace_(self.admit, attempt=attempt - 1)))
            case "admit of a newer attempt":
                return self._do(lambda: service.admit(replace_(self.admit, attempt=attempt + 1)))
            case "bind":
                return self._do(lambda: service.bind(self.bind))
            case "bind no room":
                service.landing.free_slots.clear()
                return self._do(lambda: service.bind(self.bind))
            case "bind other layout":
                return self._do(lambda: service.bind(replace_(self.bind, layout_id="other")))
            case "bind by another writer":
                return self._do(lambda: service.bind(replace_(self.bind, writer="prefill-other~host~99")))
            case "cancel":
                return self._do(lambda: service.cancel(m.Cancel(name, attempt, "client")))
            case "cancel text stop":
                self.world.pause(self.world.places["gateway", 0])  # it has not asked for it
                return self._do(lambda: service.cancel(m.Cancel(name, attempt, "stop", {0: 1})))
            case "resume":
                return self._do(lambda: service.resume(m.Resume(name, attempt, 0, 0)))
            case "fail":
                return self._do(lambda: service.fail_attempt(m.Fail(name, attempt, "", m.Problem(502, "transfer", "it broke"))))
            case "run":
                return self._do(lambda: service.run(self.run))
            case "run much is queued":
                for number in range(100):
                    one = replace_(self.run, request=f"another {number}")
                    answer = self._do(lambda one=one: service.run(one))
                    if not isinstance(answer, m.Accepted):
                        break
                assert number, "not even one was accepted"
                return answer
            case "run too long":
                return self._do(lambda: service.run(replace_(self.run, ids=bytes(4 * 5000))))
            case "run other hashes":
                return self._do(lambda: service.run(replace_(self.run, block_hashes=bytes(len(self.run.block_hashes)))))
            case "status":
                job = service.jobs.get(self.key)
                ticket = job.ticket.ticket if job is not None and job.ticket is not None else "never minted"
                return self._do(lambda: service.ticket_status(m.TicketStatus(ticket)))
            case "gateway silent":
                return self._do(lambda: service.peer_died(self.gateway.instance, "it was silent"))
            case "decode lost":
                return self._do(lambda: service.peer_died(self.other.service.instance, "it was silent"))
            case "deadline":
                self._pass_deadline()
            case "engine fails":
                self.process.breaks = True
                self._until(lambda: not service.requests)
            case "hand-off complete":
                self._until(lambda: self._live("running"))
            case "hand-off does not fit":
                landed = next(iter(service.landing.landed.values()))
                landed.wire = replace_(landed.wire, content=b"another prompt's")
                self.world.on_log = lambda event: None  # an error that operators must see
                self._until(lambda: self.key not in service.requests)
                assert service.counters["corrupt"] == 1
            case "last token":
                self._until(lambda: not service.requests)
            case "bind refused: full":
                self.other.service.landing.free_slots.clear()
                self.world.resume(self.other)
                self.world.run_until(self.world.now + 0.1)
            case "bind refused: stale":
                self.world.schedule.enter(self.other.loop)
                self.other.service.cancel(m.Cancel(name, attempt, "client"))
                self.world.resume(self.other)
                self.world.run_until(self.world.now + 0.2)
            case _:
                raise AssertionError(f"docs/handoff.md has an event {event!r} that this test does not know")
        return None

    def _pass_deadline(self) -> None:
        if self.role == "decode":
            self.service.requests[self.key].deadline = self.world.now
            return self.world.run_until(self.world.now + 0.3) and None
        job = self.service.jobs[self.key]
        job.deadline = self.world.now
        if job.ticket is not None:
            live = self.service.tickets.live
            live[job.ticket.ticket] = replace(live[job.ticket.ticket], deadline=self.world.now)
        self.world.run_until(self.world.now + 0.3)
        return None

    # ------------------------------------------------------------ what follows

    def phase(self) -> str:
        service = self.service
        if self.role == "decode":
            if self.key in service.requests:
                return service.requests[self.key].phase.value
            return "over" if self.key in service.finished else "tombstone" if self.key in service.tombstones else "unknown"
        job = service.jobs.get(self.key)
        if job is None:
            return "over" if self.key in service.tombstones else "unknown"
        if job.state.phase in TICKET:
            stopped = service.tickets.get(job.ticket.ticket).phase in (*writer.STOPPED, writer.RELEASED)
            return "over" if stopped else "ticket"
        return "working" if job.state.phase in WORKING else "over"

    def follows(self, answer, words: list[str]) -> None:
        expected = [
            word for word in words if word.split()[0] in ("Admitted", "Accepted", "Bound", "Resumed", "Refused", "Done")
        ]
        said = type(answer).__name__ if answer is not None else ""
        said += f" {answer.code}" if said == "Refused" else f" {answer.state}" if said == "Done" else ""
        assert [said] == (expected or [""])
        self.world.run_until(self.world.now + 0.05)
        count = self.world.network.counts
        sent = {name: count[name] - self.before.get(name, 0) for name in ("Cancel", "Fail", "WriterDone")}
        mine = [entry for entry in self.told if f"{entry.request}/{entry.attempt}" == self.key]
        assert bool(mine) == ("gateway told" in words)
        if "writer told" in words:
            assert sent["Cancel"] >= 1
        if "decode told" in words:
            assert sent["Fail"] + sent["WriterDone"] >= 1
        if "ticket cancelled" in words:
            ledger = self.service.landing.ledger
            outcomes = [state.outcome for state in (*ledger.live.values(), *(state for state, _ in ledger._past.values()))]
            assert "cancelled" in outcomes
        if "credit back" in words:
            live = self.service.requests  # another attempt may have come
            assert self.key not in live and not any(self.key in g.requests for g in self.service.gateways.values())
            assert self.service.credits_used == sum(request.admit.sampling.n for request in live.values())
            assert self.service.promised == sum(request.promised for request in live.values())


def replace_(message, **fields):
    return msgspec.structs.replace(message, **fields)


ROWS = [(role, *row) for role in ("decode", "prefill") for row in request_rows(role)]


@pytest.mark.parametrize(("role", "phase", "event", "after", "words"), ROWS, ids=lambda value: str(value).replace(" ", "_"))
def test_row(role, phase, event, after, words):
    with installed():
        stage = Stage(role, phase)
        assert stage.phase() == phase
        answer = stage.happen(event)
        stage.follows(answer, words)
        assert stage.phase() == after
        assert stage.world.violations == []
        stage.world.over = True
        stage.world.schedule.enter(None)
        for process in stage.world.processes:
            process.loop.discard()


def test_every_phase_has_rows():
    assert {row[1] for row in ROWS if row[0] == "decode"} == {"unknown", "credit", "bound", "running", "over", "tombstone"}
    assert {row[1] for row in ROWS if row[0] == "prefill"} == {"unknown", "working", "ticket", "over"}
    assert len(ROWS) > 60


def test_every_command_is_in_the_table_of_messages():
    """Section 2 has a row for whatever these services listen to, with its key and what faults do to it."""
    section = DOC.read_text().split("## 2.")[1].split("\n## ")[0]
    named = {line.split("|")[1].split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    with installed():
        stage = Stage("decode", "unknown")
        verbs = {verb for process in stage.world.processes for verb in process.service.verbs()}
        stage.world.over = True
        for process in stage.world.processes:
            process.loop.discard()
    verbs |= set(KvStoreService.verbs(KvStoreService.__new__(KvStoreService)))
    assert verbs - {"audit"} <= named, "audit changes nothing and may be asked by anybody"
    assert {"out", "ping"} <= named
    for line in section.splitlines():
        if line.startswith("|") and "---" not in line:
            assert len([cell for cell in line.strip("|").split("|") if cell.strip()]) == 6, line
