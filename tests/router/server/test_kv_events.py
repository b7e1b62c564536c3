"""What engines publish, decoded."""

import random

import msgspec
import pytest

from smetric_router.blocks import BlocksCleared, BlocksRemoved, BlocksStored, engine_key, stored_blocks
from smetric_router.server.kv_events import GROUPS_MAX, Arrival, Groups, Order, decode

from ..publisher import Cleared, Removed, Stored, batch


def test_both_forms_of_hashes() -> None:
    as_bytes = decode(batch(Stored([b"a" * 32, b"b" * 32], b"p" * 32, [1, 2, 3, 4], 2), rank=3))
    assert as_bytes.rank == 3
    assert as_bytes.events == [stored_blocks([b"a" * 32, b"b" * 32], b"p" * 32, [1, 2, 3, 4], 2)]
    numbers = decode(batch(Stored([-5, 2**63], None, [1, 2], 1, medium=None), Removed([-5]), Cleared(), rank=None))
    assert numbers.rank == 0
    assert numbers.events == [
        stored_blocks([-5, 2**63], None, [1, 2], 1),
        BlocksRemoved((engine_key(-5),)),
        BlocksCleared(),
    ]


def test_adapter_salt_and_images_wherever_they_stand() -> None:
    """vLLM repeats the adapter in the extra keys of each block and the salt in those of the first; SGLang has a field for it."""
    keys = [["ad", ["image", 3], "salt"], ["ad"], ["ad", ["image", -1]]]
    (event,) = decode(batch(Stored([1, 2, 3], None, [1, 2, 3], 1, lora_name="ad", extra_keys=keys))).events
    assert isinstance(event, BlocksStored)
    assert (event.lora, event.salt) == ("ad", "salt")
    assert event.extras == (msgspec.msgpack.encode([["image", 3]]), b"", msgspec.msgpack.encode([["image", -1]]))
    (event,) = decode(batch(Stored([1], None, [1], 1, cache_salt="salt"))).events
    assert isinstance(event, BlocksStored)
    assert (event.salt, event.extras) == ("salt", None)
    (event,) = decode(batch(Stored([1], None, [1], 1, extra_keys=[["salt"]]))).events
    assert isinstance(event, BlocksStored)
    assert (event.salt, event.extras) == ("salt", None)


def test_pairs_of_tokens() -> None:
    """SGLang's pages with a draft model: each token is told with the one behind it."""
    found = decode(batch(Stored([7, 8], 6, [[1, 2], [2, 3], [3, 4], [4, 5]], 2, cache_salt="salt"), Removed([7])))
    assert found.events == [
        stored_blocks([7, 8], 6, [1, 2, 3, 4], 2, salt="salt"),
        BlocksRemoved((engine_key(7),)),
    ]


def test_what_means_nothing_here_is_counted_and_the_rest_is_taken() -> None:
    strange = {"type": "SomethingNew", "x": 1}
    odd = [
        Stored([1], None, [[1, 2, 3]], 1),
        Stored([1], None, [[1, 2], 3], 2),
        Stored([1], None, [-1], 1),
        Stored([1], None, [1 << 40], 1),
        Stored([1], None, [1], 1, group_idx=1),
        Stored([1], None, [1], 1, locality="REMOTE"),
        Stored(["text"], None, [1], 1),
        Stored([1], None, [1], 1, extra_keys=[None, None]),
        Removed([1], group_idx=2),
    ]
    found = decode(batch(strange, *odd, 7, None, Cleared()))
    assert found.events == [BlocksCleared()]
    assert found.ignored == len(odd) + 3


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"{}", batch(rank=-1), batch(rank=1 << 40), b"\x91" * 100_000])
def test_garbage_is_told_from_events(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a batch|no data-parallel rank"):
        decode(payload)


def test_ten_thousand_mutations_raise_nothing_else() -> None:
    draw = random.Random(5)
    whole = batch(Stored([b"a" * 32, 5], None, [1, 2, 3, 4], 2, extra_keys=[["x"], None]), Removed([7]), Cleared())
    decoded = 0
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            match draw.randrange(3):
                case 0:
                    data[draw.randrange(len(data))] = draw.randrange(256)
                case 1:
                    del data[draw.randrange(len(data)) :]
                case _:
                    at = draw.randrange(len(data) + 1)
                    data[at:at] = draw.randbytes(draw.randrange(9))
            if not data:
                break
        try:
            decode(bytes(data))
            decoded += 1
        except ValueError:
            pass
    assert 0 < decoded < 10_000


FULL, WINDOW, STATE = "full_attention", "sliding_window", "mamba"


def group(number: int, kind: str | None, key: int = 1) -> Stored:
    return Stored([key], None, [key], 1, group_idx=number, kv_cache_spec_kind=kind)


@pytest.mark.parametrize(
    ("stored", "deciding"),
    [
        ([group(0, FULL)], 0),
        ([group(0, FULL), group(1, WINDOW)], 0),
        ([group(0, WINDOW), group(1, FULL), group(2, WINDOW)], 1),
        ([group(0, STATE), group(1, STATE), group(2, "mla_attention")], 2),
        ([group(0, None), group(1, None)], 0),
        ([group(1, None), group(0, None)], 0),
        ([group(0, WINDOW)], None),
        ([group(0, STATE), group(1, WINDOW)], None),
    ],
)
def test_of_several_groups_the_one_that_needs_all_of_a_prompt_decides(
    stored: list[Stored], deciding: int | None
) -> None:
    groups = Groups()
    batch_of_all = decode(batch(*stored), groups)
    assert groups.deciding == deciding
    assert groups.undecided is (deciding is None)
    assert len(batch_of_all.events) == (deciding is not None)
    removed = decode(batch(*(Removed([1], group_idx=each.group_idx) for each in stored)), groups)
    assert len(removed.events) == (deciding is not None)


def test_groups_without_end_are_no_engine() -> None:
    groups = Groups()
    decode(batch(*(group(at, WINDOW) for at in range(10 * GROUPS_MAX))), groups)
    assert len(groups.kinds) == GROUPS_MAX


def test_the_order_of_numbers() -> None:
    order = Order()
    assert [order.live(at) for at in (5, 6, 8)] == [Arrival.NEXT, Arrival.NEXT, Arrival.GAP]
    assert [order.replayed(at) for at in (6, 7, 8, 9)] == [Arrival.KNOWN, Arrival.NEXT, Arrival.NEXT, Arrival.NEXT]
    assert [order.live(at) for at in (9, 10)] == [Arrival.KNOWN, Arrival.NEXT], "read in the replay already"
    assert order.live(10) is Arrival.RESTART
    order.restart()
    assert [order.live(at) for at in (0, 1, 3)] == [Arrival.NEXT, Arrival.NEXT, Arrival.GAP]
