"""Turn, expected hit and canonical prompt, from the request alone."""

import json
import time
from typing import Any

import pytest

from smetric_router.errors import BadRequest
from smetric_router.state.requests import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    MESSAGES_MAX,
    MESSAGES_PATH,
    RequestReader,
    with_deduced_turn,
)
from smetric_router.types import RequestInfo
from smetric_router.view import ClusterView, InstanceView

READER = RequestReader(64)


def chat(*messages: dict[str, Any], **fields: Any) -> RequestInfo:
    return READER.read(CHAT_PATH, json.dumps({"model": "m", "messages": messages, **fields}).encode())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def shared(one: RequestInfo, other: RequestInfo) -> int:
    """Canonical bytes in common."""
    common = 0
    for digest, same, end in zip(one.chain.digests, other.chain.digests, one.chain.ends, strict=False):
        if digest != same:
            break
        common = end
    return common


def test_turn_is_the_number_of_answers() -> None:
    assert chat(user("a")).turn == 0
    assert chat(user("a"), assistant("b"), user("c")).turn == 1
    assert chat(user("a"), assistant(None), {"role": "tool", "content": "x"}, assistant("b"), user("c")).turn == 2
    assert chat({"role": "latest_reminder", "content": "assistant"}).turn == 0


def test_expected_hit_is_exactly_the_previous_prompt() -> None:
    system = {"role": "system", "content": "s" * 1000}
    first = chat(system, user("short"))
    second = chat(system, user("short"), assistant("answer"), user("next"))
    third = chat(system, user("short"), assistant("answer"), user("next"), assistant("more"), user("x"), user("y"))
    assert first.est_hit == 0
    assert second.est_hit == first.chain.length == shared(first, second)
    assert third.est_hit == second.chain.length == shared(second, third)


def test_what_changes_the_prompt_changes_the_chain() -> None:
    text = user("q" * 500)
    plain = chat(text)
    for fields in (
        {"model": "n"},
        {"cache_salt": "salt"},
        {"chat_template_kwargs": {"thinking": True}},
        {"tools": [{"type": "function"}]},
        {"documents": [{"a": 1}]},
    ):
        assert shared(plain, chat(text, **fields)) == 0, fields
    body = json.dumps({"model": "m", "messages": [text]}).encode()
    assert shared(plain, READER.read(CHAT_PATH, body, tenant="t")) == 0
    for fields in ({"temperature": 1}, {"max_tokens": 5}, {"stream": True}, {"user": "u"}):
        assert chat(text, **fields).chain == plain.chain, fields


def test_short_parts_cannot_be_confused() -> None:
    one = READER.read(CHAT_PATH, b'{"model":"ab","messages":[{}]}', tenant="c")
    other = READER.read(CHAT_PATH, b'{"model":"a","messages":[{}]}', tenant="bc")
    assert shared(one, other) == 0


def test_a_growing_message_keeps_its_leading_bytes() -> None:
    assert shared(chat(user("a" * 640)), chat(user("a" * 640 + "b" * 640))) >= 576


def test_completions_share_what_they_have_in_common() -> None:
    def completion(prompt: object) -> RequestInfo:
        return READER.read(COMPLETIONS_PATH, json.dumps({"model": "m", "prompt": prompt}).encode())

    assert completion("x").turn is None
    assert shared(completion("a" * 640), completion("a" * 1000)) == 640
    tokens = list(range(1000))
    assert shared(completion(tokens), completion([*tokens, 7, 8])) >= completion(tokens).chain.length - 64


@pytest.mark.parametrize(("hit", "turn", "est_hit"), [(0, 0, 0), (499, 0, 0), (500, 1, 500), (1000, 1, 1000)])
def test_a_completion_is_a_follow_up_when_half_of_it_is_cached(hit: int, turn: int, est_hit: int) -> None:
    body = json.dumps({"prompt": "p" * 999}).encode()
    request = READER.read(COMPLETIONS_PATH, body)
    assert request.chain.length == 1000
    seen = with_deduced_turn(request, ClusterView.of([InstanceView("a")], {"a": hit}))
    assert (seen.turn, seen.est_hit) == (turn, est_hit)


def test_the_client_may_state_the_turn() -> None:
    body = b'{"model":"m","messages":[]}'
    assert READER.read(CHAT_PATH, body, turn="7").turn == 7
    assert READER.read(COMPLETIONS_PATH, b'{"prompt":"x"}', turn="0").turn == 0
    for wrong in ("-1", "x", "", "1.5", "²", "9" * 30):
        with pytest.raises(BadRequest, match="whole number"):
            READER.read(CHAT_PATH, body, turn=wrong)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
def test_malformed_json_is_refused_with_its_position(path: str) -> None:
    for body in (b"", b"{", b'{"model": "m", x', b'{"model":"m"} trailing', b"\xff\xfe", b'{"model":"\xff"}'):
        with pytest.raises(BadRequest, match="not valid JSON"):
            READER.read(path, body)
    with pytest.raises(BadRequest, match=r"byte 15"):
        READER.read(path, b'{"model": "m", x')


@pytest.mark.parametrize(
    "body",
    [
        b"[]", b"5", b'"x"', b"{}", b'{"model":5}', b'{"model":null,"messages":null}', b'{"messages":{"a":1}}',
        b'{"messages":[1,[],"x",null]}', b'{"messages":[{"role":5},{"role":{"a":"assistant"}}]}',
        b'{"stream":"yes","model":"m"}', b'{"prompt":null}',
    ],
)  # fmt: skip
def test_odd_types_are_left_to_the_engine(body: bytes) -> None:
    for path in (CHAT_PATH, COMPLETIONS_PATH, "/v1/embeddings"):
        READER.read(path, body)


def test_other_paths_need_no_json() -> None:
    assert READER.read("/v1/audio", b"--boundary\r\n\xff") == RequestInfo()
    assert READER.read("/v1/embeddings", b'{"model":"e","input":"x"}') == RequestInfo(model="e")
    assert READER.read("/v1/responses", b'{"model":5,"stream":true}') == RequestInfo(stream=True)
    assert READER.read("/tokenize", b"") == RequestInfo()


def test_duplicate_keys_and_whitespace() -> None:
    body = b'{ "model" : "x" , "model":"m", "messages" : [ {"role" : "user"} , {"role":"assistant"} ] }'
    request = READER.read(CHAT_PATH, body)
    assert (request.model, request.turn, request.est_hit) == ("m", 1, len(b'{"role" : "user"}'))


@pytest.mark.slow
@pytest.mark.parametrize(("message", "count"), [(b"1", 4_000_000), (b'{"role":"assistant","content":"x"}', 900_000)])
def test_the_work_on_one_request_is_bounded(message: bytes, count: int) -> None:
    body = b'{"messages":[' + b",".join([message] * count) + b"]}"
    begun = time.thread_time()
    request = READER.read(CHAT_PATH, body)
    assert time.thread_time() - begun < 1
    assert len(request.chain.digests) == MESSAGES_MAX
    assert request.turn == (MESSAGES_MAX if count < 1_000_000 else 0)


def test_the_chunks_of_one_request_are_bounded() -> None:
    reader = RequestReader(64, chunks_max=10)
    messages = [user("a" * 600), assistant("b"), user("c" * 600)]
    request = reader.read(CHAT_PATH, json.dumps({"messages": messages}).encode())
    assert (len(request.chain.digests), request.est_hit, request.turn) == (10, request.chain.length, 1)
    assert len(reader.read(COMPLETIONS_PATH, json.dumps({"prompt": "x" * 5000}).encode()).chain.digests) == 10


def test_odd_types_and_a_model_that_can_be_read() -> None:
    assert READER.read(CHAT_PATH, b'{"model":"m","stream":true,"messages":5}') == RequestInfo("m", stream=True)


def messages(*turns: dict[str, Any], **fields: Any) -> RequestInfo:
    return READER.read(MESSAGES_PATH, json.dumps({"model": "m", "messages": turns, **fields}).encode())


def test_anthropics_messages() -> None:
    system = [{"type": "text", "text": "s" * 500, "cache_control": {"type": "ephemeral"}}]
    tools = [{"name": "t", "input_schema": {"type": "object"}}]
    blocks = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "t", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]}
    first = messages(user("a"), system=system, tools=tools, max_tokens=5)
    second = messages(user("a"), blocks, result, system=system, tools=tools, max_tokens=9, stream=True)
    assert (first.turn, first.est_hit, first.model, first.stream) == (0, 0, "m", False)
    assert (second.turn, second.stream) == (1, True)
    assert second.est_hit == first.chain.length == shared(first, second)
    assert shared(first, messages(user("a"), system="other", tools=tools)) < first.chain.length
    assert shared(first, messages(user("a"), system=system)) == 0
    assert messages(user("b"), system="s" * 300).turn == 0


def test_marks_of_anthropics_caching_are_no_part_of_the_prompt() -> None:
    def marked(text: str, mark: bool, first: bool = False) -> dict[str, Any]:
        mark_field = {"cache_control": {"type": "ephemeral", "ttl": "1h"}} if mark else {}
        block = {**mark_field, "type": "text", "text": text} if first else {"type": "text", "text": text, **mark_field}
        return {"role": "user", "content": [block]}

    for first in (False, True):
        before = messages(marked("a" * 300, True, first), system="s" * 300)
        after = messages(marked("a" * 300, False), assistant("b"), marked("c", True, first), system="s" * 300)
        assert after.est_hit == before.chain.length == shared(before, after)
    spoken = [messages(user(f'say "cache_control": {{{n}}}'), system="s") for n in range(2)]
    assert shared(*spoken) < spoken[0].chain.length, "what is said of them is part of it"


@pytest.mark.parametrize("body", [b"", b"{", b'{"messages": [1,]}'])
def test_messages_that_are_no_json(body: bytes) -> None:
    with pytest.raises(BadRequest):
        READER.read(MESSAGES_PATH, body)
