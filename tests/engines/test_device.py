"""Pages hold what the KV cache holds, head-major, and come back byte for byte."""

import numpy as np
import pytest

from tensorcast_connector.engines.device import CpuPageCopier, copier_for
from tensorcast_connector.errors import ConfigError

torch = pytest.importorskip("torch")
BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 7, 4, 16, 8, 3


def shared_storage(dtype: "torch.dtype") -> "list[torch.Tensor]":
    """As vLLM's CPU backend lays it out: one buffer, layer after layer."""
    whole = torch.randint(-100, 100, (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH), dtype=torch.int16).to(dtype)
    return list(whole.unbind(0))


def separate(dtype: "torch.dtype") -> "list[torch.Tensor]":
    """Layers anywhere, so no common stride."""
    layers = shared_storage(dtype)
    return [layers[2].clone(), layers[0].clone(), layers[1].clone()]


def block_outermost(dtype: "torch.dtype") -> "list[torch.Tensor]":
    """Layers interleaved within a block."""
    whole = torch.randint(-100, 100, (BLOCKS, LAYERS, HEADS, TOKENS, WIDTH), dtype=torch.int16).to(dtype)
    return [whole[:, layer] for layer in range(LAYERS)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", [shared_storage, separate, block_outermost])
def test_a_page_is_head_major_and_round_trips(layout, dtype) -> None:
    layers = layout(dtype)
    copier = copier_for(layers)
    page = memoryview(bytearray(copier.page_bytes))
    copier.save(3, page)
    expected = b"".join(
        layer[3, head].contiguous().view(torch.uint8).numpy().tobytes() for head in range(HEADS) for layer in layers
    )
    assert bytes(page) == expected
    before = [layer.clone() for layer in layers]
    for layer in layers:
        layer[5] = 0
    copier.load(5, page)
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[5].view(torch.uint8), old[3].view(torch.uint8))
        others = [block for block in range(BLOCKS) if block != 5]
        assert torch.equal(layer[others].view(torch.uint8), old[others].view(torch.uint8)), "a neighbour was touched"


def test_one_strided_copy_is_used_where_layers_are_evenly_spaced() -> None:
    assert "one copy a page" in repr(CpuPageCopier(shared_storage(torch.bfloat16)))
    assert "one copy a layer" in repr(CpuPageCopier(separate(torch.bfloat16)))


def test_a_rank_owns_one_contiguous_range_of_the_whole_models_page() -> None:
    layers = shared_storage(torch.bfloat16)
    whole = copier_for(layers)
    page = memoryview(bytearray(whole.page_bytes))
    whole.save(2, page)
    halves = []
    for rank in range(2):
        rank_layers = [layer[:, rank * 2 : rank * 2 + 2] for layer in layers]
        copier = copier_for(rank_layers)
        part = memoryview(bytearray(copier.page_bytes))
        copier.save(2, part)
        halves.append(bytes(part))
    assert bytes(page) == halves[0] + halves[1]


def test_layouts_that_cannot_be_shared_are_refused() -> None:
    token_major = torch.zeros(BLOCKS, TOKENS, HEADS, WIDTH).permute(0, 2, 1, 3)
    with pytest.raises(ConfigError, match="not contiguous"):
        copier_for([token_major])
    with pytest.raises(ConfigError, match="expected"):
        copier_for([torch.zeros(2, BLOCKS, HEADS, TOKENS, WIDTH)])
    with pytest.raises(ConfigError, match="different shapes"):
        copier_for([torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH), torch.zeros(BLOCKS, 1, TOKENS, WIDTH)])
    with pytest.raises(ConfigError, match="meta"):
        copier_for([torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH, device="meta")])


def test_copies_do_not_hold_the_interpreter_lock_for_long() -> None:
    layers = [torch.zeros(2, 8, 128, 128, dtype=torch.bfloat16) for _ in range(8)]
    copier = copier_for(layers)
    page = memoryview(np.zeros(copier.page_bytes, np.uint8))
    copier.save(1, page)
    assert copier.page_bytes == 8 * 8 * 128 * 128 * 2
