"""What a writer must know to reach a memory. Opaque bytes to everybody else."""

from __future__ import annotations

import msgspec

from headrace.transfer.errors import TransferError

VERSION = 1


class Region(msgspec.Struct, array_like=True, frozen=True):
    nbytes: int
    readable: bool


class Address(msgspec.Struct, array_like=True, frozen=True):
    """Made by `Memory.address()`. `key` must be shown by whoever connects over tcp: only those who got the address may
    write."""

    version: int
    instance: str
    incarnation: str
    kinds: tuple[str, ...]
    regions: dict[str, Region]
    nonce: str = ""  # of the owner's shm directory
    shm_dir: str = ""
    host: str = ""
    port: int = 0
    key: bytes = b""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Address:
        try:
            address = msgspec.msgpack.decode(data, type=Address)
        except msgspec.MsgspecError as error:
            raise TransferError(f"not a memory address ({len(data)} bytes): {error}") from error
        if address.version != VERSION:
            raise TransferError(
                f"memory address of version {address.version}; this side speaks {VERSION}: run one release on both"
            )
        return address
