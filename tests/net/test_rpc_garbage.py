"""What breaks the protocol ends one connection or one call, with one line, and nothing else."""

import random

import pytest

from tensorcast_connector.errors import (
    ProtocolError,
    Unavailable,
)
from tensorcast_connector.net import rpc
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.wire.codec import (
    encode,
    failure_decoder,
)
from tensorcast_connector.wire.frames import HEADER_BYTES, Kind, encode_frame
from tensorcast_connector.wire.messages import (
    GetStatistics,
    Hello,
    Ok,
    Statistics,
)
from tests.net.conftest import Place
from tests.net.pair import Pair, T, frame, hello
from tests.net.service import lookup
from tests.waiting import until

GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "one byte": b"x",
    "zeros": bytes(4096),
    "no hello": encode_frame(Kind.REQUEST, 1, encode(GetStatistics())),
    "a reply": encode_frame(Kind.REPLY, 1, encode(Ok())),
    "no message": encode_frame(Kind.REQUEST, 1, b"\xc1"),
    "half a hello": encode_frame(Kind.REQUEST, 1, encode(Hello(2, 2, "r", "n")))[:-3],
    "lists in lists": encode_frame(Kind.REQUEST, 1, b"\x96\xa5Hello\x02\x02\xa1r\xa1n" + b"\x91" * 50_000 + b"\xc0"),
    "a long hello": encode_frame(Kind.REQUEST, 1, encode(Hello(2, 2, "r", "n" * 100_000))),
    "impatient": encode_frame(Kind.REQUEST, 1, encode(Hello(2, 2, "r", "n"))) * 2,
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_leaves_the_server_serving_and_is_one_line(
    pair: Pair, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await pair.raw()
    stream.write(GARBAGE[name])
    if name == "half a hello":
        stream.close()
    else:
        answer = b""
        try:
            while piece := await stream.receive():
                answer += piece
        except Unavailable:
            pass  # reset, since some of the garbage was never read
        if answer:
            assert failure_decoder.decode(answer[HEADER_BYTES:]).code == "protocol"
        stream.close()
    await until(lambda: caplog.records)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and lines[0].startswith("connection from ") and "\n" not in lines[0]
    client = await pair.connected()
    assert await client.call(GetStatistics(), Statistics, T) == Statistics({})


async def test_garbage_after_the_hello_ends_the_connection_and_says_why(pair: Pair) -> None:
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    stream.write(encode_frame(Kind.REPLY, 5, encode(Ok())))
    kind, request_id, body = await frame(stream)
    assert (kind, request_id) == (Kind.ERROR, 0) and "not REPLY" in failure_decoder.decode(body).message
    stream.close()


async def test_a_message_that_is_not_understood_fails_only_itself(pair: Pair) -> None:
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    stream.write(
        encode_frame(Kind.REQUEST, 2, b"\x91\xa4Nope") + encode_frame(Kind.REQUEST, 3, encode(GetStatistics()))
    )
    kind, request_id, body = await frame(stream)
    assert (kind, request_id) == (Kind.ERROR, 2) and "not understood" in failure_decoder.decode(body).message
    assert (await frame(stream))[:2] == (Kind.REPLY, 3)
    stream.close()


async def test_lists_in_lists_in_lists_are_not_understood(pair: Pair) -> None:
    deep = b"\x91" * 200_000 + b"\xc0"
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    stream.write(encode_frame(Kind.REQUEST, 2, b"\x92\xadGetStatistics" + deep))
    kind, _, body = await frame(stream)
    assert kind is Kind.ERROR and "not understood: maximum recursion" in failure_decoder.decode(body).message
    stream.close()


async def test_a_request_id_that_is_in_use_ends_the_connection(pair: Pair) -> None:
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    stream.write(encode_frame(Kind.REQUEST, 2, encode(lookup("a"))) * 2)
    assert "request id 2 is in use" in failure_decoder.decode((await frame(stream))[2]).message
    stream.close()


async def test_a_server_that_speaks_nonsense(place: Place) -> None:
    async def nonsense(stream: Stream) -> None:
        await stream.receive()
        stream.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await stream.receive()

    listener = await place.network.listen(place.address, nonsense)
    client = RpcClient(place.network, listener.address, "engine", "e", random.Random(1))
    client.start()
    with pytest.raises(ProtocolError, match="not a tensorcast connection"):
        await client.wait_connected(T, patient=False)
    await client.close()
    await listener.close()


async def test_a_server_that_answers_with_a_request(place: Place) -> None:
    async def odd(stream: Stream) -> None:
        await rpc.accept(stream, "worker", "odd")
        _, got = await rpc.receive_frame(stream)
        stream.write(encode_frame(Kind.REQUEST, got.request_id, encode(Ok())))
        await stream.receive()

    listener = await place.network.listen(place.address, odd)
    client = RpcClient(place.network, listener.address, "engine", "e", random.Random(1))
    client.start()
    await client.wait_connected(T)
    with pytest.raises(ProtocolError, match="not REQUEST"):
        await client.call(GetStatistics(), Statistics, T)
    await client.close()
    await listener.close()
