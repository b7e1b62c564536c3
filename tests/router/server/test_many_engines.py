"""Engines by the hundred: checks that do not come all at once, names that nobody knows, and what of it is seen."""

import asyncio

import pytest

from smetric_router.config import RouterConfig
from smetric_router.server.health import AT_ONCE_MAX, HealthMonitor
from smetric_router.server.links import EngineLinks
from smetric_router.state.cluster import ClusterState

from ..conftest import until
from ..raw_engine import raw_engine


class Calls:
    """Engines that are well, and slow to say so."""

    def __init__(self) -> None:
        self.begun_s: list[float] = []
        self.running = self.most = 0

    async def get(self, instance: str, path: str) -> tuple[int, bytes]:
        if path != "/health":
            return 404, b""
        self.begun_s.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return 200, b""


@pytest.mark.slow
async def test_checks_are_spread():
    engines = tuple(f"http://engine-{at}:1" for at in range(2 * AT_ONCE_MAX))
    config = RouterConfig(engines=engines, health_interval_s=1.0)
    clock = asyncio.get_running_loop().time
    state = ClusterState(engines, chunk_bytes=64, index_chunks_max=1000)
    calls = Calls()
    links = EngineLinks(connect_timeout_s=1, keepalive_s=1, clock=clock)
    monitor = HealthMonitor(state, links, calls, config, clock)  # type: ignore[arg-type]
    await monitor.start()
    assert calls.most == AT_ONCE_MAX
    assert all(each.health == "up" for each in state.statistics(0).instances.values())
    begun = len(calls.begun_s)
    await asyncio.sleep(2.5)
    await monitor.stop()
    later = calls.begun_s[begun:]
    assert len(later) > len(engines)
    most = max(sum(at <= other < at + 0.05 for other in later) for at in later)
    assert most < len(engines) / 3, "a twentieth is due in that time"


async def test_names_that_nobody_knows_and_ports_where_nobody_listens(engines, route, caplog):
    (engine,) = await engines()
    router = await route(
        engine, "http://no-such-host.invalid:80", "http://127.0.0.1:1", f"http://localhost:{engine.port}"
    )
    assert router.healthy() == 2
    for _ in range(4):
        assert (await router.chat("x")).status == 200
    told = {entry.fields["instance"]: entry.fields["cause"] for entry in caplog.records if entry.levelname == "WARNING"}
    assert told["http://127.0.0.1:1"].startswith("no connection to http://127.0.0.1:1: ")
    assert told["http://no-such-host.invalid:80"].startswith("no connection to http://no-such-host.invalid:80: ")


async def test_models_of_an_engine_that_is_down_are_not_listed_and_asked_for_in_vain(engines, route):
    """503 and not 404: the model exists, and comes back."""
    (one,) = await engines(models=("shared", "a"))
    (two,) = await engines(models=("shared", "b"))
    router = await route(one, two)
    listed = (await router.get("/v1/models")).json()["data"]
    assert [(each["id"], each["owned_by"]) for each in listed] == [
        ("shared", one.name),
        ("a", one.name),
        ("b", two.name),
    ]
    await two.stop()
    assert (await router.chat("x", model="shared")).status == 200
    answer = await router.chat("x", model="b")
    for _ in range(50):
        if answer.status == 503:
            break
        answer = await router.chat("x", model="b")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert (await router.chat("x", model="c")).status == 404
    await two.start()
    for _ in range(200):
        await asyncio.sleep(0.02)
        if (await router.chat("x", model="b")).status == 200:
            return
    raise AssertionError("it has not come back")


async def test_a_model_that_is_loaded_through_the_router_is_known_at_once(engines, route):
    (engine,) = await engines()
    router = await route(engine, models_interval_s=3600)
    assert (await router.chat("x", model="adapter")).status == 404
    engine.models.append({"id": "adapter"})
    async with router.client.post(f"{router.url}/v1/load_lora_adapter", json={"lora_name": "adapter"}) as answer:
        assert answer.status == 200
    await until(lambda: "adapter" in router.state.models())
    assert (await router.chat("x", model="adapter")).status == 200


async def test_an_engine_that_wants_a_key_is_told_of_once(engines, route, caplog):
    async def locked(engine, reader, writer, head):
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")

    async with raw_engine(locked, models=True) as engine:
        router = await route(engine.url, models_interval_s=0.05, health_interval_s=0.05)
        await until(lambda: len(engine.heads) > 3)
        told = [entry.fields["cause"] for entry in caplog.records if entry.getMessage() == "no model list"]
        assert len(told) == 1 and "set engine_api_key" in told[0]
        assert router.healthy() == 1
