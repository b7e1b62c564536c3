"""What a store and a worker are told: by flags, and by a file in TOML. Limits and what the environment says: config.py."""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from tensorcast_connector.config import (
    ARENA_BYTES_MIN,
    DEVICE_MEMORY_BYTES,
    ROLES,
    SHARDS_MAX,
    default_store_dir,
    parse_devices,
    parse_endpoints,
    parse_size,
    unknown_key,
)
from tensorcast_connector.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """`tensorcast store`: where it listens and keeps its database."""

    listen: str = "127.0.0.1:7700"
    data_dir: str = field(default_factory=default_store_dir)
    metrics: str = ""  # HOST:PORT for Prometheus, see docs/metrics.md; none unless told
    etcd: str = ""  # HOST:PORT of one member, or several with commas: the database is this etcd, and not a folder
    etcd_prefix: str = "tensorcast/"  # of every key there; several clusters can share an etcd
    shards: int = 0  # into how many the pages of a new cluster are cut; 0: SHARDS, or what an existing one has
    token_file: str = ""  # these four as in docs/security.md
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    def __post_init__(self) -> None:
        if self.shards and (self.shards < 0 or self.shards > SHARDS_MAX or self.shards & (self.shards - 1)):
            raise ConfigError(f"shards={self.shards}: a power of two from 1 to {SHARDS_MAX} is needed")
        if not self.etcd:
            return
        parse_endpoints(self.etcd, "etcd")
        if self.data_dir != default_store_dir():
            raise ConfigError(
                f"data={self.data_dir!r} and etcd={self.etcd!r}: a store has one database, give one of them"
            )
        if not self.etcd_prefix.isprintable() or not re.fullmatch("[^/].*/", self.etcd_prefix):
            raise ConfigError(
                f"etcd_prefix={self.etcd_prefix!r} should be a name with a slash behind it, like tensorcast/"
            )


def parse_roles(text: str) -> tuple[str, ...]:
    """Roles of a worker from "basic,shard-home"; basic is always one (TensorCast, section 4.1).

    Raises:
        ConfigError: a role that does not exist.
    """
    roles = [each.strip() for each in text.split(",") if each.strip()]
    for role in roles:
        if role not in ROLES:
            raise ConfigError(f"roles={text!r}: {role!r} is no role; choose among {', '.join(ROLES)}")
    return tuple(role for role in ROLES if role == "basic" or role in roles)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """`tensorcast worker`: one arena on one host."""

    store: str = "127.0.0.1:7700"  # several with commas: processes of one store
    name: str = ""  # the host name unless told
    listen: str = "127.0.0.1:0"  # for other workers
    advertise: str = ""  # what other workers dial; the listening address unless told
    socket: str = ""  # for engines on this host; <runtime dir>/<name>.sock unless told
    arena_bytes: int = 1 << 30
    artifact_bytes: int = 1 << 30  # what artifacts (weights and other named tensors) may have; allocated when needed
    devices: str = (
        ""  # "cuda:0,cuda:1": copies of artifacts in their memory, which a child process owns; none unless told
    )
    device_bytes: int = DEVICE_MEMORY_BYTES  # of such copies, on each device
    tenant_bytes_max: int = 0  # of these, what the artifacts of one tenant may have; 0: all
    page_age_max_s: float = 0  # a page is evicted so long after it was first saved; 0: when room is needed
    roles: str = ",".join(ROLES)
    token_file: str = ""  # these four as in docs/security.md
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    metrics: str = ""  # HOST:PORT for Prometheus, see docs/metrics.md; none unless told

    def __post_init__(self) -> None:
        if self.arena_bytes < ARENA_BYTES_MIN:
            raise ConfigError(
                f"arena={self.arena_bytes} bytes is below the least size of {ARENA_BYTES_MIN} bytes (1MiB)"
            )
        parse_roles(self.roles)
        parse_devices(self.devices, "devices")
        if self.device_bytes <= 0:
            raise ConfigError(f"device_bytes={self.device_bytes}: a size above 0, for example 8GiB")
        if not 0 <= self.page_age_max_s < math.inf:
            raise ConfigError(f"page_age_max_s={self.page_age_max_s}: seconds above 0, or 0 for no limit")


T = TypeVar("T")
_EXPECTED: dict[str, tuple[type | UnionType, str]] = {
    "arena_bytes": (int, 'a size, for example "4GiB"'),
    "artifact_bytes": (int, 'a size, for example "4GiB"'),
    "device_bytes": (int, 'a size, for example "4GiB"'),
    "tenant_bytes_max": (int, 'a size, for example "4GiB"'),
    "shards": (int, "a number"),
    "page_age_max_s": (int | float, "seconds"),
}


def config_from_file(
    kind: type[T], path: str, overrides: Mapping[str, Any], refused: Mapping[str, str] | None = None
) -> T:
    """A `kind` from a TOML file (none if `path` is empty) and the flags that were given (None = not given).

    Args:
        refused: keys that contradict the command, and what to do instead.

    Raises:
        ConfigError: unreadable file, bad TOML, unknown key, or a value of the wrong type; names file and key.
    """
    raw: dict[str, Any] = {}
    if path:
        try:
            raw = tomllib.loads(Path(path).read_bytes().decode())
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path}: not TOML: {error}") from error
    names = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key, value in raw.items():
        if key not in names:
            raise unknown_key(key, names, f"config file {path}")
        if refused and key in refused:
            raise ConfigError(f"config file {path}: {key}={value!r}: {refused[key]}")
        if key.endswith(("_bytes", "_bytes_max")) and isinstance(value, str):
            value = raw[key] = parse_size(value, f"config file {path}: {key}")
        expected, what = _EXPECTED.get(key, (str, "text in quotes"))
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ConfigError(f"config file {path}: {key}={value!r} should be {what}")
    return kind(**{**raw, **{key: value for key, value in overrides.items() if value is not None}})
