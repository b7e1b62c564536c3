"""The hit index against a model that is too simple to be wrong."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric_router.state import prefix_index
from smetric_router.state.prefix_index import PrefixIndex, Use
from smetric_router.types import Chain

SIZE = 10


def chain(text: str) -> Chain:
    """One chunk of ten bytes per letter."""
    return Chain(
        tuple(hash(text[: at + 1]) or 1 for at in range(len(text))), tuple(SIZE * (at + 1) for at in range(len(text)))
    )


def lengths(index: PrefixIndex, text: str) -> dict[str, int]:
    return {name: hit // SIZE for name, hit in index.match(chain(text)).items()}


def test_longest_prefix_per_instance() -> None:
    index = PrefixIndex(["a", "b", "c"], 100)
    index.record("a", chain("xyz"))
    index.record("b", chain("xyzw"))
    assert lengths(index, "xyzwv") == {"a": 3, "b": 4}
    assert lengths(index, "xy") == {"a": 2, "b": 2}
    assert lengths(index, "q") == lengths(index, "") == {}
    assert repr(index) == "<PrefixIndex 4 digests, a=3 b=4 c=0>"
    index.check()


def test_bounded_and_the_oldest_leaf_goes_first() -> None:
    index = PrefixIndex(["a"], 4)
    index.record("a", chain("sp"))
    index.record("a", chain("sq"))
    index.record("a", chain("srt"))
    assert lengths(index, "srt") == {"a": 3}
    assert lengths(index, "sq") == {"a": 2}
    assert lengths(index, "sp") == {"a": 1}, "the shared part outlives its oldest branch"
    index.record("a", chain("zzzzzz"))
    assert lengths(index, "zzzzzz") == {"a": 4}
    assert index.statistics().entries == {"a": 4}
    index.check()


def test_evidence_of_eviction_drops_all_that_is_older() -> None:
    index = PrefixIndex(["a", "b"], 100)
    for text in ("old", "lost", "new"):
        index.settle(index.record("a", chain(text)), computed=True)
    index.record("b", chain("old"))
    again = index.record("a", chain("lost!"))
    assert index.settle(again, computed=True, resident=0) == 3
    assert lengths(index, "old") == {"b": 3}
    assert lengths(index, "new") == {"a": 3}
    assert lengths(index, "lost!") == {"a": 5}, "it has just been computed"
    index.check()


def test_a_full_hit_drops_nothing() -> None:
    index = PrefixIndex(["a"], 100)
    for text in ("old", "kept"):
        index.settle(index.record("a", chain(text)), computed=True)
    assert index.settle(index.record("a", chain("kept+")), computed=True, resident=4 * SIZE) == 0


def test_missing_what_is_still_being_computed_proves_nothing() -> None:
    index = PrefixIndex(["a"], 100)
    index.settle(index.record("a", chain("other")), computed=True)
    index.record("a", chain("s1"))
    assert index.settle(index.record("a", chain("s2")), computed=True, resident=0) == 0
    assert lengths(index, "other") == {"a": 5}


def test_a_prompt_that_was_never_computed_is_taken_back() -> None:
    index = PrefixIndex(["a"], 100)
    index.settle(index.record("a", chain("sp")), computed=True)
    aborted = index.record("a", chain("spq"))
    assert lengths(index, "spqr") == {"a": 3}
    assert index.settle(aborted, computed=False) == 1
    assert lengths(index, "spqr") == {"a": 2}
    first = index.record("a", chain("spx"))
    index.settle(index.record("a", chain("spxy")), computed=True)
    index.settle(first, computed=False)
    assert lengths(index, "spxy") == {"a": 4}, "another request has computed it since"
    index.check()


def test_forget_is_complete_and_late_settlements_are_harmless() -> None:
    index = PrefixIndex(["a", "b"], 100)
    late = index.record("a", chain("xyz"))
    index.record("b", chain("xy"))
    assert index.forget("a") == 3
    assert lengths(index, "xyz") == {"b": 2}
    index.record("a", chain("x"))
    index.settle(late, computed=False)
    assert lengths(index, "xyz") == {"a": 1, "b": 2}
    index.check()


@dataclass
class Model:
    """Prefixes as strings, in one list per instance in order of last use."""

    limit: int
    held: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: {"a": [], "b": []})
    unsettled: dict[str, set[int]] = field(default_factory=lambda: {"a": set(), "b": set()})

    def record(self, name: str, text: str, stamp: int) -> tuple[str, str, int, dict[str, int]]:
        stamps = dict(self.held[name])
        before = {
            prefix: 0 if stamps[prefix] in self.unsettled[name] else stamps[prefix]
            for prefix in prefixes(text)
            if prefix in stamps
        }
        rest = [pair for pair in self.held[name] if not text.startswith(pair[0])]
        self.held[name] = [*rest, *((prefix, stamp) for prefix in reversed(prefixes(text)))][-self.limit :]
        self.unsettled[name].add(stamp)
        return name, text, stamp, before

    def settle(self, use: tuple[str, str, int, dict[str, int]], computed: bool, resident: int | None) -> None:
        name, text, stamp, before = use
        self.unsettled[name].discard(stamp)
        if not computed:
            gone = {(prefix, stamp) for prefix in prefixes(text) if prefix not in before}
            self.held[name] = [pair for pair in self.held[name] if pair not in gone]
        elif resident is not None:
            lost = before.get(text[: resident + 1], 0) if resident < len(text) else 0
            self.held[name] = [pair for pair in self.held[name] if pair[1] > lost]

    def match(self, text: str) -> dict[str, int]:
        hits = {
            name: max((len(p) for p, _ in held if text.startswith(p)), default=0) for name, held in self.held.items()
        }
        return {name: hit for name, hit in hits.items() if hit}


def prefixes(text: str) -> list[str]:
    return [text[: at + 1] for at in range(len(text))]


prompts = st.text("xy", min_size=0, max_size=6)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.sampled_from("ab"), prompts),
        st.tuples(st.just("settle"), st.integers(0, 5), st.booleans(), st.none() | st.integers(0, 6)),
        st.tuples(st.just("forget"), st.sampled_from("ab")),
        st.tuples(st.just("match"), prompts),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 12))
def test_agrees_with_the_model(todo: list[tuple[object, ...]], limit: int) -> None:
    agrees_with_the_model(todo, limit)


@pytest.mark.slow
def test_agrees_with_the_model_when_many_hold_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lengths are kept as arrays from so many holders on: here from one on."""
    monkeypatch.setattr(prefix_index, "HOLDERS_MANY", 1)
    settings(max_examples=150, deadline=None)(given(steps, st.integers(1, 12))(agrees_with_the_model))()


def agrees_with_the_model(todo: list[tuple[object, ...]], limit: int) -> None:
    index, model = PrefixIndex("ab", limit), Model(limit)
    open_uses: list[tuple[Use, tuple[str, str, int, dict[str, int]]]] = []
    for step in todo:
        match step:
            case "record", str(name), str(text):
                use = index.record(name, chain(text))
                open_uses.append((use, model.record(name, text, use.stamp)))
            case "settle", int(which), bool(computed), (None | int()) as resident if open_uses:
                use, mirrored = open_uses.pop(which % len(open_uses))
                index.settle(use, computed=computed, resident=None if resident is None else resident * SIZE)
                model.settle(mirrored, computed, resident)
            case "forget", str(name):
                index.forget(name)
                model.held[name], model.unsettled[name] = [], set()
            case "match", str(text):
                assert lengths(index, text) == model.match(text)
        index.check()
        for text in ("xyxyxy", "xxyyxx"):
            assert lengths(index, text) == model.match(text)
        for name, held in model.held.items():
            assert index.statistics().entries[name] == len(held)


def test_the_same_chain_is_found_anew_after_every_change() -> None:
    """What was found for a chain is kept for the moment in which it is recorded, and no longer."""
    chance = random.Random(7)
    index = PrefixIndex("ab", 40)
    chains = []
    for _ in range(60):
        tokens = [chance.randrange(1, 4) for _ in range(chance.randrange(1, 9))]
        digests = tuple(hash(tuple(tokens[: at + 1])) for at in range(len(tokens)))
        chains.append(Chain(digests, tuple(range(1, len(tokens) + 1))))

    def same(chain: Chain) -> None:
        assert index.match(chain) == index.match(Chain(chain.digests, chain.ends))

    for _ in range(1500):
        kept, other = chance.choice(chains), chance.choice(chains)
        index.match(kept)
        match chance.randrange(3):
            case 0:
                use = index.record(chance.choice("ab"), other)
                index.match(kept)
                index.settle(use, computed=chance.random() < 0.5)
            case 1:
                index.settle(index.record(chance.choice("ab"), kept), computed=True, resident=chance.choice((None, 0)))
            case _:
                for name in "ab" if chance.random() < 0.2 else "a":
                    index.forget(name)
                index.settle(index.record("a", kept), computed=True)
        same(kept)
        index.check()
