"""The command as a process: how it starts, complains and stops."""

import asyncio
import contextlib
import json
import platform
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import aiohttp
import pytest

from smetric_router.cli import main

from .conftest import until
from .fake_engine import send_event, start_stream


@contextlib.asynccontextmanager
async def running(tmp_path: Path, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The command on a free port; its URL comes from the ready file."""
    ready = tmp_path / "new" / "ready.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "smetric_router.cli", "serve", "--port", "0", "--ready-file", str(ready), *arguments,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        await until(lambda: ready.exists() or process.returncode is not None, 30)
        yield process, json.loads(ready.read_text())["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "no engine is configured"),
        (["serve", "--config", "none.toml"], "cannot read none.toml"),
        (["serve", "--engine", "nonsense"], "'nonsense' is not a URL"),
        (["serve", "--engine", "http://a:1", "--set", "polcy=x"], "unknown key 'polcy'; did you mean 'policy'?"),
        (["serve", "--engine", "http://a:1", "--policy", "best"], "policy = 'best' is not one of smetric"),
        (["serve", "--engine", "http://a:1", "--set", "policies.smetric.overlod=1"], "did you mean 'overload'?"),
        (["serve", "--engine", "http://a:1", "--host", "999.1.1.1"], "cannot listen on 999.1.1.1:8000"),
        (["serve", "--engine", "http://a:1", "--host", "a" * 300], "cannot listen on aaa"),
        (["serve", "--engine", "http://a:1", "--host", "a\0\nb"], "cannot listen on 'a\\x00\\nb'"),
        (["serve", "--engine", "http://a:1", "--ready-file", "/proc/x/ready"], "cannot write /proc/x/ready: No such"),
        (["serve", "--engine", "http://a:1", "--ready-file", "/proc"], "cannot write /proc: "),
    ],
)
def test_a_wrong_configuration_is_one_line(capsys, monkeypatch, arguments, message) -> None:
    monkeypatch.setattr("smetric_router.server.logs.set_up_logging", lambda *_: None)
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("smetric-router: ") and message in lines[0]


def test_the_versions(capsys) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    line = f"smetric-router {version('tensorcast-connector')}, Python {platform.python_version()}\n"
    assert capsys.readouterr().out == line


def test_a_port_in_use(capsys, monkeypatch) -> None:
    monkeypatch.setattr("smetric_router.server.logs.set_up_logging", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--engine", "http://a:1", "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"smetric-router: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.slow
async def test_serves_drains_and_leaves_with_zero(tmp_path, engines) -> None:
    (engine,) = await engines()
    finish = asyncio.Event()

    async def behave(request):
        response = await start_stream(request)
        await send_event(response, {"n": 1})
        await finish.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    engine.behaviour = behave
    async with (
        running(tmp_path, "--engine", engine.url, "--log-format", "json") as (process, url),
        aiohttp.ClientSession() as client,
    ):
        async with client.post(f"{url}/v1/chat/completions", json={"messages": [], "stream": True}) as answer:
            await answer.content.readany()
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
            process.send_signal(signal.SIGTERM)
            await until(lambda: not accepts(url))
            finish.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        _, errors = await process.communicate()
    assert process.returncode == 0
    assert not list((tmp_path / "new").iterdir()), "the ready file is removed"
    lines = [json.loads(line) for line in errors.splitlines()]
    assert "request" in [line["event"] for line in lines]
    assert not [line for line in lines if line["level"] not in ("info", "debug")]


@pytest.mark.slow
async def test_a_stream_that_never_ends_does_not_hold_up_the_end(tmp_path, engines) -> None:
    (engine,) = await engines()

    async def behave(request):
        response = await start_stream(request)
        await send_event(response, {"n": 1})
        await asyncio.Event().wait()

    engine.behaviour = behave
    async with (
        running(tmp_path, "--engine", engine.url, "--set", "drain_timeout_s=1") as (process, url),
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/chat/completions", json={"messages": [], "stream": True}) as answer,
    ):
        await answer.content.readany()
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert process.returncode == 0
    await until(lambda: engine.running == 0)


@pytest.mark.slow
async def test_starts_without_its_engines(tmp_path, engines) -> None:
    (engine,) = await engines()
    await engine.stop()
    async with running(tmp_path, "--engine", engine.url) as (process, url), aiohttp.ClientSession() as client:
        async with client.get(f"{url}/health") as answer:
            assert answer.status == 503
        await engine.start()

        async with asyncio.timeout(5):
            while True:
                async with client.post(f"{url}/v1/chat/completions", json={"messages": []}) as answer:
                    if answer.status == 200:
                        break
                await asyncio.sleep(0.02)
        process.terminate()
        _, errors = await process.communicate()
    assert process.returncode == 0
    warnings = [line for line in errors.decode().splitlines() if "level=warning" in line]
    assert len(warnings) == 1
    assert f"instance={engine.url}" in warnings[0]


def accepts(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
