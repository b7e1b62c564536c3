"""Structured log lines on standard error: key=value for people, JSON for machines."""

import json
import logging
import re
import sys
from typing import Any

log = logging.getLogger("smetric_router")
access_log = logging.getLogger("smetric_router.access")

_is_plain = re.compile(r'[^\x00-\x20\x7f"=\\]+').fullmatch
FIELD_CHARS_MAX = 2048
"""Of what clients and engines say, so that a line stays a line."""


class _Formatter(logging.Formatter):
    """Fields come in `record.fields`; the rest is time, level and the message."""

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        seconds = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **{name: _cut(value) for name, value in getattr(record, "fields", {}).items()},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return fields


class LogfmtFormatter(_Formatter):
    """`key=value` pairs; values are quoted where they need it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        return " ".join(f"{key}={_quoted(value)}" for key, value in self._fields(record).items() if value is not None)


class JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        # In ASCII: some readers take other characters for the end of a line.
        return json.dumps(self._fields(record), default=str)


def set_up_logging(log_format: str, level: str) -> None:
    """Send everything, the libraries' messages too, to standard error in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else LogfmtFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in ("aiohttp", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def _quoted(value: object) -> str:
    text = str(value)
    if text.isprintable():
        return text if _is_plain(text) else json.dumps(text, ensure_ascii=False)
    return json.dumps(text)  # ends of lines, commands for a terminal, halves of characters


def _cut(value: object) -> object:
    if not isinstance(value, str) or len(value) <= FIELD_CHARS_MAX:
        return value
    return f"{value[:FIELD_CHARS_MAX]}... ({len(value)} characters)"
