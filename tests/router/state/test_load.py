"""Load: own requests, prompts that wait, and the engines' reports."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from smetric_router.dispatch import Dispatcher
from smetric_router.policies.least_loaded import LeastLoaded
from smetric_router.policies.round_robin import RoundRobin
from smetric_router.state.cluster import ClusterState
from smetric_router.state.load import RATE_SAMPLES_MIN, LoadBoard, TokenRatio
from smetric_router.state.shared_counts import SharedCounts
from smetric_router.types import (
    Chain,
    EngineReport,
    EngineReported,
    InstanceDown,
    InstanceUp,
    ModelsSeen,
    PrefillCost,
    RequestInfo,
    Usage,
)
from smetric_router.view import ADDED, InstanceView, Row

INF = float("inf")


def board(count: int = 1) -> LoadBoard:
    return LoadBoard(count, cost=PrefillCost(1.0, 0.01), report_stale_s=10)


def column(loads: LoadBoard, ordinal: int = 0) -> InstanceView:
    return InstanceView("a", *loads.table[:, ordinal].tolist())


def test_a_prompt_is_pending_until_its_first_byte() -> None:
    loads = board()
    loads.dispatched(1, 0, 1000, 400, 0)
    # 600 + 0.01 * 600 * (1000 - 300)
    assert column(loads) == InstanceView("a", load=1, pending=600, work=4800, context=1000)
    loads.first_byte(1, 2, computed=True)
    loads.first_byte(1, 3, computed=True)
    assert column(loads) == InstanceView("a", load=1, context=1000)
    loads.check()
    loads.finished(1)
    assert column(loads) == InstanceView("a")
    loads.first_byte(1, 4, computed=True)
    loads.check()


def test_a_prompt_that_is_never_answered_is_released() -> None:
    loads = board()
    loads.dispatched(1, 0, 1000, 0, 0)
    loads.finished(1)
    assert column(loads) == InstanceView("a")
    loads.dispatched(2, 0, 100, 900, 0)
    assert column(loads).pending == 0, "a hit is no longer than the prompt"


def test_the_rate_is_that_of_the_quick_requests() -> None:
    loads = board()
    for number in range(1, 101):
        loads.dispatched(number, 0, 100, 0, 0)
        # work 100 + 0.01 * 100 * 50 = 150; rates 150, 75, 50 ...
        loads.first_byte(number, number, computed=True)
        loads.finished(number)
        assert (column(loads).rate == INF) == (number < RATE_SAMPLES_MIN)
    # Of the last 64, numbers 37 to 100, the 58th from below: the seventh quickest.
    assert column(loads).rate == pytest.approx(150 / 43)
    assert loads.figures(0, 0).prefill_rate == column(loads).rate
    loads.forget(0)
    assert column(loads).rate == INF and loads.figures(0, 0).prefill_rate is None


@pytest.mark.parametrize(("computed", "hit", "at"), [(False, 0, 1), (True, 100, 1), (True, 0, 0)])
def test_what_tells_nothing_is_no_sample(computed: bool, hit: int, at: float) -> None:
    """An answer that is an error or no stream, a prompt that was cached, no time at all."""
    loads = board()
    for number in range(20):
        loads.dispatched(number, 0, 100, hit, 0)
        loads.first_byte(number, at, computed=computed)
    assert column(loads).rate == INF


def test_a_report_adds_what_others_sent() -> None:
    loads = board(2)
    for number in range(3):
        loads.dispatched(number, 0, 100, 0, 0)
    loads.reported(0, EngineReport(running=4, waiting=3, kv_usage=0.5, queued_tokens=450), own=2, now=1)
    # 7 there, 3 of them ours by now; 300 of 450 tokens are ours.
    assert column(loads) == InstanceView(
        "a", load=7, pending=450, work=300 + 0.01 * 3 * 5000 + 150, waiting=3, context=300
    )
    assert column(loads, 1) == InstanceView("a")
    loads.finished(0)
    assert column(loads).load == 6, "ours are exact at any time"
    loads.reported(0, EngineReport(running=4, waiting=0), own=6, now=2)
    assert column(loads).load == 2, "six of ours were there when it was asked: the four it counts are ours"
    loads.reported(0, EngineReport(), own=2, now=3)
    assert column(loads).load == 2, "never below our own"
    loads.check()


def test_reports_age() -> None:
    loads = board(2)
    loads.reported(0, EngineReport(running=5), own=0, now=100)
    loads.reported(1, EngineReport(running=6), own=0, now=105)
    loads.expire(109.9)
    assert (column(loads).load, loads.figures(0, 109).report_age_s) == (5, 9)
    loads.expire(110)
    assert (column(loads).load, column(loads, 1).load) == (0, 6)
    assert loads.figures(0, 110).report_age_s is None
    loads.expire(115)
    assert column(loads, 1).load == 0
    loads.check()


def test_the_ratio_is_learnt() -> None:
    ratio = TokenRatio()
    assert ratio.bytes_per_token == 4
    ratio.learn(600, 100)
    ratio.learn(200, 100)
    assert ratio.bytes_per_token == 4
    ratio.learn(3000, 500)
    assert ratio.bytes_per_token == pytest.approx(3800 / 700)
    for length, tokens in ((10**6, 10), (10, 10**6), (5, 0), (0, 0)):
        ratio.learn(length, tokens)  # a picture, a prompt that was not read to its end, nothing
    assert ratio.bytes_per_token == pytest.approx(3800 / 700)
    for _ in range(100):
        ratio.learn(200_000, 100_000)
    assert ratio.bytes_per_token == pytest.approx(2, abs=0.01)


# --- in the state ---


def cluster(names: str = "ab") -> Dispatcher:
    state = ClusterState(names, chunk_bytes=512, index_chunks_max=10_000, report_stale_s=10)
    for name in names:
        state.apply(InstanceUp(name), 0)
        state.apply(ModelsSeen(name, {"m": b"{}"}), 0)
    return Dispatcher(state, LeastLoaded())


def prompt(length: int, digest: int = 1, *, stream: bool = True, model: str = "m") -> RequestInfo:
    return RequestInfo(model, chain=Chain((digest,), (length,)), stream=stream)


def test_pending_work_in_tokens_of_the_model() -> None:
    dispatcher = cluster("a")
    ticket = dispatcher.dispatch(prompt(4000), 0)
    assert dispatcher.state.view(prompt(1)).pending.tolist() == [1000]
    dispatcher.finish(ticket, 1, computed=True, usage=Usage(prompt_tokens=2000))
    assert dispatcher.state.view(prompt(1)).bytes_per_token == 2
    assert dispatcher.state.view(prompt(1, model="")).bytes_per_token == 4, "another model, which is not known"
    again = dispatcher.dispatch(prompt(4000), 2)
    assert dispatcher.state.view(prompt(1)).pending.tolist() == [0], "all of it is cached"
    assert dispatcher.state.view(prompt(1)).context.tolist() == [2000]
    longer = dispatcher.dispatch(RequestInfo("m", chain=Chain((1, 2), (4000, 5000))), 2)
    assert dispatcher.state.view(prompt(1)).pending.tolist() == [500]
    for each in (again, longer):
        dispatcher.finish(each, 3)
    assert dispatcher.state.view(prompt(1)).table[:5].sum() == 0
    dispatcher.state.check()


def test_only_streams_tell_the_rate() -> None:
    dispatcher = cluster("a")
    for stream in (False, True):
        assert dispatcher.state.view(prompt(1)).rate.tolist() == [INF]
        for at in range(RATE_SAMPLES_MIN):
            ticket = dispatcher.dispatch(prompt(4000, 10 * stream + at, stream=stream), 0)
            dispatcher.first_byte(ticket, 2, computed=True)
            assert dispatcher.state.view(prompt(1)).pending.tolist() == [0]
            dispatcher.finish(ticket, 3)
    assert dispatcher.state.view(prompt(1)).rate.tolist() == [pytest.approx((1000 + 0.0001 * 500_000) / 2)]


def test_reports_reach_decisions_and_go_out_of_date() -> None:
    dispatcher = cluster()
    state = dispatcher.state
    state.apply(EngineReported("a", EngineReport(running=3, kv_usage=0.25), own=0), 100)
    assert [dispatcher.dispatch(prompt(4, at), 101).decision.instance for at in range(3)] == ["b"] * 3
    figures = state.statistics(102).instances["a"]
    assert (figures.inflight, figures.load, figures.kv_usage, figures.report_age_s) == (0, 3, 0.25, 2)
    assert dispatcher.dispatch(prompt(4, 9), 110).decision.instance == "a", "after ten seconds nobody believes it"
    state.apply(EngineReported("a", EngineReport(running=5), own=1), 111)
    state.apply(InstanceDown("a", "gone"), 112)
    assert state.statistics(112).instances["a"].load == 1
    state.check()


def test_load_imbalance() -> None:
    dispatcher = cluster("abcd")
    assert dispatcher.state.statistics(0).load_imbalance == 1
    for at in range(4):
        dispatcher.dispatch(prompt(4, at), 0, exclude="cd")
    assert dispatcher.state.statistics(0).load_imbalance == 2
    for name in "cd":
        dispatcher.state.apply(InstanceDown(name, "x"), 0)
    assert dispatcher.state.statistics(0).load_imbalance == 1


class LoadMachine(RuleBasedStateMachine):
    """Whatever the order of events, every sum is that of the requests in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = cluster("abc")
        self.dispatcher.policy = RoundRobin()
        self.tickets: list = []
        self.now = 0.0

    @rule(length=st.integers(0, 5000), digest=st.integers(0, 5), stream=st.booleans())
    def dispatch(self, length: int, digest: int, stream: bool) -> None:
        self.now += 0.25
        asked = prompt(length, digest, stream=stream) if length else RequestInfo("m")
        self.tickets.append(self.dispatcher.dispatch(asked, self.now))

    @precondition(lambda self: self.tickets)
    @rule(at=st.integers(0), computed=st.booleans())
    def first_byte(self, at: int, computed: bool) -> None:
        self.now += 0.25
        self.dispatcher.first_byte(self.tickets[at % len(self.tickets)], self.now, computed=computed)

    @precondition(lambda self: self.tickets)
    @rule(at=st.integers(0), computed=st.booleans(), tokens=st.integers(0, 2000), again=st.booleans())
    def finish(self, at: int, computed: bool, tokens: int, again: bool) -> None:
        ticket = self.tickets[at % len(self.tickets)]
        if not again:
            self.tickets.remove(ticket)
        self.dispatcher.finish(ticket, self.now, computed=computed, usage=Usage(tokens or None))

    @rule(name=st.sampled_from("abc"), running=st.integers(0, 9), waiting=st.integers(0, 9), own=st.integers(0, 9))
    def report(self, name: str, running: int, waiting: int, own: int) -> None:
        self.dispatcher.state.apply(EngineReported(name, EngineReport(running, waiting, None, 99), own), self.now)

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def sound(self) -> None:
        self.dispatcher.state.check()
        view = self.dispatcher.state.view(RequestInfo("m"), now=self.now)
        own = [self.dispatcher.state.inflight_at(name) for name in view.names]
        assert all(load >= mine for load, mine in zip(view.load.tolist(), own, strict=True))

    def teardown(self) -> None:
        for ticket in self.tickets:
            self.dispatcher.finish(ticket, self.now)
        self.dispatcher.state.check()
        view = self.dispatcher.state.view(RequestInfo("m"), now=self.now + 100)
        assert not view.table[:5].any(), "nothing is left"


LoadMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLoadMachine = pytest.mark.slow(LoadMachine.TestCase)


def test_processes_see_one_load() -> None:
    memory = memoryview(bytearray(SharedCounts.size(3, 2)))
    rows = [SharedCounts(memory, 3, 2, row) for row in range(3)]
    cost = PrefillCost(1.0, 0.01)
    boards = [LoadBoard(2, cost=cost, report_stale_s=10, shared=each) for each in rows]
    whole = LoadBoard(2, cost=cost, report_stale_s=10)
    for number, (at, length, hit) in enumerate([(0, 1000, 400), (1, 500, 0), (0, 70, 0), (1, 900, 900)]):
        for loads in (boards[number % 3], whole):
            loads.dispatched(number, at, length, hit, 0)
    for loads in (boards[1], whole):
        loads.first_byte(1, 5, computed=False)
    for each in boards:
        assert each.look(None)[:ADDED].tolist() == whole.table[:ADDED].tolist()
        assert each.look(np.array([1]))[:ADDED].tolist() == whole.table[:ADDED, 1:].tolist()
        assert each.inflight_column().tolist() == [2, 2] and each.inflight(0) == 2
        found = each.figures(0, 0)
        assert (found.inflight, found.load, found.pending_tokens) == (2, 2, 670)
        each.check()
    # What the others have there is not taken for somebody else's.
    boards[2].reported(0, EngineReport(running=3, waiting=1, queued_tokens=700), own=2, now=6)
    assert (boards[2].figures(0, 6).load, boards[2].figures(0, 6).pending_tokens) == (4, 700)
    rows[2].clear_inflight(0)
    assert boards[1].look(None)[Row.LOAD].tolist() == [1, 1]


def test_the_limit_of_an_instance_is_of_all_processes() -> None:
    memory = memoryview(bytearray(SharedCounts.size(2, 2)))
    states = [
        ClusterState("ab", chunk_bytes=512, index_chunks_max=9, inflight_max=1, shared=SharedCounts(memory, 2, 2, row))
        for row in range(2)
    ]
    for state in states:
        for name in "ab":
            state.apply(InstanceUp(name), 0)
    one, other = (Dispatcher(state, LeastLoaded()) for state in states)
    first = one.dispatch(RequestInfo("m"), 0)
    assert states[1].inflight == 1 and states[1].inflight_at(first.decision.instance) == 1
    assert other.dispatch(RequestInfo("m"), 0).decision.instance != first.decision.instance
    assert not states[0].has_room("m")
    one.finish(first, 0)
    assert states[1].has_room("m")
