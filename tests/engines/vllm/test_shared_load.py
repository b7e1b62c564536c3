"""What a rank has loaded is published behind its back and mapped by the next one; what happens to the pool costs that alone."""

import asyncio
import copy
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from tensorcast_connector.client.blocking import BlockingSession, connect_blocking  # noqa: E402
from tensorcast_connector.client.checkpoint import Checkpoint  # noqa: E402
from tensorcast_connector.config import PUBLISH_NICE  # noqa: E402
from tensorcast_connector.engines.weights.lineage import Lineage  # noqa: E402
from tensorcast_connector.engines.weights.load_plan import Copy, trace  # noqa: E402
from tensorcast_connector.engines.weights.load_sources import Pooled, Source  # noqa: E402
from tensorcast_connector.engines.weights.materialised import KeyDocument, Materialised, NotShared  # noqa: E402
from tensorcast_connector.engines.weights.publication import Publication, claimed  # noqa: E402
from tensorcast_connector.engines.weights.shared_load import Shared  # noqa: E402
from tensorcast_connector.errors import InvalidArgument, NotFound  # noqa: E402
from tests.client.callers import Pool  # noqa: E402
from tests.client.conftest import pool, quick, quiet_loop  # noqa: E402, F401

ROWS, COLUMNS = 700, 300
FACTS = {"weights": "files:1", "tp": [0, 1]}


class Small(nn.Module):
    """Two parameters, one of which has two names and is filled in part by the model itself, and a buffer."""

    __module__ = "vllm.made_here"  # as far as sharing goes it is one of the engine's own models

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((ROWS, COLUMNS), -1.0, dtype=torch.bfloat16), requires_grad=False)
        self.tied = self.w
        self.padded = nn.Parameter(torch.full((ROWS + 9, COLUMNS), -1.0), requires_grad=False)
        self.register_buffer("bias", torch.full((5000,), -1.0))
        self.register_buffer("table", torch.arange(7), persistent=False)

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            if name == "w":
                self.w.data.copy_(tensor)
            elif name == "padded":
                self.padded[: tensor.shape[0]].data.copy_(tensor)
                self.padded[tensor.shape[0] :].data.fill_(0)
            else:
                self.bias.copy_(tensor)
        return {"w", "padded"}


class Watched(Pooled):
    """Tells of itself before it fills for the second time, in the thread that publishes.

    Args:
        before: called then.
        changed: so it is then.
        far: it is not to be read twice.
    """

    def __init__(self, before: Callable[[], None] = lambda: None, changed: bool = False, far: bool = False) -> None:
        torch.manual_seed(3)
        tensors = {
            "w": torch.randn(ROWS, COLUMNS).bfloat16(), "padded": torch.randn(ROWS, COLUMNS), "bias": torch.randn(5000),
        }  # fmt: skip
        super().__init__("made", tensors, threads=2)
        self._before, self._changed, self._far, self._second = before, changed, far, False
        self.fills: list[int] = []

    def again(self) -> Source | None:
        if self._far:
            return None
        made = copy.copy(self)
        made._second = True
        return made

    def fill(self, copies: Sequence[Copy], progress: Callable[[int], None]) -> int:
        self.fills.append(len(copies))
        if self._second:
            self._before()
        return super().fill(copies, progress)

    def check(self) -> None:
        if self._changed and self._second:
            raise InvalidArgument("the files were changed while they were read")


def state(model: nn.Module) -> dict[str, bytes]:
    return {
        name: each.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, each in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }


def expected() -> dict[str, bytes]:
    model = Small()
    model.load_weights(Watched().streamed())
    return state(model)


class Rank:
    """A model that is about to be loaded."""

    def __init__(
        self, session: BlockingSession, facts: dict[str, Any] = FACTS, tenant: str = "default",
        lineage: Lineage | None = None,
    ) -> None:  # fmt: skip
        self.model = Small()
        self.said: list[str] = []
        self.materialised = Materialised(self.model)
        document = KeyDocument(facts, {"model": "small", "rank": "tp 0 of 1"})
        self.name = document.name
        self.shared = Shared(session, tenant, self.materialised, document, self.said.append, lineage=lineage)

    def load(self, source: Watched, after: threading.Event | None = None) -> "Publishing":
        """As the loader does it. What the parameters are is checked as soon as the engine would go on."""
        closing = ExitStack()
        plan = trace(self.model, source.given, source.read, 1000)
        publication = self.shared.publication(plan, source, closing)
        beside = publication.beside if publication is not None else ()
        source.fill([*plan.copies, *beside], lambda done: None)
        del beside
        begun = publication is not None and publication.begin(after)
        found = state(self.model)
        assert found == expected()
        return Publishing(publication, begun, closing)


class Publishing:
    """A publication that has begun, or not."""

    def __init__(self, publication: Publication | None, begun: bool, closing: ExitStack) -> None:
        self.publication, self.begun, self.closing = publication, begun, closing

    def join(self) -> None:
        """Until it has ended."""
        assert self.publication is not None and self.begun
        self.publication._thread.join(30)
        assert not self.publication._thread.is_alive()


async def with_session(pool: Pool, work: Callable[[BlockingSession], None]) -> None:
    """With a session in a thread of its own."""

    def run() -> None:
        with connect_blocking(str(pool.workers[0].socket)) as session:
            work(session)

    await asyncio.to_thread(run)


@pytest.mark.slow
@pytest.mark.parametrize("far", [False, True], ids=["read again", "read once"])
async def test_the_second_rank_maps_what_the_first_has_loaded(pool: Pool, far: bool) -> None:
    await pool.start("a")

    def work(session: BlockingSession) -> None:
        first, second, other = Rank(session), Rank(session), Rank(session, {**FACTS, "tp": [0, 2]})
        assert second.shared.map() is None and "not in the pool" in second.said[0]
        source = Watched(far=far)
        publishing = first.load(source)
        for tensor in (first.model.w.data, first.model.padded.data, first.model.bias):
            tensor.fill_(5)  # what the engine does with them is its own affair
        publishing.join()
        assert first.said[-1].startswith("shared from now on: 0.001 GB"), first.said
        assert len(source.fills) == (1 if far else 2)
        assert second.shared.map() is not None and state(second.model) == expected()
        assert second.model.tied is second.model.w
        assert other.shared.map() is None
        # Who writes to what it has mapped writes for itself.
        second.model.w.data.fill_(7)
        second.model.bias.fill_(7)
        third = Rank(session)
        assert third.shared.map() is not None and state(third.model) == expected()

    await with_session(pool, work)


@pytest.mark.slow
async def test_the_engine_waits_for_nothing_and_its_parameters_are_let_go(pool: Pool) -> None:
    await pool.start("a")

    def work(session: BlockingSession) -> None:
        rank, go, nice = Rank(session), threading.Event(), list[int]()

        def before() -> None:
            nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            go.wait(30)

        publishing = rank.load(Watched(before=before))
        with pytest.raises(NotFound):
            session.artifact(rank.name).id()  # nothing is seen of it yet
        weak = weakref.ref(rank.model), weakref.ref(rank.model.w.untyped_storage())
        rank.model = rank.materialised = rank.shared = None  # type: ignore[assignment]
        gc.collect()
        assert [each() for each in weak] == [None, None]
        go.set()
        publishing.join()
        assert session.artifact(rank.name).id()
        assert nice == [max(PUBLISH_NICE, os.getpriority(os.PRIO_PROCESS, 0))]

    await with_session(pool, work)


@pytest.mark.slow
async def test_it_begins_when_the_engine_has_packed_them(pool: Pool) -> None:
    (worker,) = await pool.start("a")

    def work(session: BlockingSession) -> None:
        rank, other = Rank(session), Rank(session, {"weights": "other"})
        processed, never = threading.Event(), threading.Event()
        publishing, ended = rank.load(Watched(), processed), other.load(Watched(), never)
        time.sleep(0.2)
        assert not worker.artifacts.statistics()["uploads"] and session.list_artifacts() == []
        processed.set()
        publishing.join()
        assert rank.said[-1].startswith("shared from now on")
        assert ended.publication is not None
        ended.publication.end()  # the engine has failed before
        ended.join()
        assert other.said == [] and len(session.list_artifacts()) == 1

    await with_session(pool, work)


@pytest.mark.slow
async def test_what_was_loaded_from_files_that_were_written_over_goes(pool: Pool) -> None:
    await pool.start("a")

    def work(session: BlockingSession) -> None:
        def load(folder: str, state: str, rank: int = 0) -> Rank:
            made = Rank(session, {"weights": state, "tp": [rank, 2]}, lineage=Lineage(folder, state))
            made.load(Watched()).join()
            assert made.said[-1].startswith("shared from now on"), made.said
            return made

        def there() -> set[str]:
            return {name for each in session.list_artifacts() for name in each.names if name.startswith("weights/")}

        first, second, elsewhere = load("one", "a"), load("one", "a", rank=1), load("two", "a2")
        assert there() == {first.name, second.name, elsewhere.name}
        session.name("kept", second.name)
        mapped = Rank(session, {"weights": "a", "tp": [0, 2]})
        assert mapped.shared.map() is not None
        newer = load("one", "b")
        assert there() == {second.name, elsewhere.name, newer.name}
        assert any("files that were written over" in line for line in newer.said)
        assert state(mapped.model) == expected()  # who has it mapped keeps it
        again = load("one", "b", rank=1)
        assert there() == {second.name, elsewhere.name, newer.name, again.name}
        # Files that are changed just now take nobody's place.
        late = Rank(session, {"weights": "c", "tp": [0, 2]}, lineage=Lineage("one", "c"))
        late.load(Watched(changed=True)).join()
        assert "changed" in late.said[-1] and there() == {second.name, elsewhere.name, newer.name, again.name}

    await with_session(pool, work)


def test_a_folder_is_told_by_what_it_is_and_its_state_by_its_files(tmp_path: Path) -> None:
    def put(folder: Path, value: float) -> Lineage:
        folder.mkdir(exist_ok=True)
        save_file({"w": torch.full((4,), value)}, folder / "model.safetensors")
        with Checkpoint.open(folder) as checkpoint:
            return Lineage.of(checkpoint)

    first, other = put(tmp_path / "one", 1.0), put(tmp_path / "two", 1.0)
    again = put(tmp_path / "one", 2.0)
    assert first.folder == again.folder != other.folder
    assert len({first.state, again.state, other.state}) == 3
    (tmp_path / "link").symlink_to(tmp_path / "one")
    with Checkpoint.open(tmp_path / "link") as checkpoint:
        assert Lineage.of(checkpoint) == again
    assert again.name("weights/abc") == f"weights-of/{again.folder}/{again.state}/abc"


@pytest.mark.slow
async def test_a_worker_that_dies_meanwhile_costs_nothing_but_the_sharing(pool: Pool) -> None:
    (worker,) = await pool.start("a")
    loop = asyncio.get_running_loop()

    def die() -> None:
        asyncio.run_coroutine_threadsafe(pool.crash(worker), loop).result(10)

    def work(session: BlockingSession) -> None:
        rank = Rank(session)
        rank.load(Watched(before=die)).join()
        assert rank.said[-1].startswith("not shared:")
        assert state(rank.model) == expected()

    await with_session(pool, work)


@pytest.mark.slow
async def test_an_engine_that_ends_leaves_nothing_half_published(pool: Pool) -> None:
    (worker,) = await pool.start("a")

    def work(session: BlockingSession) -> None:
        rank, filling, go = Rank(session), threading.Event(), threading.Event()

        def before() -> None:
            filling.set()
            go.wait(30)

        publishing = rank.load(Watched(before=before))
        assert filling.wait(30) and worker.artifacts.statistics()["uploads"] == 1
        assert publishing.publication is not None
        publishing.publication._ending.set()
        go.set()
        publishing.join()
        assert rank.said == [] and session.list_artifacts() == []

    await with_session(pool, work)
    assert not worker.artifacts.statistics()["uploads"]


@pytest.mark.slow
async def test_of_two_that_load_the_same_one_publishes(pool: Pool) -> None:
    await pool.start("a")

    def work(session: BlockingSession) -> None:
        first, second, third, go = Rank(session), Rank(session), Rank(session), threading.Event()
        filling = threading.Event()

        def before() -> None:
            filling.set()
            go.wait(30)

        one = first.load(Watched(before=before))
        assert filling.wait(30)
        second.load(Watched()).join()
        assert second.said == ["another engine is sharing the same"]
        with connect_blocking(str(pool.workers[0].socket), tenant="blue") as other:
            blue = Rank(other, tenant="blue")
            blue.load(Watched()).join()
            assert blue.said[-1].startswith("shared from now on")
        go.set()
        one.join()
        third.load(Watched()).join()
        assert third.said == ["shared by another engine meanwhile"]
        assert len(session.list_artifacts()) == 1

    await with_session(pool, work)


def test_a_claim_ends_with_who_has_it() -> None:
    with claimed("it") as mine:
        assert mine
        with claimed("it") as too, claimed("other") as other:
            assert not too and other
    with claimed("it") as mine:
        assert mine


@pytest.mark.slow
async def test_without_room_nothing_is_lost_but_the_sharing(pool: Pool) -> None:
    await pool.start("a", artifact_bytes=100_000)

    def work(session: BlockingSession) -> None:
        near, far = Rank(session), Rank(session)
        near.load(Watched()).join()
        publishing = far.load(Watched(far=True))
        assert publishing.publication is None
        for rank in (near, far):
            assert rank.said[-1].startswith("not shared:") and state(rank.model) == expected()

    await with_session(pool, work)


@pytest.mark.slow
async def test_what_was_changed_while_it_was_read_is_not_shared(pool: Pool) -> None:
    (worker,) = await pool.start("a")

    def work(session: BlockingSession) -> None:
        rank = Rank(session)
        rank.load(Watched(changed=True)).join()
        assert "changed" in rank.said[-1] and session.list_artifacts() == []

    await with_session(pool, work)
    assert not worker.artifacts.statistics()["uploads"]


@pytest.mark.slow
async def test_an_artifact_that_is_not_what_its_name_says_is_not_used(pool: Pool) -> None:
    await pool.start("a", artifact_bytes=32 << 20)

    def work(session: BlockingSession) -> None:
        good = Rank(session)
        good.load(Watched()).join()
        found = session.artifact(good.name).tensor_dict(framework="torch")
        before = state(Small())
        wrong = {
            "its key document": {**found, "tensorcast.key": torch.zeros(3, dtype=torch.uint8)},
            "says something else": {**found, "tensorcast.key": torch.tensor(list(b'{"facts": {}}'), dtype=torch.uint8)},
            "is not in both": {name: each for name, each in found.items() if name != "w"},
            "there and": {**found, "w": found["w"].t().contiguous()},
            "here": {**found, "padded": found["padded"].double()},
        }
        for words, tensors in wrong.items():
            session.put(tensors, name=good.name)
            rank = Rank(session)
            assert rank.shared.map() is None and words in rank.said[0] and "cannot be used" in rank.said[0]
            assert state(rank.model) == before
            rank.load(Watched()).join()  # and is replaced
            assert rank.said[-1].startswith("shared from now on"), rank.said
            mapping = Rank(session)
            assert mapping.shared.map() is not None, mapping.said

    await with_session(pool, work)


def test_models_that_cannot_be_shared_say_why() -> None:
    class Foreign(Small):
        __module__ = "somewhere.else"

    transposed, parts, watching, helper = Small(), Small(), Small(), Small()
    transposed.w.data = torch.zeros(COLUMNS, ROWS).t()
    whole = torch.zeros(2, 10)
    parts.one, parts.other = nn.Parameter(whole[0]), nn.Parameter(whole[1])
    watching.view = watching.w.data[3:]
    helper.method = type("Method", (), {})()
    helper.method.scales = [helper.w.data]
    for model, words in [
        (Foreign(), "no model of the engine's own"), (transposed, "no plain bytes"), (parts, "parts of one tensor"),
        (watching, "view looks at the memory of"), (helper, "method.scales looks at the memory of"),
    ]:  # fmt: skip
        with pytest.raises(NotShared, match=words):
            Materialised(model)


def test_what_is_neither_parameter_nor_buffer_is_not_shared() -> None:
    model = Small()
    model.extra = torch.zeros(ROWS, COLUMNS)
    usual = model.load_weights

    def load(weights: Any) -> set[str]:
        def passed() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                if name == "padded":
                    model.extra.copy_(tensor)
                yield name, tensor

        return usual(passed())

    model.load_weights = load  # type: ignore[method-assign]
    materialised, source = Materialised(model), Watched()
    with pytest.raises(NotShared, match="extra is neither"):
        materialised.loaded(trace(model, source.given, source.read, 1000))
