"""`tensorcast weights` and `prefetch` of published versions, on a real store and two real workers."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from tensorcast_connector import cli_weights
from tensorcast_connector.cli import main
from tensorcast_connector.cli_weights import with_progress
from tensorcast_connector.client.blocking import BlockingSession, connect_blocking
from tensorcast_connector.client.publisher import WeightPublisher
from tensorcast_connector.core.artifact import CHUNK_BYTES
from tensorcast_connector.errors import NotFound
from tests.client.callers import Pool
from tests.client.conftest import pool
from tests.client.test_weights import model
from tests.cluster import quick
from tests.documented import section
from tests.loops import quiet_loop
from tests.test_cli_service import Site, site
from tests.waiting import until, until_blocking

__all__ = ["pool", "quick", "quiet_loop", "site"]
pytestmark = pytest.mark.slow


class Caller:
    """One tenant of the site, which nobody else is."""

    def __init__(self, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
        site.tenants += 1
        self.site = site
        self.tenant = f"w{site.tenants}"
        self._capsys = capsys

    def session(self, worker: int = 0) -> BlockingSession:
        return connect_blocking(self.site.workers[worker]["worker"], tenant=self.tenant)

    def run(self, *args: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        status = main([*args, "--worker", self.site.socket, "--tenant", self.tenant])
        return status, *self._capsys.readouterr()

    def done(self, *args: str) -> str:
        status, out, err = self.run(*args)
        assert status == 0, err
        return out

    def fails(self, *args: str) -> str:
        status, _, err = self.run(*args)
        assert status and err.count("\n") == 1 and "Traceback" not in err, err
        return err

    def listed(self, *args: str) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.done("weights", "ls", *args, "--json"))
        return said

    def shares(self, prefix: str) -> list[float]:
        """Of the newest version, that workers have: this one hears of another's copy a moment later."""
        return sorted(round(each, 1) for each in self.listed(prefix)["versions"][0]["workers"].values())


@pytest.fixture
def caller(site: Site, capsys: pytest.CaptureFixture[str]) -> Caller:
    """A new one."""
    return Caller(site, capsys)


def document(**more: Any) -> dict[str, Any]:
    """Tensors with a key document, as the loader of engines puts them."""
    text = json.dumps({"model": "org/m", "rank": "tp 0 of 2", "facts": {"engine": ["vllm", "0.1", "2.0"]}} | more)
    return {"w": np.ones(100, np.float32), "tensorcast.key": np.frombuffer(text.encode(), np.uint8)}


def test_versions_and_loaded_parameters_are_listed(caller: Caller) -> None:
    assert caller.run("weights", "ls")[2] == "no weights\n"
    with caller.session() as session, caller.session(1) as other:
        publisher = session.weight_publisher("policy")
        publisher.publish(model(), 1)
        second = publisher.publish(model({3: 50}), 2)
        session.name("production", second.artifact_id)
        session.weight_publisher("org/m").publish(model(), "step-a")
        other.put(document(), name="weights/0123")
        other.put(document(facts=[]), name="weights/4567")
        other.put({"w": np.ones(3), "tensorcast.key": np.ones(1, np.uint8)}, name="weights/89ab")
        until_blocking(lambda: len(caller.listed()["materialised"]) == 3)
        listed = caller.listed()
        assert [(each["model"], each["version"], each["newest"]) for each in listed["versions"]] == [
            ("org/m", "step-a", True), ("policy", "2", True), ("policy", "1", False),
        ]  # fmt: skip
        newest = listed["versions"][1]
        assert (newest["id"], newest["bytes"], newest["moved_bytes"], newest["parts"]) == (second.id, 40960, 4096, 2)
        assert newest["names"] == ["production"] and newest["workers"] == {session._session.worker_id: 1.0}
        session.weights("policy", 1).prefetch(to="b")
        until_blocking(lambda: caller.shares("pol") == [0.9, 1.0])
        assert [(each["model"], each["rank"], each["engine"]) for each in listed["materialised"]] == [
            ("org/m", "tp 0 of 2", "vllm 0.1"), ("org/m", "tp 0 of 2", ""), ("", "", ""),
        ]  # fmt: skip
        for each in listed["materialised"]:
            assert session.artifact(each["artifact_id"]).describe().workers == (other._session.worker_id,), "not moved"
        assert [each["name"] for each in caller.listed("45")["materialised"]] == ["weights/4567"]
    text = caller.done("weights", "ls")
    assert "policy:2 (newest)" in text and "production" in text and "tp 0 of 2" in text and "4.0 KiB" in text


def test_versions_are_pinned_and_fetched(caller: Caller) -> None:
    with caller.session() as session:
        publisher = session.weight_publisher("policy")
        publisher.publish(model(), 1)
        publisher.publish(model({3: 50}), 2)
        assert "deadline" in caller.fails("prefetch", "policy:2", "--to", "b", "--timeout", "0.000001")
        caller.done("prefetch", "policy:2", "--to", "b", "--timeout", "30")
        until_blocking(lambda: caller.shares("policy") == [1.0, 1.0])
        caller.done("weights", "pin", "policy", "--ttl", "5m", "--on", "b", "--timeout", "30")
        session.put(model(), name="plain")
        caller.done("prefetch", "plain", "--to", "b")
        until_blocking(lambda: len(session.artifact("plain").describe().workers) == 2)
        assert "no artifact has the name 'nosuch'" in caller.fails("prefetch", "nosuch", "--to", "b")
        assert "no artifact has the name 'policy:9'" in caller.fails("weights", "pin", "policy:9", "--ttl", "5m")
        assert "--ttl 'x' is no time" in caller.fails("weights", "pin", "policy", "--ttl", "x")
        assert "deadline" in caller.fails("weights", "pin", "policy:1", "--ttl", "5m", "--timeout", "0.000001")


def test_versions_are_deleted(caller: Caller) -> None:
    with caller.session() as session:
        publisher = session.weight_publisher("policy", keep_last=3)
        for version in (1, 2, 3):
            publisher.publish(model({version: 50}), version)
        assert "policy:3 is the newest version" in caller.fails("weights", "rm", "policy:3")
        caller.done("weights", "rm", "policy:1")
        assert [each["version"] for each in caller.listed()["versions"]] == ["3", "2"]
        assert "there is no published version 'policy:1'" in caller.fails("weights", "rm", "policy:1")
        status, _, err = caller.run("weights", "rm", "nosuch", "policy:2")
        assert status == 1 and "1 of 2 not deleted: nosuch: there is no published version" in err
        session.put(document(), name="weights/0123")
        caller.done("weights", "rm", "policy", "weights/0123")
        assert not session.list_artifacts()
        with pytest.raises(NotFound):
            session.weights("policy")


async def test_the_worker_says_how_far_it_is(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_weights, "PROGRESS_INTERVAL_S", 0.005)
    a, b = await pool.start("a", "b", artifact_bytes=64 << 20)
    session = await pool.session(a)
    await WeightPublisher(session, "policy").publish({"w": np.ones(3 * CHUNK_BYTES, np.uint8)}, 1)
    await pool.seen()
    fetch, going = b.artifacts._elsewhere.fetch_bytes, asyncio.Event()
    fetched = 0

    async def slow(*args: Any) -> None:
        nonlocal fetched
        await fetch(*args)
        fetched += 1
        if fetched >= 3:
            await going.wait()

    monkeypatch.setattr(b.artifacts._elsewhere, "fetch_bytes", slow)
    found, told = await session.stored("policy"), list[tuple[int, int]]()
    work = asyncio.ensure_future(
        with_progress(found.prefetch("b"), found, "b", lambda done, size: told.append((done, size)))
    )
    await until(lambda: told and 0 < told[-1][0] < told[-1][1])
    going.set()
    await work
    assert told == sorted(told) and told[-1][1] >= 3 * CHUNK_BYTES
    done, size = await found.arrival("b")
    assert done == size


def test_what_json_says_is_documented(caller: Caller) -> None:
    with caller.session() as session:
        session.weight_publisher("policy").publish(model(), 1)
        session.put(document(), name="weights/0123")
    until_blocking(lambda: bool(caller.listed()["materialised"]))
    said, documented = caller.listed(), section("commands.md", "What `--json` says")
    fields = [*said, *said["versions"][0], *said["materialised"][0]]
    assert not [each for each in fields if f"`{each}`" not in documented]
