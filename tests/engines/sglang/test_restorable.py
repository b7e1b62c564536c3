"""Which prefixes can be restored: checked against a plain search over all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_connector.engines.sglang.restorable import Presence, restorable

PRESENCE = st.builds(Presence, st.lists(st.booleans(), max_size=12), st.one_of(st.none(), st.integers(1, 5)))


@pytest.mark.slow
@given(st.integers(0, 12), st.dictionaries(st.sampled_from("abc"), PRESENCE))
def test_as_a_plain_search_finds_it(kv_pages: int, pools: dict[str, Presence]) -> None:
    def serves(presence: Presence, length: int) -> bool:
        first = 0 if presence.window is None else max(0, length - presence.window)
        return length <= len(presence.there) and all(presence.there[first:length])

    lengths, longest = restorable(kv_pages, pools)
    candidates = range(1, kv_pages + 1)
    assert lengths == [n for n in candidates if all(serves(each, n) for each in pools.values())]
    assert longest == {name: max((n for n in candidates if serves(each, n)), default=0) for name, each in pools.items()}
