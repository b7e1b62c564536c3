"""A cluster with a token, attacked over the network: every message that a store or a worker takes, without the token and with
the token of another tenant. Nothing is read, nothing is changed, and those who belong here are served on."""

import asyncio
import contextlib
import subprocess
import sys
import typing
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from demo.processes import Running, Supervisor, read_ready, ready_file

from tensorcast_connector.client.session import Session, connect
from tensorcast_connector.config import parse_address
from tensorcast_connector.errors import NotFound, TensorcastError, Unauthorized
from tensorcast_connector.net.bulk import BulkClient
from tensorcast_connector.net.rpc import receive_frame
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.store.client import read_cluster
from tensorcast_connector.wire import codec
from tensorcast_connector.wire.frames import Kind, encode_frame
from tensorcast_connector.wire.messages import (
    BULK_ROLE,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Fetch,
    FetchBytes,
    Hello,
    Message,
)
from tensorcast_connector.wire.tokens import Access, tenant_token

pytestmark = [pytest.mark.faults, pytest.mark.slow]
REFUSALS = (b"unauthorized", b"first message must be Hello", b"protocol versions 1-1 of")
TOKEN = "the token of this cluster"
SECRET = np.frombuffer(b"what nobody else may read" * 1000, np.uint8)


def messages(union: typing.Any) -> list[type[Message]]:
    """All types of a union of unions."""
    found: list[type[Message]] = []
    for each in typing.get_args(union):
        found += messages(each) if typing.get_args(each) else [each]
    return found


def example(kind: type[Message]) -> Message:
    """A message of that kind that makes as much sense as can be without knowing anything."""
    made: dict[str, typing.Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.required:
            made[field.name] = value(field.type)
    return kind(**made)


def value(kind: typing.Any) -> typing.Any:
    """Some value of a type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{each.name: value(each.type) for each in msgspec.structs.fields(kind) if each.required})
    if origin is tuple and Ellipsis not in arguments:
        return tuple(value(each) for each in arguments)
    if origin in (list, tuple, dict) or kind in (list, dict):
        return origin() if origin else kind()
    if arguments:  # a union, mostly with None
        return value(next(each for each in arguments if each is not type(None)))
    return {int: 1, str: "mine", bytes: b"x" * 16, float: 1.0, bool: True}.get(kind)


ALL = sorted({*messages(codec.StoreRequest), *messages(codec.PeerRequest), *messages(codec.EngineRequest), Fetch, FetchBytes},
             key=lambda each: each.__name__)  # fmt: skip


@dataclass
class Cluster:
    """A store and a worker that want a token, and a member's session."""

    store: str
    peer: str
    worker: str
    session: Session

    async def state(self) -> tuple[object, ...]:
        """All that an attacker might change."""
        view = await read_cluster(
            SocketNetwork(Access(TOKEN)), [parse_address(self.store, "store")], "test", __import__("random").Random()
        )
        return (
            sorted(view.workers), sorted(view.instances), {shard: each.token for shard, each in view.shards.items()},
            dict(view.replicas), dict(view.artifacts), dict(view.names), dict(view.disabled),
        )  # fmt: skip


def _start(supervisor: Supervisor, name: str, *command: str) -> tuple[Running, dict[str, str]]:
    ready = supervisor.folder / f"{name}.json"
    line = [sys.executable, "-m", "tensorcast_connector.cli", *command, "--ready-file", str(ready)]
    running = supervisor.start(name, line)
    running.wait(ready_file(ready), 30)
    return running, read_ready(ready)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, token_file: Path) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("attack")
    with Supervisor(folder) as supervisor:
        token = ("--token-file", str(token_file))
        _, store = _start(supervisor, "store", "store", "--data", str(folder / "db"), "--listen", "127.0.0.1:0", *token)
        socket = str(folder / "w.sock")
        _, worker = _start(
            supervisor, "worker", "worker", "--store", store["store"], "--name", "w", "--socket", socket,
            "--arena", "16MiB", *token,
        )  # fmt: skip
        yield store | worker


@pytest.fixture
async def cluster(processes: dict[str, str]) -> AsyncIterator[Cluster]:
    async with await connect(processes["worker"], tenant="victim") as session:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(TensorcastError):
                    await session.put({"secret": SECRET}, name="secret")
                    break
                await asyncio.sleep(0.1)
        yield Cluster(processes["store"], processes["peer"], processes["worker"], session)


async def everything_heard(network: SocketNetwork, address: str, hello: Hello | None, message: Message) -> bytes:
    """What comes back for a message, after a hello if there is one, until the other side has nothing more to say."""
    heard = b""
    with contextlib.suppress(TensorcastError):
        stream = await network.dial(parse_address(address, "address"), 5.0)
        try:
            if hello is not None:
                stream.write(encode_frame(Kind.REQUEST, 0, codec.encode(hello)))
                _, frame = await receive_frame(stream)
                heard += frame.body
                if frame.kind is Kind.ERROR:
                    return heard
            stream.write(encode_frame(Kind.REQUEST, 1, codec.encode(message), 500))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    _, frame = await receive_frame(stream)
                    heard += frame.body
        finally:
            stream.close()
    return heard


def hello(role: str, tenant: str = "") -> Hello:
    return Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, role, "w/00000000", tenant)


async def test_without_the_token_no_message_is_heard(cluster: Cluster) -> None:
    """Neither with a wrong token; whoever the sender claims to be."""
    before = await cluster.state()
    for network in (SocketNetwork(), SocketNetwork(Access("a token that is not theirs"))):
        for address in (cluster.store, cluster.peer):
            for kind in ALL:
                for greeting in (None, hello("worker"), hello(BULK_ROLE), hello("caller", "victim")):
                    heard = await everything_heard(network, address, greeting, example(kind))
                    assert not heard or b"wants a token" in heard or b"wrong token" in heard, (kind, heard)
    assert await cluster.state() == before
    assert np.array_equal(await cluster.session.artifact("secret").tensor("secret"), SECRET)


async def test_a_tenant_reaches_nothing_but_its_own(cluster: Cluster) -> None:
    """With the token of another tenant: no role but its own, no artifact, name or plan of others, no page, no store."""
    before = await cluster.state()
    token = tenant_token(TOKEN, "attacker")
    network = SocketNetwork(Access(token), tenant="attacker")
    identity = await cluster.session.artifact("secret").id()
    for address in (cluster.store, cluster.peer):
        for kind in ALL:
            for greeting in (
                None,
                hello("worker"),
                hello("client"),
                hello(BULK_ROLE),
                hello("caller", "victim"),
                hello("engine"),
            ):
                heard = await everything_heard(network, address, greeting, example(kind))
                assert not heard or any(each in heard for each in REFUSALS), (kind, greeting, heard)
    async with await connect(cluster.peer, tenant="attacker", token=token) as session:
        assert await session.list_artifacts() == []
        for reference in ("secret", identity):
            for attempt in (session.artifact(reference).tensor_dict, session.artifact(reference).describe):
                with pytest.raises(NotFound):
                    await attempt()
            with pytest.raises(NotFound):
                await session.delete(reference)
            with pytest.raises(NotFound):
                await session.name("mine", reference)
        with pytest.raises(Unauthorized):
            await session.disable("model")
        with pytest.raises(NotFound):  # a plan of its own cannot name what is another's either
            plan = session.plan()
            plan.on_worker("w").prefetch(identity)
            await plan.run().result()
        bulk = BulkClient(network, parse_address(cluster.peer, "peer"), "attacker", 1, "attacker")
        with pytest.raises(NotFound):
            await bulk.fetch_bytes(identity, [(0, memoryview(bytearray(100)))])
        bulk.close()
    state = await cluster.state()
    assert state == before
    assert np.array_equal(await cluster.session.artifact("secret").tensor("secret"), SECRET)


async def test_members_and_the_tenant_are_served(cluster: Cluster, token_file: Path) -> None:
    for token in (TOKEN, tenant_token(TOKEN, "victim")):
        async with await connect(cluster.peer, tenant="victim", token=token) as session:
            assert np.array_equal(await session.artifact("secret").tensor("secret"), SECRET)
    command = ["status", "--store", cluster.store]
    assert (await asyncio.to_thread(tensorcast, *command)).returncode == 1
    shown = await asyncio.to_thread(tensorcast, *command, "--token-file", str(token_file))
    assert shown.returncode == 0 and "w/" in shown.stdout, shown.stderr


def tensorcast(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tensorcast_connector.cli", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=30)


def test_the_commands_for_tokens(token_file: Path, tmp_path: Path) -> None:
    made = tensorcast("token", "--new").stdout
    assert len(made) > 40 and made != tensorcast("token", "--new").stdout
    of_tenant = tensorcast("token", "--tenant", "a", "--token-file", str(token_file))
    assert of_tenant.stdout.strip() == tenant_token(TOKEN, "a")
    path = tmp_path / "tenant"
    path.write_text(of_tenant.stdout)
    assert "can be read by others" in tensorcast("status", "--token-file", str(path)).stderr
    path.chmod(0o600)
    started = tensorcast("worker", "--token-file", str(path), "--socket", str(tmp_path / "s"))
    assert started.returncode == 2 and "is a tenant's" in started.stderr and started.stderr.count("\n") == 1
