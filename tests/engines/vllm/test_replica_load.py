"""A rank copies its parameters from a replica on a device; whatever happens to that, it goes on to the next way."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from tensorcast_connector.client.blocking import BlockingSession  # noqa: E402
from tensorcast_connector.engines.options import LoaderConfig  # noqa: E402
from tensorcast_connector.engines.weights import replica_load  # noqa: E402
from tensorcast_connector.engines.weights.load_sources import Stage, in_threads  # noqa: E402
from tensorcast_connector.engines.weights.loading import Load  # noqa: E402
from tensorcast_connector.engines.weights.materialised import KeyDocument, Materialised  # noqa: E402
from tensorcast_connector.engines.weights.replica_load import device_of  # noqa: E402
from tensorcast_connector.errors import ConfigError  # noqa: E402
from tests.client.callers import Pool  # noqa: E402
from tests.client.conftest import pool, quick, quiet_loop  # noqa: E402, F401
from tests.engines.devices.conftest import device, fake_cuda, stand_in  # noqa: E402, F401
from tests.engines.vllm.test_shared_load import FACTS, Rank, Small, Watched, expected, state, with_session  # noqa: E402
from tests.waiting import until_blocking  # noqa: E402


def shared_on(session: BlockingSession, device: str) -> Rank:
    """What the first rank has loaded is in the pool and on the device."""
    first = Rank(session)
    first.load(Watched()).join()
    session.artifact(first.name).replicate(device)
    return first


@pytest.mark.slow
async def test_parameters_are_copied_from_a_replica(pool: Pool, device: str) -> None:
    (worker,) = await pool.start("a", devices=device)

    def work(session: BlockingSession) -> None:
        early = Rank(session)
        assert early.shared.replica(device) is None and "no artifact has the name" in early.said[-1]
        shared_on(session, device)
        second, third = Rank(session), Rank(session)
        copied = second.shared.replica(device)
        assert copied == (device, second.shared.map()) and second.said == []
        assert third.shared.replica(device) == copied
        assert state(third.model) == expected() and third.model.tied is third.model.w
        third.model.w.data.fill_(7)  # its own: nobody else sees it
        fourth = Rank(session)
        assert fourth.shared.replica(device) and state(fourth.model) == expected()
        assert worker.devices.table.listed()[0].openers.total() == 0
        other = Rank(session, {**FACTS, "tp": [0, 2]})
        assert other.shared.replica(device) is None

    await with_session(pool, work)


@pytest.mark.slow
async def test_the_parameters_stay_where_they_are(pool: Pool) -> None:
    await pool.start("a", devices="host:0")

    def work(session: BlockingSession) -> None:
        shared_on(session, "host:0")
        rank = Rank(session)
        before = {name: each.data_ptr() for name, each in rank.model.named_parameters()}
        assert rank.shared.replica("host:0") is not None
        assert {name: each.data_ptr() for name, each in rank.model.named_parameters()} == before

    await with_session(pool, work)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before it is opened", "in the middle of the copies"])
async def test_the_owner_of_the_memory_is_killed(
    pool: Pool, device: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = await pool.start("a", devices=device)
    real = replica_load._copy_all

    def kill() -> None:
        process = worker.devices.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        until_blocking(lambda: not process.alive)

    def in_the_middle(memory: Any, source: int, placed: Any) -> int:
        size = real(memory, source, placed[:1])
        kill()
        return size + real(memory, source, placed[1:])

    def work(session: BlockingSession) -> None:
        shared_on(session, device)
        rank = Rank(session)
        if when == "before it is opened":
            kill()
        else:
            monkeypatch.setattr(replica_load, "_copy_all", in_the_middle)
        assert rank.shared.replica(device) is None
        assert rank.said[-1].startswith(f"no replica of {rank.name} on {device}: ") and len(rank.said) == 1
        assert rank.shared.map() is not None and state(rank.model) == expected()

    await with_session(pool, work)


@pytest.mark.slow
async def test_what_is_not_of_this_rank_is_not_copied(pool: Pool) -> None:
    await pool.start("a", artifact_bytes=32 << 20, devices="host:0")

    def work(session: BlockingSession) -> None:
        good = shared_on(session, "host:0")
        found = session.artifact(good.name).tensor_dict(framework="torch")
        wrong = {
            "its key document": {**found, "tensorcast.key": torch.zeros(3, dtype=torch.uint8)},
            "cannot be read": {name: each for name, each in found.items() if name != "tensorcast.key"},
            "is not in both": {name: each for name, each in found.items() if name != "w"},
            "there and": {**found, "w": found["w"].t().contiguous()},
            "here": {**found, "padded": found["padded"].double()},
        }
        before = state(Small())
        for words, tensors in wrong.items():
            session.put(tensors, name=good.name).replicate("host:0")
            rank = Rank(session)
            assert rank.shared.replica("host:0") is None and words in rank.said[0], rank.said
            assert state(rank.model) == before
        assert not [each for each in session.artifact(good.name).replicas() if each.open]

    await with_session(pool, work)


@pytest.mark.slow
async def test_without_a_device_of_its_own_a_rank_does_not_ask(pool: Pool) -> None:
    await pool.start("a", devices="host:0")

    def work(session: BlockingSession) -> None:
        shared_on(session, "host:0")
        rank = Rank(session)
        assert rank.shared.replica("") is None and rank.said == []  # its parameters are the CPU's
        assert rank.shared.replica("host:1") is None and "none of the worker's devices" in rank.said[0]
        assert rank.shared.replica("cuda:0") is None and rank.said[1].startswith(
            f"no replica of {rank.name} on cuda:0: "
        )

    await with_session(pool, work)


class Engine:
    """What loading has to know of an engine whose models are Small."""

    name, whole = "vllm", False
    processed = None

    def __init__(self, folder: Path) -> None:
        self.model, self._folder = str(folder), folder

    def folder(self) -> Path:
        return self._folder

    def files(self) -> tuple[str, list[str], bool]:
        return str(self._folder), [str(each) for each in self._folder.glob("*.safetensors")], True

    def document(self, materialised: Materialised, epoch: str) -> KeyDocument:
        return KeyDocument({"weights": epoch}, {"model": "small", "rank": "tp 0 of 1"})

    def missing(self, plan: Any) -> list[str]:
        return []

    def loaded(self, names: Any) -> None:
        assert names == {"w", "padded"}


@pytest.mark.slow
async def test_it_is_the_first_way_of_a_load(pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (worker,) = await pool.start("a", devices="host:0")
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(dict(Watched().streamed()), folder / "model.safetensors")
    caplog.set_level("INFO", "tensorcast_connector.engines")

    def load() -> str:
        """A new model is loaded; what was said."""
        caplog.clear()
        model = Small()
        options = LoaderConfig(worker=str(worker.socket), device="host:0")
        with ExitStack() as stack:
            Load(Engine(folder), options, model, stack).run()
        assert state(model) == expected()
        return caplog.text

    def work(session: BlockingSession) -> None:
        said = load()
        assert "no replica of weights/" in said and "from files, being shared" in said, said
        until_blocking(lambda: bool(session.list_artifacts("weights/")))
        (listed,) = session.list_artifacts("weights/")
        assert "no replica of weights/" in (said := load()) and "from the pool, mapped" in said
        session.artifact(listed.artifact_id).replicate("host:0")
        assert "from a replica on host:0: 0.001 GB" in (said := load()) and "no replica" not in said
        process = worker.devices.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        assert "no replica of weights/" in (said := load()) and "from the pool, mapped" in said

    await with_session(pool, work)


def test_which_device_is_asked_for() -> None:
    assert device_of(Materialised(Small()), "") == "" and device_of(Materialised(Small()), "host:3") == "host:3"
    assert LoaderConfig.from_extra({"device": "cuda:1"}).device == "cuda:1"
    for text, words in [("gpu", "'gpu' is no device"), ("cuda:0,cuda:1", "should be one device")]:
        with pytest.raises(ConfigError, match=words):
            LoaderConfig.from_extra({"device": text})


# --- copies to other devices, as far as the CPU shows them --------------------------------------------------------------


def test_parts_of_a_tensor_are_sent_wherever_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorcast_connector.engines.weights import load_sources

    monkeypatch.setattr(load_sources, "STAGE_BYTES", 200)
    cases: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "whole": lambda each: each,
        "columns": lambda each: each[:, 3:11],
        "transposed": lambda each: each.t(),
        "every other row": lambda each: each[::2],
        "long rows, apart": lambda each: each.t()[5:9],
        "a value": lambda each: each[2, 3],
        "nothing": lambda each: each[:0],
    }
    for name, view in cases.items():
        target, stage = torch.zeros(60, 16), Stage()
        given = torch.randn(view(target).shape)
        stage.send(view(target), given)
        stage.finish()
        assert torch.equal(view(target), given), name
        assert int((target != 0).sum()) <= given.numel(), name


def test_when_a_thread_fails_nothing_is_under_way_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = []
    monkeypatch.setattr(Stage, "finish", lambda self: finished.append(self))

    def work(number: int, stage: Stage) -> int:
        time.sleep(0.01)
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"):
        in_threads(range(10), work, 2, lambda _: None)
    assert len(finished) == 2
    assert in_threads(range(10), lambda number, _: number, 2, lambda _: None) == 45
