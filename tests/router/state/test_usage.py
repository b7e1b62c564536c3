"""Usage figures out of answers that pass by."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric_router.state.usage import TAIL_BYTES, UsageScan
from smetric_router.types import Usage

FIGURES = {"prompt_tokens": 50, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 32}}


def stream(*events: object, done: bool = True) -> bytes:
    text = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return text + (b"data: [DONE]\n\n" if done else b"")


def scanned(body: bytes, *, is_stream: bool, cuts: list[int] | None = None, limit: int = 1 << 20) -> UsageScan:
    scan = UsageScan(stream=is_stream, limit=limit)
    begin = 0
    for cut in [*sorted(cuts or []), len(body)]:
        scan.feed(body[begin:cut])
        begin = max(begin, cut)
    return scan


CHUNKS = stream({"choices": [{"delta": {"content": 'says "usage" \n data: x'}}], "usage": None}, {"usage": FIGURES})


@given(st.lists(st.integers(0, len(CHUNKS)), max_size=6))
def test_stream_split_anywhere(cuts: list[int]) -> None:
    scan = scanned(CHUNKS, is_stream=True, cuts=cuts)
    assert scan.usage() == Usage(50, 32, 7)
    assert scan.is_done() and scan.at_event_end()


def test_only_the_tail_of_a_stream_is_kept() -> None:
    scan = UsageScan(stream=True, limit=0)
    for _ in range(1000):
        scan.feed(stream({"content": "x" * 500}, done=False))
    scan.feed(stream({"usage": FIGURES}))
    assert scan.usage() == Usage(50, 32, 7)
    assert sum(map(len, scan._parts)) < TAIL_BYTES + 1024


def test_last_figures_win() -> None:
    body = stream({"usage": {"prompt_tokens": 1}}, {"usage": FIGURES}, {"usage": None})
    assert scanned(body, is_stream=True).usage() == Usage(50, 32, 7)


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"usage": FIGURES}, Usage(50, 32, 7)),
        ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}}, Usage(5, None)),
        ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}}, Usage(5, 0)),
        ({"usage": None}, Usage()),
        ({"usage": {"prompt_tokens": -5}}, Usage()),
        ({"usage": {"prompt_tokens": 2**60, "prompt_tokens_details": {"cached_tokens": 5}}}, Usage()),
        ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": -1}}}, Usage(5, None)),
        ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 50}}}, Usage(5, 5)),
        ({"usage": "lots"}, Usage()),
        ({}, Usage()),
        ([], Usage()),
    ],
)
def test_json_answers(answer: object, usage: Usage) -> None:
    body = json.dumps(answer).encode()
    assert scanned(body, is_stream=False, cuts=[3]).usage() == usage


def test_a_large_answer_is_not_kept() -> None:
    body = json.dumps({"text": "x" * 1000, "usage": FIGURES}).encode()
    assert scanned(body, is_stream=False, cuts=[500], limit=600).usage() == Usage()
    assert scanned(body + b"", is_stream=False, cuts=[500], limit=2000).usage() == Usage(50, 32, 7)


def test_ends_of_streams() -> None:
    assert scanned(b"", is_stream=True).at_event_end()
    assert not scanned(b'data: {"a"', is_stream=True).at_event_end()
    assert scanned(b"data: {}\r\n\r\n", is_stream=True, cuts=[9, 10]).at_event_end()
    assert not scanned(b"data: {}\n\n", is_stream=True).is_done()
    assert scanned(b"data: [DONE]\n\n", is_stream=True, cuts=[7, 12]).is_done()


@pytest.mark.parametrize("body", [b'{"usage":' + b"[" * 100_000, b'{"usage":{"prompt_tokens":1' + b"0" * 5000 + b"}}"])
def test_what_cannot_be_read_has_no_figures(body: bytes) -> None:
    assert scanned(body, is_stream=False).usage() == Usage()


START = {"type": "message_start", "message": {"usage": {"input_tokens": 18, "cache_read_input_tokens": 30,
         "cache_creation_input_tokens": 2, "output_tokens": 0}}}  # fmt: skip
DELTA = {"type": "content_block_delta", "delta": {"text": "usage message_stop"}}
END = {"type": "message_delta", "usage": {"output_tokens": 7}}
FULL_END = {"type": "message_delta", "usage": {"input_tokens": 20, "cache_read_input_tokens": 30, "output_tokens": 7}}


def anthropic(*events: dict[str, object]) -> bytes:
    return b"".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in events)


@pytest.mark.parametrize(
    ("events", "usage"),
    [
        ([START, DELTA, END], Usage(50, 30, 7)),
        ([START, *[DELTA] * 500, END], Usage(50, 30, 7)),
        ([{"type": "message_start", "message": {"usage": {"input_tokens": 50, "output_tokens": 0}}}, FULL_END],
         Usage(50, 30, 7)),
        ([START, DELTA], Usage(50, 30, 0)),
        ([{"type": "message_start", "message": {}}, DELTA, END], Usage(None, None, 7)),
        ([{"type": "message_start", "message": 5}, DELTA], Usage()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cuts", [[], [1], [5, 40, 90], [22, 23]])
def test_streams_in_anthropics_form(events: list[dict[str, object]], usage: Usage, cuts: list[int]) -> None:
    scan = scanned(anthropic(*events), is_stream=True, cuts=cuts)
    assert scan.usage() == usage
    assert not scan.is_done()
    scan.feed(anthropic({"type": "message_stop"}))
    assert scan.is_done()
    assert scan.usage() == usage


def test_an_answer_in_anthropics_form() -> None:
    body = json.dumps({"type": "message", "usage": START["message"]["usage"]}).encode()  # type: ignore[index]
    assert scanned(body, is_stream=False).usage() == Usage(50, 30, 0)
    assert scanned(b'{"input_tokens": 12}', is_stream=False).usage() == Usage(), "of count_tokens"
