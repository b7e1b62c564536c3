"""An index of millions of chunks stops nobody: no collector looks through it, no table is copied as a whole."""

import gc
import random
import sys

from smetric_router.state.digest_map import DigestMap
from smetric_router.state.prefix_index import PrefixIndex
from smetric_router.state.use_order import UseOrder
from smetric_router.types import Chain


class Thing:
    def __init__(self, name: str) -> None:
        self.name = name
        self.older: object = None
        self.newer: object = None


def names(order: UseOrder[Thing]) -> str:
    return "".join(each.name for each in order.newest_first())


def test_the_order_of_use() -> None:
    order: UseOrder[Thing] = UseOrder()
    a, b, c = map(Thing, "abc")
    assert order.oldest is None and names(order) == "" and a not in order
    for each in (a, b, c, a, a):
        order.touch(each)
    assert names(order) == "acb" and order.oldest is b and c in order
    order.drop(c)
    assert names(order) == "ab" and c not in order
    order.drop(b)
    order.drop(a)
    assert order.oldest is None and names(order) == ""
    order.touch(c)
    assert names(order) == "c" and order.oldest is c


def test_a_table_of_many_digests_has_only_small_dictionaries() -> None:
    draw, table = random.Random(1), DigestMap[str]()
    digests = [draw.getrandbits(64) for _ in range(50_000)]
    table.put(digests, "a")
    table.put(digests[:3], "b")
    assert len(table) == len(digests) and table.get(digests[0]) == "b" and table.get(digests[3]) == "a"
    assert max(map(len, table.parts)) < len(digests) / 128
    table.drop(digests[1:])
    assert table.values() == ["b"] and table.get(digests[1]) is None


def used(index: PrefixIndex, sessions: int) -> None:
    draw = random.Random(2)
    shared = [draw.getrandbits(64) for _ in range(4)]
    for _ in range(sessions):
        digests = (*shared, *(draw.getrandbits(64) for _ in range(8)))
        for count in (6, 12):
            chain = Chain(digests[:count], tuple(range(1, count + 1)))
            index.settle(index.record(draw.choice("ab"), chain), computed=True)


def test_the_collector_of_cycles_knows_nothing_of_what_is_in_the_index() -> None:
    index = PrefixIndex("ab", 100_000)
    used(index, 10)
    gc.collect()
    before = len(gc.get_objects())
    used(index, 2_000)
    gc.collect()
    assert len(gc.get_objects()) - before < 100, "2,000 segments, and as many holders"


def test_what_is_dropped_is_freed_without_a_collector() -> None:
    index = PrefixIndex("ab", 1_000)
    used(index, 500)
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        used(index, 2_000)
        assert sys.getallocatedblocks() - before < 2_000, "each of 2,000 sessions takes 30 or more"
        index.forget("a")
        index.forget("b")
        assert sys.getallocatedblocks() < before, "nothing is left"
    finally:
        gc.enable()
    index.check()
