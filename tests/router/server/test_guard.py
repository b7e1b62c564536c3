"""Who may call: keys, the operator's key, TLS."""

import asyncio
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest

from smetric_router.config import RouterConfig
from smetric_router.errors import ConfigError
from smetric_router.server.app import RouterApp
from smetric_router.server.guard import Guard
from smetric_router.server.serve import Server

from ..conftest import until
from ..raw_engine import answer_to, request
from .test_storms import connect


async def ask(router, path: str = "/v1/chat/completions", method: str = "POST", **headers: str):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with router.client.request(method, router.url + path, data=b'{"messages":[]}', headers=named) as answer:
        return answer.status, answer.headers, await answer.json()


async def test_a_key_is_needed_and_not_passed_on(engines, route, tmp_path):
    (engine,) = await engines()
    file = tmp_path / "keys"
    file.write_text("# clients\n\nfrom-file\n  and-another \n")
    router = await route(engine, api_keys=("one",), api_keys_file=str(file), engine_api_key="of-the-engine")
    for headers in (
        {},
        {"authorization": "Bearer on"},
        {"authorization": "one"},
        {"x_api_key": "onee"},
        {"x_api_key": ""},
    ):
        status, answered, body = await ask(router, **headers)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert answered["www-authenticate"] == "Bearer"
    assert engine.requests == []
    for key in ("one", "from-file", "and-another"):
        assert (await ask(router, authorization=f"bearer {key}"))[0] == 200
    assert (await ask(router, x_api_key="one", x_kept="1"))[0] == 200
    assert (await ask(router, authorization="Bearer -", x_api_key="one", x_kept="1"))[0] == 200
    got = engine.requests[-1].headers
    assert (got["authorization"], got["x-kept"], "x-api-key" in got) == ("Bearer of-the-engine", "1", False)
    assert (await router.get("/health")).status == 200
    assert (await router.get("/metrics")).status == 200
    assert (await router.get("/v1/models")).status == 401
    assert (await router.get("/admin/state")).status == 401
    assert (await router.get("/%61dmin/state")).status == 401


async def test_a_key_is_passed_on_where_it_is_told_to(engines, route):
    (engine,) = await engines()
    router = await route(engine, api_keys=("one",), api_keys_pass_on=True)
    assert (await ask(router, authorization="Bearer one"))[0] == 200
    assert engine.requests[0].headers["authorization"] == "Bearer one"


async def test_without_keys_the_clients_are_passed_on(engines, route):
    (engine,) = await engines()
    router = await route(engine, engine_api_key="own")
    assert (await ask(router, authorization="Bearer mine"))[0] == 200
    assert engine.requests[0].headers["authorization"] == "Bearer mine"


async def test_a_body_of_who_may_not_call_is_not_read(engines, route):
    (engine,) = await engines()
    router = await route(engine, api_keys=("one",))
    reader, writer = await connect(router)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 30000000\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_drain_and_resume(engines, route):
    one, other = await engines(2)
    router = await route(one, other, admin_key="secret")
    key = {"authorization": "Bearer secret"}
    assert (await ask(router, f"/admin/drain?engine={one.url}"))[0] == 401
    assert (await ask(router, f"/admin/drain?engine={one.url}", authorization="Bearer other"))[0] == 401
    assert (await ask(router, "/admin/state", "GET"))[0] == 401
    started = asyncio.Event()

    async def wait(request):
        started.set()
        await go_on.wait()
        return await one.answer(request, b"{}")

    go_on = asyncio.Event()
    one.behaviour = other.behaviour = wait
    calls = [asyncio.create_task(router.chat("x")) for _ in range(2)]
    await until(lambda: one.running == other.running == 1)
    status, _, body = await ask(router, f"/admin/drain?engine={one.url}/", **key)
    assert (status, body) == (200, {"engine": one.url, "draining": True, "inflight": 1})
    go_on.set()
    assert [(await call).status for call in calls] == [200, 200], "what is under way goes on"
    one.behaviour = other.behaviour = None
    assert {(await router.chat("x")).headers["x-smetric-instance"] for _ in range(4)} == {other.url}
    assert (await ask(router, f"/admin/drain?engine={other.url}", **key))[0] == 200
    assert (await router.chat("x")).status == 503
    assert (await router.get("/health")).status == 503
    for engine in (one, other):
        status, _, body = await ask(router, f"/admin/resume?engine={engine.url}", **key)
        assert (status, body["draining"]) == (200, False)
    assert {(await router.chat("x")).headers["x-smetric-instance"] for _ in range(4)} == {one.url, other.url}
    status, _, body = await ask(router, "/admin/drain?engine=http://nowhere:1", **key)
    assert (status, body["error"]["code"]) == (404, "engine_not_found")
    assert (await ask(router, "/admin/drain", **key))[0] == 422


async def test_without_an_operators_key_nothing_can_be_changed(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    status, _, body = await ask(router, f"/admin/drain?engine={engine.url}")
    assert (status, body["error"]["code"]) == (403, "forbidden")
    assert (await router.get("/admin/state")).status == 200
    assert (await router.chat("x")).status == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("# only\n", "has no key in it"),
        ("a b\n", "printable ASCII characters without spaces"),
        ("schl\u00fcssel\n", "printable ASCII"),
    ],
)
def test_files_of_keys_that_are_none(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"api_keys_file.*{message}"):
        Guard(RouterConfig(engines=("http://a:1",), api_keys_file=str(file)))


async def test_tls(engines, route, certificate):
    (engine,) = await engines()
    cert, key = certificate
    router = await route(engine, tls_cert=cert, tls_key=key)
    assert router.url.startswith("https://")
    context = ssl.create_default_context(cafile=cert)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as client:
        body = {"messages": [], "stream": True}
        async with client.post(f"{router.url}/v1/chat/completions", json=body) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        async with client.post(f"{router.url}/v1/completions", data=b"x") as answer:
            assert answer.status == 400
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientError):
            await client.get(router.url.replace("https", "http"))
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("https://").split(":"))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await asyncio.wait_for(reader.read(), 5)
    writer.close()


def test_mistakes_with_certificates(certificate, tmp_path):
    cert, key = certificate
    with pytest.raises(ConfigError, match="give both"):
        RouterConfig(engines=("http://a:1",), tls_cert=cert)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        for pair in ((cert, cert), (str(tmp_path / "none"), key)):
            app = RouterApp(RouterConfig(engines=("http://a:1",), tls_cert=pair[0], tls_key=pair[1]))
            with pytest.raises(ConfigError, match=r"^tls_cert = .*"):
                Server(app, listener)


async def test_browsers_ask_without_a_key(engines, route):
    (engine,) = await engines()
    router = await route(engine, api_keys=("one",), admin_key="two")
    assert (await ask(router, method="OPTIONS", origin="http://page", access_control_request_method="POST"))[0] == 200
    assert engine.requests[-1].headers["access-control-request-method"] == "POST"
    assert (await ask(router, "/admin/drain", method="OPTIONS"))[0] == 401


async def test_only_the_paths_that_are_listed_are_passed_on(engines, route):
    (engine,) = await engines()
    router = await route(engine, paths_passed_on=("/v1/chat/", "/v1/messages"))
    for path, expected in (
        ("/v1/chat/completions?x=1", 200),
        ("/v1/messages/count_tokens", 200),
        ("/v1/chat/%63ompletions", 200),
        ("/v1/completions", 404),
        ("/sleep", 404),
        ("/v1/chat/../../sleep", 404),
        ("/v1/chat/%2e%2e/%2e%2e/sleep", 404),
        ("/v1/chat/..%5c..%5csleep", 404),
        ("//v1/chat/completions", 404),
        ("http://h/sleep", 404),
    ):
        answer = await answer_to(router.url, request(path=path, headers="connection: close\r\n"))
        assert int(answer[9:12]) == expected, path
    assert {each.path for each in engine.requests} == {"/v1/chat/completions", "/v1/messages/count_tokens"}
    for path in ("/health", "/metrics", "/v1/models", "/admin/state"):
        assert (await router.get(path)).status == 200
