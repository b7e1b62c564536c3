"""Frozen values that every layer shares. Nothing here does I/O, and nothing here knows the wire."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType

WorkerId = NewType("WorkerId", str)
"""One run of one worker process: its name and a random incarnation, `host-a/5f2c91d0`."""

InstanceId = NewType("InstanceId", str)
"""One run of one engine."""

PageKey = NewType("PageKey", bytes)
"""A keyspace (16 bytes) followed by the engine's block hash; see core/identity.py."""

KEYSPACE_BYTES = 16


def page_key(keyspace: bytes, block_hash: bytes) -> PageKey:
    """The key of the page that holds `block_hash` in `keyspace`."""
    return PageKey(keyspace + block_hash)


class Token(NamedTuple):
    """Fencing token of a shard lease, strictly increasing per shard for ever (TensorCast, section 4.2).

    The incarnation is the store's: a restored backup has a higher one, so that tokens granted after the backup was
    made never outrank those granted after it was restored.
    """

    incarnation: int
    revision: int


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [offset, offset + length) of an arena."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener is: a Unix socket path or a TCP host and port."""

    scheme: Literal["unix", "tcp"]
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of the same host can be there."""
        return self.scheme == "unix" or self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
