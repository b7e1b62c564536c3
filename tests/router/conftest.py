"""A router and its engines in this process, over real sockets on free ports."""

import asyncio
import contextlib
import io
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDictProxy

from smetric_router.config import RouterConfig
from smetric_router.server.app import RouterApp
from smetric_router.server.place import Place, listen
from smetric_router.server.serve import Server

from .fake_engine import FakeEngine


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition, not for a time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the conditions are plain values, not events
            await asyncio.sleep(0.002)


@dataclass(frozen=True)
class Reply:
    """An answer that has been read."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Router:
    """A running router and a client for it."""

    def __init__(self, app: RouterApp, url: str, client: aiohttp.ClientSession) -> None:
        self.app = app
        self.state = app.state
        self.url = url
        self.client = client

    async def chat(
        self, *contents: str, stream: bool = False, headers: dict[str, str] | None = None, **fields: Any
    ) -> Reply:
        """A conversation: user and assistant in turns."""
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
        body = {"model": "fake", "messages": messages, **({"stream": True} if stream else {}), **fields}
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        return await self._ask("POST", "/v1/chat/completions", data=io.BytesIO(data), headers=headers)

    async def get(self, path: str) -> Reply:
        return await self._ask("GET", path)

    async def _ask(self, method: str, path: str, **options: Any) -> Reply:
        async with self.client.request(method, self.url + path, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    def inflight(self) -> int:
        return sum(each.inflight for each in self.state.statistics(0).instances.values())

    def healthy(self) -> int:
        return sum(each.health == "up" for each in self.state.statistics(0).instances.values())


@pytest.fixture
async def engines() -> AsyncIterator[Callable[..., Awaitable[list[FakeEngine]]]]:
    """Starts engines; all are stopped at the end."""
    started: list[FakeEngine] = []

    async def start(count: int = 1, **options: Any) -> list[FakeEngine]:
        new = [FakeEngine(f"fake-{len(started) + at}", **options) for at in range(count)]
        for engine in new:
            await engine.start()
        started.extend(new)
        return new

    yield start
    for engine in started:
        await engine.stop()


@pytest.fixture
async def route() -> AsyncIterator[Callable[..., Awaitable[Router]]]:
    """Starts routers; all are stopped at the end, and none may have leaked a request or a byte of one."""
    async with contextlib.AsyncExitStack() as stack:
        routers: list[Router] = []

        async def start(*engines: FakeEngine | str, place: Place | None = None, **options: Any) -> Router:
            urls = tuple(engine if isinstance(engine, str) else engine.url for engine in engines)
            options = {"health_interval_s": 0.2, "health_recheck_s": 0.05, "drain_timeout_s": 5} | options
            router = await stack.enter_async_context(running(RouterConfig(engines=urls, **options), place))
            routers.append(router)
            return router

        yield start
        for router in routers:
            await until(lambda router=router: router.inflight() == 0 and router.app._held.count == 0)
            router.state.check()


def self_signed(folder: Path, name: str, address: str) -> tuple[str, str]:
    """A certificate and its key."""
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout key.pem -out cert.pem"
    )
    options = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}"]
    subprocess.run([*command.split(), *options], cwd=folder, check=True, capture_output=True)
    return str(folder / "cert.pem"), str(folder / "key.pem")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of 127.0.0.1, signed by itself; and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"), "localhost", "127.0.0.1")


@pytest.fixture(scope="session")
def other_certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of another host."""
    return self_signed(tmp_path_factory.mktemp("tls"), "other", "192.0.2.1")


@contextlib.asynccontextmanager
async def running(config: RouterConfig, place: Place | None = None) -> AsyncIterator[Router]:
    """A router until the end of the block."""
    app = RouterApp(config, place=place)
    listener = listen("127.0.0.1", 0)
    server = Server(app, listener)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started.is_set() or task.done())
    client = aiohttp.ClientSession(auto_decompress=False)
    try:
        yield Router(app, server.url, client)
    finally:
        await client.close()
        server.stop()
        await task
        listener.close()
