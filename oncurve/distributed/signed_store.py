"""The key-value store in which ranks meet. Entries are signed: what another program writes there is ignored.

torch's store has no access control. On one machine it listens on the loopback address only, and the launcher passes a secret to
the ranks (`SECRET`), which other users of the machine can't read. If they delete or overwrite an entry, its writer restores it
with its next heartbeat, or while it waits; they can slow a run down or stop it with an error, but not change what it computes.
With torchrun there is no secret: whoever can reach the address that it listens on can write to it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

SECRET = "ONCURVE_SECRET"
"""Environment variable with the secret that the ranks of one run share."""
SIGNATURE_BYTES = 32
RETRY_S = 0.05
RESTORE_S = 0.5
"""How often a waiting rank restores its own entries."""
UNREAD = 8
"""How many of the last entries that a rank wrote may not have been read yet."""


class SignedStore:
    """A client of the store. The rank's heartbeat has a separate one, since a client may block."""

    def __init__(self, store: Store, secret: str, written: dict[str, bytes] | None = None) -> None:
        self.secret = secret.encode()
        self._written = {} if written is None else written
        """What this rank has written and not deleted, for all of its clients."""
        self.store, self._unprefixed = PrefixStore(hashlib.sha256(self.secret).hexdigest()[:16], store), store

    @classmethod
    def from_environment(cls, store: Store) -> SignedStore:
        return cls(store, os.environ.get(SECRET, ""))

    def clone(self) -> SignedStore:
        return SignedStore(self._unprefixed.clone(), self.secret.decode(), self._written)  # type: ignore[attr-defined]

    def set(self, key: str, value: str) -> None:
        self._written[key] = self._sign(key, value.encode())
        self.store.set(key, self._written[key])  # type: ignore[arg-type]

    def restore(self) -> None:
        """Rewrites the entries of this rank that another program has deleted, or overwritten before they were read."""
        entries = tuple(self._written.items())
        is_complete = self.store.check([key for key, _ in entries])  # one request, as this is called twice a second
        for key, signed in entries[-UNREAD:] if is_complete else entries:
            if self.find(key) is None and key in self._written:
                self.store.set(key, signed)  # type: ignore[arg-type]

    def set_first(self, key: str, value: str) -> bytes:
        """Sets an entry if there is none. Returns the one that is there."""
        signed = self._sign(key, value.encode())
        current = self._verified(key, self.store.compare_set(key, "", signed))  # type: ignore[arg-type]
        if current is None:
            self.set(key, value)
            return value.encode()
        return current

    def find(self, key: str) -> bytes | None:
        """An entry; None if no rank has written it."""
        try:
            return self._verified(key, self.store.get(key)) if self.store.check([key]) else None
        except DistStoreError:  # another program deleted it between the two
            return None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until ranks have written all of these entries. Raises DistStoreError after the time limit."""
        limit: timedelta = self.store.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            with suppress(DistStoreError):  # not there yet
                self.store.wait(list(keys), timedelta(seconds=min(max(deadline - time.monotonic(), RETRY_S), RESTORE_S)))
                if all(self.find(key) is not None for key in keys):
                    return
                time.sleep(RETRY_S)
            if time.monotonic() > deadline:
                raise DistStoreError(f"no rank has written all of {', '.join(keys)}")
            self.restore()  # the others may wait for an entry of this rank; the heartbeat may not have started

    def get(self, key: str) -> bytes:
        """An entry, once a rank has written it."""
        while True:
            self.wait([key])
            value = self.find(key)
            if value is not None:  # else another program deleted it meanwhile
                return value

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(key, amount))

    def delete(self, key: str) -> None:
        self._written.pop(key, None)
        self.store.delete_key(key)

    def _sign(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self.secret, key.encode() + b"\0" + value, "sha256") + value

    def _verified(self, key: str, signed: bytes) -> bytes | None:
        value = signed[SIGNATURE_BYTES:]
        return value if hmac.compare_digest(self._sign(key, value), signed) else None
