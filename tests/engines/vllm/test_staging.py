"""Copies to a GPU through buffers, where there is none: a device that copies nothing before somebody waits for it.

So a buffer that is filled again too early, and memory that is let go of too early, are wrong values, always.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from tensorcast_connector.client.checkpoint import Checkpoint  # noqa: E402
from tensorcast_connector.engines.weights import load_sources  # noqa: E402
from tensorcast_connector.engines.weights.load_plan import Copy  # noqa: E402
from tensorcast_connector.engines.weights.load_sources import Files, Pooled, Stage, in_threads  # noqa: E402

CUDA = torch.device("cuda", 0)


class Stream:
    """Work that is asked for, in its order, and not done yet."""

    current: "Stream | None" = None

    def __init__(self, device: Any) -> None:
        assert device == CUDA
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.work[self.done]()
            self.done += 1

    def synchronize(self) -> None:
        self.run(len(self.work))


class Event:
    """A place in a stream."""

    waits = True

    def record(self, stream: Stream) -> None:
        self._stream, self._place = stream, len(stream.work)

    def synchronize(self) -> None:
        if Event.waits:
            self._stream.run(self._place)


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor on that device."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return CUDA

    def copy_(self, source: Any, non_blocking: bool = False) -> Any:
        assert non_blocking and Stream.current is not None, "a copy that everybody would wait for"
        assert source.is_contiguous() and source.dtype == self.dtype, "torch would copy it once more before"
        target, given = self.as_subclass(torch.Tensor), source  # the memory itself, not what is in it now
        Stream.current.work.append(lambda: target.copy_(given))
        return self


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was waited for as a whole."""
    waited: list[str] = []
    empty = torch.empty

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        made = empty(*args, **kwargs)
        made.pinned = pin_memory
        return made

    @contextlib.contextmanager
    def current(stream: Stream) -> Iterator[None]:
        Stream.current, before = stream, Stream.current
        yield
        Stream.current = before

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    monkeypatch.setattr(load_sources, "STAGE_BYTES", 4096)
    yield waited


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda each: each, "columns": lambda each: each[:, 10:51], "transposed": lambda each: each.t(),
    "every other row": lambda each: each[::2], "a value": lambda each: each[3, 4], "nothing": lambda each: each[:0],
}  # fmt: skip


def pairs() -> list[tuple[Any, Any, Any]]:
    """Tensors on the device, views of them, and what is to be there."""
    chance, found = torch.Generator().manual_seed(1), []
    for view in LAYOUTS.values():
        for dtype in (torch.float32, torch.bfloat16):
            for flip in (False, True):
                whole = torch.full((300, 64), -1.0, dtype=torch.bfloat16)
                given = torch.randn(view(whole).shape, generator=chance).to(dtype)
                found.append(
                    (
                        whole,
                        view(whole.as_subclass(OnDevice)),
                        given.t().contiguous().t() if flip and given.dim() == 2 else given,
                    )
                )
    return found


def send_all(given: list[tuple[Any, Any, Any]], stage: Stage) -> None:
    for _, view, source in given:
        stage.send(view, source)
    stage.finish()


def wrong(given: list[tuple[Any, Any, Any]]) -> int:
    """How many are not as they should be."""
    found = 0
    for whole, view, source in given:
        there = view.as_subclass(torch.Tensor)
        beside = int((whole != -1).sum()) - int((there != -1).sum())
        found += not torch.equal(there, source.to(there.dtype)) or beside != 0
    return found


def test_every_layout_and_dtype_arrives(gpu: list[str]) -> None:
    given, stage = pairs(), Stage()
    send_all(given, stage)
    assert wrong(given) == 0
    assert gpu == ["cuda:0"], "what the model has filled in itself is there before the first copy, once for a thread"
    assert len(stage._buffers) == 2 and all(each.pinned for each in stage._buffers)


def test_it_is_seen_when_a_buffer_is_not_waited_for(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "waits", False)
    given = pairs()
    send_all(given, Stage())
    assert wrong(given) > 0


def test_nothing_is_under_way_after_a_failure(gpu: list[str]) -> None:
    target = torch.zeros(64)
    stages: list[Stage] = []

    def work(number: int, stage: Stage) -> int:
        stages.append(stage)
        if number:
            raise ValueError("the second")
        stage.send(target.as_subclass(OnDevice), torch.ones(64))
        assert not target.any()
        return 1

    with pytest.raises(ValueError, match="the second"):
        in_threads([0, 1], work, 1, lambda _: None)
    assert bool(target.all()) and stages[0]._stream.done == len(stages[0]._stream.work)


@pytest.mark.parametrize("kind", ["files", "pooled"])
def test_a_plan_is_carried_out(gpu: list[str], kind: str, tmp_path: Path) -> None:
    """Rows, columns, a conversion and a repeated value, to views of parameters on the device, by several threads."""
    tensors = {"a": torch.randn(300, 64), "b": torch.randn(1000).bfloat16(), "c": torch.randn(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    fused, bias, scale = torch.zeros(200, 64), torch.zeros(2, 1000), torch.zeros(50)
    there = [each.as_subclass(OnDevice) for each in (fused, bias, scale)]
    copies = [
        Copy("a", torch.float32, 64 * 10, (100, 64), (64, 1), there[0][:100]),
        Copy("a", torch.float32, 32, (100, 32), (64, 1), there[0][100:, :32]),
        Copy("a", torch.float32, 64 * 200, (100, 32), (64, 1), there[0][100:, 32:]),
        Copy("b", torch.bfloat16, 0, (1000,), (1,), there[1][1]),
        Copy("c", torch.float32, 0, (50,), (0,), there[2]),
    ]
    with Checkpoint.open(tmp_path) as checkpoint:
        source = Files(checkpoint, 3) if kind == "files" else Pooled("it", tensors, 3)
        source.fill(copies, lambda _: None)
    a = tensors["a"]
    assert torch.equal(fused[:100], a[10:110]) and torch.equal(fused[100:, :32], a[:100, 32:])
    assert torch.equal(fused[100:, 32:], a[200:, :32])
    assert torch.equal(bias[1], tensors["b"].float()) and not bias[0].any()
    assert torch.equal(scale, tensors["c"].expand(50))


def test_memory_of_this_process_may_be_among_it(gpu: list[str]) -> None:
    """As when a source that is far away fills parameters and shared memory at once."""
    near, far, stage = torch.zeros(2, 3000), torch.zeros(2, 3000), Stage()
    for number in range(2):
        stage.send(near[number], torch.full((3000,), 5.0))
        stage.send(far.as_subclass(OnDevice)[number], torch.full((3000,), 6.0))
    stage.finish()
    assert bool((near == 5).all()) and bool((far == 6).all())
