"""Indices that hear from each other agree, whatever is lost and whoever begins late."""

import mmap
import random

import pytest

from smetric_router.dispatch import Dispatcher
from smetric_router.policies.smetric import SMetric
from smetric_router.state.cluster import ClusterState
from smetric_router.state.prefix_index import PrefixIndex
from smetric_router.state.shared_counts import SharedCounts
from smetric_router.types import (
    CacheCleared,
    Chain,
    DrainingChanged,
    Forgotten,
    Heard,
    InstanceUp,
    Recorded,
    RequestInfo,
    Settled,
    Told,
    Usage,
    Wanted,
)

from ..workload import simulate


def made(process: int, shared: SharedCounts | None = None) -> ClusterState:
    state = ClusterState("ab", chunk_bytes=10, index_chunks_max=1000, process=process, shared=shared)
    for name in "ab":
        state.apply(InstanceUp(name), 0)
    return state


def asked(*digests: int, turn: int = 1) -> RequestInfo:
    return RequestInfo("m", turn=turn, chain=Chain(digests, tuple(range(10, 10 * len(digests) + 1, 10))))


def joined(*states: ClusterState) -> list[tuple[int, Told | Wanted]]:
    """Each hears at once what another tells; whoever wants a chain is given it by the others. Returns what was told."""
    log: list[tuple[int, Told | Wanted]] = []

    def teller(at: int):
        def tell(told: Told | Wanted) -> None:
            log.append((at, told))
            for other in states:
                if other is states[at]:
                    continue
                if not isinstance(told, Wanted):
                    other.apply(Heard(told), 0)
                elif (found := other.telling.wanted(told)) is not None:
                    states[at].apply(Heard(found), 0)

        return tell

    for at, state in enumerate(states):
        state.telling.tell = teller(at)
    return log


def test_what_one_sends_all_know_by_its_tail_alone() -> None:
    one, other = made(1), made(2)
    log = joined(one, other)
    first = Dispatcher(one, SMetric())
    ticket = first.dispatch(asked(1, 2, 3), 0)
    first.finish(ticket, 0, computed=True)
    again = first.dispatch(asked(1, 2, 3, 4), 0)
    where = again.decision.instance
    assert other.view(asked(1, 2, 3, 4)).hits == {where: 40}
    assert [told for _, told in log] == [
        Recorded(1 << 32 | 1, "ab".index(where), 0, (1, 2, 3)),
        Recorded(1 << 32 | 2, "ab".index(where), 3, (4,)),
    ]
    follow_up = Dispatcher(other, SMetric()).dispatch(asked(1, 2, 3, 4, 5), 0)
    assert (follow_up.decision.instance, follow_up.decision.reason) == (where, "sticky")


def test_what_came_to_nothing_is_taken_back_everywhere() -> None:
    one, other = made(1), made(2)
    joined(one, other)
    dispatcher = Dispatcher(one, SMetric())
    dispatcher.finish(dispatcher.dispatch(asked(1), 0), 0, computed=True)
    ticket = dispatcher.dispatch(asked(1, 2, 3), 0)
    dispatcher.finish(ticket, 0, computed=False)
    assert other.view(asked(1, 2, 3)).hits == {ticket.decision.instance: 10}
    other.check()


def test_an_eviction_that_an_answer_shows_is_known_everywhere() -> None:
    one, other = made(1), made(2)
    log = joined(one, other)
    dispatcher = Dispatcher(one, SMetric())
    long = tuple(range(1, 501))
    dispatcher.finish(dispatcher.dispatch(asked(*long), 0), 0, computed=True)
    ticket = dispatcher.dispatch(asked(*long), 0)
    dispatcher.finish(ticket, 0, computed=True, usage=Usage(prompt_tokens=5000, cached_tokens=0))
    assert isinstance(log[-1][1], Settled)
    assert other.view(asked(*long, 501)).hits == one.view(asked(*long, 501)).hits
    other.check()


def test_who_does_not_know_what_is_before_asks_for_the_whole() -> None:
    one, other = made(1), made(2)
    dispatcher = Dispatcher(one, SMetric())
    dispatcher.finish(dispatcher.dispatch(asked(1, 2, 3), 0), 0, computed=True)  # nobody hears it
    log = joined(one, other)
    ticket = dispatcher.dispatch(asked(1, 2, 3, 4), 0)
    assert [type(told) for _, told in log] == [Recorded, Wanted]
    assert other.view(asked(1, 2, 3, 4)).hits == {ticket.decision.instance: 40}


def test_caches_that_were_lost_and_who_is_draining_is_told() -> None:
    one, other = made(1), made(2)
    joined(one, other)
    Dispatcher(one, SMetric()).dispatch(asked(1, 2), 0, exclude="b")
    one.apply(DrainingChanged("b", True), 0)
    assert [each.id for each in other.view(asked(1)).instances] == ["a"]
    one.apply(CacheCleared("a"), 0)
    assert other.view(asked(1, 2)).hits == {}
    late = made(3)
    for told in one.known(100):
        late.apply(Heard(told), 0)
    assert [each.id for each in late.view(asked(1)).instances] == ["a"]


def test_what_cannot_be_does_no_harm() -> None:
    state = made(1)
    for told in (Recorded(5, 7, 0, (1,)), Recorded(5, -1, 0, (1,)), Recorded(5, 0, 99, (1,)), Recorded(0, 0, 0, ()),
                 Settled(5, 3), Settled(0, -1), Forgotten(9)):  # fmt: skip
        state.apply(Heard(told), 0)
    state.check()


@pytest.mark.parametrize("seed", range(5))
def test_who_begins_late_learns_all_there_is(seed: int) -> None:
    draw = random.Random(seed)
    whole, late = PrefixIndex("ab", 500), PrefixIndex("ab", 500)
    chains = []
    for _ in range(60):
        digests = list(draw.choice(chains)[: draw.randrange(1, 20)]) if chains and draw.random() < 0.8 else []
        digests += [draw.randrange(1, 1 << 60) for _ in range(draw.randrange(1, 10))]
        chains.append(tuple(digests))
        use = whole.record(draw.choice("ab"), Chain(tuple(digests), tuple(range(1, len(digests) + 1))))
        whole.settle(use, computed=draw.random() < 0.9)
    for name in "ab":
        for before, digests in whole.chains(name, 10_000):
            start = late.prefix(before) if before else ()
            assert start is not None, "each digest before is there"
            chain = (*start, *digests)
            late.settle(late.record(name, Chain(chain, tuple(range(1, len(chain) + 1)))), computed=True)
    for chain in chains:
        asked_for = Chain(chain, tuple(range(1, len(chain) + 1)))
        assert late.match(asked_for) == whole.match(asked_for)
    late.check()
    few = whole.chains("a", 20)
    assert sum(len(digests) for _, digests in few) <= 20 + max(map(len, chains)), "about as much as was asked for"


def test_processes_see_each_others_requests_and_placements() -> None:
    table = memoryview(mmap.mmap(-1, SharedCounts.size(3, 2)))
    states = [made(row, SharedCounts(table, 3, 2, row)) for row in range(3)]
    dispatchers = [Dispatcher(state, SMetric()) for state in states]
    tickets = [(each, each.dispatch(asked(at, turn=0), 0)) for at, each in enumerate(dispatchers * 4, 1)]
    for state in states:
        loads = [view.load for view in state.view(asked(0)).instances]
        assert loads == [6, 6]
        assert sum(each.inflight for each in state.statistics(0).instances.values()) == 12
        assert state.view(asked(0)).placed.sum() == 12
    SharedCounts(table, 3, 2, 0).clear_inflight(2)
    assert sum(view.load for view in states[0].view(asked(0)).instances) == 8
    for each, ticket in tickets:
        each.finish(ticket, 0)
    assert [view.load for view in states[1].view(asked(0)).instances] == [0, 0]


class ByTurns:
    """A dispatcher that is another one at each request, as processes on one port are."""

    def __init__(self, dispatchers: list[Dispatcher], seed: int) -> None:
        self._dispatchers, self._draw = dispatchers, random.Random(seed)
        self._of: dict[int, Dispatcher] = {}

    def dispatch(self, info: RequestInfo, now: float):
        dispatcher = self._draw.choice(self._dispatchers)
        ticket = dispatcher.dispatch(info, now)
        self._of[id(ticket)] = dispatcher
        return ticket

    def finish(self, ticket, now: float, *, computed: bool) -> None:
        self._of.pop(id(ticket)).finish(ticket, now, computed=computed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shared", [True, False], ids=["processes", "replicas"])
def test_sessions_stay_and_engines_are_even(seed: int, *, shared: bool) -> None:
    table = memoryview(mmap.mmap(-1, SharedCounts.size(2, 4)))
    states = [
        ClusterState(
            "abcd",
            chunk_bytes=1024,
            index_chunks_max=100_000,
            process=row,
            shared=SharedCounts(table, 2, 4, row) if shared else None,
        )
        for row in range(2)
    ]
    for state in states:
        for name in "abcd":
            state.apply(InstanceUp(name), 0)
    joined(*states)
    tally = simulate(ByTurns([Dispatcher(state, SMetric()) for state in states], seed), seed)  # type: ignore[arg-type]
    assert tally.sticky >= 0.98
    assert tally.imbalance(4) <= (1.1 if shared else 1.3)
    for state in states:
        state.check()
