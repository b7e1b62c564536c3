"""Sets of workers by number: each set has one, for as long as some page has it."""

import random

import numpy as np
import pytest

from tensorcast_connector.core.holder_sets import NOBODY, Holders, HolderSets
from tensorcast_connector.core.page_table import Values
from tests.core.made import A, B, C


def numbers(*each: int) -> Values:
    return np.array(each, dtype=np.uint32)


def test_a_set_has_one_number_which_is_free_when_no_page_has_it() -> None:
    sets = HolderSets()
    only_a = sets.change(numbers(0, 0, 0), lambda _: frozenset([A]))
    assert only_a.tolist() == [1, 1, 1] and sets.names(1) == [A]
    both = sets.change(only_a[:2], lambda holders: holders | {B})
    assert both.tolist() == [2, 2] and sets.of(2) == {A, B} and sets.names(2) == [A, B]
    sets.check(numbers(1, 2, 2))
    assert sets.having(B).tolist() == [False, False, True]
    assert sets.change(numbers(1), lambda holders: holders | {B}).tolist() == [2]
    sets.check(numbers(2, 2, 2))
    assert sets.change(numbers(0), lambda _: frozenset([C])).tolist() == [1], "the number of the set that is gone"
    assert sets.change(numbers(2, 1, 2, 2), lambda _: NOBODY).tolist() == [0] * 4
    sets.check(numbers())
    assert repr(sets) == "<HolderSets: 0>" and len(sets) == 3
    assert sets.change(numbers(), lambda _: frozenset([A])).tolist() == []


def test_changing_nothing_keeps_the_number() -> None:
    sets = HolderSets()
    one = sets.change(numbers(0), lambda _: frozenset([A]))
    assert sets.change(one, lambda holders: holders | {A}).tolist() == one.tolist()
    sets.check(one)


@pytest.mark.parametrize("seed", range(3))
def test_against_a_list_of_sets(seed: int) -> None:
    """Of more workers than any word has bits."""
    chance = random.Random(seed)
    sets, workers = HolderSets(), [*(A, B, C), *(type(A)(f"w{number}/1") for number in range(100))]
    values, model = np.zeros(300, dtype=np.uint32), [NOBODY] * 300
    for _ in range(300):
        worker, adds = chance.choice(workers), chance.random() < 0.6
        places = chance.sample(range(300), chance.randrange(60))

        def become(holders: Holders, worker: str = worker, adds: bool = adds) -> Holders:
            return holders | {worker} if adds else holders - {worker}  # type: ignore[arg-type,return-value]

        values[places] = sets.change(values[places], become)
        for at in places:
            model[at] = become(model[at])
        sets.check(values)
        assert [sets.of(number) for number in values.tolist()] == model
        assert [sets.names(number) for number in values.tolist()] == [sorted(each) for each in model]
        assert sets.having(worker).take(values).tolist() == [worker in each for each in model]
