"""Who is asking: API keys and the tenant behind each.

A tenant is what KV is shared within. A client can't name one; `cache_salt` only divides its own. Without keys all
clients are one tenant. Keys are kept as digests and compared by them, so neither a dump nor a timing tells one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from headrace.bus import StartError
from headrace.kv.hashing import namespace_key

from . import errors

MAX_SALTS = 4096


class Auth:
    """`tenant(headers)` of a request; `namespace(tenant, salt)` is the 16-byte key of its KV."""

    def __init__(self, keys: list[str], path: str = "", secret: str = ""):
        entries = list(keys)
        if path:
            try:
                lines = Path(path).read_text().splitlines()
            except OSError as error:
                raise StartError(f"can't read the API keys in {path}: {error.strerror}") from error
            entries += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        self._tenants: dict[bytes, bytes] = {}
        self._secret = secret.encode()
        self._namespaces: dict[tuple[bytes, str | None], bytes] = {}
        for entry in entries:
            tenant, _, key = entry.rpartition(":")
            if not key:
                raise StartError(f"an API key is empty (`{tenant}:`); write `tenant:key` or `key`")
            digest = _digest(key.encode())
            self._tenants[digest] = tenant.encode() or b"key-" + digest.hex().encode()

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def tenant(self, headers: Mapping[str, str]) -> bytes:
        """Raises GatewayError (401)."""
        if not self._tenants:
            return b""
        key = headers.get("x-api-key", "")
        if not key:
            scheme, _, key = headers.get("Authorization", "").partition(" ")
            key = key.strip() if scheme.lower() == "bearer" else ""
        tenant = self._tenants.get(_digest(key.encode("utf-8", "surrogateescape"))) if key else None
        if tenant is None:
            raise errors.unauthorized()
        return tenant

    def namespace(self, tenant: bytes, salt: str | None) -> bytes:
        found = self._namespaces.get((tenant, salt))
        if found is None:
            if len(self._namespaces) >= MAX_SALTS:
                self._namespaces.clear()
            found = self._namespaces[tenant, salt] = namespace_key(tenant, salt, self._secret)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()
