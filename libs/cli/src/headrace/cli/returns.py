"""Says when a process that died is ready again.

Knows: presence messages, by which the process that was started anew differs from the one that died: its instance is another.
Does not know: who starts it. NATS has no presence; `back` says that it carries messages again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.bus import Peers
from headrace.bus.messages import Presence


class Returns:
    """Processes of one system, by name, that died and have not come back. `say(text)` is called once for each return."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._since: dict[str, float] = {}  # name -> time.monotonic() of the first death since it was ready
        self._dead: dict[str, set[str]] = {}  # name -> instances that were before; their presence may still arrive

    def died(self, name: str, peers: Peers | None) -> None:
        """`name` ended; those that `peers` knows under this name are of the past."""
        self._since.setdefault(name, time.monotonic())
        old = [presence.instance for presence in peers.all() if presence.name == name] if peers else []
        self._dead.setdefault(name, set()).update(old)

    def on_presence(self, kind: str, presence: Presence) -> None:
        """A watcher of `Peers`."""
        alive = kind != "leave" and presence.state == "ready"
        if alive and presence.instance not in self._dead.get(presence.name, ()):
            self.back(presence.name)

    def back(self, name: str) -> None:
        """`name` works; said if it had died."""
        if since := self._since.pop(name, None):
            self._dead.pop(name)
            self._say(f"{name} is ready again, {time.monotonic() - since:.1f} s after it died")
