"""The port to the metadata database: etcd's data model, so that SQLite serves one machine and etcd a cluster.

Keys are text and not empty, values bytes. Every change raises one global revision. A key may hang on a lease and goes
with it. All errors of a backend are those of `errors.py`; every operation may raise Unavailable, and after
DeadlineExceeded nobody knows whether it was done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tensorcast_connector.errors import Exhausted

TXN_OPERATIONS_MAX = 128  # compares included
TXN_BYTES_MAX = 1 << 20  # of all values together
KEY_OVERHEAD_BYTES = 32
RESTORING_KEY = "restoring"  # there while a restore is under way that is not one transaction
ALIVE = "alive/"  # + lease of a store process that serves the database


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as read: its value, the revisions of its creation and last change, and its lease (0 = none)."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class Event:
    """One change of one key: its new value (None = deleted), the revision it happened at, and its lease (0 = none)."""

    key: str
    value: bytes | None
    mod_revision: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class Compare:
    """True if the key's mod_revision is `mod_revision`; 0 = the key does not exist."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a key; one that is missing is fine."""

    key: str


@dataclass(frozen=True, slots=True)
class TxnResult:
    """Whether all compares held (only then the operations were done), and the revision afterwards."""

    succeeded: bool
    revision: int


class KvStore(Protocol):
    """One contract, tested against every backend."""

    async def revision(self) -> int:
        """The revision of the last change."""

    async def range(self, prefix: str) -> tuple[int, list[KeyValue]]:
        """All keys that start with `prefix`, in the order of their bytes, and the revision they were read at."""

    async def page(self, prefix: str, after_key: str, bytes_max: int) -> tuple[int, list[KeyValue], bool]:
        """The next keys under `prefix` behind `after_key` in the order of their bytes ("" = from the first).

        One, if there is any, and as many more as weigh `bytes_max` together (`weight`) or fewer; the revision they were
        read at; and whether there are more behind them. Pages are read at different revisions: whoever reads all of them
        has the present state once the changes since the first page are applied.
        """

    async def changes(self, prefix: str, after_revision: int) -> tuple[int, list[Event]]:
        """All changes of keys under `prefix` after `after_revision`, oldest first, and the revision they are complete to.

        Several changes of one key may all be listed. Only a bounded number of past revisions is kept.

        Raises:
            Compacted: the history does not reach back to `after_revision`, or has not come to it, as after the
                database was replaced by another one. List again with `range`.
        """

    async def wait(self, after_revision: int, timeout_s: float, prefix: str = "") -> None:
        """Returns once a key under `prefix` has changed after `after_revision`, or after `timeout_s`, which is no error.

        A lease that runs out is a change like any other. It may return early: what has changed, `changes` tells.
        """

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """Compare-and-swap over any keys, atomically; all it writes has one revision, and nothing written is no revision.

        Raises:
            NotFound: a Put names a lease that does not exist.
            Exhausted: more than TXN_OPERATIONS_MAX compares and operations, more than TXN_BYTES_MAX bytes of values, or
                the database is full; etcd may have done it even then.
            ValueError: an empty key, or one key in two operations.
        """

    async def lease_grant(self, ttl_s: int) -> int:
        """A new lease of whole seconds, at least 1; returns its id, which was never one before.

        Its time counts from here or the last keepalive. A backend may give more (etcd: at least 2 s), and after a restart
        or a change of leader every lease has its full time anew: a lease ends late, never early.
        """

    async def lease_keepalive(self, lease_id: int) -> None:
        """Renews for its full time.

        Raises:
            NotFound: expired or revoked. A lease is never revived.
        """

    async def lease_revoke(self, lease_id: int) -> None:
        """Ends the lease and deletes its keys; one that does not exist is fine."""

    async def close(self) -> None:
        """Releases files and connections. Waiters return."""


def check_txn(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> None:
    """What every backend checks before it starts a transaction; raises as `KvStore.txn` says."""
    size = sum(len(each.value) for each in operations if isinstance(each, Put))
    if len(operations) + len(compares) > TXN_OPERATIONS_MAX or size > TXN_BYTES_MAX:
        raise Exhausted(f"a transaction of {len(operations)} operations and {size} bytes exceeds the limit")
    keys = [each.key for each in operations]
    if len(set(keys)) < len(keys) or not all(keys):
        raise ValueError("a transaction changes a key once, and no key is empty")


def weight(key: str, value: bytes) -> int:
    """About how many bytes a key takes in a message."""
    return len(key.encode()) + len(value) + KEY_OVERHEAD_BYTES


def prefix_end(prefix: str) -> str | None:
    """The least text above all that starts with `prefix`, by code points and so by UTF-8 bytes; None: there is none."""
    for last in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[last])
        if code < 0x10FFFF:
            following = 0xE000 if code == 0xD7FF else code + 1  # the surrogates between them are no characters
            return prefix[:last] + chr(following)
    return None
