"""JSON as the engines' servers take it: Python's `json` is laxer than the decoder that reads requests here.

For reading only: what is sent on stays as it came. Texts of which half a character was cut off, as programs in JavaScript
and the agents written in it send them, hold half of a surrogate pair; files and some shells put a byte order mark in front.
"""

import json
import re
from typing import Any

PARSED_BYTES_MAX = 1_048_576
"""More than that is not parsed at ten times the usual cost."""

# Two bytes that no JSON text has in it stand for an escaped backslash, so that every other backslash begins an escape.
_BACKSLASH, _HELD = b"\\\\", b"\x00\x01"
_lone_high = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])").sub
_lone_low = re.compile(rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}").sub
_UNKNOWN = rb"\\ufffd"  # as a template


def mended(body: bytes) -> bytes:
    """The same JSON in UTF-8, without a mark in front and with whole surrogate pairs only; as it was if it has none of these.

    What stands for half a pair is as long as it, so a text that only grew keeps its leading bytes.
    """
    encoding = json.detect_encoding(body)
    if encoding != "utf-8":
        try:
            body = body.decode(encoding).encode()
        except UnicodeError:
            return body
    if b"\\ud" in body or b"\\uD" in body:
        held = body.replace(_BACKSLASH, _HELD)
        body = _lone_low(_UNKNOWN, _lone_high(_UNKNOWN, held)).replace(_HELD, _BACKSLASH)
    return body


def parsed(body: bytes) -> dict[str, Any] | None:
    """The object, where Python's `json` takes what is none by the book (NaN, Infinity); None for anything else."""
    if len(body) > PARSED_BYTES_MAX:
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
