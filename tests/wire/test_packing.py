"""Numbers that stand for values, packed for hundreds of keys at once: the short way and the long way say the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.wire.codec import pack_indexes, pack_numbered, unpack_indexes

SMALL = st.integers(0, 255)
LARGE = st.integers(0, 1 << 80)


@settings(derandomize=True, max_examples=50)
@given(st.one_of(st.lists(SMALL), st.lists(LARGE), st.lists(st.one_of(SMALL, LARGE))))
def test_each_value_is_packed_as_its_number(values: list[int]) -> None:
    numbers = {0: 0}
    for value in values:
        numbers.setdefault(value, len(numbers))
    packed = pack_numbered(values, numbers)
    assert packed == pack_indexes(numbers[value] for value in values)
    assert [list(numbers)[number] for number in unpack_indexes(packed)] == values


def test_all_small_values_at_once() -> None:
    numbers = {value: 255 - value for value in range(256)}
    assert list(unpack_indexes(pack_numbered(range(256), numbers))) == list(range(255, -1, -1))


def test_the_border_between_small_and_large() -> None:
    for large in (255, 256, 257):
        assert list(unpack_indexes(pack_numbered([large, 7, large], {0: 0, 7: 1, large: 2}))) == [2, 1, 2]
