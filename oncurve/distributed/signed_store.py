"""The key-value store in which ranks meet. Entries are signed: what another program writes there is ignored.

torch's store has no access control. On one machine it listens on the loopback address only, and the launcher passes a secret to
the ranks (`SECRET`), which other users of the machine can't read. With torchrun there is no secret: whoever can reach the
address that it listens on can write to it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

SECRET = "ONCURVE_SECRET"
"""Environment variable with the secret that the ranks of one run share."""
SIGNATURE_BYTES = 32
RETRY_S = 0.05


class SignedStore:
    """A client of the store. The rank's heartbeat has a separate one, since a client may block."""

    def __init__(self, store: Store, secret: str) -> None:
        self.secret = secret.encode()
        self.store, self._unprefixed = PrefixStore(hashlib.sha256(self.secret).hexdigest()[:16], store), store

    @classmethod
    def from_environment(cls, store: Store) -> SignedStore:
        return cls(store, os.environ.get(SECRET, ""))

    def clone(self) -> SignedStore:
        return SignedStore(self._unprefixed.clone(), self.secret.decode())  # type: ignore[attr-defined]

    def set(self, key: str, value: str) -> None:
        self.store.set(key, self._sign(key, value.encode()))  # type: ignore[arg-type]

    def set_first(self, key: str, value: str) -> bytes:
        """Sets an entry if there is none. Returns the one that is there."""
        signed = self._sign(key, value.encode())
        current = self._verified(key, self.store.compare_set(key, "", signed))  # type: ignore[arg-type]
        if current is None:
            self.store.set(key, signed)  # type: ignore[arg-type]
            return value.encode()
        return current

    def find(self, key: str) -> bytes | None:
        """An entry; None if no rank has written it."""
        return self._verified(key, self.store.get(key)) if self.store.check([key]) else None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until ranks have written all of these entries. Raises DistStoreError after the time limit."""
        limit: timedelta = self.store.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            self.store.wait(list(keys), max(deadline - time.monotonic(), RETRY_S) * timedelta(seconds=1))
            if all(self.find(key) is not None for key in keys):
                return
            if time.monotonic() > deadline:
                raise DistStoreError(f"no rank has written all of {', '.join(keys)}")
            time.sleep(RETRY_S)

    def get(self, key: str) -> bytes:
        """An entry, once a rank has written it."""
        self.wait([key])
        value = self.find(key)
        assert value is not None, "entries are never deleted before every rank has read them"
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(key, amount))

    def delete(self, key: str) -> None:
        self.store.delete_key(key)

    def _sign(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self.secret, key.encode() + b"\0" + value, "sha256") + value

    def _verified(self, key: str, signed: bytes) -> bytes | None:
        value = signed[SIGNATURE_BYTES:]
        return value if hmac.compare_digest(self._sign(key, value), signed) else None
