"""TLS on both sides: engines whose certificate is wrong, and certificates that are replaced while the router runs."""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import ssl
import sys
from pathlib import Path

import pytest

from smetric_router.config import RouterConfig
from smetric_router.errors import ConfigError
from smetric_router.server.app import RouterApp

from ..conftest import until
from ..raw_engine import answers, raw_engine

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def server_side(certificate: tuple[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


def cause(router) -> str:
    (instance,) = router.state.statistics(0).instances.values()
    return instance.cause


async def test_an_engine_with_a_certificate_of_a_private_authority(route, certificate, other_certificate):
    async with raw_engine(answers(OK), server_side(certificate)) as engine:
        router = await route(engine.url, engine_tls_ca=certificate[0])
        assert ((await router.chat("x")).status, router.healthy()) == (200, 1)
        router = await route(engine.url)
        assert ((await router.chat("x")).status, router.healthy()) == (503, 0)
        assert "its certificate is not accepted: self-signed certificate" in cause(router)
    async with raw_engine(answers(OK), server_side(other_certificate)) as engine:
        router = await route(engine.url, engine_tls_ca=other_certificate[0])
        assert (await router.chat("x")).status == 503
        assert "its certificate is not accepted: IP address mismatch" in cause(router)


async def test_an_engine_that_speaks_no_tls(engines, route, certificate):
    (engine,) = await engines()
    router = await route(engine.url.replace("http", "https"))
    assert (await router.chat("x")).status == 503
    assert ": no TLS: " in cause(router)
    async with raw_engine(answers(OK), server_side(certificate)) as secure:
        router = await route(secure.url.replace("https", "http"))
        assert (await router.chat("x")).status == 503
        assert "broke" in cause(router)


def test_a_file_of_authorities_that_is_none(certificate, tmp_path):
    for file in (str(tmp_path / "none"), certificate[1]):
        with pytest.raises(ConfigError, match=r"^engine_tls_ca: cannot read .*"):
            RouterApp(RouterConfig(engines=("https://a:1",), engine_tls_ca=file))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_certificate_and_keys_are_read_again_after_sighup(
    engines, tmp_path: Path, certificate, other_certificate, workers
):
    (engine,) = await engines()
    cert, key, keys = (tmp_path / name for name in ("cert.pem", "key.pem", "keys"))
    shutil.copy(certificate[0], cert)
    shutil.copy(certificate[1], key)
    keys.write_text("first\n")
    line = [
        "serve",
        "--port",
        "0",
        "--engine",
        engine.url,
        "--workers",
        str(workers),
        "--ready-file",
        tmp_path / "ready",
    ]
    for name, value in (("tls_cert", cert), ("tls_key", key), ("api_keys_file", keys)):
        line += ["--set", f"{name}={value}"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "smetric_router.cli", *line, stderr=-1)
    assert process.stderr is not None
    lines: list[str] = []
    reading = asyncio.create_task(read_lines(process.stderr, lines))
    try:
        await until((tmp_path / "ready").exists, 30)
        port = int(json.loads((tmp_path / "ready").read_text())["url"].rpartition(":")[2])
        first = ssl.PEM_cert_to_DER_cert(cert.read_text())
        assert await asked(port, "first") == (first, 200)

        async def told(what: str) -> None:
            before = len(lines)
            process.send_signal(signal.SIGHUP)
            await until(lambda: sum(what in line for line in lines[before:]) == workers, 30)

        keys.write_text("second\n")
        shutil.copy(other_certificate[0], cert)  # and not its key: both stay as they are
        await told('event="not read again" what=certificate')
        assert await asked(port, "second") == (first, 200)
        assert await asked(port, "first") == (first, 401)
        shutil.copy(other_certificate[1], key)
        keys.write_text("\n")
        await told('event="read again" what=certificate')
        assert await asked(port, "second") == (ssl.PEM_cert_to_DER_cert(cert.read_text()), 200)
        assert sum('event="not read again" what=keys' in line for line in lines) == workers
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        assert await process.wait() == 0
        await reading


async def read_lines(stream: asyncio.StreamReader, lines: list[str]) -> None:
    async for line in stream:
        lines.append(line.decode())


async def asked(port: int, key: str) -> tuple[bytes, int]:
    """The certificate that the listener shows, and its answer to the key."""

    def ask() -> tuple[bytes, int]:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(plain) as secure:
            secure.sendall(f"GET /v1/models HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\n\r\n".encode())
            return secure.getpeercert(binary_form=True) or b"", int(secure.recv(4096).split()[1])

    return await asyncio.to_thread(ask)
