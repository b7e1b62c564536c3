"""What a worker and the process that owns its device memory say to each other, one message in each packet of a socket pair.

The child begins: DevicesReady, or DevicesRefused and its end. Then it is asked, and answers in the order in which it was asked.
Both are of one installation, so there are no versions.
"""

from typing import TypeVar

import msgspec

from tensorcast_connector.errors import ProtocolError

T = TypeVar("T")


class DeviceMessage(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages; the tag on the wire is the class name."""


class DeviceInfo(msgspec.Struct, frozen=True, array_like=True):
    """A device: its name as this process counts, what it is called whoever looks, and its memory."""

    name: str
    identity: str
    total_bytes: int
    free_bytes: int


class DevicesReady(DeviceMessage):
    """The child has its devices."""

    devices: list[DeviceInfo]


class Refused(DeviceMessage):
    """Instead of any answer: code and text of an error. `fatal`: the child ends with it."""

    code: str
    message: str
    fatal: bool = False


class MakeCopy(DeviceMessage):
    """Copies `bytes` bytes of the memory whose descriptor comes with this (of none if there are none) to a device."""

    number: int  # by which it is freed
    device: str
    bytes: int


class CopyMade(DeviceMessage):
    """Answer to MakeCopy, when all is there."""

    handle: bytes


class FreeCopy(DeviceMessage):
    """Gives the memory back."""

    number: int


class CopyFreed(DeviceMessage):
    """Answer to FreeCopy."""


encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[MakeCopy | FreeCopy] = msgspec.msgpack.Decoder(MakeCopy | FreeCopy)
_answers: msgspec.msgpack.Decoder[DevicesReady | Refused | CopyMade | CopyFreed] = msgspec.msgpack.Decoder(
    DevicesReady | Refused | CopyMade | CopyFreed
)


def decode_request(packet: bytes) -> MakeCopy | FreeCopy:
    """What a worker asks; raises ProtocolError."""
    return _decoded(_requests, packet)


def decode_answer(packet: bytes) -> DevicesReady | Refused | CopyMade | CopyFreed:
    """What the child says; raises ProtocolError."""
    return _decoded(_answers, packet)


def _decoded(decoder: msgspec.msgpack.Decoder[T], packet: bytes) -> T:
    try:
        return decoder.decode(packet)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"between a worker and the owner of its device memory: {error}") from error
