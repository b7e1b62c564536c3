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
ENV_CONFIG = "SMETRIC_ROUTER_CONFIG"
ENV_ENGINE_API_KEY = "SMETRIC_ROUTER_ENGINE_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All that an operator can set."""

    engines: tuple[str, ...] = ()
    """Base URLs of the engines, without /v1."""
    engine_api_key: str = field(default="", repr=False)
    """Sent by the router's own calls only (/health, /v1/models); a client's headers are passed on as they are."""
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
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameters by policy."""

    chunk_bytes: int = 512
    """Granularity of the hit index."""
    index_chunks_max: int = 4_194_304
    """Chunks remembered over all instances, about 150 bytes of memory each."""

    body_bytes_max: int = 33_554_432
    usage_scan_bytes_max: int = 4_194_304
    """An answer larger than this is passed on without looking for its usage."""
    connect_timeout_s: float = 3.0
    upstream_keepalive_s: float = 3.0
    """Less than the 5 s after which the engines' servers close an idle connection."""
    retries_max: int = 1
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
        if not self.engine_api_key.isprintable() or not self.engine_api_key.isascii():
            raise ConfigError("engine_api_key: only printable ASCII characters can be sent")
        seen: set[tuple[object, ...]] = set()
        for url in self.engines:
            place = _check_engine(url)
            if place in seen:
                raise ConfigError(f"engines: {url} is listed twice")
            seen.add(place)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("port", 0, 65_535),
    ("chunk_bytes", 64, 65_536),
    ("index_chunks_max", 1, 2**32),
    ("body_bytes_max", 1, 2**32),
    ("usage_scan_bytes_max", 0, 2**32),
    ("connect_timeout_s", 0.01, 300),
    ("upstream_keepalive_s", 0.1, 3600),
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
_CHOICES = {"log_format": ("logfmt", "json"), "log_level": ("debug", "info", "warning", "error")}


def load_config(
    path: Path | None, settings: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> RouterConfig:
    """The configuration from all sources. Raises ConfigError with a message that names the key and its source."""
    if path is None and os.environ.get(ENV_CONFIG):
        path = Path(os.environ[ENV_CONFIG])
    values: dict[str, Any] = {}
    if key := os.environ.get(ENV_ENGINE_API_KEY):
        values["engine_api_key"] = key
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
    try:
        return msgspec.convert(values, RouterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'the command line'}: {error}") from None


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
    """Apply one `key=value` or `policies.name.key=value`. The value is TOML, or else taken as a string."""
    source = f"--set {setting}"
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{source}: expected key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    first, *rest = key.strip().split(".")
    _checked({first: None}, source)
    if not rest:
        values[first] = value
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
    if parts.path.endswith("/v1"):
        raise ConfigError(
            f"engines: {url!r} ends with /v1; give the address without it, requests bring their whole path"
        )
    return parts.scheme, host, port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")
