"""Requests to an etcd cluster: its JSON interface over HTTP, several endpoints, deadlines, and errors of our own.

Every etcd from 3.4 on answers JSON at its client port. That interface needs no other library than the HTTP client, gives
an exact deadline per request, and lets this file decide when to turn to another endpoint.
"""

import asyncio
import io
import logging
import os
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn, TypeVar

import aiohttp
import msgspec

from tensorcast_connector.config import ETCD_CONNECT_TIMEOUT_S
from tensorcast_connector.errors import Compacted, ConfigError, DeadlineExceeded, Exhausted, NotFound, Unavailable
from tensorcast_connector.types import Address

logger = logging.getLogger(__name__)
VERSION_MIN = (3, 4)
VERSION_END = (4, 0)
NO_ETCD = "is no etcd, or not its client port, or it insists on TLS, which this version does not speak"
FULL = (
    "etcd is full: compact and defragment it (etcdctl compact, etcdctl defrag), then `etcdctl alarm disarm`, "
    "or give it more (--quota-backend-bytes)"
)


CORRUPT = (
    "takes no writes, because what its members have differs (alarm CORRUPT): replace the member that `etcdctl alarm list` "
    "names, then `etcdctl alarm disarm`"
)


class Header(msgspec.Struct):
    """Which etcd answered, and its revision at that moment."""

    cluster_id: int = 0
    revision: int = 0


class Answer(msgspec.Struct):
    """What every answer of etcd begins with; zero values are left out in JSON."""

    header: Header = msgspec.field(default_factory=Header)

    def whose(self) -> Header:
        """The header, wherever this kind of answer has it."""
        return self.header


class EtcdKey(msgspec.Struct):
    """A key with all that etcd knows of it."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class _Failure(msgspec.Struct):
    code: int
    message: str = ""


class _Version(msgspec.Struct):
    etcdserver: str


A = TypeVar("A", bound=Answer)
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def decode(data: bytes, kind: type[A]) -> A:
    """`data` as `kind`: numbers of 64 bits are text in etcd's JSON, and bytes are base64.

    Raises:
        Unavailable: it is something else.
    """
    decoder = _decoders.get(kind) or _decoders.setdefault(kind, msgspec.json.Decoder(kind, strict=False))
    try:
        answer: A = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"an answer that is not etcd's: {error}") from error
    return answer


class Gateway:
    """One etcd cluster at its endpoints. Requests go to one of them until it fails, then to the next.

    Args:
        endpoints: where members of one cluster listen for clients.
        timeout_s: for every operation, all attempts together.
    """

    def __init__(self, endpoints: Sequence[Address], timeout_s: float) -> None:
        self._endpoints = list(endpoints)
        self._timeout_s = timeout_s
        self._current = 0
        self._cluster_id = 0
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._trouble = False  # since the last operation that was done
        self.revision = 0  # the highest that was seen

    def __repr__(self) -> str:
        return f"<Gateway {self.endpoint} of {len(self._endpoints)}>"

    @property
    def endpoint(self) -> Address:
        """The one that requests go to."""
        return self._endpoints[self._current]

    def leave(self, endpoint: Address, why: object) -> None:
        """Requests go to the next endpoint from now on, unless they have left this one already. `why` names it."""
        if self.endpoint == endpoint and len(self._endpoints) > 1:
            self._current = (self._current + 1) % len(self._endpoints)
            logger.log(logging.DEBUG if self._trouble else logging.WARNING, "%s; going on with %s", why, self.endpoint)
            self._trouble = True

    async def check(self) -> None:
        """At the start: every endpoint that answers is an etcd that this version can use, and one at least answers.

        Raises:
            ConfigError: one is something else, or of another version.
            Unavailable: none answers.
        """
        found = await asyncio.gather(*map(self._version, self._endpoints), return_exceptions=True)
        failures = {at: each for at, each in zip(self._endpoints, found, strict=True) if each is not None}
        for failure in failures.values():
            if not isinstance(failure, Unavailable):
                raise failure
        if len(failures) == len(found):
            raise Unavailable("no etcd answers: " + "; ".join(map(str, failures.values())))
        for endpoint, failure in failures.items():
            logger.warning("%s; the others are used", failure)
            self.leave(endpoint, failure)

    async def _version(self, endpoint: Address) -> None:
        try:
            async with self._session.get(f"http://{endpoint}/version", timeout=self._timeout(self._timeout_s)) as got:
                version = msgspec.json.decode(await got.content.read(1000), type=_Version).etcdserver
        except (aiohttp.ClientConnectionError, TimeoutError, OSError) as error:
            if isinstance(error, aiohttp.ServerDisconnectedError):
                raise ConfigError(f"{endpoint} {NO_ETCD}") from error
            raise Unavailable(f"etcd at {endpoint}: {_said(error)}") from error
        except (aiohttp.ClientError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{endpoint} {NO_ETCD}") from error
        numbers = re.match(r"(\d{1,9})\.(\d{1,9})\.", version)
        if numbers is None or not VERSION_MIN <= (int(numbers[1]), int(numbers[2])) < VERSION_END:
            raise ConfigError(f"etcd at {endpoint} has version {version[:40]!r}; 3.4 or a later 3.x is needed")

    def _timeout(self, total_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=ETCD_CONNECT_TIMEOUT_S)

    async def call(self, path: str, request: object, kind: type[A], *, repeatable: bool) -> A:
        """One operation. `repeatable`: that it may be done twice, so it is sent again if no answer came.

        Raises:
            Unavailable: no endpoint does it; DeadlineExceeded if one may still do it.
            NotFound, Exhausted, ConfigError: as etcd says.
        """
        body = msgspec.json.encode(request)
        clock = asyncio.get_running_loop().time
        end = clock() + self._timeout_s
        failure: Unavailable = DeadlineExceeded("etcd does not answer in time")
        for _ in range(max(2, len(self._endpoints))):
            endpoint, left = self.endpoint, end - clock()
            if left <= 0:
                break
            sent = True
            try:
                answer = await self.ask(endpoint, path, body, kind, left / 2 if repeatable else left)
                self._trouble = False
                return answer
            except Unavailable as error:
                failure = error
                sent = not isinstance(error.__cause__, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            self.leave(endpoint, failure)
            if sent and not repeatable:
                break
        raise failure

    async def ask(self, endpoint: Address, path: str, body: bytes, kind: type[A], timeout_s: float) -> A:
        """One attempt at one endpoint; raises as `call`."""
        try:
            url = f"http://{endpoint}{path}"
            async with self._session.post(url, data=io.BytesIO(body), timeout=self._timeout(timeout_s)) as got:
                data = await got.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise Unavailable(f"etcd at {endpoint}: cannot connect") from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"etcd at {endpoint} does not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"etcd at {endpoint}: {_said(error)}") from error
        if got.status == 404 and not self._cluster_id:
            why = "its JSON interface is missing: this is its port for peers, or it was started with --enable-grpc-gateway=false"
            raise ConfigError(f"etcd at {endpoint}: {why}")
        if got.status != 200:
            _refused(endpoint, data)
        answer = decode(data, kind)
        self._belongs(endpoint, answer)
        return answer

    def _belongs(self, endpoint: Address, answer: Answer) -> None:
        """Revisions of another cluster mean nothing here, whether it is listed by mistake or took the former one's place."""
        header = answer.whose()
        if not header.cluster_id:
            raise Unavailable(f"etcd at {endpoint}: an answer that is not etcd's")
        if header.cluster_id != (self._cluster_id or header.cluster_id):
            raise Unavailable(f"etcd at {endpoint} belongs to another cluster than the one that was found at the start")
        self._cluster_id = header.cluster_id
        self.revision = max(self.revision, header.revision)

    async def stream(self, endpoint: Address, path: str, request: object, kind: type[A]) -> AsyncIterator[A]:
        """The answers to a request that goes on answering, until the connection ends.

        Raises:
            Unavailable: it broke; or another error that etcd says.
        """
        try:
            url, data = f"http://{endpoint}{path}", msgspec.json.encode(request)
            async with self._session.post(url, data=data, timeout=self._timeout(None)) as got:
                if got.status != 200:
                    _refused(endpoint, await got.read())
                parts: list[bytes] = []
                async for chunk in got.content.iter_any():
                    *lines, rest = chunk.split(b"\n")
                    for line in lines:
                        answer = _result(endpoint, b"".join([*parts, line]), kind)
                        parts.clear()
                        self._belongs(endpoint, answer)
                        yield answer
                    parts.append(rest)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"etcd at {endpoint}: {_said(error)}") from error
        raise Unavailable(f"etcd at {endpoint}: the stream ended")

    async def close(self) -> None:
        """Ends all connections."""
        await self._session.close()


class _Streamed(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")


def _result(endpoint: Address, line: bytes, kind: type[A]) -> A:
    try:
        streamed = msgspec.json.decode(line, type=_Streamed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"etcd at {endpoint}: an answer that is not etcd's: {error}") from error
    if not bytes(streamed.result):
        _refused(endpoint, bytes(streamed.error))
    return decode(bytes(streamed.result), kind)


def _refused(endpoint: Address, data: bytes) -> NoReturn:
    """Raises what an error answer means."""
    try:
        failure = msgspec.json.decode(data, type=_Failure, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"etcd at {endpoint}: an answer that is not etcd's") from error
    said = failure.message.removeprefix("etcdserver: ")
    if "lease not found" in said:
        raise NotFound("the lease does not exist")
    if "has been compacted" in said:
        raise Compacted(said)
    if "database space exceeded" in said:
        raise Exhausted(FULL)
    if "corrupt cluster" in said:
        raise Unavailable(f"etcd at {endpoint} {CORRUPT}")
    if "too large" in said or "too many" in said:
        raise Exhausted(f"etcd: {said}")
    if failure.code in (7, 16) or "user name is empty" in said:  # PERMISSION_DENIED, UNAUTHENTICATED
        raise ConfigError(f"etcd at {endpoint} asks for a user ({said}), which this version cannot give")
    if "timed out" in said or failure.code == 4:  # DEADLINE_EXCEEDED
        raise DeadlineExceeded(f"etcd at {endpoint}: {said}")
    raise Unavailable(f"etcd at {endpoint}: {said}")


def _said(error: BaseException) -> str:
    """What an error of the HTTP client says, for people."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"cannot connect: {os.strerror(number) if number and number > 0 else error.os_error.strerror}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
