"""The state and the dispatcher around it."""

import json

import pytest

from smetric_router.dispatch import Dispatcher
from smetric_router.errors import NoInstance, Overloaded, UnknownModel
from smetric_router.policies.least_loaded import LeastLoaded
from smetric_router.policies.round_robin import RoundRobin
from smetric_router.policies.smetric import SMetric
from smetric_router.state.cluster import ClusterState, Health
from smetric_router.state.requests import CHAT_PATH, RequestReader
from smetric_router.types import (
    CacheCleared,
    DrainingChanged,
    EngineReport,
    EngineReported,
    Finished,
    InstanceDown,
    InstanceUp,
    ModelsSeen,
    RequestInfo,
    Usage,
)

READER = RequestReader()


def cluster(names: str = "ab") -> ClusterState:
    state = ClusterState(names, chunk_bytes=512, index_chunks_max=10_000)
    for name in names:
        state.apply(InstanceUp(name), 0)
    return state


def chat(*contents: str, model: str = "m") -> RequestInfo:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return READER.read(CHAT_PATH, json.dumps({"model": model, "messages": messages}).encode())


def serve(dispatcher: Dispatcher, request: RequestInfo, cached_share: float | None = None) -> str:
    ticket = dispatcher.dispatch(request, 0)
    tokens = request.chain.length // 4
    cached = None if cached_share is None else int(tokens * cached_share)
    dispatcher.finish(ticket, 0, computed=True, usage=Usage(tokens, cached))
    dispatcher.state.check()
    return ticket.decision.instance


def test_load_is_counted_before_sending_and_released_once() -> None:
    dispatcher = Dispatcher(cluster(), LeastLoaded())
    first = dispatcher.dispatch(chat("x"), 0)
    second = dispatcher.dispatch(chat("x"), 0)
    assert {first.decision.instance, second.decision.instance} == {"a", "b"}
    assert [view.load for view in dispatcher.state.view(chat("x")).instances] == [1, 1]
    for _ in range(3):
        dispatcher.finish(first, 0)
        dispatcher.state.check()
    assert [view.load for view in dispatcher.state.view(chat("x")).instances] == [0, 1]
    dispatcher.state.apply(Finished(999), 0)
    assert repr(dispatcher) == (
        "<Dispatcher least-loaded, 2 tickets, <ClusterState 2/2 up, 1 in flight, <PrefixIndex 1 digests, a=0 b=1>>>"
    )


def test_a_session_stays_and_an_exclusion_moves_it() -> None:
    dispatcher = Dispatcher(cluster("abc"), SMetric())
    home = serve(dispatcher, chat("q" * 3000))
    follow_up = chat("q" * 3000, "a" * 100, "next")
    assert serve(dispatcher, follow_up) == home
    ticket = dispatcher.dispatch(follow_up, 0, exclude=[home])
    assert ticket.decision.instance != home
    assert ticket.decision.reason == "no-hit"


def test_policy_of_one_request() -> None:
    dispatcher = Dispatcher(cluster(), LeastLoaded())
    assert dispatcher.dispatch(chat("x"), 0, policy=RoundRobin()).policy == "round-robin"
    assert dispatcher.dispatch(chat("x"), 0).policy == "least-loaded"


def test_reported_eviction_is_believed() -> None:
    dispatcher = Dispatcher(cluster("a"), SMetric())
    old, lost = "o" * 20_000, "l" * 20_000
    serve(dispatcher, chat(old))
    serve(dispatcher, chat(lost))
    assert dispatcher.state.view(chat(old)).hits
    serve(dispatcher, chat(lost, "answer", "next"), cached_share=0.0)
    assert not dispatcher.state.view(chat(old)).hits
    assert dispatcher.state.view(chat(lost)).hits, "it was computed again just now"
    assert dispatcher.state.statistics(0).evictions == 1


@pytest.mark.parametrize("share", [None, 0.97, 0.8])
def test_rounding_is_not_eviction(share: float | None) -> None:
    dispatcher = Dispatcher(cluster("a"), SMetric())
    serve(dispatcher, chat("o" * 20_000))
    serve(dispatcher, chat("l" * 20_000))
    serve(dispatcher, chat("l" * 20_000, "answer", "next"), cached_share=share)
    assert dispatcher.state.view(chat("o" * 20_000)).hits
    assert dispatcher.state.statistics(0).evictions == 0


def test_a_failed_request_leaves_no_trace() -> None:
    dispatcher = Dispatcher(cluster("a"), SMetric())
    dispatcher.finish(dispatcher.dispatch(chat("x" * 2000), 0), 0, computed=False)
    assert not dispatcher.state.view(chat("x" * 2000)).hits


def test_only_healthy_instances_are_seen() -> None:
    state = ClusterState("ab", chunk_bytes=512, index_chunks_max=100)
    with pytest.raises(NoInstance) as refused:
        state.view(chat("x"))
    assert refused.value.retry_after_s == 1
    state.apply(InstanceUp("a"), 1)
    assert [view.id for view in state.view(chat("x")).instances] == ["a"]
    state.apply(DrainingChanged("a", True), 1)
    assert not state.has_candidate("m", [])
    state.apply(DrainingChanged("a", False), 1)
    state.apply(InstanceDown("a", "why"), 5)
    assert state.health("a") is Health.DOWN
    with pytest.raises(NoInstance):
        state.view(chat("x"))
    figures = state.statistics(7).as_dict()["instances"]["a"]
    assert figures == {
        "health": "down", "cause": "why", "since_s": 2, "draining": False, "breaker_open": False,
        "inflight": 0, "load": 0, "pending_tokens": 0, "prefill_rate": None, "report_age_s": None, "kv_usage": None,
        "models": None, "chunks": 0,
    }  # fmt: skip


def test_the_index_is_forgotten_when_an_instance_comes_back() -> None:
    dispatcher = Dispatcher(cluster("ab"), SMetric())
    home = serve(dispatcher, chat("x" * 2000))
    state = dispatcher.state
    state.apply(InstanceUp(home), 1)
    assert home in state.view(chat("x" * 2000)).hits
    state.apply(InstanceDown(home, "refused"), 2)
    assert not state.view(chat("x" * 2000)).hits
    state.apply(InstanceUp(home), 3)
    assert not state.view(chat("x" * 2000)).hits
    serve(dispatcher, chat("y" * 2000))
    for name in "ab":
        state.apply(CacheCleared(name), 4)
    assert not state.view(chat("y" * 2000)).hits


def test_a_returning_instance_does_not_make_up_for_its_absence() -> None:
    dispatcher = Dispatcher(cluster("ab"), LeastLoaded())
    dispatcher.state.apply(InstanceDown("a", "x"), 0)
    for _ in range(10):
        assert serve(dispatcher, chat("x")) == "b"
    dispatcher.state.apply(InstanceUp("a"), 0)
    assert "".join(serve(dispatcher, chat("x")) for _ in range(6)) in ("ababab", "bababa")


def test_models() -> None:
    state = cluster("abc")
    state.apply(ModelsSeen("a", {"m": b"1", "n": b"2"}), 0)
    assert [view.id for view in state.view(chat("x", model="m")).instances] == ["a", "b", "c"], "b and c may serve it"
    state.apply(ModelsSeen("b", {"m": b"3"}), 0)
    state.apply(ModelsSeen("c", {"o": b"4"}), 0)
    assert [view.id for view in state.view(chat("x", model="m")).instances] == ["a", "b"]
    assert [view.id for view in state.view(chat("x", model="")).instances] == ["a", "b", "c"]
    assert state.models() == {"m": b"1", "n": b"2", "o": b"4"}
    with pytest.raises(UnknownModel, match="'zzz'; known models: m, n, o"):
        state.view(chat("x", model="zzz"))
    state.apply(InstanceDown("c", "x"), 0)
    with pytest.raises(NoInstance, match="1 for the model 'o'"):
        state.view(chat("x", model="o"))


def test_a_name_that_nobody_lists_may_be_served_by_who_lists_nothing() -> None:
    state = cluster("abc")
    state.apply(ModelsSeen("a", {"m": b"1"}), 0)
    for _ in range(2):
        for name in ("x", "y"):
            assert state.view(chat("q", model=name)).names == ("b", "c")
        assert state.view(chat("q", model="")).names == ("a", "b", "c")
    state.apply(ModelsSeen("b", {"x": b"1"}), 0)
    assert state.view(chat("q", model="x")).names == ("b", "c")
    assert state.view(chat("q", model="y")).names == ("c",)
    assert len(state._usable) <= 4, "whatever names are asked for"


def test_a_view_without_some_is_that_of_the_others() -> None:
    dispatcher = Dispatcher(cluster("abcde"), RoundRobin())
    for _ in range(7):
        dispatcher.dispatch(chat("x" * 3000), 0)
    dispatcher.state.apply(InstanceDown("d", "x"), 0)
    whole = {each.id: each for each in dispatcher.state.view(chat("x" * 3000)).instances}
    part = dispatcher.state.view(chat("x" * 3000), exclude=["b"])
    assert part.names == ("a", "c", "e") and part.instances == tuple(whole[name] for name in part.names)
    assert set(part.hits) == set(part.names) and part.placed.tolist() == [2, 1, 1]
    assert dict(part.members.positions) == {"a": 0, "c": 1, "e": 2}
    with pytest.raises(NoInstance):
        dispatcher.state.view(chat("x"), exclude="abce")


def test_models_take_turns_apart() -> None:
    state = cluster("abcd")
    for name, model in zip("abcd", "mmnn", strict=True):
        state.apply(ModelsSeen(name, {model: b"{}"}), 0)
    dispatcher = Dispatcher(state, RoundRobin())
    chosen = [serve(dispatcher, chat("x", model=model)) for model in "mnmnmn"]
    assert chosen == ["a", "c", "b", "d", "a", "c"]
    for at in range(100):
        state.apply(ModelsSeen("a", {f"m{at}": b"{}"}), 0)
        serve(dispatcher, chat("x", model=f"m{at}"))
    assert len(state._placed) <= 4, "models that are gone leave nothing behind"


def test_old_placements_fade() -> None:
    dispatcher = Dispatcher(cluster("ab"), RoundRobin())
    for _ in range(1000):
        serve(dispatcher, chat("x"))
    assert sum(dispatcher.state.view(chat("x")).placed) < 2 * 64


def test_the_limit_of_an_instance_is_of_what_this_router_sent() -> None:
    state = ClusterState("ab", chunk_bytes=512, index_chunks_max=1000, inflight_max=2)
    for name in "ab":
        state.apply(InstanceUp(name), 0)
    for name in "ab":  # others keep them busy, which makes neither of them full
        state.apply(EngineReported(name, EngineReport(running=9, waiting=9), own=0), 0)
    dispatcher = Dispatcher(state, LeastLoaded())
    tickets = [dispatcher.dispatch(RequestInfo("m"), 0) for _ in range(3)]
    open_to = [each.id for each in state.view(RequestInfo("m")).instances]
    assert len(open_to) == 1 and state.has_room("m") and not state.has_candidate("m", open_to)
    tickets.append(dispatcher.dispatch(RequestInfo("m"), 0))
    assert not state.has_room("m")
    with pytest.raises(Overloaded):
        state.view(RequestInfo("m"))
    state.check()
    dispatcher.finish(tickets[0], 0)
    assert state.has_room("m") and state.view(RequestInfo("m")).names == (tickets[0].decision.instance,)
