"""What must differ lives apart, and what is the same is found by others."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorcast_connector.engines.sglang.host_pages import HostPages, pages_of_tensors
from tensorcast_connector.engines.sglang.namespace import (
    Pool,
    Rank,
    block_hash,
    chunks,
    describe,
    keyspaces,
    model_facts,
    namespace,
)
from tensorcast_connector.errors import ConfigError

FACTS = model_facts({"model_type": "x", "_name_or_path": "/a"}, {"dtype": "bfloat16"})
POOL = Pool("kv", {"dtype": "bfloat16", "layout": "page_head", "head_num": 8, "size_per_token": 4096}, (0, 4))
ONE = Rank(0, 1)


def spaces(pool: Pool = POOL, rank: Rank = ONE, lcm: int | None = None, **named: str) -> list[bytes]:
    given = {"weights": "w", "tenant": "t", "salt": ""} | named
    return keyspaces(namespace(FACTS, **given), pool, rank, lcm)


@pytest.mark.parametrize(
    "other",
    [
        lambda: spaces(weights="v"),
        lambda: spaces(tenant="u"),
        lambda: spaces(salt="cleared"),
        lambda: spaces(pool=replace(POOL, name="draft")),
        lambda: spaces(pool=replace(POOL, layers=(4, 8))),
        lambda: spaces(pool=replace(POOL, facts={**POOL.facts, "dtype": "float8"})),
        lambda: spaces(pool=replace(POOL, facts={**POOL.facts, "layout": "page_first"})),
        lambda: spaces(rank=Rank(0, 2)),
        lambda: spaces(rank=Rank(1, 2)),
        lambda: spaces(rank=Rank(0, 1, cp_rank=1, cp_size=2)),
        lambda: spaces(rank=Rank(0, 1, stage=1, stages=2)),
        lambda: keyspaces(namespace(model_facts({"model_type": "y"}, {}), "w", "t"), POOL, ONE),
    ],
)
def test_whatever_differs_lives_apart(other: Any) -> None:
    assert not set(other()) & set(spaces())


def test_where_the_model_lay_does_not_matter() -> None:
    assert model_facts({"model_type": "x", "_name_or_path": "/b"}, {"dtype": "bfloat16"}) == FACTS


def test_a_cache_that_all_ranks_have_is_one() -> None:
    ranks = [Rank(rank, size, replicated=True) for size in (1, 2, 8) for rank in range(size)]
    assert len({space for rank in ranks for space in spaces(rank=rank, lcm=4)}) == 1


def test_ranks_of_several_sizes_share_ranges_of_heads() -> None:
    def of(size: int) -> list[bytes]:
        pool = replace(POOL, facts={"layout": "page_head", "head_num": 8 // size, "size_per_token": 4096 // size})
        return [space for rank in range(size) for space in spaces(pool, Rank(rank, size), lcm=4)]

    assert of(1) == of(2) == of(4) and len(set(of(1))) == 4
    assert set(spaces(lcm=8)) & set(of(1)) == set(), "another cut"


def test_only_layouts_with_heads_first_are_cut() -> None:
    pool = replace(POOL, facts={**POOL.facts, "layout": "page_first"})
    assert spaces(pool, lcm=4) == spaces(pool)


@pytest.mark.parametrize(("rank", "lcm"), [(Rank(0, 3), 4), (Rank(0, 1), 16), (Rank(0, 1), 3)])
def test_heads_that_cannot_be_cut_evenly_are_a_mistake(rank: Rank, lcm: int) -> None:
    with pytest.raises(ConfigError, match="tp_lcm_size"):
        chunks(POOL, rank, lcm)


def test_keys_are_sglangs_hashes() -> None:
    assert block_hash("ab" * 32) == b"\xab" * 32
    odd = {block_hash(each) for each in ("", "x", "zz" * 32, "ab" * 32 + "_draft")}
    assert len(odd) == 4 and all(len(each) == 32 for each in odd)


class FakePool(SimpleNamespace):
    """A host pool of pages in two parts of 100 bytes, or 4 ranges of heads."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        starts = [int(each) * 1000 for each in indices[:: self.page_size]]
        return [start + part for start in starts for part in (0, 500)], [100] * 2 * len(starts)

    def get_split_heads_page_buffer_meta(self, indices: torch.Tensor, factor: int) -> tuple[list[int], list[int]]:
        starts = [int(each) * 1000 for each in indices[:: self.page_size]]
        parts = [start + chunk + part for start in starts for chunk in range(factor) for part in (0, 500)]
        return parts, [100 // factor] * len(parts)


def test_places_of_pages_in_place_and_cut() -> None:
    pool = FakePool(page_size=2, layout="page_head", head_num=4, layer_num=3, start_layer=3, end_layer=6)
    whole = HostPages("kv", pool, ONE, False, None, True)
    places = whole.pages(torch.tensor([4, 5, 8, 9]), 2)
    assert places == [[[(4000, 100), (4500, 100)], [(8000, 100), (8500, 100)]]]
    cut = HostPages("kv", pool, ONE, False, 2, True)
    assert cut.pages(torch.tensor([4, 5]), 1) == [[[(4000, 50), (4500, 50)]], [[(4001, 50), (4501, 50)]]]
    assert len(cut.spaces("n")) == 2 and cut.spaces("n") is cut.spaces("n") and cut.spaces("m") != cut.spaces("n")
    with pytest.raises(ValueError, match="parts for 3 pages"):
        whole.pages(torch.tensor([4, 5]), 3)


def test_a_pool_that_cannot_name_its_pages_says_why() -> None:
    pages = HostPages("odd", SimpleNamespace(page_size=2), ONE, False, None, True)
    assert "cannot be named" in pages.unusable and "cannot be named" in repr(pages)
    huge = FakePool(page_size=1)
    huge.get_page_buffer_meta = lambda _: ([1], [1 << 40])
    assert "too large" in HostPages("huge", huge, ONE, False, None, True).unusable


def test_states_and_heads_are_of_one_rank_even_if_the_kv_cache_is_not() -> None:
    latent, heads = FakePool(page_size=1), FakePool(page_size=1, head_num=4)
    second = Rank(1, 2)
    first = Rank(0, 2)

    def space(name: str, pool: Any, rank: Rank) -> list[bytes]:
        return HostPages(name, pool, rank, True, None, True).spaces("n")

    assert space("kv", latent, first) == space("kv", latent, second)
    assert space("mamba", latent, first) != space("mamba", latent, second)
    assert space("draft", heads, first) != space("draft", heads, second)


def test_states_of_two_stages_of_a_pipeline_and_of_two_dtypes_live_apart() -> None:
    """A pool of states does not say which layers it has, and float16 takes as many bytes as bfloat16."""

    def space(stage: int, dtype: torch.dtype, shape: tuple[int, ...] = (4, 8)) -> list[bytes]:
        pool = FakePool(
            page_size=1, layout="page_first_direct", dtype=torch.bfloat16, conv_dtype=torch.bfloat16,
            temporal_dtype=dtype, temporal_state_shape=shape, num_mamba_layers=6, size_per_token=4096,
        )  # fmt: skip
        return HostPages("mamba", pool, Rank(0, 1, stage=stage, stages=2), False, None, True).spaces("n")

    first = space(0, torch.bfloat16)
    apart = [space(1, torch.bfloat16), space(0, torch.float16), space(0, torch.bfloat16, (8, 4))]
    assert first not in apart and first == space(0, torch.bfloat16)


def test_tensors_as_pages() -> None:
    tensors = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 2)]
    assert pages_of_tensors(tensors) == [[(each.data_ptr(), size)] for each, size in zip(tensors, (6, 16), strict=True)]


def test_a_description_holds_what_the_pool_says_and_how_it_is_taken() -> None:
    pool = SimpleNamespace(dtype=torch.bfloat16, layout="page_first", page_size=16)
    described = describe(pool, "flat")
    assert described["dtype"] == "torch.bfloat16" and described["page_size"] == 16 and described["head_num"] is None
    assert describe(pool, "in place") != described
