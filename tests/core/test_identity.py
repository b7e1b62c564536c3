"""What determines a page's bytes determines its key, and nothing else does."""

import enum
from typing import Any

import pytest

from tensorcast_connector.core.identity import canonical, digest, keyspace, namespace_digest, precision

FACTS: dict[str, Any] = {
    "weights": "declared:v1", "tenant": "default", "dtype": "bfloat16", "block_tokens": 16, "rope": {"theta": 1e6},
    "layout": ["cpu", "NHD", None], "tied": True,
}  # fmt: skip
GROUP = {"kind": "FullAttentionSpec", "kv_heads": 8, "head_size": [128, 128], "dtype": "bfloat16", "block_tokens": 16}
CHANGES: dict[str, Any] = {
    "weights": "declared:v2", "tenant": "other", "dtype": "float16", "block_tokens": 32, "rope": {"theta": 1e6 + 1},
    "layout": ["cpu", "HND", None], "tied": 1,
}  # fmt: skip


def test_literal_digests() -> None:
    """A change of format makes every page unreadable: then PAGE_FORMAT_VERSION is raised and these change knowingly."""
    namespace = namespace_digest(FACTS)
    assert namespace == "45e6430b86be282ad8789b27c52f049be270b38b09e8f06324825a77ded90071"
    assert keyspace(namespace, GROUP, (0, 28), 1, 0).hex() == "a203669d8cbd4f50646dccc53ad4a56a"


def test_the_order_of_facts_does_not_matter() -> None:
    assert namespace_digest(dict(reversed(FACTS.items()))) == namespace_digest(FACTS)
    assert canonical({"b": 1, "a": [1, (2, 3)]}) == b'{"a":[1,[2,3]],"b":1}'


@pytest.mark.parametrize("name", CHANGES)
def test_any_other_fact_is_another_namespace(name: str) -> None:
    assert namespace_digest({**FACTS, name: CHANGES[name]}) != namespace_digest(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_less_is_another_namespace(name: str) -> None:
    assert namespace_digest({key: value for key, value in FACTS.items() if key != name}) != namespace_digest(FACTS)


def test_no_fact_can_stand_for_the_format_version() -> None:
    assert len({namespace_digest({}), namespace_digest({"format": 1}), namespace_digest({"format": 2})}) == 3


def test_any_other_place_is_another_keyspace() -> None:
    namespace = namespace_digest(FACTS)
    spaces = [
        keyspace(namespace, GROUP, (0, 28), 1, 0),
        keyspace(namespace, GROUP, (0, 14), 1, 0),
        keyspace(namespace, GROUP, (14, 28), 1, 0),
        keyspace(namespace, GROUP, (0, 28), 2, 0),
        keyspace(namespace, GROUP, (0, 28), 2, 1),
        keyspace(namespace_digest({}), GROUP, (0, 28), 1, 0),
        *(keyspace(namespace, {**GROUP, name: "other"}, (0, 28), 1, 0) for name in GROUP),
    ]
    assert len(set(spaces)) == len(spaces) and {len(each) for each in spaces} == {16}


def test_floats_and_text_have_one_form() -> None:
    assert canonical([1.0, 1, 0.1, 1e300, "é", float("inf")]) == b'[1.0,1,0.1,1e+300,"\\u00e9",Infinity]'
    assert digest(1) != digest("1") != digest(1.0)


class Colour(enum.Enum):
    """Anything json cannot write."""

    RED = 1


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, Colour.RED, object(), {1: "a"}, [{"a": {None: 1}}], ({2.0: 1},)])
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        canonical({"fact": value})


def test_what_the_environment_says_of_precision_is_a_fact_and_nothing_else_of_it() -> None:
    kept = {"SGLANG_MAMBA_SSM_DTYPE": "float32", "SGLANG_ROPE_CACHE_FP32": "1", "VLLM_MARLIN_INPUT_DTYPE": "fp8"}
    assert precision({"SGLANG_PORT": "1", "VLLM_PORT": "2", "OTHER_DTYPE": "x", **kept}) == {"environment": kept}
    assert precision({"VLLM_PORT": "2"}) == {}, "the namespaces of who sets nothing stay what they were"
