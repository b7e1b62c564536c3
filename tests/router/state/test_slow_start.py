"""A new or recovered instance gets its share step by step."""

import pytest

from smetric_router.dispatch import Dispatcher
from smetric_router.policies.least_loaded import LeastLoaded
from smetric_router.policies.round_robin import RoundRobin
from smetric_router.state.cluster import ClusterState
from smetric_router.types import Chain, InstanceDown, InstanceUp, RequestInfo

REQUEST = RequestInfo(model="m")


def cluster(slow_start_s: float = 10.0) -> tuple[ClusterState, Dispatcher]:
    state = ClusterState(["a", "b", "c", "d"], chunk_bytes=1024, index_chunks_max=1000, slow_start_s=slow_start_s)
    for name in ("a", "b", "c"):
        state.apply(InstanceUp(name), 0.0)
    return state, Dispatcher(state, RoundRobin())


def shares(dispatcher: Dispatcher, start_s: float, end_s: float, count: int = 400) -> dict[str, float]:
    placed = dict.fromkeys("abcd", 0)
    for n in range(count):
        now = start_s + (end_s - start_s) * n / count
        ticket = dispatcher.dispatch(REQUEST, now)
        placed[ticket.decision.instance] += 1
        dispatcher.finish(ticket, now)
    return {name: number / count for name, number in placed.items()}


def test_instances_that_start_together_share_evenly():
    _, dispatcher = cluster()
    found = shares(dispatcher, 0, 1)
    assert found == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3, "d": 0}, abs=0.01)


def test_the_share_of_a_newcomer_grows():
    state, dispatcher = cluster()
    shares(dispatcher, 0, 20)
    state.apply(InstanceUp("d"), 20.0)
    steps = [shares(dispatcher, 20 + at * 2, 22 + at * 2)["d"] for at in range(5)]
    assert steps == sorted(steps)
    assert 0 < steps[0] < 0.06 and 0.1 < steps[2] < 0.25
    assert shares(dispatcher, 30, 32)["d"] == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("policy", [LeastLoaded(), RoundRobin()])
def test_without_slow_start_the_share_is_even_at_once(policy):
    state, dispatcher = cluster(slow_start_s=0)
    dispatcher.policy = policy
    shares(dispatcher, 0, 20)
    state.apply(InstanceUp("d"), 20.0)
    assert shares(dispatcher, 20, 21)["d"] == pytest.approx(0.25, abs=0.02)


def test_its_own_sessions_go_there_at_once():
    state, dispatcher = cluster()
    shares(dispatcher, 0, 20)
    state.apply(InstanceUp("d"), 20.0)
    chain = Chain((1, 2), (1024, 2048))
    seen = set()
    for _ in range(60):
        ticket = dispatcher.dispatch(RequestInfo("m", chain=chain), 20.1)
        seen.add(ticket.decision.instance)
        dispatcher.finish(ticket, 20.1, computed=True)
    assert "d" in seen, "it has a first turn now"
    view = state.view(RequestInfo("m", chain=chain), (), 20.1)
    assert "d" in {each.id for each in view.instances}


def test_the_only_instance_left_is_used_however_new_it_is():
    state, dispatcher = cluster()
    shares(dispatcher, 0, 20)
    state.apply(InstanceUp("d"), 20.0)
    for name in ("a", "b", "c"):
        state.apply(InstanceDown(name, "gone"), 20.1)
    assert shares(dispatcher, 20.1, 20.2, 50)["d"] == 1
