"""The queue of requests that wait for room."""

import pytest

from smetric_router.errors import Overloaded
from smetric_router.state.waiting import WaitingRoom


def test_first_come_first_served_within_a_model():
    room: WaitingRoom[str] = WaitingRoom(10, 5)
    for at, name in enumerate(("a1", "b1", "a2")):
        room.enter(name[0], name, at)
    assert (room.models(), room.first("a"), room.first("b"), room.first("c"), len(room)) == (
        ["a", "b"], "a1", "b1", None, 3,
    )  # fmt: skip
    room.served("a")
    assert room.models() == ["b", "a"]
    room.leave("a1")
    assert room.first("a") == "a2"
    room.leave("a1")
    room.leave("a2")
    room.leave("b1")
    room.served("b")
    assert (room.models(), len(room), room.has("a"), bool(room)) == ([], 0, False, False)


def test_deadlines():
    room: WaitingRoom[str] = WaitingRoom(10, 5)
    room.enter("a", "a1", 0)
    room.enter("b", "b1", 1)
    room.enter("a", "a2", 2)
    assert list(room.overdue(4.9)) == []
    assert list(room.overdue(6)) == ["a1", "b1"]
    assert list(room.overdue(7)) == ["a1", "a2", "b1"]


@pytest.mark.parametrize("places", [0, 2])
def test_a_full_queue_refuses(places):
    room: WaitingRoom[int] = WaitingRoom(places, 5)
    for n in range(places):
        room.enter("", n, 0)
    with pytest.raises(Overloaded) as error:
        room.enter("", 99, 0)
    assert (error.value.status, error.value.retry_after_s) == (429, 1)
    assert len(room) == places
