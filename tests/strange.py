"""Well-formed messages that make no sense: any values of the right types, from a seeded chance."""

import random
import types
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from tensorcast_connector.wire.messages import Message

INTEGERS = (-(1 << 63), -1, 0, 1, 2, 1000, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-300, 0.01, 1e308)
TEXTS = (
    "",
    "a",
    "n",
    "x" * 400,
    "two\nlines",
    "\x1b[2J\0",
    "0" * 32,
    "..",
    "a/../../b",
    "/",
    "default/k",
    "\N{SNOWMAN}",
)
BYTES = (
    b"",
    b"\0" * 100,
    b"\xc1",
    b"\x91" * 20_000,
    b"\x90",
    b"\x94\x90\x00\xc4\x00\x01",
    b"\x91\x90",
    bytes(range(256)),
)


def strange(kind: Any, chance: random.Random, texts: Sequence[str] = TEXTS) -> Any:
    """Any value of that type. A message's fields are strange themselves."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return strange(chance.choice(arguments), chance, texts)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(*(strange(each.type, chance, texts) for each in msgspec.structs.fields(kind)))
    if origin is tuple and Ellipsis not in arguments:
        return tuple(strange(each, chance, texts) for each in arguments)
    if origin is not None and issubclass(origin, Sequence):
        return [strange(arguments[0], chance, texts) for _ in range(chance.choice((0, 1, 3, 40)))]
    if origin is dict:
        return {chance.choice(texts): strange(arguments[1], chance, texts) for _ in range(chance.choice((0, 1, 3)))}
    simple: dict[Any, Sequence[Any]] = {
        int: INTEGERS, float: FLOATS, str: texts, bytes: BYTES, bool: (True, False), type(None): (None,),
        Any: (None, 0, -1.5, "n", b"n", [], {}, [{"a": [1]}], "x" * 1000),
    }  # fmt: skip
    return chance.choice(simple[kind])


def some(kind: type[Message], chance: random.Random, count: int, texts: Sequence[str] = TEXTS) -> list[Message]:
    """So many messages of that kind."""
    return [strange(kind, chance, texts) for _ in range(count)]
