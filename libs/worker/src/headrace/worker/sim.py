"""The simulated engine: the engine's contract without arithmetic and without torch, labelled "sim" wherever an engine is named.

Knows: a timing model (seconds per prompt token, seconds per decode step; 0 is allowed and means "as fast as Python goes"),
scripted token streams that are a function of (prompt, seed, choice), and bytes that can be recognised: every full block
holds its own chain hash over and over, a partial block and a state hold a digest of the ids they stand for. So the block
pool, the hand-off, the store and both caches are exercised with real memory, and a block that was lost, swapped or
overwritten on its way is found when the request is admitted (`Corrupt`), not when somebody reads strange text.

Does not know: the bus, asyncio, sampling. Temperature and penalties are accepted and change nothing; logprobs are made up.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from headrace.engine import api
from headrace.kv.hashing import ROOT, BlockHasher
from headrace.kv.pool import BlockPool

BLOCK = 128  # tokens

# " the water runs down from the hill to the mill and turns the wheel ..." in the V4 tokenizer: a fixed cycle of whole words.
WORDS = (
    270, 2237, 12122, 1910, 538, 270, 25131, 304, 270, 2607, 305, 13738, 270, 15942, 396, 2159, 13106, 270, 20873,
    1055, 16668, 362, 14586, 1901, 270, 2607, 264, 33591, 295, 270, 6029, 418, 793, 7539, 305, 52508, 270, 8007, 3066,
)  # fmt: skip


class Corrupt(ValueError):
    """Bytes in memory are not those of the prompt they stand for."""


@dataclass(slots=True)
class SimConfig:
    """Sizes and timing. `script`: one answer (token ids, EOS follows it) per entry, chosen by prompt and seed; empty: word
    cycle. `replies`: (cue, answer), which go before: the answer whose cue comes last in the prompt."""

    num_blocks: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    block_bytes: int = 4096
    state_bytes: int = 1024
    hidden_bytes: int = 64
    vocab_size: int = 129_280
    eos_token_ids: tuple[int, ...] = (1,)
    prefill_seconds_per_token: float = 0.0
    decode_step_seconds: float = 0.0
    replay_rows: int = 128
    max_snapshots: int = 1024
    script: Sequence[Sequence[int]] = ()
    replies: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    echo: bool = False  # answer with the prompt itself, then EOS
    model_name: str = "sim"
    checkpoint: str = "sim"


def load_script(path: str) -> tuple[list[list[int]], list[tuple[list[int], list[int]]]]:
    """A script file, one entry per line: a JSON list of token ids, or {"cue": ids, "ids": ids}. -> answers for any prompt,
    (cue, answer) for prompts in which the cue stands. ValueError names the line that is neither."""
    answers, replies = [], []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            cue, ids = (entry["cue"], entry["ids"]) if isinstance(entry, dict) else (None, entry)
            array("I", ids if isinstance(ids, list) else [None])
            array("I", cue or ())
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            what = 'a JSON list of token ids, or {"cue": ids, "ids": ids}'
            raise ValueError(f"{path}:{number}: expected {what}, got {line[:60]!r} ({error})") from error
        if cue is None:
            answers.append(ids)
        else:
            replies.append((cue, ids))
    return answers, replies


@dataclass(slots=True, eq=False)
class _Sequence:
    """One choice of one request. `rows`: prompt and output positions whose KV exists (counted, for output: see `_decode`)."""

    request: api.EngineRequest
    choice: int = 0
    hashes: list[bytes] = field(default_factory=list)  # of full blocks, prompt and output
    table: list[int] = field(default_factory=list)  # physical block per logical block
    tokens: array | None = None  # prompt and output ids
    prompt: int = 0  # tokens
    position: int = 0  # PREFILL: next row
    cached: int = 0
    replay: int = 0
    snapshot: bool = False
    begun: int = 0  # of `prompt`, the last tokens are output already, of an attempt elsewhere
    output: int = 0  # tokens sampled here
    stream: Sequence[int] | None = None
    offset: int = 0
    cyclic: bool = True
    running: bool = False  # named by the plan that is being executed
    dead: bool = False
    hasher: BlockHasher | None = None


@dataclass(slots=True)
class SimPlan:
    """One step. `seconds` is what `execute` waits; a host that waits by itself sets it to 0."""

    prefill: list[tuple[_Sequence, int, int]]  # rows [start, stop)
    decode: list[_Sequence]
    seconds: float


class SimEngine:
    """`api.Engine` over `buffer` (num_blocks * block_bytes bytes; own memory when None)."""

    def __init__(self, config: SimConfig, buffer=None) -> None:
        self.config = config
        nbytes = config.num_blocks * config.block_bytes
        memory = memoryview(bytearray(nbytes) if buffer is None else buffer).cast("B")
        if len(memory) < nbytes:
            raise ValueError(
                f"KV buffer has {len(memory)} bytes; {config.num_blocks} blocks of {config.block_bytes} bytes need {nbytes}"
            )
        if config.block_bytes % 16 or config.state_bytes % 16:
            raise ValueError(f"sim blocks and states are multiples of 16 bytes; got {config.block_bytes}, {config.state_bytes}")
        self.memory = memory
        self.pool = BlockPool(config.num_blocks)
        self.grammars = None  # its words are made up: no grammar is followed
        layout = f"sim-b{config.block_bytes}-s{config.state_bytes}"
        self.info = api.EngineInfo(
            kind="sim",
            layout_id=layout,
            checkpoint=config.checkpoint,
            block_tokens=BLOCK,
            block_bytes=config.block_bytes,
            state_bytes=config.state_bytes,
            hidden_bytes=config.hidden_bytes,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            model_name=config.model_name,
        )
        self._words = [word for word in WORDS if word < config.vocab_size] or list(range(min(16, config.vocab_size)))
        self._eos = frozenset(config.eos_token_ids)
        self._free_slots = config.max_num_seqs
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: list[_Sequence] = []
        self._decoding: list[_Sequence] = []
        self._held: dict[str, _Sequence] = {}  # PREFILL: done, pinned until release()
        self._live: dict[str, list[_Sequence]] = {}
        self._tables: dict[str, list[int]] = {}  # reservations: the whole block table, resident blocks included
        self._dying: list[_Sequence] = []
        self._failed: list[api.Failed] = []
        self._snapshots: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        self._hashers: dict[bytes, BlockHasher] = {}
        self._steps = self._prefill_rows = self._prefill_seconds = 0
        self._step_seconds = config.decode_step_seconds

    # ------------------------------------------------------------ requests in

    def submit(self, request: api.EngineRequest) -> None:
        """Queue a prompt, lower priority numbers first. ValueError: empty, too long, larger than the pool, known already."""
        n, config = len(request.ids), self.config
        if n < 1:
            raise ValueError("the prompt is empty; it needs at least one token")
        api.check_output(n, request.output_tokens, request.first_choice, request.sampling)
        if n > config.max_model_len:
            raise ValueError(f"the prompt has {n} tokens; the model takes {config.max_model_len}")
        if -(-n // BLOCK) > config.num_blocks:
            raise ValueError(f"the prompt needs {-(-n // BLOCK)} blocks; the pool has {config.num_blocks}")
        if request.request in self._live or request.request in self._held:
            raise ValueError(f"request {request.request} is here already")
        sequence = self._sequence(request)
        self._live[request.request] = [sequence]
        at = len(self._waiting)
        while at and self._waiting[at - 1].request.priority > request.priority:
            at -= 1
        self._waiting.insert(at, sequence)

    def reserve(self, request: str, hashes: Sequence[bytes], prompt_tokens: int) -> api.Reservation | None:
        if not self._free_slots or request in self._tables or request in self._live:
            return None
        resident = self.pool.match(hashes[: prompt_tokens // BLOCK])
        missing = self.pool.allocate(-(-prompt_tokens // BLOCK) - len(resident))
        if missing is None:
            self.pool.release(resident)
            return None
        self._free_slots -= 1
        self._tables[request] = resident + missing
        return api.Reservation(request, len(resident), missing, slot=0)

    def admit(self, reservation: api.Reservation, handoff: api.Handoff, request: api.EngineRequest) -> None:
        """Checks every block, the state and the hidden vector against the ids, then decodes. Corrupt (a ValueError) leaves the
        reservation as it was."""
        table = self._tables[reservation.request]
        api.check_output(len(handoff.ids), request.output_tokens, request.first_choice, request.sampling)
        first = self._sequence(request, ids=handoff.ids)
        first.position = first.prompt
        self._verify_blocks(first, table)
        packed = first.tokens.tobytes()
        if bytes(handoff.state) != _fill(_mark(packed), self.config.state_bytes):
            raise Corrupt(f"request {request.request}: the state is not that of its {first.prompt} ids")
        if bytes(handoff.hidden) != _fill(_mark(b"hidden" + packed), self.config.hidden_bytes):
            raise Corrupt(f"request {request.request}: the hidden vector is not that of its {first.prompt} ids")
        sequences = self._fork(first, table, request.sampling.n)
        del self._tables[reservation.request]
        parent = ROOT
        for digest, block in zip(first.hashes, table, strict=False):
            self.pool.announce(block, digest, parent)
            parent = digest
        self._live[request.request] = sequences
        self._decoding += sequences

    def abandon(self, reservation: api.Reservation) -> None:
        table = self._tables.pop(reservation.request, None)
        if table is not None:
            self._free_slots += 1
            self.pool.release(table[: reservation.have])

    def add_snapshot(self, key: bytes, position: int, state: bytes) -> None:
        self._snapshots[key] = (position, bytes(state))
        self._snapshots.move_to_end(key)
        while len(self._snapshots) > self.config.max_snapshots:
            self._snapshots.popitem(last=False)

    def begun(self, request: str) -> bool:
        return request in self._held or any(sequence.table for sequence in self._live.get(request, ()))

    def would_restore(self, hashes: Sequence[bytes], prompt_tokens: int) -> bool:
        return not hashes or hashes[-1] in self._snapshots

    def first_row(self, resident: int, prompt_tokens: int) -> int:
        return prompt_tokens  # no row is computed from an embedding

    def release(self, request: str) -> None:
        sequence = self._held.pop(request, None)
        if sequence is not None:
            self._free(sequence)

    def cancel(self, request: str) -> bool:
        sequences = self._live.pop(request, None)
        if sequences is None:
            held = self._held.pop(request, None)
            if held is not None:
                self._free(held)
            return held is not None
        for sequence in sequences:
            sequence.dead = True
            if sequence.running:
                self._dying.append(sequence)  # its memory is the running step's until that ends
            else:
                self._free(sequence)
        self._waiting = deque(s for s in self._waiting if not s.dead)
        self._prefilling = [s for s in self._prefilling if not s.dead]
        self._decoding = [s for s in self._decoding if not s.dead]
        return True

    def has_work(self) -> bool:
        return bool(self._decoding or self._prefilling or self._waiting or self._failed)

    def owners(self) -> dict[int, int]:
        """References per physical block that live sequences, held prompts and reservations account for."""
        out: dict[int, int] = {}
        sequences = [s for group in self._live.values() for s in group] + list(self._held.values()) + self._dying
        for table in [s.table for s in sequences] + list(self._tables.values()):
            for block in table:
                out[block] = out.get(block, 0) + 1
        return out

    # ------------------------------------------------------------ the step

    depth = 1

    def plan(self) -> SimPlan | None:
        budget = self.config.max_num_batched_tokens
        decode = [s for s in self._decoding if self._room(s)] if self._decoding else []
        prefill: list[tuple[_Sequence, int, int]] = []
        rows = 0
        if self._waiting or self._prefilling:
            budget -= len(decode)
            for sequence in self._prefilling:
                if budget <= 0:
                    break
                stop = min(sequence.prompt, sequence.position + budget)
                prefill.append((sequence, sequence.position, stop))
                budget -= stop - sequence.position
            while self._waiting and budget > 0 and self._free_slots:
                sequence = self._waiting[0]
                if not self._start(sequence):
                    break
                self._waiting.popleft()
                if sequence.dead:
                    continue
                self._prefilling.append(sequence)
                rows += sequence.replay
                stop = min(sequence.prompt, sequence.position + budget)
                prefill.append((sequence, sequence.position, stop))
                budget -= stop - sequence.position
        if not prefill and not decode and not self._failed:
            if self._decoding and not self._prefilling:  # every sequence waits for a block that only another one could give
                self._give_up(self._decoding[-1])
                return self.plan()
            return None
        rows += sum(stop - start for _, start, stop in prefill)
        for sequence, _, _ in prefill:
            sequence.running = True
        for sequence in decode:
            sequence.running = True
        self._prefill_rows += rows
        self._prefill_seconds += rows * self.config.prefill_seconds_per_token
        seconds = rows * self.config.prefill_seconds_per_token + (self.config.decode_step_seconds if decode else 0.0)
        return SimPlan(prefill, decode, seconds)

    def execute(self, plan: SimPlan) -> None:
        if plan.seconds > 0:
            time.sleep(plan.seconds)
        for sequence, start, stop in plan.prefill:
            for index in range(max(start // BLOCK, sequence.cached // BLOCK), -(-stop // BLOCK)):
                self._write(sequence, index, stop)

    def apply(self, plan: SimPlan, result: None) -> list[api.Event]:
        self._steps += 1
        events: list[api.Event] = []
        for sequence, start, stop in plan.prefill:
            sequence.running = False
            if sequence.dead:
                self._free(sequence)
            else:
                self._computed(sequence, start, stop, events)
        for sequence in plan.decode:
            sequence.running = False
            if sequence.dead:
                self._free(sequence)
            else:
                self._decode(sequence, events)
        if self._failed:
            events += self._failed
            self._failed = []
        return events

    def fail(self, plan: SimPlan | None, error: BaseException) -> list[api.Event]:
        """A step broke: its requests (all of them when there is no plan) end here and their memory is free again."""
        if plan is None:
            names = list(self._live)
        else:
            sequences = [s for s, _, _ in plan.prefill] + plan.decode
            names = list(dict.fromkeys(s.request.request for s in sequences))
            for sequence in sequences:
                sequence.running = False
                if sequence.dead:
                    self._free(sequence)
        return [api.Failed(name, "internal", repr(error)) for name in names if self.cancel(name)]

    def stats(self) -> dict[str, float]:
        seconds = self._prefill_seconds
        return {
            "running": len(self._decoding) + len(self._prefilling),
            "waiting": len(self._waiting),
            "queued_tokens": sum(s.prompt - s.position for s in self._prefilling) + sum(s.prompt for s in self._waiting),
            "steps": self._steps,
            "prefill_tokens_per_second": self._prefill_rows / seconds if seconds else 0.0,
            "step_seconds": self._step_seconds,
            "free_slots": self._free_slots,
            "snapshots": len(self._snapshots),
        }

    # ------------------------------------------------------------ prefill

    def _start(self, sequence: _Sequence) -> bool:
        """Take the longest resident prefix (a row is always left to compute) and memory for the rest; False: not now."""
        pool, n = self.pool, sequence.prompt
        resident = pool.match(sequence.hashes[: (n - 1) // BLOCK])
        missing = pool.allocate(-(-n // BLOCK) - len(resident))
        if missing is None:
            pool.release(resident)
            return False
        self._free_slots -= 1
        sequence.table = resident + missing
        sequence.cached = sequence.position = len(resident) * BLOCK
        try:
            self._verify_blocks(sequence, resident)
        except Corrupt as error:
            sequence.dead = True
            self._live.pop(sequence.request.request, None)
            self._free(sequence)
            self._failed.append(api.Failed(sequence.request.request, "corrupt", str(error)))
            return True
        if resident:
            sequence.snapshot = self._restore(sequence, sequence.hashes[len(resident) - 1], sequence.cached)
            sequence.replay = 0 if sequence.snapshot else min(self.config.replay_rows, sequence.cached)
        return True

    def _restore(self, sequence: _Sequence, key: bytes, position: int) -> bool:
        found = self._snapshots.get(key)
        if found is None:
            return False
        expected = _fill(_mark(sequence.tokens[:position].tobytes()), self.config.state_bytes)
        return found == (position, expected)

    def _computed(self, sequence: _Sequence, start: int, stop: int, events: list[api.Event]) -> None:
        request, table, hashes = sequence.request, sequence.table, sequence.hashes
        sequence.position = stop
        filled = []
        for index in range(start // BLOCK, stop // BLOCK):
            parent = hashes[index - 1] if index else ROOT
            self.pool.announce(table[index], hashes[index], parent)
            filled.append((hashes[index], table[index], parent))
        if filled:
            events.append(api.BlocksFilled(request.request, filled))
        if request.prefill_only:
            events.append(api.ChunkDone(request.request, stop, table))
        if stop < sequence.prompt:
            return
        self._prefilling.remove(sequence)
        if (most := request.sampling.prompt_logprobs) >= 0:
            scores = [_logprob(token, most) for token in sequence.tokens[1 : sequence.prompt]]
            events.append(api.PromptScores(request.request, 1, scores))
        boundary = stop // BLOCK * BLOCK
        if boundary > sequence.cached:
            key = hashes[boundary // BLOCK - 1]
            state = _fill(_mark(sequence.tokens[:boundary].tobytes()), self.config.state_bytes)
            self.add_snapshot(key, boundary, state)
            events.append(api.SnapshotTaken(request.request, key, boundary, state))
        if not request.prefill_only:
            try:
                sequences = self._fork(sequence, table, request.sampling.n)
            except ValueError as error:
                self.cancel(request.request)
                events.append(api.Failed(request.request, "full", str(error)))
                return
            self._live[request.request] = sequences
            self._decoding += sequences
            rows = sequence.prompt - sequence.cached
            events.append(api.PromptDone(request.request, sequence.cached, rows, sequence.replay, sequence.snapshot))
            return
        del self._live[request.request]
        self._held[request.request] = sequence
        packed = sequence.tokens.tobytes()
        handoff = api.Handoff(
            ids=sequence.tokens,
            state=_fill(_mark(packed), self.config.state_bytes),
            hidden=_fill(_mark(b"hidden" + packed), self.config.hidden_bytes),
        )
        events.append(
            api.PrefillDone(
                request=request.request,
                block_table=table,
                handoff=handoff,
                cached_tokens=sequence.cached,
                computed_rows=sequence.prompt - sequence.cached,
                replay_rows=sequence.replay,
                snapshot_hit=sequence.snapshot,
            )
        )

    # ------------------------------------------------------------ decode

    def _fork(self, first: _Sequence, table: list[int], n: int) -> list[_Sequence]:
        """n choices over one prompt: full blocks shared, the partial one copied. All or none: NoRoom when memory is
        short."""
        full = first.prompt // BLOCK
        extra = (n - 1) * (len(table) - full)
        if n - 1 > self._free_slots:
            raise api.NoRoom(f"n = {n} needs {n - 1} more slots; {self._free_slots} are free")
        copies = self.pool.allocate(extra) if extra else []
        if copies is None:
            raise api.NoRoom(f"n = {n} needs {extra} more blocks; {self.pool.free} are free")
        sequences = [first]
        first.table = list(table)
        for choice in range(1, n):
            sequence = self._sequence(first.request, ids=first.tokens, choice=choice)
            sequence.table = table[:full]
            self.pool.retain(sequence.table)
            if extra:
                block = copies[choice - 1]
                self._block(block)[:] = self._block(table[full])
                sequence.table.append(block)
            sequences.append(sequence)
        self._free_slots -= n - 1
        for sequence in sequences:
            sequence.position = sequence.prompt
            self._script(sequence)
        return sequences

    def _room(self, sequence: _Sequence) -> bool:
        """Memory for the row that the next step computes (the last sampled token's)."""
        if sequence.output == 0 or len(sequence.table) * BLOCK >= sequence.prompt + sequence.output:
            return True
        block = self.pool.allocate(1)
        if block is None:
            return False
        sequence.table += block
        return True

    def _decode(self, sequence: _Sequence, events: list[api.Event]) -> None:
        """Compute the row of the last token, if there is one, and sample the next."""
        sampling, k = sequence.request.sampling, sequence.begun + sequence.output
        rows = sequence.prompt + sequence.output
        if sequence.output and rows % BLOCK == 0:
            self._filled(sequence, rows, events)
        token = self._token(sequence, k)
        finish, stop_id, ids = "", -1, [token]
        if token in self._eos and not sampling.ignore_eos:
            if k < sampling.min_tokens:
                ids = [self._words[0]]
            else:
                finish, stop_id, ids = "stop", token, []
        elif token in sampling.stop_token_ids and k >= sampling.min_tokens:
            finish, stop_id = "stop", token
        sequence.tokens.extend(ids)
        sequence.output += 1
        if not finish and (k + 1 >= sampling.max_tokens or rows + 1 >= self.config.max_model_len):
            finish = "length"
        logprobs = None
        if sampling.logprobs >= 0:
            logprobs = [_logprob(t, sampling.logprobs) for t in ids]
        events.append(api.Tokens(sequence.request.request, sequence.choice, k, ids, logprobs, finish, stop_id))
        if finish:
            self._decoding.remove(sequence)
            group = self._live[sequence.request.request]
            group.remove(sequence)
            if not group:
                del self._live[sequence.request.request]
            self._free(sequence)

    def _filled(self, sequence: _Sequence, rows: int, events: list[api.Event]) -> None:
        index = rows // BLOCK - 1
        if index < len(sequence.hashes):
            return  # the prompt's own last block
        parent = sequence.hashes[-1] if sequence.hashes else ROOT
        images = [(i.start % BLOCK, i.digest) for i in sequence.request.images if i.start // BLOCK == index]
        digest = self._hasher(sequence.request.namespace).next(parent, sequence.tokens[index * BLOCK : rows], images)
        sequence.hashes.append(digest)
        self._write(sequence, index, rows)
        self.pool.announce(sequence.table[index], digest, parent)
        events.append(api.BlocksFilled(sequence.request.request, [(digest, sequence.table[index], parent)]))

    def _give_up(self, sequence: _Sequence) -> None:
        request = sequence.request.request
        self.cancel(request)
        self._failed.append(
            api.Failed(request, "preempted", f"no free block of {self.config.num_blocks}; no other sequence to wait for")
        )

    def _script(self, sequence: _Sequence) -> None:
        """Choose the answer: a function of the client's prompt, seed and choice alone."""
        request, prompt = sequence.request, sequence.tokens[: sequence.prompt - sequence.begun]
        key = prompt.tobytes() + (request.sampling.seed & (1 << 64) - 1).to_bytes(8, "little")
        pick = int.from_bytes(_mark(key)[:4], "little") + request.first_choice + sequence.choice
        reply = self._reply(prompt)
        if reply is not None:
            sequence.stream, sequence.cyclic = reply, False
        elif self.config.echo:
            sequence.stream, sequence.cyclic = prompt, False
        elif self.config.script:
            sequence.stream, sequence.cyclic = self.config.script[pick % len(self.config.script)], False
        else:
            sequence.stream, sequence.offset = self._words, pick

    def _reply(self, prompt: array) -> Sequence[int] | None:
        """The scripted answer whose cue comes last in the prompt."""
        packed, size = prompt.tobytes(), prompt.itemsize
        last, found = -1, None
        for cue, answer in self.config.replies:
            wanted = array("I", cue).tobytes()
            at = packed.rfind(wanted)
            while at > last and at % size:  # not at the border of two ids
                at = packed.rfind(wanted, 0, at + len(wanted) - 1)
            if at > last:
                last, found = at, answer
        return found

    def _token(self, sequence: _Sequence, k: int) -> int:
        stream = sequence.stream
        if sequence.cyclic:
            return stream[(sequence.offset + k) % len(stream)]
        return stream[k] if k < len(stream) else self.config.eos_token_ids[0]

    # ------------------------------------------------------------ memory

    def _sequence(self, request: api.EngineRequest, ids=None, choice: int = 0) -> _Sequence:
        tokens = array("I", request.ids if ids is None else ids)
        hashes = list(request.hashes[: len(tokens) // BLOCK])
        return _Sequence(request, choice, hashes, tokens=tokens, prompt=len(tokens), begun=request.output_tokens)

    def _free(self, sequence: _Sequence) -> None:
        if sequence in self._dying:
            self._dying.remove(sequence)
        if sequence.table:  # a waiting sequence has neither blocks nor a slot
            self._free_slots += 1
            self.pool.release(sequence.table)
            sequence.table = []

    def _hasher(self, namespace: bytes) -> BlockHasher:
        hasher = self._hashers.get(namespace)
        if hasher is None:
            if len(self._hashers) > 256:
                self._hashers.clear()
            hasher = self._hashers[namespace] = BlockHasher(self.info.layout_id, namespace)
        return hasher

    def _block(self, block: int) -> memoryview:
        size = self.config.block_bytes
        return self.memory[block * size : (block + 1) * size]

    def _content(self, sequence: _Sequence, index: int, rows: int) -> bytes:
        """Bytes of logical block `index` when `rows` rows of the sequence exist."""
        if (index + 1) * BLOCK <= rows:
            mark = sequence.hashes[index]
        else:
            mark = _mark((sequence.hashes[index - 1] if index else ROOT) + sequence.tokens[index * BLOCK : rows].tobytes())
        return _fill(mark, self.config.block_bytes)

    def _write(self, sequence: _Sequence, index: int, rows: int) -> None:
        self._block(sequence.table[index])[:] = self._content(sequence, index, rows)

    def _verify_blocks(self, sequence: _Sequence, table: Sequence[int]) -> None:
        for index, block in enumerate(table):
            if self._block(block) != self._content(sequence, index, sequence.prompt):
                raise Corrupt(
                    f"request {sequence.request.request}: logical block {index} (physical {block}) is not its tokens'"
                )


def _mark(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _fill(mark: bytes, nbytes: int) -> bytes:
    return mark * (nbytes // 16)


def _logprob(token: int, k: int) -> tuple[int, float, list[tuple[int, float]]]:
    """Made-up but repeatable: the sampled token, then its successors, each half as likely."""
    return token, -0.5 - (token % 8) / 16, [(token + i, -0.5 - (token % 8) / 16 - i) for i in range(k)]
