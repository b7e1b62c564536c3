"""Replicas in the memory of devices: what is found, what stays, what goes."""

import random

import pytest

from tensorcast_connector.config import DEVICE_PAGE_BYTES
from tensorcast_connector.core.replicas import Replica, Replicas, room_for
from tensorcast_connector.errors import Exhausted, InvalidArgument, NotFound

PAGE = DEVICE_PAGE_BYTES


def table(pages: int = 4, *devices: str) -> Replicas:
    return Replicas(devices or ("cuda:0", "cuda:1"), pages * PAGE)


def put(replicas: Replicas, artifact: str, device: str = "cuda:0", pages: int = 1) -> Replica:
    """One that is whole; what had to go for it is freed."""
    made, gone = replicas.reserve(artifact, device, pages * PAGE)
    for each in gone:
        replicas.freed(each.number)
    assert replicas.filled(made.number, b"handle", b"header")
    replicas.check()
    return made


def test_a_replica_is_found_by_artifact_and_device_once_it_is_whole() -> None:
    replicas = table()
    made, gone = replicas.reserve("a", "cuda:0", 10)
    assert not gone and replicas.find("a", "cuda:0") is None and replicas.used_bytes("cuda:0") == PAGE
    assert replicas.filled(made.number, b"handle", b"header")
    assert replicas.find("a", "cuda:0") is made and replicas.find("a", "cuda:1") is None
    assert replicas.listed("a") == [made] == replicas.listed() and replicas.artifacts == {"a"}
    assert replicas.statistics()["cuda:0"] == {"replicas": 1, "open": 0, "bytes_used": PAGE, "bytes_max": 4 * PAGE}


def test_the_one_that_was_opened_longest_ago_goes_first_and_none_that_is_open() -> None:
    replicas = table()
    a, b, c, d = (put(replicas, name) for name in "abcd")
    other = put(replicas, "a", "cuda:1", pages=4)
    for each in (b, a):
        replicas.open(each.number, "engine")
    assert replicas.close(b.number, "engine") == []
    made, gone = replicas.reserve("e", "cuda:0", 2 * PAGE)
    assert gone == [c, d] and replicas.find("c", "cuda:0") is None and replicas.evictions == 2
    assert replicas.used_bytes("cuda:0") == 6 * PAGE  # until they are freed
    for each in gone:
        replicas.freed(each.number)
    replicas.filled(made.number, b"handle", b"header")
    assert put(replicas, "f").whole and replicas.find("b", "cuda:0") is None and replicas.find("a", "cuda:0") is a
    with pytest.raises(Exhausted, match=f"cuda:0 has no room for {4 * PAGE} bytes"):
        replicas.reserve("g", "cuda:0", 4 * PAGE)
    assert replicas.find("e", "cuda:0") is made, "nothing went for what got no room"
    assert replicas.find("a", "cuda:1") is other
    replicas.check()


def test_what_never_fits_and_what_is_nowhere_is_refused() -> None:
    replicas = table()
    with pytest.raises(
        InvalidArgument, match=r"takes 10485760 on cuda:0, which has 8388608 for all \(--device-memory\)"
    ):
        replicas.reserve("a", "cuda:0", 4 * PAGE + 1)
    with pytest.raises(InvalidArgument, match="no device 'cuda:7'; there are cuda:0, cuda:1"):
        replicas.reserve("a", "cuda:7", 1)
    with pytest.raises(InvalidArgument, match=r"it has none \(--devices\)"):
        Replicas((), PAGE).check_device("cuda:0")
    assert room_for(0) == room_for(1) == PAGE and room_for(PAGE + 1) == 2 * PAGE


def test_a_deleted_artifact_goes_with_the_last_who_has_it_open() -> None:
    replicas = table()
    a, idle = put(replicas, "a"), put(replicas, "a", "cuda:1")
    filling, _ = replicas.reserve("a", "cuda:0", 1)
    for opener in ("x", "x", "y"):
        replicas.open(a.number, opener)
    assert replicas.forget("a") == [idle] and replicas.forget("a") == []
    assert replicas.find("a", "cuda:0") is None and replicas.artifacts == set()
    assert not replicas.filled(filling.number, b"handle", b"header"), "it is not wanted any more"
    assert replicas.end("y") == [] and replicas.close(a.number, "x") == []
    assert replicas.close(a.number, "x") == [a]
    for each in (a, idle, filling):
        replicas.freed(each.number)
        replicas.freed(each.number)
    assert replicas.used_bytes("cuda:0") == replicas.used_bytes("cuda:1") == 0
    replicas.check()


def test_who_closes_what_he_has_not_opened_is_told() -> None:
    replicas = table()
    a = put(replicas, "a")
    replicas.open(a.number, "x")
    for number, opener in [(a.number, "y"), (99, "x")]:
        with pytest.raises(NotFound):
            replicas.close(number, opener)
    assert replicas.close(a.number, "x") == []
    with pytest.raises(NotFound):
        replicas.close(a.number, "x")


def test_when_the_owner_dies_all_is_gone() -> None:
    replicas = table()
    a = put(replicas, "a")
    filling, _ = replicas.reserve("b", "cuda:1", 1)
    replicas.open(a.number, "x")
    assert replicas.lose() == 2 and replicas.listed() == [] and replicas.used_bytes("cuda:0") == 0
    assert not replicas.filled(filling.number, b"handle", b"header")
    with pytest.raises(NotFound, match="has died"):
        replicas.close(a.number, "x")
    assert put(replicas, "a").number > filling.number, "numbers are not given again"


@pytest.mark.parametrize("seed", range(20))
def test_it_adds_up_whatever_happens(seed: int) -> None:
    chance, replicas = random.Random(seed), table(6)
    opened: list[tuple[int, str]] = []
    for _ in range(400):
        what = chance.randrange(7)
        artifact, device = chance.choice("abcdef"), chance.choice(replicas.devices)
        gone: list[Replica] = []
        found = replicas.find(artifact, device)
        if what < 2 and found is None:
            try:
                made, gone = replicas.reserve(artifact, device, chance.randrange(3 * PAGE))
            except Exhausted:
                assert any(each.openers or not each.whole for each in replicas._replicas.values())
            else:
                if chance.random() < 0.2 or not replicas.filled(made.number, b"handle", b"header"):
                    replicas.freed(made.number)
        elif what == 2 and found is not None:
            opened.append((found.number, chance.choice("xyz")))
            replicas.open(*opened[-1])
        elif what == 3 and opened:
            gone = replicas.close(*opened.pop(chance.randrange(len(opened))))
        elif what == 4:
            gone = replicas.forget(artifact)
        elif what == 5 and chance.random() < 0.3:
            opener = chance.choice("xyz")
            gone = replicas.end(opener)
            opened = [each for each in opened if each[1] != opener]
        elif what == 6 and chance.random() < 0.05:
            replicas.lose()
            opened.clear()
        assert not any(each.openers for each in gone)
        for each in gone:
            replicas.freed(each.number)
        replicas.check()
        assert sum(sum(each.openers.values()) for each in replicas._replicas.values()) == len(opened)
