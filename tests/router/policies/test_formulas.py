"""Each published formula: by hand for a small table, and against a plain transcription for any view."""

import dataclasses
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from smetric_router.policies.bailian import Bailian
from smetric_router.policies.base import Policy
from smetric_router.policies.cache_aware import CacheAware
from smetric_router.policies.dynamo import Dynamo
from smetric_router.policies.least_loaded import LeastLoaded
from smetric_router.policies.lmetric import LMetric
from smetric_router.policies.power_of_two import PowerOfTwo
from smetric_router.policies.random_choice import Random
from smetric_router.policies.session_hash import SessionHash
from smetric_router.policies.smetric import SMetric
from smetric_router.policies.smetric_slo import SMetricSlo
from smetric_router.types import PrefillCost, RequestInfo
from smetric_router.view import ClusterView, InstanceView

from .views import FIRST, NAMES, request, view, views


def scores(policy: Policy, asked: RequestInfo, seen: ClusterView) -> dict[str, float]:
    return dict(policy.decide(asked, seen).scores)


# --- by hand ---


def test_bailian_by_hand() -> None:
    seen = view([4, 2, 0], {"a": 1000, "b": 500})
    # 0.3 * l/4 + 0.7 * (1 - c/1000)
    assert scores(Bailian(), request(1000), seen) == pytest.approx({"a": 0.3, "b": 0.15 + 0.35, "c": 0.7})
    assert Bailian().decide(request(1000), seen).instance == "a"
    assert Bailian(hit_weight=0).decide(request(1000), seen).instance == "c"
    assert scores(Bailian(), request(1000), view([0, 0])) == pytest.approx({"a": 0.7, "b": 0.7}), "all of them idle"


def test_lmetric_by_hand() -> None:
    seen = view([4, 2, 1], {"a": 3600, "b": 2000}, pending=[50, 100, 10])
    # (L - c) * l in tokens of four bytes: 100 * 4, 500 * 2, 1000 * 1
    assert scores(LMetric(), request(4000), seen) == {"a": 400, "b": 1000, "c": 1000}
    # (queued + L - c) * (l + 1)
    authors = LMetric(form="authors")
    assert scores(authors, request(4000), seen) == {"a": 150 * 5, "b": 600 * 3, "c": 1010 * 2}
    assert authors.decide(request(4000), view([0, 0], {"b": 2000})).instance == "b"
    assert LMetric().decide(request(4000), view([0, 0], {"b": 2000})).instance == "a", "nothing times anything"


def test_dynamo_by_hand() -> None:
    seen = view([1, 1], {"a": 2000}, pending=[330, 10], context=[1600, 170])
    # new tokens 500 and 1000; blocks of 16: 31.25 + 32 + 100, and 62.5 + 63 + 11
    assert scores(Dynamo(), request(4000), seen) == {"a": 163.25, "b": 136.5}
    assert scores(Dynamo(overlap_weight=2), request(4000), seen) == {"a": 194.5, "b": 199.0}
    # 830 and 1010 tokens to prefill
    prefill = Dynamo(serving="disaggregated")
    assert scores(prefill, request(4000), seen) == {"a": 51.875 + 51, "b": 63.125 + 63}


def test_vllm_by_hand() -> None:
    seen = view([10, 8, 3], waiting=[0, 1, 3])
    assert scores(LeastLoaded(variant="vllm"), FIRST, seen) == {"a": 10, "b": 11, "c": 12}
    assert LeastLoaded().decide(FIRST, seen).instance == "c"
    assert scores(LeastLoaded(variant="vllm"), FIRST, view([2], waiting=[9])) == {"a": 8}, "no more wait than are there"
    assert LeastLoaded(load="tokens").decide(FIRST, view([0, 5], pending=[9, 8])).instance == "b"


def test_cache_aware_by_hand() -> None:
    seen = view([9, 0, 0], {"a": 501, "b": 400})
    assert CacheAware().decide(request(1000), seen).reason == "match"
    assert CacheAware().decide(request(1000), seen).instance == "a", "whatever its load"
    balanced = CacheAware().decide(request(1002), seen)
    assert (balanced.instance, balanced.reason, balanced.placement) == ("b", "no-match", True)
    assert CacheAware(match_threshold=0).decide(request(1000), view([0, 0])).reason == "no-match"


# --- smetric-slo ---

COST = PrefillCost(1.0, 0.001)


def slo(seen: ClusterView, *, turn: int = 1, est_hit: int = 4000, **parameters: object) -> tuple[str, str]:
    policy = SMetricSlo(**{"ttft_base_s": 1.0, "ttft_per_token_s": 0.0, "prefill_rate": 1000.0, **parameters})  # type: ignore[arg-type]
    decision = policy.decide(request(8000, turn=turn, est_hit=est_hit), seen)
    return decision.instance, decision.reason


def test_smetric_slo_work_by_hand() -> None:
    # L = 2000 tokens. a: n = 1000, 1000 + 0.001 * 1000 * 1500 = 2500. b: n = 2000, 2000 + 0.001 * 2000 * 1000 = 4000.
    seen = view([2, 3], {"a": 4000}, work=[100.0, 50.0], cost=COST)
    decision = SMetricSlo().decide(request(8000), seen)
    assert decision.scores == {"a": 2600 * 2, "b": 4050 * 3}
    prefill = SMetricSlo(serving="disaggregated").decide(request(8000), seen)
    assert prefill.scores == {"a": 2600, "b": 4050}


def test_smetric_slo_reasons() -> None:
    hits = {"a": 4001, "b": 100}
    idle = {"work": [0.0, 0.0], "cost": PrefillCost(1.0, 0.0)}
    # a has 999.75 tokens to compute, at 1,000 a second; the limit is 1 s.
    assert slo(view([5, 0], hits, **idle), turn=0) == ("b", "first-turn")
    assert slo(view([5, 0], **idle)) == ("b", "no-hit")
    assert slo(view([5, 0], hits, **idle), est_hit=8002) == ("b", "evicted")
    assert slo(view([5, 0], hits, **idle)) == ("a", "home-meets"), "however many are in flight"
    busy = {"work": [1.0, 0.0], "cost": PrefillCost(1.0, 0.0)}
    assert slo(view([5, 0], hits, **busy)) == ("a", "none-meets-stick"), "b would take two seconds"
    assert slo(view([5, 1], hits, **busy), slack=2.0) == ("a", "home-meets")
    busier = {"work": [1001.0, 0.0], "cost": PrefillCost(1.0, 0.0)}
    assert slo(view([5, 1], hits, **busier), slack=2.0) == ("b", "home-rejected")
    assert slo(view([5, 1], hits, **busier), slack=1.0, ttft_per_token_s=0.0005) == ("b", "home-rejected")
    assert slo(view([5, 1], hits, **busier), slack=1.0, ttft_per_token_s=0.001001) == ("a", "home-meets")


def test_smetric_slo_meets_until_the_rate_is_known() -> None:
    busy = {"work": [1e9, 0.0], "cost": PrefillCost(1.0, 0.0)}
    assert slo(view([5, 0], {"a": 4001}, **busy), prefill_rate=0.0) == ("a", "home-meets")
    known = view([5, 0], {"a": 4001}, rate=[1000.0, math.inf], **busy)
    assert slo(known, prefill_rate=0.0) == ("b", "home-rejected")


# --- transcriptions: loops over the instances, as the papers write them ---


def columns(seen: ClusterView) -> list[tuple[InstanceView, float, float]]:
    """(instance, hit length, placements) one by one."""
    placed = seen.placed.tolist()
    return [(each, seen.hits.get(each.id, 0), placed[at]) for at, each in enumerate(seen.instances)]


def round_robin_argmin(seen: ClusterView, score: dict[str, float]) -> str:
    least = min(score.values())
    tied = [(count, at, each.id) for at, (each, _, count) in enumerate(columns(seen)) if score[each.id] == least]
    return min(tied)[2]


def argmax_hit(seen: ClusterView) -> str:
    longest = max(hit for _, hit, _ in columns(seen))
    held = [(each.load, count, at, each.id) for at, (each, hit, count) in enumerate(columns(seen)) if hit == longest]
    return min(held)[3]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_smetric_as_published(case: tuple[RequestInfo, ClusterView]) -> None:
    """SMetric, figure 13, without the two additions of ours."""
    asked, seen = case
    loads = {each.id: each.load for each in seen.instances}
    hits = {each.id: hit for each, hit, _ in columns(seen)}
    s = argmax_hit(seen)
    not_overloaded = loads[s] <= 2.0 * (sum(loads.values()) / len(loads))
    not_evicted = hits[s] > 0.5 * asked.est_hit
    stick = bool(asked.turn) and not_overloaded and not_evicted and hits[s] > 0
    expected = s if stick else round_robin_argmin(seen, loads)
    assert SMetric(overload_min=0, tie_spread=0).decide(asked, seen).instance == expected


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_smetric_slo_as_published(case: tuple[RequestInfo, ClusterView]) -> None:
    asked, seen = case
    length = asked.chain.length / seen.bytes_per_token
    if not length:
        return
    queued: dict[str, float] = {}
    meets: dict[str, bool] = {}
    hits: dict[str, float] = {}
    for each, hit, _ in columns(seen):
        n = length - hit / seen.bytes_per_token
        own = seen.cost.linear * n + seen.cost.attention * n * (length - n / 2)
        queued[each.id], hits[each.id] = each.work + own, hit
        meets[each.id] = queued[each.id] / each.rate <= 1.0 * (1.0 + 0.0000625 * length)
    s = argmax_hit(seen)
    stick = bool(asked.turn) and hits[s] > 0 and hits[s] > 0.5 * asked.est_hit
    stick = stick and (meets[s] or not any(meets.values()))
    times_load = {each.id: queued[each.id] * each.load for each in seen.instances}
    decision = SMetricSlo().decide(asked, seen)
    if stick:
        assert decision.instance == s
    else:
        assert decision.scores == pytest.approx(times_load)
        assert decision.instance == round_robin_argmin(seen, dict(decision.scores))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_products_and_sums_as_published(case: tuple[RequestInfo, ClusterView]) -> None:
    asked, seen = case
    length, ratio = asked.chain.length, seen.bytes_per_token
    if not length:
        return
    most = max(each.load for each in seen.instances) or 1
    expected: dict[Policy, dict[str, float]] = {}
    table = columns(seen)
    expected[Bailian(0.7)] = {i.id: 0.3 * i.load / most + 0.7 * (1 - c / length) for i, c, _ in table}
    expected[LMetric("paper")] = {i.id: (length - c) / ratio * i.load for i, c, _ in table}
    expected[LMetric("authors")] = {i.id: (i.pending + (length - c) / ratio) * (i.load + 1) for i, c, _ in table}
    expected[Dynamo(1.5, 16)] = {
        i.id: 1.5 * ((length - c) / ratio) / 16 + math.ceil((length - c) / ratio / 16) + math.ceil(i.context / 16)
        for i, c, _ in table
    }
    expected[Dynamo(1.5, 16, "disaggregated")] = {
        i.id: 1.5 * (i.pending + (length - c) / ratio) / 16 + math.floor((i.pending + (length - c) / ratio) / 16)
        for i, c, _ in table
    }
    expected[LeastLoaded(variant="vllm")] = {
        i.id: 4 * min(i.waiting, i.load) + (i.load - min(i.waiting, i.load)) for i, _, _ in table
    }
    for policy, figures in expected.items():
        decision = policy.decide(asked, seen)
        assert decision.scores == pytest.approx(figures), policy
        assert decision.instance == round_robin_argmin(seen, dict(decision.scores)), policy
        assert decision.placement


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_cache_aware_transcribed(case: tuple[RequestInfo, ClusterView]) -> None:
    asked, seen = case
    best = argmax_hit(seen)
    hit = seen.hits.get(best, 0)
    matches = hit > 0 and hit / asked.chain.length > 0.5
    expected = best if matches else round_robin_argmin(seen, {each.id: each.load for each in seen.instances})
    decision = CacheAware().decide(asked, seen)
    assert (decision.instance, decision.reason) == (expected, "match" if matches else "no-match")


# --- what a formula does not depend on ---


def with_columns(seen: ClusterView, factor: float, *names: str) -> ClusterView:
    instances = [
        dataclasses.replace(each, **{name: getattr(each, name) * factor for name in names}) for each in seen.instances
    ]
    return ClusterView.of(
        instances, seen.hits, seen.placed, bytes_per_token=seen.bytes_per_token, cost=seen.cost, draw=seen.draw
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_twice_the_load_everywhere_changes_nothing(case: tuple[RequestInfo, ClusterView]) -> None:
    asked, seen = case
    doubled = with_columns(seen, 2, "load", "waiting")
    published = SMetric(overload_min=0, tie_spread=0)
    for policy in (
        Bailian(),
        LMetric(),
        LeastLoaded(),
        LeastLoaded(variant="vllm"),
        published,
        SMetricSlo(),
        PowerOfTwo(),
    ):
        assert policy.decide(asked, seen).instance == policy.decide(asked, doubled).instance, policy


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_twice_the_prompt_and_all_hits_changes_nothing(case: tuple[RequestInfo, ClusterView]) -> None:
    asked, seen = case
    longer = replace(request(2 * asked.chain.length), turn=asked.turn, est_hit=2 * asked.est_hit)
    doubled = with_columns(seen, 2, "pending")
    doubled = ClusterView.of(
        doubled.instances,
        {name: 2 * hit for name, hit in seen.hits.items()},
        seen.placed,
        bytes_per_token=seen.bytes_per_token,
    )
    for policy in (Bailian(), LMetric(), LMetric("authors"), SMetric(), CacheAware()):
        assert policy.decide(asked, seen).instance == policy.decide(longer, doubled).instance, policy


# --- chance and hashing ---


@pytest.mark.slow
def test_chance_is_the_draw_and_is_even() -> None:
    drawn = [(0x9E3779B97F4A7C15 * at) & (2**64 - 1) for at in range(4000)]
    chosen = Counter(Random().decide(FIRST, view([0] * 8, draw=draw)).instance for draw in drawn)
    assert set(chosen) == set(NAMES) and max(chosen.values()) <= 1.2 * 500
    pairs = Counter(tuple(PowerOfTwo().decide(FIRST, view([0] * 4, draw=draw)).scores) for draw in drawn)
    assert len(pairs) == 6 and max(pairs.values()) <= 1.2 * 4000 / 6, "any two, never the same one twice"


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(views())
def test_power_of_two_takes_the_less_loaded(case: tuple[RequestInfo, ClusterView]) -> None:
    asked, seen = case
    decision = PowerOfTwo().decide(asked, seen)
    loads = {each.id: each.load for each in seen.instances}
    assert len(decision.scores) == min(2, len(loads)) or len(loads) == 1
    assert all(loads[decision.instance] <= loads[other] for other in decision.scores)


KEYS = [f"session-{at}" for at in range(4000)]


def homes(names: str) -> dict[str, str]:
    seen = ClusterView.of([InstanceView(name) for name in names])
    return {key: SessionHash().decide(request(0, session=key), seen).instance for key in KEYS}


@pytest.mark.slow
def test_session_hash_is_even_and_moves_only_what_it_must() -> None:
    all_eight, without_c = homes(NAMES), homes("abdefgh")
    share = Counter(all_eight.values())
    assert set(share) == set(NAMES) and max(share.values()) <= 1.2 * 500 and min(share.values()) >= 0.8 * 500
    moved = {key for key in KEYS if all_eight[key] != without_c[key]}
    assert moved == {key for key in KEYS if all_eight[key] == "c"}
    heirs = Counter(without_c[key] for key in moved)
    assert set(heirs) == set("abdefgh") and max(heirs.values()) <= 1.5 * len(moved) / 7, "all others share them"
    assert homes("hgfedcba") == all_eight, "whatever their order"


def test_session_hash_without_a_key_balances() -> None:
    decision = SessionHash().decide(request(100), view([2, 1]))
    assert (decision.instance, decision.reason) == ("b", "no-session-key")
    with_key = SessionHash().decide(request(100, session="\udcff"), view([2, 1]))
    assert (with_key.reason, with_key.placement) == ("session-key", False)
