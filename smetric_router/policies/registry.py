"""The policies by name, and how their parameters are read."""

import math
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import msgspec

from smetric_router.errors import ConfigError
from smetric_router.policies.bailian import Bailian
from smetric_router.policies.base import Policy
from smetric_router.policies.cache_aware import CacheAware
from smetric_router.policies.dynamo import Dynamo
from smetric_router.policies.least_loaded import LeastLoaded
from smetric_router.policies.lmetric import LMetric
from smetric_router.policies.power_of_two import PowerOfTwo
from smetric_router.policies.random_choice import Random
from smetric_router.policies.round_robin import RoundRobin
from smetric_router.policies.session_hash import SessionHash
from smetric_router.policies.smetric import SMetric
from smetric_router.policies.smetric_basic import SMetricBasic
from smetric_router.policies.smetric_slo import SMetricSlo

_OURS = (SMetric, SMetricBasic, SMetricSlo)
_PUBLISHED = (Bailian, LMetric, LeastLoaded, Dynamo)
_USUAL = (PowerOfTwo, CacheAware, RoundRobin, Random, SessionHash)
POLICIES: dict[str, type[Policy]] = {
    **{kind.name: kind for kind in _OURS},
    **{kind.name: kind for kind in _PUBLISHED},
    **{kind.name: kind for kind in _USUAL},
}


def build_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """The policy of that name with these parameters."""
    kind = POLICIES.get(name)
    if kind is None:
        raise ConfigError(f"unknown policy {name!r}; {_hint(name, list(POLICIES))}")
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in options:
        if key not in known:
            raise ConfigError(f"policies.{name}: unknown key {key!r}; {_hint(key, known)}")
    try:
        policy = msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policies.{name}: {error}") from None
    for key in options:
        value = getattr(policy, key)
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ConfigError(f"policies.{name}.{key} = {value!r} is not a finite number from 0 on")
    return policy


def build_policies(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Policy]:
    """All policies by name, with the parameters given for some of them."""
    for name in options:
        if name not in POLICIES:
            raise ConfigError(f"policies.{name}: unknown policy; {_hint(name, list(POLICIES))}")
    return {name: build_policy(name, options.get(name, {})) for name in POLICIES}


def _hint(key: str, known: list[str]) -> str:
    """What may have been meant."""
    near = get_close_matches(key, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(sorted(known))}" if known else "it takes no parameters"
