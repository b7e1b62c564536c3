"""Log lines that people and machines can read."""

import json
import logging

from smetric_router.server.logs import JsonFormatter, LogfmtFormatter


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
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
