"""Mistakes with TLS: the caller and the listener's log each get one line that says what is wrong and which flag to look at."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorcast_connector.config import REFUSALS_REMEMBERED_MAX, REFUSED_AGAIN_S
from tensorcast_connector.errors import ConfigError, Unauthorized
from tensorcast_connector.net.refusals import Refusals
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.tls import load_tls
from tensorcast_connector.types import Address
from tensorcast_connector.wire.tokens import Access
from tests.net.certificates import of
from tests.net.pair import Pair, T
from tests.waiting import until

ACCESS = Access("a token that nobody guesses")
ANYWHERE = Address("tcp", host="127.0.0.1", port=0)
Networks = Callable[[Path], SocketNetwork]


def a(folder: Path) -> SocketNetwork:
    return of(folder, "a")


def plain(_: Path) -> SocketNetwork:
    return SocketNetwork()


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if getattr(each, "event", "") == "connection-refused"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listener", "caller", "says", "logs"),
    [
        (a, plain, "ADDRESS wants TLS, and the caller came without: give it --tls-cert, --tls-key and --tls-ca", "wants TLS"),
        (a, lambda _: SocketNetwork(ACCESS), "ADDRESS wants TLS, and the caller came without: give it --tls-cert", "wants TLS"),
        (plain, a, "ADDRESS does not speak TLS, and this side does: leave out --tls-cert, --tls-key and --tls-ca",
         "it speaks TLS, and this listener was started without --tls-cert"),
        (lambda _: SocketNetwork(ACCESS), a, "ADDRESS does not speak TLS, and this side does", "it speaks TLS"),
        (a, lambda at: of(at, "b"),
         "the certificate of ADDRESS is not accepted here (self-signed certificate in certificate chain): is --tls-ca "
         "the authority of that cluster", "it broke off the TLS handshake; most likely it does not accept"),
        (a, lambda at: of(at, "b", "a"), "ADDRESS ended the connection right after the TLS handshake: it does not accept the "
         "certificate of this process, --tls-cert FOLDER/b.pem (unable to get local issuer certificate)",
         "its certificate is not accepted here: unable to get local issuer certificate"),
        (a, lambda at: of(at, "old", "a"), "it does not accept the certificate of this process, --tls-cert FOLDER/old.pem "
         "(certificate has expired)", "its certificate is not accepted here: certificate has expired"),
        (lambda at: of(at, "old", "a"), a, "the certificate of ADDRESS is not accepted here (certificate has expired)",
         "it broke off the TLS handshake"),
        (lambda at: of(at, "a", "b"), a, "--tls-cert FOLDER/a.pem: is it of the same authority as the listener's?",
         "its certificate is not accepted here: self-signed certificate in certificate chain"),
    ],
)  # fmt: skip
async def test_both_sides_are_told(
    authority: Path, listener: Networks, caller: Networks, says: str, logs: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(listener(authority), ANYWHERE)
    await pair.listen()
    pair.network = caller(authority)
    try:
        for _ in range(2):
            client = pair.client()
            with pytest.raises(Unauthorized) as failed:
                await client.wait_connected(T, patient=False)
            await client.close()
            says = says.replace("ADDRESS", str(pair.address)).replace("FOLDER", str(authority))
            assert says in str(failed.value) and "\n" not in str(failed.value)
        await until(lambda: told(caplog) != [])
        again = pair.client()
        await until(lambda: again._failures > 1)
    finally:
        for client in pair.clients:
            await client.close()
        await pair.stop()
    [record] = told(caplog)
    assert logs in record.getMessage() and record.peer.startswith("127.0.0.1:")  # type: ignore[attr-defined]
    assert logs in record.reason and pair.service.sessions == 0  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_who_shows_no_certificate_and_who_speaks_something_else(
    authority: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(of(authority, "a"), ANYWHERE)
    await pair.listen()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority / "ca-a.pem")
    context.check_hostname = False

    def shows_nothing() -> None:
        with socket.create_connection((pair.address.host, pair.address.port), timeout=T) as raw:
            try:
                with context.wrap_socket(raw) as wrapped:
                    wrapped.recv(1)
            except OSError:
                pass

    await asyncio.to_thread(shows_nothing)
    await until(lambda: len(told(caplog)) == 1)
    reader, writer = await asyncio.open_connection(pair.address.host, pair.address.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), T) == b""
    writer.close()
    await until(lambda: len(told(caplog)) == 2)
    assert [each.reason.split(" (")[0] for each in told(caplog)] == [  # type: ignore[attr-defined]
        "it shows no certificate", "it does not speak TLS"
    ]  # fmt: skip
    client = await pair.connected()
    await client.close()
    await pair.stop()


@pytest.mark.slow
async def test_a_connection_that_was_up_is_not_taken_for_a_refused_one(authority: Path) -> None:
    pair = Pair(of(authority, "a"), ANYWHERE)
    await pair.listen()
    client = await pair.connected()
    await pair.stop()
    await until(lambda: not client.connected)
    assert not isinstance(client.error, Unauthorized)
    await client.close()
    assert "was closed" in str(client.error)


def test_each_host_and_reason_is_told_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(3):
        refusals.tell(f"h:{number}", "h", "no token", number)
    refusals.tell("h:4", "h", "no certificate", 5)
    refusals.tell("g:1", "g", "no token", 6)
    refusals.tell("h:5", "h", "no token", REFUSED_AGAIN_S)
    refusals.tell("h:6", "h", "no token", REFUSED_AGAIN_S + 1)
    assert [each.getMessage() for each in told(caplog)] == [
        "connection from h:0 closed: no token", "connection from h:4 closed: no certificate",
        "connection from g:1 closed: no token",
        "connection from h:5 closed: no token (and 2 times more since this was last told)",
    ]  # fmt: skip
    for number in range(REFUSALS_REMEMBERED_MAX + 5):
        refusals.tell("p", f"host {number}", "x", 1000)
    assert len(refusals._told) == REFUSALS_REMEMBERED_MAX


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_key_that_others_can_read(authority: Path, tmp_path: Path, mode: int) -> None:
    key = tmp_path / "a.key"
    key.write_bytes((authority / "a.key").read_bytes())
    files = str(authority / "a.pem"), str(key), str(authority / "ca-a.pem")
    key.chmod(mode)
    with pytest.raises(ConfigError, match=rf"^tls_key='{key}' can be read by others \(mode {mode:o}\); chmod 600 it$"):
        load_tls(*files)
    key.chmod(0o400)
    assert load_tls(*files) is not None


@pytest.mark.slow
def test_what_is_wrong_with_ones_own_certificate(authority: Path) -> None:
    def fault(name: str, ca: str) -> str:
        tls = load_tls(*(str(authority / each) for each in (f"{name}.pem", f"{name}.key", f"ca-{ca}.pem")))
        assert tls is not None
        return tls.own_fault()

    assert fault("a", "a") == "" and fault("old", "a") == "certificate has expired"
    assert fault("b", "a") == "unable to get local issuer certificate"
