"""Settings of the kvstore. Knows names, defaults and how sizes are written."""

from __future__ import annotations

import re
from typing import Annotated

from headrace.bus import Meta, Settings

_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


def parse_bytes(text: str | int) -> int:
    """ "1GiB", "512 MiB", "1.5g" or a plain number -> bytes. ValueError says what would be right."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text), re.IGNORECASE)
    if not found or found[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 1GiB, 512MiB or 1000000000")
    return int(float(found[1]) * _UNITS[found[2].lower()])


class KvStoreSettings(Settings):
    """Watermarks are shares of the capacity."""

    capacity_bytes: Annotated[int | str, Meta(description="size of the arena, taken at start, for example 1GiB")] = "256MiB"
    kv_cache_ttl_hours: Annotated[float, Meta(gt=0, description="an object unused for this long is dropped")] = 168.0
    evict_start: Annotated[float, Meta(gt=0, le=1, description="eviction starts above this share of the capacity")] = 0.80
    evict_stop: Annotated[float, Meta(ge=0, le=1, description="and goes on down to this share")] = 0.70
    refuse_above: Annotated[float, Meta(gt=0, le=1, description="room is refused when it would fill more than this share")] = (
        0.95
    )
    max_ttl_seconds: Annotated[float, Meta(gt=0, description="longest lease of pins and write grants")] = 60.0
    max_handles: Annotated[int, Meta(ge=1, description="lookups and write grants open at a time")] = 4096
    tcp_host: Annotated[str, Meta(description="address that workers use; none: --host, or this machine's")] = ""
    tcp_port: Annotated[int, Meta(ge=0, le=65535, description="port for tensors; 0: a free one")] = 0
    tiered_kv_storage_path: Annotated[str, Meta(description="folder of an NVMe tier; not in this build")] = ""

    def __post_init__(self) -> None:
        if self.tiered_kv_storage_path:
            raise ValueError(
                f"--tiered-kv-storage-path {self.tiered_kv_storage_path}: this build keeps KV in memory only; leave it out and "
                "give --capacity-bytes what the host can spare"
            )
        if not self.evict_stop <= self.evict_start <= self.refuse_above:
            raise ValueError(
                f"watermarks must rise: --evict-stop {self.evict_stop} <= --evict-start {self.evict_start} <= "
                f"--refuse-above {self.refuse_above}"
            )
        if self.capacity < 1 << 16:
            raise ValueError(f"--capacity-bytes {self.capacity_bytes} is too small for anything; give at least 64KiB")

    @property
    def capacity(self) -> int:
        """Bytes."""
        return parse_bytes(self.capacity_bytes)
