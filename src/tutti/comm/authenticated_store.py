"""A store whose values only ranks of the job can write: names and values carry codes made with the job's key."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from tutti.errors import LaunchError
from tutti.job_secret import mac, same
from tutti.surviving_rank import SURVIVING_RANK

_CODE_NBYTES = 32

_LOOK_EVERY_S = 0.005


class AuthenticatedStore(Store):
    """Stores values under names, and with codes, that nobody makes without the key.

    torch's TCPStore lets any process that reaches its port list, read and write everything. Here the names in it are
    digests, and a value counts only with the HMAC-SHA256 of its name and its bytes. Values can still be read, deleted
    or held back by a stranger who reaches the port, which delays a run but does not change it.

    Args:
        store: torch's store.
        key: the key of the ranks.
    """

    def __init__(self, store: Any, key: bytes) -> None:
        super().__init__()
        self._store, self._key = store, key
        self._timeout_s = float(store.timeout.total_seconds())

    def _name(self, key: str) -> str:
        return mac(self._key, "name", key).hex()

    def set(self, key: str, value: Any) -> None:
        """Store a value with its code."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._name(key), mac(self._key, "value", key, data) + data)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it without its code.

        Raises:
            LaunchError: the value was not written by a rank of this job.
        """
        self._look_for([self._name(key)])
        stored = bytes(self._store.get(self._name(key)))
        code, data = stored[:_CODE_NBYTES], stored[_CODE_NBYTES:]
        if not same(code, mac(self._key, "value", key, data)):
            raise LaunchError(
                f"the value of {key!r} at the rendezvous was not written by a rank of this job: a stranger reaches the "
                "port of the rendezvous; let only the job's hosts reach it, then run again"
            )
        return data

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its value. Counters carry no code."""
        return int(self._store.add(self._name(key), amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        names = [self._name(key) for key in keys]
        self._look_for(names)
        if timeout is None:
            self._store.wait(names)
        else:
            self._store.wait(names, timeout)

    def _look_for(self, names: list[str]) -> None:
        """Wait for names where this rank outlives the loss of others: torch's wait would not notice that.

        Raises:
            RuntimeError: a rank is lost.
        """
        deadline = time.monotonic() + self._timeout_s
        while SURVIVING_RANK.enabled and not self._store.check(names) and time.monotonic() < deadline:
            SURVIVING_RANK.check()
            time.sleep(_LOOK_EVERY_S)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._store.check([self._name(key) for key in keys]))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._store.delete_key(self._name(key)))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait."""
        self._timeout_s = timeout.total_seconds()
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """Return False: lists of keys are read one by one."""
        return False

    def clone(self) -> "AuthenticatedStore":
        """Return a store of the same values with a connection of its own."""
        return AuthenticatedStore(self._store.clone(), self._key)
