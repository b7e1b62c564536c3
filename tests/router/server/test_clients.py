"""The clients that people use, unchanged: OpenAI's and Anthropic's, streaming and not, errors included."""

import io
import json
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from ..fake_engine import break_stream, drop, send_event, start_stream, status

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
MESSAGES = [{"role": "user", "content": "hi"}]


def chunk(delta: dict[str, Any], finish: str | None = None, usage: dict[str, Any] | None = None) -> dict[str, Any]:
    choices = [] if usage else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "fake",
        "choices": choices,
        "usage": usage,
    }


async def openai_engine(request: web.Request) -> web.StreamResponse:
    """As vLLM answers."""
    body = await request.read()
    if request.path == "/v1/audio/transcriptions":
        return web.json_response({"text": f"{len(body)} bytes"})
    asked = json.loads(body)
    if request.path == "/v1/embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
        return web.json_response({"object": "list", "data": data, "model": "fake", "usage": USAGE})
    if request.path == "/v1/completions":
        choice = {"index": 0, "text": "there", "finish_reason": "stop", "logprobs": None}
        answer = {
            "id": "c",
            "object": "text_completion",
            "created": 1,
            "model": "fake",
            "choices": [choice],
            "usage": USAGE,
        }
        return web.json_response(answer)
    call = {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": None if asked.get("tools") else "hello"}
        if asked.get("tools"):
            message["tool_calls"] = [call]
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        answer = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "fake",
            "choices": [choice],
            "usage": USAGE,
        }
        return web.json_response(answer)
    response = await start_stream(request)
    for delta in [
        {"role": "assistant", "content": ""},
        {"content": "hel"},
        {"content": "lo ü"},
        {"tool_calls": [call]},
    ]:
        await send_event(response, chunk(delta))
    await send_event(response, chunk({}, "stop"))
    await send_event(response, chunk({}, usage=USAGE))
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture
async def two(engines, route):
    """A router in front of two engines that answer as vLLM does."""
    both = await engines(2)
    for each in both:
        each.behaviour = openai_engine
    return await route(*both, breaker_failures_min=0), both


@pytest.fixture
async def client(two):
    async with openai.AsyncOpenAI(base_url=f"{two[0].url}/v1", api_key="-", max_retries=0) as made:
        yield made


async def test_openai(client, two) -> None:
    answer = await client.chat.completions.create(model="fake", messages=MESSAGES, extra_body={"top_k": 3})
    assert (answer.choices[0].message.content, answer.usage.total_tokens) == ("hello", 7)
    assert json.loads(max(each.bodies for each in two[1])[0])["top_k"] == 3
    answer = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=[TOOL])
    assert answer.choices[0].message.tool_calls[0].function.name == "f"
    assert (await client.completions.create(model="fake", prompt="hi")).choices[0].text == "there"
    assert (await client.embeddings.create(model="fake", input="hi", encoding_format="float")).data[0].embedding == [
        0.5
    ]
    heard = await client.audio.transcriptions.create(model="fake", file=("a.wav", io.BytesIO(b"\0" * 5000)))
    assert heard.text.endswith("bytes")
    assert [each.id async for each in await client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).id == "fake"
    raw = await client.chat.completions.with_raw_response.create(model="fake", messages=MESSAGES)
    assert raw.headers["x-smetric-instance"] in [each.url for each in two[1]] and raw.headers["x-request-id"]


async def test_openais_streams(client) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [each async for each in await client.chat.completions.create(model="fake", messages=MESSAGES, **options)]
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "hello ü"
    assert chunks[-1].usage.total_tokens == 7
    async with client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello ü" and final.choices[0].message.tool_calls


async def test_a_stream_that_its_client_leaves_ends_at_the_engine(client, two) -> None:
    """And the connection pool of the client goes on."""
    for _ in range(3):
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        await anext(aiter(stream))
        await stream.close()
    assert (await client.chat.completions.create(model="fake", messages=MESSAGES)).choices


@pytest.mark.parametrize(
    ("behaviour", "asked", "expected"),
    [
        (openai_engine, {"model": "unknown"}, openai.NotFoundError),
        (openai_engine, {"extra_headers": {"x-smetric-turn": "x"}}, openai.BadRequestError),
        (status(400), {}, openai.BadRequestError),
        (status(422), {}, openai.UnprocessableEntityError),
        (status(429, **{"retry-after": "7"}), {}, openai.RateLimitError),
        (status(503), {}, openai.InternalServerError),
        (drop, {}, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_openais_errors(client, two, behaviour, asked, expected, stream) -> None:
    for each in two[1]:
        each.behaviour = behaviour
    with pytest.raises(expected) as error:
        await client.chat.completions.create(**{"model": "fake", "messages": MESSAGES, "stream": stream, **asked})
    assert error.value.response.headers["x-request-id"]
    assert error.value.body["message"], "in the shape that the client takes apart"
    if expected is openai.RateLimitError:
        assert error.value.response.headers["retry-after"] == "7"


async def test_openais_stream_that_breaks_raises(client, two) -> None:
    for each in two[1]:
        each.behaviour = break_stream
    with pytest.raises(openai.APIError, match="broke") as error:
        async for _ in await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True):
            pass
    assert error.value.code == "upstream_disconnected"


async def test_keys(engines, route) -> None:
    (engine,) = await engines()
    engine.behaviour = openai_engine
    router = await route(engine, api_keys=("right",))
    for key, expected in (("right", None), ("wrong", openai.AuthenticationError)):
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0) as client:
            if expected is None:
                await client.chat.completions.create(model="fake", messages=MESSAGES)
                continue
            with pytest.raises(expected):
                await client.chat.completions.create(model="fake", messages=MESSAGES)
    async with anthropic.AsyncAnthropic(base_url=router.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as error:
            await client.messages.create(model="fake", max_tokens=5, messages=MESSAGES)
        assert error.value.body["error"]["type"] == "authentication_error"


# --- Anthropic's ---

COUNTED = {"input_tokens": 20, "cache_read_input_tokens": 30, "output_tokens": 7}


async def anthropic_engine(request: web.Request) -> web.StreamResponse:
    """As vLLM answers `/v1/messages`: one text, one call of a tool."""
    asked = json.loads(await request.read())
    if request.path.endswith("count_tokens"):
        return web.json_response({"input_tokens": 50})
    message = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "stop_reason": None,
        "stop_sequence": None,
    }
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    if not asked.get("stream"):
        content = [{"type": "text", "text": "hello"}, call]
        return web.json_response({**message, "content": content, "stop_reason": "tool_use", "usage": COUNTED})
    response = await start_stream(request)
    for event in (
        {"type": "message_start", "message": {**message, "content": [], "usage": {**COUNTED, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hello ü"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": call},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"x": 1}'}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 7},
        },
        {"type": "message_stop"},
    ):
        await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
    return response


ASKED: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        {"name": "f", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}}
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
                {"type": "text", "text": "what is it", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
ANSWERED: list[dict[str, Any]] = [
    *ASKED["messages"],
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "hello"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "42"}]}],
    },
]


@pytest.fixture
async def claude(two):
    for each in two[1]:
        each.behaviour = anthropic_engine
    async with anthropic.AsyncAnthropic(base_url=two[0].url, api_key="-", max_retries=0) as made:
        yield made


async def test_anthropic(claude) -> None:
    raw = await claude.messages.with_raw_response.create(**ASKED)
    answer = await raw.parse()
    assert [each.type for each in answer.content] == ["text", "tool_use"]
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (20, 30)
    follow_up = await claude.messages.with_raw_response.create(**{**ASKED, "messages": ANSWERED})
    assert follow_up.headers["x-smetric-instance"] == raw.headers["x-smetric-instance"]
    counted = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    assert (await claude.messages.count_tokens(**counted)).input_tokens == 50
    assert [each.id async for each in await claude.models.list()] == ["fake"]


async def test_anthropics_streams(claude) -> None:
    async with claude.messages.stream(**ASKED) as stream:
        assert "".join([text async for text in stream.text_stream]) == "hello ü"
        final = await stream.get_final_message()
    assert (final.content[1].input, final.stop_reason, final.usage.output_tokens) == ({"x": 1}, "tool_use", 7)
    kinds = [event.type async for event in await claude.messages.create(**ASKED, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


@pytest.mark.parametrize(
    ("behaviour", "asked", "expected"),
    [
        (anthropic_engine, {"model": "unknown"}, anthropic.NotFoundError),
        (anthropic_engine, {"extra_headers": {"x-smetric-turn": "x"}}, anthropic.BadRequestError),
        (status(400), {}, anthropic.BadRequestError),
        (status(429, **{"retry-after": "7"}), {}, anthropic.RateLimitError),
        (drop, {}, anthropic.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_errors(claude, two, behaviour, asked, expected, stream) -> None:
    for each in two[1]:
        each.behaviour = behaviour
    with pytest.raises(expected) as error:
        await claude.messages.create(**{**ASKED, "stream": stream, **asked})
    if asked or behaviour is drop:
        assert error.value.body["type"] == "error" and error.value.body["error"]["message"]


async def test_anthropics_stream_that_breaks_raises(claude, two) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        start = {"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "model": "fake",
                 "content": [], "stop_reason": None, "stop_sequence": None, "usage": COUNTED}}  # fmt: skip
        await response.write(f"event: message_start\ndata: {json.dumps(start)}\n\n".encode())
        assert request.transport is not None
        request.transport.close()
        return response

    for each in two[1]:
        each.behaviour = broken
    with pytest.raises(anthropic.APIStatusError, match="broke"):
        async for _ in await claude.messages.create(**ASKED, stream=True):
            pass
