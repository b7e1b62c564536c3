"""The policies as pure functions."""

import dataclasses

import pytest

from smetric_router.errors import ConfigError
from smetric_router.policies.base import Policy
from smetric_router.policies.least_loaded import LeastLoaded
from smetric_router.policies.registry import POLICIES, build_policies, build_policy
from smetric_router.policies.round_robin import RoundRobin
from smetric_router.policies.smetric import SMetric
from smetric_router.types import ClusterView, Decision, InstanceView, RequestInfo

FIRST = RequestInfo(turn=0)


def view(loads: list[int], hits: dict[str, int] | None = None, placed: list[float] | None = None) -> ClusterView:
    instances = tuple(InstanceView("abcdefgh"[at], at, load) for at, load in enumerate(loads))
    return ClusterView(instances, hits or {}, dict(zip("abcdefgh", placed or [0.0] * 8, strict=False)))


def follow_up(est_hit: int) -> RequestInfo:
    return RequestInfo(turn=3, est_hit=est_hit)


def choices(policy: Policy, request: RequestInfo, loads: list[int], rounds: int) -> str:
    placed = dict.fromkeys("abcdefgh", 0.0)
    chosen = ""
    for _ in range(rounds):
        decision = policy.decide(request, dataclasses.replace(view(loads), placed=dict(placed)))
        placed[decision.instance] += decision.placement
        chosen += decision.instance
    return chosen


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_frozen_and_pure(name: str) -> None:
    policy = build_policy(name, {})
    assert dataclasses.is_dataclass(policy) and not hasattr(policy, "__dict__")
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, 1)
    seen = view([3, 1, 2], {"a": 9})
    assert policy.decide(follow_up(9), seen) == policy.decide(follow_up(9), seen)
    assert policy.name == name


def test_least_loaded_takes_the_least_and_ties_go_round() -> None:
    assert LeastLoaded().decide(FIRST, view([3, 1, 2])).instance == "b"
    assert choices(LeastLoaded(), FIRST, [0, 0, 0, 0], 6) == "abcdab"
    assert choices(LeastLoaded(), FIRST, [1, 0, 1, 0], 5) == "bdbdb"


def test_least_loaded_makes_up_for_rounds_missed_under_load() -> None:
    assert LeastLoaded().decide(FIRST, view([1, 1, 1], placed=[2, 1, 2])).instance == "b"


def test_round_robin_ignores_load() -> None:
    assert choices(RoundRobin(), FIRST, [9, 0, 0], 5) == "abcab"


def test_first_turn_is_balanced_whatever_the_hit() -> None:
    decision = SMetric().decide(FIRST, view([1, 0], {"a": 6000}))
    assert decision == Decision("b", "first-turn", {"a": 1, "b": 0}, placement=True, hit=0)


def test_follow_up_sticks_to_the_longest_hit() -> None:
    decision = SMetric().decide(follow_up(6000), view([2, 0, 0], {"a": 6000, "b": 3000}))
    assert decision == Decision("a", "sticky", {"a": 6000}, placement=False, hit=6000)


@pytest.mark.parametrize(("hit", "reason"), [(3000, "evicted"), (3001, "sticky")])
def test_hit_ratio_is_strict(hit: int, reason: str) -> None:
    assert SMetric().decide(follow_up(6000), view([1, 0], {"a": hit})).reason == reason


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        ([1, 0, 0, 0], "sticky"),  # four times the mean, but a difference of less than OVERLOAD_MIN
        ([5, 0, 0, 0], "sticky"),  # 3.75 above the mean
        ([6, 0, 0, 0], "overloaded"),  # 4.5 above the mean, and 4 times it
        ([16, 8, 4, 4], "sticky"),  # exactly twice the mean
        ([17, 8, 4, 4], "overloaded"),
        ([20, 16, 16, 16], "sticky"),
    ],
)
def test_overload_guard(loads: list[int], reason: str) -> None:
    decision = SMetric().decide(follow_up(6000), view(loads, {"a": 6000}))
    assert decision.reason == reason
    assert (decision.instance == "a") == (reason == "sticky")


def test_published_guard_with_overload_min_zero() -> None:
    policy = SMetric(overload_min=0)
    assert policy.decide(follow_up(6000), view([1, 0, 0, 0], {"a": 6000})).reason == "overloaded"


@pytest.mark.parametrize(
    ("loads", "tied"),
    [([0, 1, 1], "a"), ([1, 2, 3], "ab"), ([3, 4, 5], "ab"), ([4, 6, 7], "ab"), ([100, 110, 111], "ab")],
)
def test_loads_that_differ_by_chance_are_a_tie(loads: list[int], tied: str) -> None:
    assert set(choices(SMetric(), FIRST, loads, 6)) == set(tied)
    assert set(choices(SMetric(tie_spread=0), FIRST, loads, 6)) == {"a"}


def test_follow_up_without_any_hit_is_balanced() -> None:
    decision = SMetric().decide(follow_up(0), view([1, 0]))
    assert (decision.instance, decision.reason, decision.placement) == ("b", "no-hit", True)


def test_equal_hits_take_the_less_loaded_then_go_round() -> None:
    hits = {"a": 5, "b": 5, "c": 5}
    assert SMetric().decide(follow_up(5), view([2, 1, 2], hits)).instance == "b"
    assert SMetric().decide(follow_up(5), view([1, 1, 1], hits, placed=[1, 1, 0])).instance == "c"


def test_parameters_are_checked() -> None:
    assert build_policy("smetric", {"overload": 3, "hit_ratio": 0.25}) == SMetric(overload=3, hit_ratio=0.25)
    with pytest.raises(ConfigError, match=r"policies.smetric: unknown key 'overlod'; did you mean 'overload'\?"):
        build_policy("smetric", {"overlod": 3})
    with pytest.raises(ConfigError, match=r"policies.smetric: Expected `float`, got `str`"):
        build_policy("smetric", {"overload": "high"})
    with pytest.raises(ConfigError, match="it takes no parameters"):
        build_policy("round-robin", {"zzz": 1})
    with pytest.raises(ConfigError, match="did you mean 'smetric'"):
        build_policies({"smetrc": {}})
    with pytest.raises(ConfigError, match="unknown policy 'x'; known: least-loaded, round-robin, smetric"):
        build_policy("x", {})
