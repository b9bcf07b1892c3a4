"""The writer's side: reach a memory by its address, over the best transport that both ends have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from headrace.transfer import shm
from headrace.transfer.address import Address
from headrace.transfer.errors import NoCommonKind
from headrace.transfer.memory import KINDS
from headrace.transfer.tcp import TcpPeer


class Peer(Protocol):
    """A reachable memory. `deadline`: time.monotonic() seconds. Buffers are any contiguous bytes; the caller may change
    them when the call has ended, however it ended.

    Raises PeerLost (dead, closed), GenerationRefused (disarmed or outside the armed ranges), BadRange, DeadlineExceeded.
    """

    kind: str  # "shm" | "tcp"
    incarnation: str  # of the owner
    instance: str
    closed: bool

    async def write(self, region: str, pieces: Sequence[tuple[int, Any]], generation: int, deadline: float) -> None: ...

    async def flush(self, deadline: float, generation: int = 0) -> None: ...

    async def commit(self, region: str, offset: int, value: int, generation: int, deadline: float) -> None: ...

    async def read(
        self,
        region: str,
        ranges: Sequence[tuple[int, int]],
        generation: int = 0,
        deadline: float = 0.0,
        into: Sequence[Any] | None = None,
    ) -> list[memoryview]: ...

    async def close(self) -> None: ...


async def connect(
    address: bytes, incarnation: str, kinds: Iterable[str] | None = None, timeout: float = 5.0, shm_dir: str | None = None
) -> Peer:
    """Reach the memory at `address` (from `Memory.address`). `incarnation`: the caller's own, which the owner will want to
    know.

    shm when this process sees the owner's directory (in `shm_dir` or where the owner has it), else tcp. Raises NoCommonKind,
    PeerLost or DeadlineExceeded.
    """
    target = Address.decode(address)
    wanted = [kind for kind in KINDS if kind in target.kinds and (kinds is None or kind in set(kinds))]
    directory = shm.visible(target, shm_dir) if "shm" in wanted else None
    if directory is not None:
        return shm.ShmPeer(target, directory)
    if "tcp" in wanted:
        return await TcpPeer.open(target, incarnation, time.monotonic() + timeout)
    raise NoCommonKind(
        f"{target.instance} offers {', '.join(target.kinds)}; this side allows {', '.join(KINDS if kinds is None else kinds)}"
        + (
            "; its shared memory is not visible from here (another host, or a volume that is not shared)"
            if "shm" in wanted
            else ""
        )
    )


class Links:
    """One Peer per target for all writers of a process; a lost one is replaced at the next `get`."""

    def __init__(self, incarnation: str, kinds: Iterable[str] | None = None, shm_dir: str | None = None) -> None:
        self.incarnation, self._kinds, self._shm_dir = incarnation, None if kinds is None else tuple(kinds), shm_dir
        self._peers: dict[str, Peer] = {}
        self._opening: dict[str, asyncio.Task[Peer]] = {}

    async def get(self, address: bytes, timeout: float = 5.0) -> Peer:
        """The link to `address`, opened if need be (once, also when many ask at the same time)."""
        target = Address.decode(address).incarnation
        peer = self._peers.get(target)
        if peer is not None and not peer.closed:
            return peer
        if target not in self._opening:
            self._opening[target] = opening = asyncio.ensure_future(self._open(target, address, timeout))
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, should nobody wait any more
        return await asyncio.shield(self._opening[target])

    async def drop(self, incarnation: str) -> None:
        """The target is gone (dead, left): forget its link."""
        if peer := self._peers.pop(incarnation, None):
            await peer.close()

    async def close(self) -> None:
        for task in list(self._opening.values()):
            task.cancel()
        for incarnation in list(self._peers):
            await self.drop(incarnation)

    async def _open(self, target: str, address: bytes, timeout: float) -> Peer:
        try:
            peer = await connect(address, self.incarnation, self._kinds, timeout, self._shm_dir)
            await self._drop_dead()
            self._peers[target] = peer
            return peer
        finally:
            self._opening.pop(target, None)

    async def _drop_dead(self) -> None:
        """A new link is the time to forget the lost ones: a dead owner's segments take memory as long as somebody maps them."""
        for incarnation, peer in list(self._peers.items()):
            if peer.closed or (peer.kind == "shm" and peer.owner_is_dead()):
                await self.drop(incarnation)
