"""A full listener: who makes room, and that those who are at work and those who hold something stay."""

import random
import resource
from dataclasses import dataclass

import pytest

from tensorcast_connector.config import OPEN_FILES_MIN, SILENCE_MAX_S
from tensorcast_connector.net.admission import Stage, allow_open_files, least_missed

NOW = 1000.0
OLD = NOW - SILENCE_MAX_S


@dataclass(eq=False)
class Caller:
    """A connection as a listener sees it."""

    host: str = "a"
    heard_at: float = NOW
    stage: Stage = Stage.ASKED


UNIX = ""
FULL: dict[str, tuple[list[Caller], Caller, int | None]] = {
    "all are at work": ([Caller(), Caller()], Caller(), None),
    "one said nothing for long": ([Caller(), Caller(heard_at=OLD), Caller()], Caller(), 1),
    "nearly as long is not as long": ([Caller(heard_at=OLD + 0.01), Caller()], Caller(), None),
    "the longest first": ([Caller(heard_at=OLD - 1), Caller(heard_at=OLD - 9)], Caller(), 1),
    "without a hello before those with one": (
        [Caller(heard_at=OLD - 9, stage=Stage.GREETED), Caller(heard_at=OLD, stage=Stage.UNGREETED)], Caller(), 1),
    "who never asked before who did": (
        [Caller(heard_at=OLD - 9), Caller(heard_at=OLD, stage=Stage.GREETED)], Caller(), 1),
    "an engine that stands still may hold something": ([Caller(UNIX, OLD - 900)], Caller(UNIX), None),
    "on a Unix socket those who never asked": (
        [Caller(UNIX, OLD - 900), Caller(UNIX, OLD, Stage.GREETED), Caller(UNIX, OLD, Stage.UNGREETED)], Caller(UNIX), 2),
    "nobody at all": ([], Caller(), None),
    "a host with the most makes room for another": ([Caller("b"), Caller("a"), Caller("b", NOW - 1)], Caller("c"), 2),
    "and for one that has fewer": ([Caller("b"), Caller("b"), Caller("b"), Caller("a")], Caller("a"), 0),
    "not for one that has about as many": ([Caller("b"), Caller("b"), Caller("a")], Caller("a"), None),
    "the newcomer's own host has the most": ([Caller("b"), Caller("b"), Caller("a")], Caller("b"), None),
    "silence comes before shares": ([Caller("b"), Caller("b"), Caller("b"), Caller("a", OLD)], Caller("c"), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL)
def test_who_makes_room(name: str) -> None:
    accepted, newcomer, expected = FULL[name]
    found = least_missed(accepted, newcomer, NOW)
    assert found is (None if expected is None else accepted[expected])


def test_hosts_end_up_with_equal_shares() -> None:
    accepted, chance = [Caller("attacker") for _ in range(60)], random.Random(1)
    for _ in range(2000):
        newcomer = Caller(chance.choice(["attacker", "attacker", "attacker", "b", "c"]))
        if victim := least_missed(accepted, newcomer, NOW):
            accepted[accepted.index(victim)] = newcomer
    shares = [sum(each.host == host for each in accepted) for host in ("attacker", "b", "c")]
    assert max(shares) - min(shares) <= 2


def test_the_limit_of_open_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(OPEN_FILES_MIN, before[1]), before[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == max(before[0], min(OPEN_FILES_MIN, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
