"""Log lines that people and machines can read."""

import json
import logging

import pytest

from smetric_router.server.logs import FIELD_CHARS_MAX, JsonFormatter, LogfmtFormatter

from ..raw_engine import answer_to, request


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("x", logging.INFO, "f", 1, message, (), None)
    made.fields = fields
    return made


def test_logfmt() -> None:
    line = LogfmtFormatter().format(record("a b", n=1, empty="", quote='x"y', newline="p\nq", nothing=None, s="plain"))
    assert line.split(" ", 1)[1] == 'level=info event="a b" n=1 empty="" quote="x\\"y" newline="p\\nq" s=plain'


def test_json() -> None:
    line = json.loads(JsonFormatter().format(record("a b", n=1, s="ü")))
    assert (line["event"], line["n"], line["s"], line["level"]) == ("a b", 1, "ü", "info")


async def test_access_line_of_a_request(engines, route, caplog) -> None:
    caplog.set_level(logging.INFO, "smetric_router.access")
    (engine,) = await engines()
    router = await route(engine)
    await router.chat("x", headers={"x-request-id": "abc"})
    (line,) = [entry.fields for entry in caplog.records if entry.name == "smetric_router.access"]
    assert {name: line[name] for name in ("request_id", "instance", "reason", "status", "attempts")} == {
        "request_id": "abc", "instance": engine.url, "reason": "first-turn", "status": 200, "attempts": 1,
    }  # fmt: skip
    assert line["client"].startswith("127.0.0.1:")
    assert 0 < line["ttft_ms"] <= line["duration_ms"]


NASTY = {
    "line": "a\nlevel=info event=forged",
    "carriage return": "a\rb",
    "next line": "a\x85b",
    "line separator": "a\u2028b",
    "escape": "a\x1b[2Jb",
    "eight-bit escape": "a\x9b2Jb",
    "written backwards": "a\u202eb",
    "half a character": "a\ud800b",
    "delete": "a\x7fb",
}


@pytest.mark.parametrize("formatter", [LogfmtFormatter(), JsonFormatter()], ids=["logfmt", "json"])
@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_what_others_write_stays_within_its_line_and_commands_no_terminal(formatter, text) -> None:
    line = formatter.format(record("x", path=text))
    assert line.isprintable() and len(line.splitlines()) == 1
    line.encode()
    if isinstance(formatter, JsonFormatter):
        assert json.loads(line)["path"] == text


def test_letters_of_any_language_stay_readable() -> None:
    assert LogfmtFormatter().format(record("x", path="/größe/名前")).endswith(" path=/größe/名前")


@pytest.mark.parametrize("formatter", [LogfmtFormatter(), JsonFormatter()], ids=["logfmt", "json"])
def test_a_line_has_an_end(formatter) -> None:
    assert len(formatter.format(record("x", path="/" + "x" * 100_000))) < FIELD_CHARS_MAX + 200


async def test_what_is_refused_has_a_line_and_an_id(engines, route, caplog) -> None:
    caplog.set_level(logging.INFO, "smetric_router.access")
    (engine,) = await engines()
    router = await route(engine, api_keys=("k",))
    answers = [
        await answer_to(router.url, request(headers="x-request-id: mine\r\n")),
        await answer_to(router.url, request(headers="content-length: 1\r\n")),
    ]
    assert b"x-request-id: mine\r\n" in answers[0] and b"x-request-id: " in answers[1]
    lines = [entry.fields for entry in caplog.records if entry.name == "smetric_router.access"]
    assert [(line["request_id"] == "mine", line["path"], line["status"]) for line in lines] == [
        (True, "/v1/chat/completions", 401),
        (False, None, 400),
    ]
    assert all(line["client"].startswith("127.0.0.1:") for line in lines)
