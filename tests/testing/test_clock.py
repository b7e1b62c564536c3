"""The settable clock."""

import pytest

from tensorcast_connector.testing.clock import SettableClock


def test_it_moves_only_when_told() -> None:
    now = SettableClock(5)
    assert (now(), now()) == (5, 5)
    now.advance(2.5)
    assert now() == 7.5 and repr(now) == "<SettableClock 7.5 s>"
    now.set(1)
    assert now() == 1
    with pytest.raises(AssertionError):
        now.advance(-1)
