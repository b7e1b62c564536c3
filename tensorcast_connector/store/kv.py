"""The port to the metadata database: etcd's data model, so that SQLite serves one machine and etcd a cluster.

Keys are text, values bytes. Every change raises one global revision. A key may hang on a lease and goes with it.
Watches join this port together with the etcd backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

TXN_OPERATIONS_MAX = 128
TXN_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as read: its value, the revisions of its creation and last change, and its lease (0 = none)."""

    key: str
    value: bytes
    create_revision: int
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
        """All keys that start with `prefix`, in order, and the revision they were read at."""

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """Compare-and-swap over any keys, atomically; all it writes has one revision, and nothing written is no revision.

        Raises:
            NotFound: a Put names a lease that does not exist.
            Exhausted: more than TXN_OPERATIONS_MAX operations or TXN_BYTES_MAX bytes.
        """

    async def lease_grant(self, ttl_s: int) -> int:
        """A new lease of whole seconds; returns its id."""

    async def lease_keepalive(self, lease_id: int) -> None:
        """Renews for its full time.

        Raises:
            NotFound: expired or revoked. A lease is never revived.
        """

    async def lease_revoke(self, lease_id: int) -> None:
        """Ends the lease and deletes its keys; one that does not exist is fine."""

    async def close(self) -> None:
        """Releases files and connections."""
