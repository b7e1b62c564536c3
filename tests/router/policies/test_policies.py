"""The policies as pure functions."""

import dataclasses
import math

import pytest
from hypothesis import given, settings

from smetric_router.errors import ConfigError
from smetric_router.policies.base import Policy
from smetric_router.policies.least_loaded import LeastLoaded
from smetric_router.policies.registry import POLICIES, build_policies, build_policy
from smetric_router.policies.round_robin import RoundRobin
from smetric_router.policies.smetric import SMetric
from smetric_router.policies.smetric_basic import SMetricBasic
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView

from .views import FIRST, NAMES, follow_up, request, view, views


def choices(policy: Policy, request: RequestInfo, loads: list[int], rounds: int) -> str:
    placed = [0.0] * len(loads)
    chosen = ""
    for _ in range(rounds):
        decision = policy.decide(request, view(loads, placed=placed))
        placed[NAMES.index(decision.instance)] += decision.placement
        chosen += decision.instance
    return chosen


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_frozen_and_pure(name: str) -> None:
    policy = build_policy(name, {})
    assert dataclasses.is_dataclass(policy) and not hasattr(policy, "__dict__")
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, 1)
    assert policy.name == name


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_every_policy_is_pure_and_chooses_a_candidate(case: tuple[RequestInfo, ClusterView]) -> None:
    asked, seen = case
    before = seen.instances, seen.hits, seen.placed.tolist()
    for policy in build_policies({}).values():
        decision = policy.decide(asked, seen)
        assert decision == policy.decide(asked, seen)
        assert decision.instance in seen.names
        assert decision.hit == seen.hits.get(decision.instance, 0)
        assert set(decision.scores) <= set(seen.names)
        assert all(math.isfinite(score) for score in decision.scores.values())
    assert before == (seen.instances, seen.hits, seen.placed.tolist())


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_every_policy_takes_the_only_instance(case: tuple[RequestInfo, ClusterView]) -> None:
    asked, seen = case
    one = ClusterView.of(seen.instances[:1], {}, draw=seen.draw)
    for policy in build_policies({}).values():
        assert policy.decide(asked, one).instance == "a"


def test_without_a_prompt_the_load_decides() -> None:
    """As for tokenisation, or what the router cannot read: there is nothing a formula over the prompt could tell."""
    for name in ("smetric", "smetric-slo", "bailian", "lmetric", "dynamo", "cache-aware", "least-loaded"):
        assert build_policy(name, {}).decide(request(0), view([3, 1, 2])).instance == "b", name


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


@pytest.mark.parametrize("loads", [[17, 8, 4, 4], [170, 80, 40, 40], [64, 60, 1, 1]])
def test_one_overloaded_instance_costs_nobody_elses_sessions_their_place(loads: list[int]) -> None:
    """Of routers that balance all requests while loads differ the hit rate falls when it is needed most."""
    for name, load in zip("abcd", loads, strict=True):
        decision = SMetric().decide(follow_up(6000), view(loads, {name: 6000}))
        stays = load <= 2 * sum(loads) / 4
        assert (decision.instance == name, decision.reason == "sticky") == (stays, stays)


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


def test_smetric_by_tokens() -> None:
    """Prompt tokens that are not computed yet are the load of an engine that only prefills."""
    policy = SMetric(load="tokens")
    hits = {"a": 6000}
    light = view([9, 0, 0, 0], hits, pending=[8191, 0, 0, 0])
    assert policy.decide(follow_up(6000), light).reason == "sticky", "four times the mean, but no long prompt ahead"
    heavy = view([1, 9, 9, 9], hits, pending=[20_000, 5_000, 4_000, 6_000])
    decision = policy.decide(follow_up(6000), heavy)
    assert (decision.instance, decision.reason) == ("c", "overloaded")
    assert decision.scores == {"a": 20_000, "b": 5_000, "c": 4_000, "d": 6_000}
    assert policy.decide(FIRST, view([0, 0, 9], pending=[101, 102, 100])).instance == "c", "tokens have no spread"
    assert SMetric(load="tokens", overload_min_tokens=0).decide(follow_up(6000), light).reason == "overloaded"


def test_smetric_basic_has_no_guards() -> None:
    policy = SMetricBasic()
    overloaded, evicted = view([50, 0, 0, 0], {"a": 6000}), view([1, 0], {"a": 1})
    assert policy.decide(follow_up(6000), overloaded) == Decision("a", "sticky", {"a": 6000}, False, 6000)
    assert policy.decide(follow_up(6000), evicted).instance == "a"
    assert policy.decide(FIRST, overloaded).reason == "first-turn" and policy.decide(FIRST, overloaded).instance == "b"
    assert policy.decide(follow_up(6000), view([1, 0])).reason == "no-hit"


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_where_smetric_sticks_the_basic_rule_does_too(case: tuple[RequestInfo, ClusterView]) -> None:
    guarded, basic = SMetric().decide(*case), SMetricBasic().decide(*case)
    if guarded.reason == "sticky":
        assert basic == guarded
    if guarded.reason in ("first-turn", "no-hit"):
        assert basic == guarded


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
    with pytest.raises(
        ConfigError, match="unknown policy 'x'; known: bailian, cache-aware, dynamo, least-loaded, lmetric, "
    ):
        build_policy("x", {})
    with pytest.raises(ConfigError, match=r"policies.bailian: hit_weight = 1.5 is not between 0 and 1"):
        build_policy("bailian", {"hit_weight": 1.5})
    with pytest.raises(ConfigError, match=r"policies.dynamo: block_tokens = 0 is not at least 1"):
        build_policy("dynamo", {"block_tokens": 0})
    with pytest.raises(ConfigError, match=r"policies.lmetric: Invalid enum value 'best' - at `\$.form`"):
        build_policy("lmetric", {"form": "best"})
    assert next(iter(POLICIES)) == "smetric" and len(POLICIES) == 12
