"""The index of page locations: announcements in order, departures, and no state that was not announced."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.core.catalog import Catalog
from tensorcast_connector.errors import NotFound
from tensorcast_connector.types import WorkerId

A, B, C = WorkerId("a/1"), WorkerId("b/1"), WorkerId("c/1")
keys = st.lists(st.sampled_from([b"1", b"2", b"3", b"4"]), unique=True)


def test_announced_pages_are_found_until_they_are_removed() -> None:
    catalog = Catalog()
    catalog.announce(A, True, [b"1", b"2"], [])
    catalog.announce(B, True, [b"2"], [])
    assert catalog.locate([b"1", b"2", b"3"]) == [(A,), (A, B), ()]
    catalog.announce(A, False, [b"3"], [b"2"])
    assert catalog.locate([b"1", b"2", b"3"]) == [(A,), (B,), (A,)]
    catalog.announce(A, True, [b"4"], [])
    assert catalog.locate([b"1", b"2", b"3", b"4"]) == [(), (B,), (), (A,)]
    assert repr(catalog) == "<Catalog 2 pages at 2 workers>"


def test_a_worker_that_is_not_known_must_announce_everything() -> None:
    catalog = Catalog()
    with pytest.raises(NotFound, match=r"nothing is known of a/1 here"):
        catalog.announce(A, False, [b"1"], [])
    assert catalog.statistics() == {"catalog_pages": 0, "catalog_workers": 0}
    catalog.announce(A, True, [], [])
    catalog.announce(A, False, [b"1"], [])
    catalog.keep_only([B])
    with pytest.raises(NotFound):
        catalog.announce(A, False, [b"2"], [])


@settings(derandomize=True, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.booleans(), keys, keys, st.booleans()), max_size=20))
def test_against_a_set_per_worker(steps: list[tuple[WorkerId, bool, list[bytes], list[bytes], bool]]) -> None:
    catalog, model = Catalog(), dict[WorkerId, set[bytes]]()
    for worker, reset, added, removed, leaves in steps:
        if leaves:
            catalog.keep_only({A, B, C} - {worker})
            model.pop(worker, None)
        elif not reset and worker not in model:
            with pytest.raises(NotFound):
                catalog.announce(worker, reset, added, removed)
        else:
            catalog.announce(worker, reset, added, removed)
            model[worker] = (set() if reset else model[worker]) - set(removed) | set(added)
        catalog.check()
        for key in (b"1", b"2", b"3", b"4"):
            assert set(catalog.locate([key])[0]) == {each for each, held in model.items() if key in held}
