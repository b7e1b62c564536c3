"""Where an engine publishes its KV events: as the configuration says, or as the engine itself does."""

from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from smetric_router.errors import RouterError
from smetric_router.server.kv_events import RANKS_MAX
from smetric_router.server.logs import log


class Asks(Protocol):
    """Makes small calls to an engine."""

    async def get(self, instance: str, path: str) -> tuple[int, bytes]:
        """Status and body. Raises RouterError or TimeoutError."""
        ...


class Source(msgspec.Struct):
    """One publisher: its stream, and where it repeats what it has published."""

    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str | None = None


class _SglangEvents(msgspec.Struct):
    """`kv_events` of SGLang's /server_info: the first rank's ports, and how many ranks there are."""

    publisher: str
    endpoint_host: str
    endpoint_port_base: int
    dp_size: int = 1
    topic: str = ""
    replay_endpoint_port_base: int | None = None


class _SglangInfo(msgspec.Struct):
    kv_events: _SglangEvents | None = None


async def discovered(asks: Asks, instance: str) -> list[Source]:
    """What an engine says of its publishers, one for each data-parallel rank; vLLM says it in one place and SGLang in another."""
    host = urlsplit(instance).hostname or ""
    for path, read in (("/kv_event_sources", _vllm_sources), ("/server_info", _sglang_sources)):
        try:
            status, body = await asks.get(instance, path)
            found = read(body) if status == 200 else []
        except (RouterError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.debug("no KV events", extra={"fields": {"instance": instance, "cause": str(error)}})
            continue
        if found:
            return [
                Source(_reachable(each.endpoint, host), _reachable(each.replay_endpoint, host), each.topic)
                for each in found
            ]
    return []


def configured(text: str) -> Source:
    """A source as the configuration writes it: "PUBLISHER REPLAY", the second if there is one."""
    publisher, _, replay = text.strip().partition(" ")
    return Source(publisher, replay.strip() or None)


def _vllm_sources(body: bytes) -> list[Source]:
    found = msgspec.json.decode(body, type=dict[str, Source])
    return [each for _, each in sorted(found.items()) if each.endpoint and each.publisher == "zmq"]


def _sglang_sources(body: bytes) -> list[Source]:
    events = msgspec.json.decode(body, type=_SglangInfo).kv_events
    if events is None or events.publisher != "zmq":
        return []
    host, replay = events.endpoint_host, events.replay_endpoint_port_base
    return [
        Source(
            f"tcp://{host}:{events.endpoint_port_base + rank}",
            None if replay is None else f"tcp://{host}:{replay + rank}",
            events.topic,
        )
        for rank in range(min(events.dp_size, RANKS_MAX))
    ]


def _reachable(endpoint: str | None, host: str) -> str | None:
    """The endpoint as it is reached from here: where a publisher binds every address, the engine's own."""
    if not endpoint:
        return None
    shown = f"[{host}]" if ":" in host else host
    for wildcard in ("//*:", "//0.0.0.0:", "//[::]:", "//:::"):
        endpoint = endpoint.replace(wildcard, f"//{shown}:")
    return endpoint
