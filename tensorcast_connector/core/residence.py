"""Which artifacts are resident at one worker, which may go, and which go first.

Memory is *reserved* for what is being written or fetched, and then belongs to an artifact. Pins keep an artifact; so does
being the *keeper*, the copy that the cluster relies on: only copies that somebody else keeps are evictable, least recently
used first. No I/O and no clock: recency is the order of calls, and `now` is an argument.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from tensorcast_connector.config import ARTIFACTS_MAX
from tensorcast_connector.errors import Exhausted, NotFound


@dataclass(slots=True)
class _Resident:
    bytes: int
    keeper: bool
    tenant: str = ""
    pins: dict[str, float] = field(default_factory=dict)  # who pins it -> until when

    def pinned(self, now: float) -> bool:
        """Whether anybody does."""
        return any(until > now for until in self.pins.values())


class Residence:
    """See the module. `check` states the invariants.

    Args:
        bytes_max: what all artifacts here may have together.
        count_max: how many they may be, with what is being written or fetched.
        tenant_bytes_max: what those of one tenant may have together; 0: all of it.
    """

    def __init__(self, bytes_max: int, count_max: int = ARTIFACTS_MAX, tenant_bytes_max: int = 0) -> None:
        self.bytes_max = bytes_max
        self.tenant_bytes_max = tenant_bytes_max or bytes_max
        self._of_tenant: Counter[str] = Counter()  # bytes, reserved ones included
        self.count_max = count_max
        self._reserved: dict[Hashable, tuple[int, str]] = {}  # bytes and tenant
        self._resident: OrderedDict[str, _Resident] = OrderedDict()  # least recently used first
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<Residence {len(self._resident)} artifacts, {self.used_bytes} of {self.bytes_max} bytes>"

    def __contains__(self, artifact_id: str) -> bool:
        return artifact_id in self._resident

    def reserve(self, owner: Hashable, size: int, now: float, tenant: str = "") -> list[str]:
        """Takes memory for what is going to be written; the artifacts that have to go for it are forgotten and returned.

        Raises:
            Exhausted: there is not that much that may go, or the tenant has its share. Nothing has changed.
        """
        gone: list[str] = []
        free = self.bytes_max - self.used_bytes
        share = self.tenant_bytes_max - self._of_tenant[tenant]
        count = len(self._resident) + len(self._reserved)
        for artifact_id, each in self._resident.items():
            enough = free >= size and count - len(gone) < self.count_max
            if enough and share >= size:
                break
            if not each.keeper and not each.pinned(now) and (each.tenant == tenant or not enough):
                gone.append(artifact_id)
                free += each.bytes
                share += each.bytes if each.tenant == tenant else 0
        if free < size:
            raise Exhausted(
                f"{size} bytes for an artifact do not fit: {self.used_bytes} of {self.bytes_max} bytes are in use, and "
                f"{free - (self.bytes_max - self.used_bytes)} of these may go; delete or unpin something, or give the worker "
                "more with --artifacts"
            )
        if share < size:
            raise Exhausted(
                f"{size} bytes for an artifact of tenant {tenant!r} do not fit: it has {self._of_tenant[tenant]} of the "
                f"{self.tenant_bytes_max} bytes that one tenant may have at this worker (--tenant-bytes-max); delete or unpin "
                "something of it, or put at another worker"
            )
        if count - len(gone) >= self.count_max:
            raise Exhausted(
                f"{count} artifacts and uploads are at this worker, of {self.count_max} that it takes; delete or unpin "
                "something, put fewer and larger ones, or put at another worker"
            )
        for artifact_id in gone:
            self.forget(artifact_id)
        self._reserved[owner] = size, tenant
        self._of_tenant[tenant] += size
        self.used_bytes += size
        return gone

    def release(self, owner: Hashable) -> None:
        """What was reserved is not needed; fine if nothing was."""
        size, tenant = self._reserved.pop(owner, (0, ""))
        self._less(size, tenant)

    def _less(self, size: int, tenant: str) -> None:
        self.used_bytes -= size
        self._of_tenant[tenant] -= size
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def commit(self, owner: Hashable, artifact_id: str, keeper: bool) -> bool:
        """What `owner` reserved is that artifact now; False if it was here already, and the memory is free again."""
        size, tenant = self._reserved[owner]
        if artifact_id in self._resident:
            self.release(owner)
            self._resident[artifact_id].keeper |= keeper
            return False
        del self._reserved[owner]
        self._resident[artifact_id] = _Resident(size, keeper, tenant)
        return True

    def use(self, artifact_id: str) -> None:
        """Somebody reads it.

        Raises:
            NotFound: it is not here.
        """
        self._of(artifact_id)
        self._resident.move_to_end(artifact_id)

    def forget(self, artifact_id: str) -> None:
        """It is gone from here; fine if it was not here."""
        found = self._resident.pop(artifact_id, None)
        if found is not None:
            self._less(found.bytes, found.tenant)

    def keep(self, artifact_id: str, keeper: bool) -> None:
        """Whether the cluster relies on this copy."""
        self._of(artifact_id).keeper = keeper

    def keeps(self, artifact_id: str) -> bool:
        """Whether it does."""
        return self._of(artifact_id).keeper

    def pin(self, artifact_id: str, pin: str, until: float) -> None:
        """Keeps it here until then, or until `unpin`; the same pin again moves its end.

        Raises:
            NotFound: it is not here.
        """
        self._of(artifact_id).pins[pin] = until

    def unpin(self, artifact_id: str, pin: str) -> None:
        """Ends a pin; fine if there is none."""
        if artifact_id in self._resident:
            self._resident[artifact_id].pins.pop(pin, None)

    def prune(self, now: float) -> None:
        """Pins that have run out take no memory any more."""
        for each in self._resident.values():
            if each.pins:
                each.pins = {pin: until for pin, until in each.pins.items() if until > now}

    def pins(self, artifact_id: str, now: float) -> Collection[str]:
        """Who pins it."""
        found = self._resident.get(artifact_id)
        return [pin for pin, until in found.pins.items() if until > now] if found else []

    def _of(self, artifact_id: str) -> _Resident:
        found = self._resident.get(artifact_id)
        if found is None:
            raise NotFound(f"artifact {artifact_id} is not resident here")
        return found

    @property
    def artifacts(self) -> Collection[str]:
        """All that are resident, least recently used first."""
        return self._resident.keys()

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        return {
            "artifacts": len(self._resident),
            "artifact_bytes_used": self.used_bytes,
            "artifact_bytes_max": self.bytes_max,
        }

    def check(self) -> None:
        """Raises AssertionError unless the sums are right."""
        parts = [*self._reserved.values(), *((each.bytes, each.tenant) for each in self._resident.values())]
        assert self.used_bytes == sum(size for size, _ in parts) == self._of_tenant.total()
        for tenant, used in self._of_tenant.items():
            assert 0 <= used == sum(size for size, whose in parts if whose == tenant) <= self.tenant_bytes_max
        assert 0 <= self.used_bytes <= self.bytes_max
