"""The exchange that opens a TCP connection where a cluster has a token (wire/tokens.py), before anything else is said on it."""

import asyncio
import os
import secrets
from pathlib import Path

from tensorcast_connector.config import HELLO_TIMEOUT_S
from tensorcast_connector.errors import (
    ConfigError,
    ProtocolError,
    TensorcastError,
    Unauthorized,
    Unavailable,
    error_from_code,
)
from tensorcast_connector.net.private import check_owner_only
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.wire.codec import decode, encode, failure_decoder
from tensorcast_connector.wire.frames import HEADER_BYTES, Kind, decode_header, encode_frame
from tensorcast_connector.wire.messages import Failure
from tensorcast_connector.wire.tokens import MAGIC, NONCE_BYTES, PROOF_BYTES, TENANT_BYTES_MAX, Access, proof, same

TOKEN_FILE_BYTES_MAX = 4096
FRAME_MAGIC = b"TC"  # what a peer without a token begins with
assert MAGIC.startswith(FRAME_MAGIC) and NONCE_BYTES == HEADER_BYTES


def read_token(path: str) -> Access | None:
    """The token in a file, which only its owner may read; None if no file is named.

    Raises:
        ConfigError: it cannot be read, others can read it too, or what is in it is no token.
    """
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(TOKEN_FILE_BYTES_MAX + 1).decode()
    except OSError as error:
        raise ConfigError(f"token_file={path!r}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"token_file={path!r}: a token is text") from None
    check_owner_only("token_file", path, mode)
    try:
        return Access(text.strip())
    except ConfigError as error:
        raise ConfigError(f"token_file={path!r}: {error}") from None


def check_tenant_fits(tenant: str) -> None:
    """Raises ConfigError for a name that is too long to be said beside a token."""
    if len(tenant.encode()) > TENANT_BYTES_MAX:
        raise ConfigError(f"tenant={tenant[:40]!r}: at most {TENANT_BYTES_MAX} bytes where there is a token")


async def introduce(stream: Stream, access: Access, tenant: str) -> None:
    """The caller's side: shows that it has the token, to somebody who has.

    Args:
        tenant: whom it acts for; "" for the cluster.

    Raises:
        Unauthorized: the other side has another token, or none.
        Unavailable: it left, or does not answer.
    """
    key, mine = access.key(tenant), secrets.token_bytes(NONCE_BYTES)
    encoded = tenant.encode()
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            stream.write(MAGIC + mine + bytes([len(encoded)]) + encoded)
            nonce = await _receive(stream, NONCE_BYTES)
            if nonce.startswith(FRAME_MAGIC):  # an error, in the form that everybody understands
                raise await _said(stream, nonce)
            shown = await _receive(stream, PROOF_BYTES)
    except TimeoutError:
        raise Unavailable(f"{stream.peer} does not answer a token") from None
    if not same(shown, proof(key, b"server", mine, nonce, tenant)):
        raise Unauthorized(f"{stream.peer} does not have the token of this cluster; who is it?")
    stream.write(proof(key, b"client", mine, nonce, tenant))


async def _said(stream: Stream, start: bytes) -> TensorcastError:
    """The error that came instead of an answer, of which `start` is the header."""
    try:
        failure = decode(failure_decoder, await _receive(stream, decode_header(start).body_bytes), "error")
    except TensorcastError:
        return Unauthorized(f"{stream.peer} does not understand a token")
    error = error_from_code(failure.code, failure.message)
    if isinstance(error, ProtocolError):
        return Unauthorized(f"{stream.peer} wants no token, and so is not of this cluster ({failure.message})")
    return error


async def admit(stream: Stream, access: Access) -> str | None:
    """The listener's side: the tenant that the caller acts for; None for a member of the cluster.

    Raises:
        Unauthorized: it has no token, or a wrong one; it has been told.
        Unavailable: it left.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await _admit(stream, access)
    except TimeoutError:
        raise Unauthorized(f"no token within {HELLO_TIMEOUT_S:g} s") from None


async def _admit(stream: Stream, access: Access) -> str | None:
    start = await _receive(stream, len(MAGIC))
    if start != MAGIC:
        raise refused(stream, "this cluster wants a token (--token-file, or token= of connect)")
    head = await _receive(stream, NONCE_BYTES + 1)
    theirs, length = head[:NONCE_BYTES], head[NONCE_BYTES]
    try:
        tenant = (await _receive(stream, length)).decode() if length else ""
    except UnicodeDecodeError:
        raise refused(stream, "the name of a tenant is text") from None
    key, mine = access.key(tenant), secrets.token_bytes(NONCE_BYTES)
    while mine.startswith(FRAME_MAGIC):  # one in 65,536
        mine = secrets.token_bytes(NONCE_BYTES)
    stream.write(mine + proof(key, b"server", theirs, mine, tenant))
    if not same(await _receive(stream, PROOF_BYTES), proof(key, b"client", theirs, mine, tenant)):
        raise refused(stream, f"a wrong token{f' for tenant {tenant!r}' if tenant else ''}")
    return tenant or None


def refused(stream: Stream, why: str) -> Unauthorized:
    """The error that is raised at the listener, after the caller was told the same, in the form that everybody understands."""
    stream.write(encode_frame(Kind.ERROR, 0, encode(Failure(Unauthorized.code, why))))
    return Unauthorized(why)


async def _receive(stream: Stream, count: int) -> bytes:
    data = bytearray(count)
    await stream.receive_into(memoryview(data))
    return bytes(data)
