"""Canonical identity of KV namespaces and pages.

A page is reused only where its bytes are the bytes that would have been computed. What determines them besides the
tokens is the *namespace*; the tokens (with LoRA, multimodal inputs and cache_salt) are in the engine's block hash. So

    keyspace = blake3(namespace digest, KV-group digest, layer span, tp size, tp rank)[:16]
    page key = keyspace + engine block hash

and two engines that differ in anything that matters live in different keyspaces: they cannot hit each other's pages.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import blake3

from tensorcast_connector.types import KEYSPACE_BYTES

# Raised whenever the meaning of a field or the byte order inside a page changes.
PAGE_FORMAT_VERSION = 1
# Of the many variables of an engine those that are about the precision of what it computes or keeps, by their names.
_PRECISION = re.compile(r"(?:VLLM|SGLANG)_\w*(?:DTYPE|QUANT|FP4|FP8|BF16|FP16|FP32|INT8|INT4)")


def canonical(value: Any) -> bytes:
    """One byte string per value: JSON with sorted keys and no spaces; Python prints a float the same way everywhere.

    Raises:
        TypeError: a value that has no canonical form; it must not silently become part of an identity.
    """
    _check(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _check(value: Any) -> None:
    """JSON would write the key 1 as "1", so that two different values had one form."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} has no canonical form; use text")
            _check(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check(each)


def digest(value: Any) -> str:
    """Hex blake3 digest of the canonical form."""
    return str(blake3.blake3(canonical(value)).hexdigest())


def namespace_digest(facts: Mapping[str, Any]) -> str:
    """The identity of everything in `facts`; the caller lists all that determines a page's bytes besides tokens."""
    return digest({"format": PAGE_FORMAT_VERSION, "facts": dict(facts)})


def precision(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """As facts, the settings of an engine that are made by environment variables alone and change what it computes.

    No fact where there is none, so that the namespaces of who sets nothing stay what they were.
    """
    found = {name: environment[name] for name in sorted(environment) if _PRECISION.match(name)}
    return {"environment": found} if found else {}


def keyspace(namespace: str, group: Mapping[str, Any], layers: tuple[int, int], tp_size: int, tp_rank: int) -> bytes:
    """The 16 bytes that start every page key of one rank and one KV group.

    Args:
        namespace: from `namespace_digest`.
        group: the specification of the KV group (kind, heads, head size, dtype, block size, window, ...).
        layers: first layer and one past the last that this page spans (a pipeline stage's share).
        tp_size, tp_rank: part of the identity until pages are shared across tensor-parallel sizes.
    """
    facts = {"namespace": namespace, "group": dict(group), "layers": list(layers), "tp": [tp_size, tp_rank]}
    return bytes(blake3.blake3(canonical(facts)).digest(length=KEYSPACE_BYTES))
