"""The copies of a plan once more, to other memory, and what none of them covers."""

import random

import pytest

torch = pytest.importorskip("torch")

from tensorcast_connector.config import SHADOW_RUNS_MAX, SNAPSHOT_GAP_BYTES  # noqa: E402
from tensorcast_connector.engines.weights.load_plan import Copy  # noqa: E402
from tensorcast_connector.engines.weights.shadow import Shadow, uncovered  # noqa: E402


def to(target: "torch.Tensor", whole: "torch.Tensor") -> Shadow:
    """A copy of something of its shape to a view of `whole`."""
    shape = tuple(target.shape)
    return Shadow.of(Copy("x", target.dtype, 0, shape, torch.empty(shape).stride(), target), "slot", whole)


def test_it_goes_to_the_same_part_and_holds_no_memory() -> None:
    whole = torch.zeros(4, 6, 8, dtype=torch.bfloat16)[1:3]
    memory = torch.zeros(whole.numel() * 2, dtype=torch.uint8)
    for view in (whole[1], whole[:, 2:5, 1], whole.transpose(0, 2)[3:], whole[0, 0, 0]):
        whole.zero_(), memory.zero_()
        made = to(view, whole)
        view.fill_(3)
        made.on(memory).target.fill_(3)
        assert memory.numpy().tobytes() == whole.contiguous().view(torch.uint8).numpy().tobytes()
        assert made._copy.target.numel() == 0


def test_what_is_not_covered_is_found() -> None:
    step = SNAPSHOT_GAP_BYTES // 4
    whole = torch.zeros(6, step)  # rows as long as a gap that separates
    size = whole.numel() * 4
    row = size // 6
    assert uncovered(size, [to(whole[:3], whole), to(whole[3:], whole)]) == []
    assert uncovered(size, []) == [(0, size)]
    assert uncovered(size, [to(whole[:5], whole)]) == [(5 * row, size)]
    assert uncovered(size, [to(whole[4], whole), to(whole[1], whole)]) == [
        (0, row),
        (2 * row, 4 * row),
        (5 * row, size),
    ]
    assert uncovered(size, [to(whole[:, 1:], whole)]) == [
        (0, 5 * row + 4)
    ]  # single elements that are close to each other
    assert uncovered(size, [to(whole[:3].t(), whole)]) == [(3 * row, size)]


def test_what_is_covered_in_very_many_pieces_is_taken_whole() -> None:
    whole = torch.zeros(SHADOW_RUNS_MAX + 1, 2)
    assert uncovered(whole.numel() * 4, [to(whole[:, 0], whole)]) == [(0, whole.numel() * 4)]


def test_every_byte_is_covered_or_found() -> None:
    chance = random.Random(5)
    for _ in range(30):
        whole = torch.zeros(chance.randint(2, 5), chance.randint(1, 4), chance.randint(1, 30_000))
        at, shadows = chance.randint(1, whole.shape[0]), []
        for view in (whole[:at, chance.randint(0, 2) :, chance.randint(0, 4) :], whole[at:]):
            if view.numel() and chance.random() < 0.8:
                shadows.append(to(view, whole))
                view.fill_(1)
        flat = whole.reshape(-1)
        for start, stop in uncovered(flat.numel() * 4, shadows):
            assert start % 4 == stop % 4 == 0 and stop > start
            flat[start // 4 : stop // 4] = 1
        assert bool(flat.all())
