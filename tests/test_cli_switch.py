"""`tensorcast disable` and `enable`: what they say, and where it is seen what is disabled."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tensorcast_connector.cli import main
from tensorcast_connector.config import default_cache_dir, default_runtime_dir
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import AttachInstance, Ok
from tests.client.callers import Pool
from tests.cluster import plane, quick
from tests.loops import quiet_loop
from tests.waiting import until

__all__ = ["quick", "quiet_loop"]


@pytest.fixture
async def pool(tmp_path: Path, quick: None) -> AsyncIterator[Pool]:
    """Nothing runs yet."""
    made = Pool(SocketNetwork(), tmp_path)
    yield made
    await made.close()


async def test_the_switch_says_what_it_does_and_is_seen(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    [a] = await pool.start()
    client = await pool.engine(a, "i")
    await client.client.call(AttachInstance("i", "vllm", "m", "n"), Ok, 5)
    await until(lambda: "i" in plane(a).view.instances)

    async def says(*words: str) -> str:
        capsys.readouterr()
        await asyncio.to_thread(main, list(words))  # the status of a doctor that finds fault is not the question here
        return capsys.readouterr().out.strip()

    at = ["--worker", str(a.socket)]
    assert "m: 1 engine(s) that are there now serve without the pool" in await says("disable", "m", "--why", "one", *at)
    assert (await says("disable", "nosuch", *at)).startswith("nosuch: nothing by that name is attached now; the rule")
    first = plane(a).view.disabled["m"]
    assert first.endswith(": one") and "nosuch" in plane(a).view.disabled
    assert f"m: was disabled already, {first}" in await says("disable", "m", *at)
    assert plane(a).view.disabled["m"] == first, "the first reason stands"
    await says("disable", "m", "--why", "another", *at)
    assert plane(a).view.disabled["m"].endswith(": another")

    store, note = ["--store", str(pool.store_address)], plane(a).view.disabled["m"]
    assert f"Disabled: m, {note}" in await says("status", *store)
    shown = json.loads(await says("status", "--json", *store))["disabled"]
    assert [each["what"] for each in shown] == ["m", "nosuch"] and shown[0]["note"] == note
    for where in (store, at):
        assert f"m serves without the pool, {note}: `tensorcast enable m`" in await says("doctor", *where)

    assert await says("enable", "m", *at) == "m: enabled"
    assert await says("enable", "m", *at) == "m: was not disabled"
    assert "Disabled: m," not in await says("status", *store)


@pytest.mark.slow
async def test_the_switch_works_for_a_user_without_a_name(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is run under any number."""
    [a] = await pool.start()
    for each in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(each, raising=False)

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert await asyncio.to_thread(main, ["disable", "m", "--worker", str(a.socket)]) == 0
    assert f"by uid {os.getuid()} on" in plane(a).view.disabled["m"]
    assert default_cache_dir() == default_runtime_dir() / "cache"
