"""Which artifacts are in the memory of devices, who has them open, and which go when room is needed.

A replica is one allocation with the bytes of one artifact. It is reserved while it is filled, then found by artifact and device,
and held by those who have opened it; when room is needed the one goes that nobody has open and that was opened longest ago.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tensorcast_connector.config import DEVICE_PAGE_BYTES, DEVICE_REPLICAS_MAX
from tensorcast_connector.errors import Exhausted, InvalidArgument, NotFound


@dataclass(slots=True, eq=False)
class Replica:
    """One of them.

    Attributes:
        number: never given to another one.
        artifact: its id.
        size: bytes that it takes on the device.
        handle: by which another process finds the memory; empty while it is filled.
        header: of the artifact, encoded.
        openers: who has it open, how often.
        doomed: nobody else is to open it, and it goes with the last one who has.
    """

    number: int
    artifact: str
    device: str
    size: int
    handle: bytes = b""
    header: bytes = b""
    openers: Counter[Hashable] = field(default_factory=Counter)
    doomed: bool = False

    @property
    def whole(self) -> bool:
        """Whether it can be opened."""
        return bool(self.handle) and not self.doomed


def room_for(size: int) -> int:
    """What an artifact of `size` bytes takes on a device."""
    return max(1, -(-size // DEVICE_PAGE_BYTES)) * DEVICE_PAGE_BYTES


class Replicas:
    """See the module. What has to be freed is returned, and counts until `freed`.

    Args:
        devices: their names.
        bytes_max: on each.
    """

    def __init__(self, devices: Sequence[str], bytes_max: int) -> None:
        self.devices = tuple(devices)
        self.bytes_max = bytes_max
        self._numbers = itertools.count(1)
        self._replicas: dict[int, Replica] = {}  # the one that was opened longest ago first
        self._used = dict.fromkeys(devices, 0)
        self.evictions = 0

    def __repr__(self) -> str:
        return f"<Replicas {len(self._replicas)} on {', '.join(self.devices) or 'no device'}>"

    def check_device(self, device: str) -> None:
        """Raises InvalidArgument if there is no such device here."""
        if device not in self.devices:
            there = f"there are {', '.join(self.devices)}" if self.devices else "it has none (--devices)"
            raise InvalidArgument(f"this worker has no device {device[:40]!r}; {there}")

    def find(self, artifact: str, device: str) -> Replica | None:
        """The one that can be opened."""
        return next(
            (each for each in self._replicas.values() if each.whole and (each.artifact, each.device) == (artifact, device)),
            None,
        )  # fmt: skip

    def reserve(self, artifact: str, device: str, size: int) -> tuple[Replica, list[Replica]]:
        """Room for a replica, to be filled; and those that have to be freed before.

        Raises:
            InvalidArgument: there is no such device, or it can never have room.
            Exhausted: all that is there is open, or being filled.
        """
        self.check_device(device)
        needed = room_for(size)
        if needed > self.bytes_max:
            raise InvalidArgument(
                f"an artifact of {size} bytes takes {needed} on {device}, which has {self.bytes_max} for all (--device-memory)"
            )
        gone: list[Replica] = []
        room = self.bytes_max - self._used[device]
        idle = [each for each in self._replicas.values() if each.device == device and each.whole and not each.openers]
        while room < needed and idle:
            gone.append(idle.pop(0))
            room += gone[-1].size
        if room < needed or len(self._replicas) - len(gone) >= DEVICE_REPLICAS_MAX:
            raise Exhausted(
                f"{device} has no room for {needed} bytes: of {self.bytes_max} {self._used[device]} are used, "
                "and what engines have open stays"
            )
        self._doom(gone)
        self.evictions += len(gone)
        made = Replica(next(self._numbers), artifact, device, needed)
        self._replicas[made.number] = made
        self._used[device] += needed
        return made, gone

    def filled(self, number: int, handle: bytes, header: bytes) -> bool:
        """It is whole; whether it is wanted still, else it is to be freed."""
        replica = self._replicas.get(number)
        if replica is None:
            return False  # its memory has been lost meanwhile
        replica.handle, replica.header = handle, header
        return not replica.doomed

    def open(self, number: int, opener: Hashable) -> None:
        """It stays until it is closed as often. Only what `find` has found."""
        replica = self._replicas.pop(number)
        assert replica.whole
        replica.openers[opener] += 1
        self._replicas[number] = replica  # behind all others

    def close(self, number: int, opener: Hashable) -> list[Replica]:
        """What has to be freed then.

        Raises:
            NotFound: its memory has gone meanwhile, or this opener has not opened it (any more).
        """
        replica = self._replicas.get(number)
        if replica is None or not replica.openers[opener]:
            raise NotFound(f"replica {number} is not there any more, or not open: the process that owned it has died")
        replica.openers -= Counter({opener: 1})
        return [replica] if replica.doomed and not replica.openers else []

    def end(self, opener: Hashable) -> list[Replica]:
        """That opener has gone; what has to be freed."""
        gone = []
        for replica in self._replicas.values():
            if replica.openers.pop(opener, 0) and replica.doomed and not replica.openers:
                gone.append(replica)
        return gone

    def forget(self, artifact: str) -> list[Replica]:
        """The artifact was deleted: nobody opens it any more. What has to be freed at once."""
        mine = [each for each in self._replicas.values() if each.artifact == artifact and not each.doomed]
        self._doom(mine)
        return [each for each in mine if each.handle and not each.openers]

    @staticmethod
    def _doom(replicas: Sequence[Replica]) -> None:
        for each in replicas:
            each.doomed = True

    def freed(self, number: int) -> None:
        """Its memory can be used again; fine if it was lost."""
        if (replica := self._replicas.pop(number, None)) is not None:
            self._used[replica.device] -= replica.size

    def lose(self) -> int:
        """The memory of all devices has gone; how many replicas were in it."""
        lost = len(self._replicas)
        self._replicas.clear()
        self._used = dict.fromkeys(self.devices, 0)
        return lost

    @property
    def artifacts(self) -> set[str]:
        """Whose replicas can be opened or are being filled."""
        return {each.artifact for each in self._replicas.values() if not each.doomed}

    def listed(self, artifact: str = "") -> list[Replica]:
        """Those that can be opened, of one artifact or of all."""
        return [each for each in self._replicas.values() if each.whole and artifact in ("", each.artifact)]

    def used_bytes(self, device: str) -> int:
        """What is taken there, by what is being filled and freed too."""
        return self._used[device]

    def statistics(self) -> dict[str, dict[str, int]]:
        """By device: how many replicas can be opened, of these how many are open, their memory, and what they may have."""
        return {
            device: {
                "replicas": sum(each.device == device for each in self.listed()),
                "open": sum(each.device == device and bool(each.openers) for each in self.listed()),
                "bytes_used": self._used[device],
                "bytes_max": self.bytes_max,
            }
            for device in self.devices
        }

    def check(self) -> None:
        """Raises AssertionError if it contradicts itself."""
        for device, used in self._used.items():
            assert used == sum(each.size for each in self._replicas.values() if each.device == device), device
            assert used <= self.bytes_max, (device, used)
        whole = [(each.artifact, each.device) for each in self._replicas.values() if each.whole]
        assert len(set(whole)) == len(whole), "two replicas of one artifact on one device"
        assert all(number == each.number for number, each in self._replicas.items())
