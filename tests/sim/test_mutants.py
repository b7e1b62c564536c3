"""Every deliberate fault is caught, by the invariant that is there for it, and the code without it passes the same seed."""

import itertools
import re

import pytest

from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.runner import Outcome, play

SEARCH_WORLDS = 400


def caught(mutant: Mutant, seed: int) -> Outcome | None:
    """The world that goes wrong, as it should."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        outcome = play(seed)
    return outcome if re.search(mutant.complaint, outcome.problem) else None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_caught(mutant: Mutant) -> None:
    """By the seed that is noted, or if the worlds have changed by another one."""
    seeds = itertools.chain([mutant.seed], range(SEARCH_WORLDS))
    outcome = next((found for seed in seeds if (found := caught(mutant, seed))), None)
    assert outcome is not None, f"not caught in {SEARCH_WORLDS} worlds: {mutant.name}"
    assert not play(outcome.seed).problem, "without the fault nothing is wrong"


def test_there_are_no_two_of_a_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 12
