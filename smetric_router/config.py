"""The router's configuration: one frozen value with every limit in it, its unit last. The only reader of the environment.

Sources, the later one wins: the defaults here, a TOML file, `--set key=value` and the other options of the command.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from smetric_router.errors import ConfigError

# The chunks of one request that are hashed and remembered; with chunks of 512 bytes, 16 MiB of prompt.
CHUNKS_PER_REQUEST_MAX = 32_768
PEER_TOKEN_CHARS_MIN = 16
ENV_CONFIG = "SMETRIC_ROUTER_CONFIG"
ENV_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
ENV_PEER_TOKEN = "SMETRIC_ROUTER_PEER_TOKEN"
ENV_ENGINE_API_KEY = "SMETRIC_ROUTER_ENGINE_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All that an operator can set."""

    engines: tuple[str, ...] = ()
    """Base URLs of the engines, without /v1."""
    engine_api_key: str = field(default="", repr=False)
    """Sent by the router's own calls only (/health, /v1/models); a client's headers are passed on as they are."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Clients must send one of these, as a bearer token or in x-api-key; none: everybody may call."""
    api_keys_file: str = ""
    """More of them, one a line."""
    api_keys_pass_on: bool = False
    """Whether the engines get the client's key too, where clients need one."""
    cors_origins: tuple[str, ...] = ("*",)
    """Web pages that may read the router's own answers, the list of models and errors, in a browser; "*": all."""
    paths_passed_on: tuple[str, ...] = ("/",)
    """Beginnings of the paths that engines get; others are 404. Engines have paths that change them."""
    admin_key: str = field(default="", repr=False)
    """Needed under /admin/; without it nothing can be changed there."""
    tls_cert: str = ""
    """PEM file with the certificate chain of the listener; it speaks HTTPS then."""
    tls_key: str = ""
    engine_tls_ca: str = ""
    """PEM file with the authorities that sign the engines' certificates; empty: the system's."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""

    policy: str = "smetric"
    policy_header: str = "x-smetric-policy"
    """Request header that selects a policy for one request; empty: none does."""
    turn_header: str = "x-smetric-turn"
    """Request header that states the turn; empty: none does."""
    tenant_header: str = "x-smetric-tenant"
    """Request header that names the tenant; prompts of different tenants share nothing. Empty: one tenant."""
    session_header: str = "x-session-id"
    """Request header by which a client names its conversation, for the policy session-hash; empty: none does."""
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameters by policy."""

    chunk_bytes: int = 1024
    """Granularity of the hit index."""
    index_chunks_max: int = 4_194_304
    """Chunks remembered over all instances, 100 to 150 bytes of memory each, 300 where prompts have two."""

    prefill_cost_linear: float = 1.0
    """Work of computing a token of a prompt: its way through the linear layers."""
    prefill_cost_attention: float = 0.0001
    """Work of its attention to one token before it."""
    report_interval_s: float = 0.0
    """How often each engine is asked for its load, which other routers' requests are part of. 0: never."""
    report_stale_s: float = 10.0
    """An engine's report counts for so long."""
    index: str = "observed"
    """`exact`: what the engines' KV events say, where they can be had."""
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    """Model -> folder with its tokenizer.json, for `index = "exact"`."""
    tokenizer_threads: int = 2
    tokens_cached_max: int = 16_777_216
    """Tokens of messages that are remembered, 4 bytes each."""
    kv_events: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Engine -> "PUBLISHER REPLAY", one for each data-parallel rank; an engine that is not in it is asked."""
    kv_media: tuple[str, ...] = ("GPU",)
    """Media of an engine's blocks that count as its local tier."""
    exact_blocks_max: int = 10_000_000
    """Blocks remembered over all instances, about 150 bytes of memory each."""

    workers: int = 1
    """Processes on the port."""
    peers: tuple[str, ...] = ()
    """HOST:PORT of the other routers in front of the same engines, listed alike: where each has its `peer_listen`."""
    peer_listen: str = ""
    """HOST:PORT for the other routers; empty: none."""
    peer_token: str = field(default="", repr=False)
    """What all of them know."""
    share_snapshot_chunks_max: int = 1_048_576
    """Chunks of the index told to a process or router that begins."""

    connections_max: int = 0
    """Clients' connections at once; one more is closed at once. 0: half of the descriptors that a process may have."""
    body_bytes_max: int = 33_554_432
    requests_bytes_max: int = 4_294_967_296
    """Of all requests that are received, wait or are not answered yet, in each process; beyond it 503."""
    head_bytes_max: int = 65_536
    """Of a request's headers."""
    request_timeout_s: float = 30.0
    """A request of which nothing more comes for so long is given up, and one that comes at less than 1 KB a second."""
    client_keepalive_s: float = 75.0
    """A client's connection without any request is closed after so long."""
    client_stall_timeout_s: float = 300.0
    """A client that takes nothing of its answer for so long is given up."""
    usage_scan_bytes_max: int = 4_194_304
    """An answer larger than this is passed on without looking for its usage."""
    connect_timeout_s: float = 3.0
    upstream_keepalive_s: float = 3.0
    """Less than the 5 s after which the engines' servers close an idle connection."""
    first_byte_timeout_s: float = 0.0
    """An engine that has sent nothing of an answer after so long is given up with 504, and nobody else asked. 0: never."""
    stream_stall_timeout_s: float = 0.0
    """An answer of which nothing more comes for so long is ended with an error. 0: never."""
    retries_max: int = 1

    inflight_max: int = 0
    """Requests at all engines together. 0: no limit."""
    engine_inflight_max: int = 0
    """Requests at one engine. 0: no limit."""
    queue_max: int = 1024
    """Requests that wait while the limits are reached; one more gets 429."""
    queue_timeout_s: float = 10.0
    """After so long in the queue a request gets 429."""

    breaker_failures_min: int = 5
    """So many failures within the window, at least half of all, take an engine out for a while. 0: none do."""
    breaker_window_s: float = 10.0
    breaker_open_s: float = 5.0
    """Then one request is sent there to see."""
    slow_start_s: float = 10.0
    """Over so long a new or recovered engine's share of first turns grows to that of the others. 0: at once."""
    drain_timeout_s: int = 30

    health_interval_s: float = 2.0
    health_recheck_s: float = 0.5
    """Interval for an instance that is not up."""
    health_timeout_s: float = 5.0
    health_failures_max: int = 3
    """Time-outs in a row until an instance counts as down; a refused connection counts at once."""
    down_grace_s: float = 5.0
    """A request on an instance that is down is given up after this much silence."""
    models_interval_s: float = 10.0

    log_format: str = "logfmt"
    log_level: str = "info"

    @property
    def chunks_per_request_max(self) -> int:
        """Of a longer prompt the rest is not looked at, so that one request cannot drop everybody else's chunks."""
        per_engine = self.index_chunks_max // max(1, len(self.engines))
        return max(1, min(CHUNKS_PER_REQUEST_MAX, per_engine // 4))

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} = {value!r} is not between {low} and {high}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} = {getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.report_stale_s < self.report_interval_s:
            raise ConfigError(
                f"report_stale_s = {self.report_stale_s:g} is less than report_interval_s = {self.report_interval_s:g}: "
                "a report must count until the next one comes"
            )
        if not self.engine_api_key.isprintable() or not self.engine_api_key.isascii():
            raise ConfigError("engine_api_key: only printable ASCII characters can be sent")
        for name, key in (*(("api_keys", each) for each in self.api_keys), ("admin_key", self.admin_key or "-")):
            if not (key and key.isprintable() and key.isascii() and " " not in key):
                raise ConfigError(f"{name}: only printable ASCII characters without spaces can be sent")
        for path in self.paths_passed_on:
            if not path.startswith("/"):
                raise ConfigError(f"paths_passed_on: {path!r} does not begin with /")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key: give both, or neither")
        seen: set[tuple[object, ...]] = set()
        for url in self.engines:
            place = _check_engine(url)
            if place in seen:
                raise ConfigError(f"engines: {url} is listed twice")
            seen.add(place)
        for address in (*self.peers, *([self.peer_listen] if self.peer_listen else [])):
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65_535:
                raise ConfigError(f"peers and peer_listen: {address!r} is not HOST:PORT")
        if (self.peers or self.peer_listen) and len(self.peer_token) < PEER_TOKEN_CHARS_MIN:
            raise ConfigError(
                f"peer_token: routers share what they know only with a token of {PEER_TOKEN_CHARS_MIN} characters"
            )
        for url in self.kv_events:
            if url not in self.engines:
                raise ConfigError(f"kv_events: {url} is not among the engines")
        if self.index == "exact" and not self.tokenizers:
            raise ConfigError('index = "exact" needs tokenizers = { "MODEL" = "FOLDER" }')


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("port", 0, 65_535),
    ("chunk_bytes", 64, 65_536),
    ("index_chunks_max", 1, 2**32),
    ("prefill_cost_linear", 0, 1e9),
    ("prefill_cost_attention", 0, 1e9),
    ("report_interval_s", 0, 3600),
    ("report_stale_s", 0.05, 86_400),
    ("tokenizer_threads", 1, 64),
    ("tokens_cached_max", 0, 2**40),
    ("exact_blocks_max", 1, 2**32),
    ("workers", 1, 64),
    ("share_snapshot_chunks_max", 0, 2**32),
    ("connections_max", 0, 2**31),
    ("body_bytes_max", 1, 2**32),
    ("requests_bytes_max", 1, 2**48),
    ("head_bytes_max", 1024, 2**20),
    ("request_timeout_s", 0.01, 3600),
    ("client_keepalive_s", 0.01, 86_400),
    ("client_stall_timeout_s", 0.01, 86_400),
    ("usage_scan_bytes_max", 0, 2**32),
    ("connect_timeout_s", 0.01, 300),
    ("upstream_keepalive_s", 0.1, 3600),
    ("first_byte_timeout_s", 0, 86_400),
    ("stream_stall_timeout_s", 0, 86_400),
    ("inflight_max", 0, 2**31),
    ("engine_inflight_max", 0, 2**31),
    ("queue_max", 0, 1_000_000),
    ("queue_timeout_s", 0, 3600),
    ("breaker_failures_min", 0, 1000),
    ("breaker_window_s", 0.01, 3600),
    ("breaker_open_s", 0.01, 3600),
    ("slow_start_s", 0, 3600),
    # A prompt that kills engines must not go round the whole cluster.
    ("retries_max", 0, 2),
    ("drain_timeout_s", 0, 86_400),
    ("health_interval_s", 0.05, 3600),
    ("health_recheck_s", 0.05, 3600),
    ("health_timeout_s", 0.05, 3600),
    ("health_failures_max", 1, 1000),
    ("down_grace_s", 0, 86_400),
    ("models_interval_s", 0.05, 86_400),
)
_CHOICES = {
    "index": ("observed", "exact"),
    "log_format": ("logfmt", "json"),
    "log_level": ("debug", "info", "warning", "error"),
}


def load_config(
    path: Path | None, settings: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> RouterConfig:
    """The configuration from all sources. Raises ConfigError with a message that names the key and its source."""
    if path is None and os.environ.get(ENV_CONFIG):
        path = Path(os.environ[ENV_CONFIG])
    values: dict[str, Any] = {}
    if key := os.environ.get(ENV_ENGINE_API_KEY):
        values["engine_api_key"] = key
    if token := os.environ.get(ENV_PEER_TOKEN):
        values["peer_token"] = token
    if path is not None:
        values |= _checked(_read(path), str(path))
    for setting in settings:
        _set(values, setting)
    values |= _checked(dict(options or {}), "the command line")
    if "engines" in values and isinstance(values["engines"], list | tuple):
        values["engines"] = [url.rstrip("/") if isinstance(url, str) else url for url in values["engines"]]
    if isinstance(key := values.get("engine_api_key"), str):
        # A key read from a file brings the end of its line along.
        values["engine_api_key"] = key.strip()
    if isinstance(token := values.get("peer_token"), str):
        values["peer_token"] = token.strip()
    try:
        return msgspec.convert(values, RouterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'the command line'}: {error}") from None


def count_in(folder: Path) -> None:
    """Several processes count in files in this folder. The library looks for it when it is imported, not later."""
    os.environ[ENV_METRICS_FOLDER] = str(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _checked(values: dict[str, Any], source: str) -> dict[str, Any]:
    known = [each.name for each in fields(RouterConfig)]
    for key in values:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {key!r}; {hint}")
    return values


def _set(values: dict[str, Any], setting: str) -> None:
    """Apply one `key=value`, `tokenizers.model=value` or `policies.name.key=value`. The value is TOML, or else a string."""
    source = f"--set {setting}"
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{source}: expected key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.lstrip().startswith("{"):  # of names of models one forgets the quotes
            raise ConfigError(f"{source}: not TOML: {error}; a name with slashes or dots needs quotes") from None
        value = text
    first, *rest = key.strip().split(".")
    _checked({first: None}, source)
    if not rest:
        values[first] = value
        return
    if first == "tokenizers":  # names of models have dots in them
        values[first] = {**(values.get(first) or {}), ".".join(rest): value}
        return
    if first != "policies" or len(rest) != 2:
        raise ConfigError(f"{source}: only policies.NAME.KEY has parts")
    name, parameter = rest
    tables = values.get(first)
    tables = dict(tables) if isinstance(tables, dict) else {}
    table = tables.get(name)
    tables[name] = {**(table if isinstance(table, dict) else {}), parameter: value}
    values[first] = tables


def _check_engine(url: str) -> tuple[object, ...]:
    """What tells the engine from others, however its URL is written. Raises ConfigError if it is not usable."""
    if not url.isprintable() or " " in url:
        raise ConfigError(f"engines: {url!r} has a space or a control character in it")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"engines: {url!r} is not a URL: {error}") from None
    if "@" in parts.netloc:
        raise ConfigError(f"engines: the URL for {host} has credentials in it; clients send their own")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"engines: {url!r} is not a URL like http://127.0.0.1:8001")
    if parts.query or parts.fragment:
        raise ConfigError(f"engines: {url!r} has a query or a fragment")
    if port == 0:
        raise ConfigError(f"engines: {url!r} has the port 0, where nobody listens")
    try:
        host.encode("ascii" if host.isascii() else "idna")
    except UnicodeError as error:
        raise ConfigError(f"engines: {url!r} has no host name: {error}") from None
    if parts.path.endswith("/v1"):
        raise ConfigError(
            f"engines: {url!r} ends with /v1; give the address without it, requests bring their whole path"
        )
    return parts.scheme, host, port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")
