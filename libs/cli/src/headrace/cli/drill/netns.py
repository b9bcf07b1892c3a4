"""A network namespace on a wire that can be cut, in one direction or both, without anybody being told.

Knows: `ip netns`, a veth pair, and that frames sent to a hardware address which nobody has are lost in silence, as behind a
dead switch: no error, no reset. Needs root and iproute2. Does not know what runs on either side.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess

NOBODY = "02:00:00:00:00:01"  # a hardware address that no interface here has


def cannot() -> str:
    """Why there can be no namespace here; "" when there can."""
    if shutil.which("ip") is None:
        return "needs iproute2 (the command `ip`)"
    if os.geteuid() != 0:
        return "needs root, for a network namespace"
    name = f"headrace-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"needs network namespaces; `ip netns add` says: {made.stderr.strip()[:120]}"
    link = ["ip", "link", "add", f"hr{name[-6:]}", "type", "veth", "peer", "name", "inside", "netns", name]
    wired = subprocess.run(link, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"needs veth interfaces; `ip link add` says: {wired.stderr.strip()[:120]}" if wired.returncode else ""


class Wire:
    """`with Wire() as wire`: a namespace `wire.name`; `wire.here` and `wire.there` are the addresses of its two ends."""

    def __init__(self) -> None:
        token = secrets.token_hex(3)
        self.name, self._link = f"headrace-{token}", f"hr{token}"
        net = f"198.18.{secrets.randbelow(256)}.{4 * secrets.randbelow(64)}"  # the range for tests of networks (RFC 2544)
        base, last = net.rsplit(".", 1)
        self.here, self.there = f"{base}.{int(last) + 1}", f"{base}.{int(last) + 2}"

    def __enter__(self) -> Wire:
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._link, "type", "veth", "peer", "name", "inside", "netns", self.name)
            for namespace, link, address in (("", self._link, self.here), (self.name, "inside", self.there)):
                _ip("address", "add", f"{address}/30", "dev", link, namespace=namespace)
                _ip("link", "set", link, "up", namespace=namespace)
            _ip("link", "set", "lo", "up", namespace=self.name)
            self._here_mac, self._there_mac = self._mac("", self._link), self._mac(self.name, "inside")
            self.heal()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """The interfaces go with the namespace."""
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)

    def inside(self, argv: list[str]) -> list[str]:
        """The command that runs `argv` in the namespace; same pid."""
        return ["ip", "netns", "exec", self.name, *argv]

    def cut(self, into: bool = True, out: bool = True) -> None:
        """From now on nothing comes `into` the namespace, or `out` of it."""
        if into:
            self._neighbour("", self._link, self.there, NOBODY)
        if out:
            self._neighbour(self.name, "inside", self.here, NOBODY)

    def heal(self) -> None:
        self._neighbour("", self._link, self.there, self._there_mac)
        self._neighbour(self.name, "inside", self.here, self._here_mac)

    @staticmethod
    def _neighbour(namespace: str, link: str, address: str, mac: str) -> None:
        _ip("neighbour", "replace", address, "lladdr", mac, "dev", link, "nud", "permanent", namespace=namespace)

    @staticmethod
    def _mac(namespace: str, link: str) -> str:
        words = _ip("-o", "link", "show", link, namespace=namespace).split()
        return words[words.index("link/ether") + 1]


def _ip(*words: str, namespace: str = "") -> str:
    argv = ["ip", *(["-n", namespace] if namespace else []), *words]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout
