"""Every limit and every configuration value, units last. The only module that reads the environment."""

import difflib
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from tensorcast_connector.errors import ConfigError
from tensorcast_connector.types import Address
from tensorcast_connector.wire.frames import FRAME_BODY_BYTES_MAX

# --- wire and RPC (what one frame may hold is part of the format: wire/frames.py) ---------------------------------------
HELLO_BYTES_MAX = 64 << 10  # from a peer that has not said who it is
REQUESTS_IN_FLIGHT_MAX = 1024  # per connection; one more is answered with Exhausted
LANE_REQUESTS_MAX = 256  # of one kind that callers cause, on a connection of their own; more wait
KEY_BYTES_MAX = 256  # of a page's key; those that engines make have at most 16 + 64
KEYS_PER_MESSAGE_MAX = 65_536  # 65,536 keys of 48 bytes are 3 MiB, well inside one frame
# Per listener. For one more a silent one is closed (net/admission.py), or else the new one.
CONNECTIONS_MAX = 1024
OPEN_FILES_MIN = 4 * CONNECTIONS_MAX + 1024  # of a process: listeners, what it dials, files
HELLO_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
PING_INTERVAL_S = 1.0
SILENCE_MAX_S = (
    3.0  # a side that has not even answered a ping for so long is stopped or gone: the connection is given up
)
TCP_KEEPALIVE_IDLE_S = 30  # a silent host is probed after so long,
TCP_KEEPALIVE_INTERVAL_S = 10  # so often,
TCP_KEEPALIVE_PROBES = 3  # and given up after so many probes without an answer
RECONNECT_DELAY_MIN_S = 0.05
RECONNECT_DELAY_MAX_S = 2.0
UNIX_PATH_BYTES_MAX = 107  # sun_path is 108 bytes with its terminating zero

# --- worker -----------------------------------------------------------------------------------------------------------
SLAB_BYTES = 64 << 20  # also the largest page
SLOT_ALIGN_BYTES = 4096
ARENA_BYTES_MIN = 1 << 20
NAME_CHARS_MAX = 128
FETCH_PAGES_PER_REQUEST = 16
FETCH_CONNECTIONS_PER_PEER = 2
FETCH_TIMEOUT_S = 10.0
FIND_TIMEOUT_S = 0.25
SOURCE_HINTS_MAX = 200_000

# --- artifacts --------------------------------------------------------------------------------------------------------
ARTIFACT_SPARE_BYTES = (
    64 << 20
)  # memory that a worker keeps allocated for the next artifact, at most an eighth of its limit
ARTIFACT_SPARE_DELAY_S = 0.05  # after one was used
ARTIFACT_SOURCES_MAX = 4  # workers from which one artifact is fetched at once
COMMIT_FOLLOW_INTERVAL_S = 0.5  # how often the store is asked whether a write was done that it did not answer
ARTIFACT_TENSORS_MAX = 100_000
ARTIFACT_HEADER_BYTES_MAX = 4 << 20  # names, shapes and the digests of its chunks
ARTIFACT_BYTES_MIN = 4096  # what the smallest one counts as
ARTIFACTS_MAX = 2048  # at one worker, uploads included: each is an open file
SESSION_UPLOADS_MAX = 64  # of one connection at once
ARTIFACT_TIMEOUT_S = 120.0  # for what may have to fetch one
RECORDS_BYTES_MAX = 64 << 10  # of one record in the store
TENANT = "default"  # of a caller who names none
READ_PART_BYTES = 16 << 20  # of an artifact that is read from another host, in one request
PUT_THREADS = 2  # that copy and digest what is put: memory is not faster for more
UPLOAD_PART_BYTES = 4 << 20  # of an artifact that is put from another host, in one request
FILE_HEADER_BYTES_MAX = 100 << 20  # of a safetensors file
SAVE_PART_BYTES = 64 << 20  # of an artifact that is written to a file, in memory at once

# --- plans ------------------------------------------------------------------------------------------------------------
PLAN_STEPS_MAX = 1000
PLAN_TRACE_CHARS_MAX = 256
PLAN_BYTES_MAX = 512 << 10  # of a plan's record, results included
PLAN_DEADLINE_S = 60.0  # of a plan that is given none
PLAN_DEADLINE_MAX_S = 3000
PLAN_CONCURRENCY = 16  # steps that run at once, unless told
PLAN_RECORD_TTL_S = 600  # how long a plan's outcome is remembered
PLAN_FOLLOW_INTERVAL_S = 0.1  # how often a plan of another gateway is looked at for a caller who waits
PLAN_ORPHANS_DELAY_MAX_S = 0.5  # after a gateway has gone the others look for its plans, at different times
PLAN_ORPHANS_INTERVAL_S = 30.0  # and so often in any case
PLAN_LEASE_SHARED_S = 60  # plans that begin within so long keep their records under one lease
PLAN_RETRY_DELAY_MIN_S = 0.05
PLAN_RETRY_DELAY_MAX_S = 2.0
LEDGER_PLANS_MAX = 10_000  # whose steps an executor remembers

# --- signals, metrics, stories ----------------------------------------------------------------------------------------
SIGNALS_INTERVAL_S = 1.0  # how often a worker measures itself
SIGNALS_TIMEOUT_S = 2.0  # how long `tensorcast status` waits for each worker, all at once
PEER_UNREACHABLE_AFTER_S = 1.0  # a member that is not connected for so long is told in the log
LATENCY_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
STORY_EVENTS_MAX = 20_000  # about 200 bytes each
STORY_KEYS_MAX = 400_000  # that all kept events name together; at most 100 bytes each, and mostly shared
STORY_LINES_MAX = 1000  # in one answer
STORY_PREFIX_DIGITS_MIN = 4  # of a block hash; shorter words are names

# --- tensorcast doctor ------------------------------------------------------------------------------------------------
DOCTOR_CLOCK_WARNING_S = 2.0  # between a worker's clock and ours
DOCTOR_CLOCK_PROBLEM_S = 60.0  # then deadlines of plans end long before or after their time
DOCTOR_SIGNALS_AGE_S = 10.0  # a worker measures itself every second
DOCTOR_OPEN_FILES_MIN = 4096  # connections of both listeners, and artifacts
DOCTOR_DISK_WARNING_BYTES = 1 << 30
DOCTOR_DISK_PROBLEM_BYTES = 64 << 20

# --- shard homes ------------------------------------------------------------------------------------------------------
SHARDS = 64  # a power of two up to 256: a page's shard is taken from one byte of its block hash
SHARDS_MAX = 256
SHARD_CONTENDERS = 3  # how many of the ranking compete for a vacant shard (TensorCast, section 4.2: k)
CLAIM_STAGGER_S = 0.25  # how much later each rank claims than the one before it
CLAIM_RETRY_S = 1.0
HANDOVER_AFTER_S = 10.0  # a better placed worker has been here for so long: it gets the shard
HANDOVER_DOUBLINGS_MAX = 6  # of that time, for a worker that does not take what it is given
HANDOVER_SHARDS_MAX = 8  # at a time: while a shard changes hands its pages are missed
SHARDS_SETTLED_AFTER_S = 2.0  # none came or went for so long, which is more than between two handovers: the log is told
SHARDS_UNSETTLED_MAX_S = 60.0  # if they never settle, the log is told so often
CLOCK_DRIFT_MAX = 0.01  # seconds per second between any clock and true time
REPORT_KEYS_PER_MESSAGE = 4096
REPORT_BACKLOG_KEYS_MAX = 65_536  # that one home has not been told; beyond this it is told the whole inventory instead
REPORT_INTERVAL_S = 1.0  # when nothing changes
REPORT_RETRY_S = 0.1
ASK_INVENTORY_INTERVAL_S = 1.0
PUMP_INTERVAL_MAX_S = 1.0

# --- store ------------------------------------------------------------------------------------------------------------
LEASE_TTL_MAX_S = 3600
MEMBER_TTL_S = 6  # whole seconds, as etcd's leases
HEARTBEAT_INTERVAL_S = 1.0
STORE_TIMEOUT_S = 2.0
# The changes that are kept for those who follow them; older ones go, a quarter at a time. Who has missed more lists again.
HISTORY_REVISIONS_MAX = 10_000
HISTORY_BYTES_MAX = 64 << 20  # of values
# One answer to a watch: a larger cluster is told in pages, each read with one request to the database.
LISTING_BYTES_MAX = 4 << 20  # or one key that is larger
LISTING_KEYS_MAX = 4096
LISTING_CATCH_UP_S = 0.1  # how long a listing waits for changes that its last pages were ahead of
EXPIRY_RETRY_S = 1.0  # how often leases are tried to be ended while the disk is full
ETCD_CONNECT_TIMEOUT_S = 0.5  # then the next endpoint is tried
ETCD_PROBE_INTERVAL_S = 1.0  # also how long the endpoint that is followed may take to answer
SEEN_ASK_S = 0.25  # a revision that is not seen after so long: the store is asked whether it has it
WATCH_WAIT_S = 10.0  # a watch with nothing to tell is answered after so long
WATCH_NOTHING_S = 0.05  # and so long after the revision has risen by what is nothing to watchers

# --- engine plugin ----------------------------------------------------------------------------------------------------
LOOKUP_DEADLINE_S = 0.5
LOAD_TIMEOUT_S = 20.0
SAVE_TIMEOUT_S = 20.0
INSTANCE_REPORT_INTERVAL_S = 1.0  # how often an engine says how it is doing
SAVE_BACKLOG_BLOCKS_MAX = 4096  # pinned blocks waiting to be copied; beyond it new blocks are not saved

# A side that is given up has had at least one whole ping to answer.
assert SILENCE_MAX_S > 2 * PING_INTERVAL_S
# A member that misses two heartbeats and a slow answer is still alive.
assert 3 * HEARTBEAT_INTERVAL_S + STORE_TIMEOUT_S < MEMBER_TTL_S
# The largest inventory message fits in a frame: 4096 keys of 16 + 64 bytes.
assert REPORT_KEYS_PER_MESSAGE * (16 + 64 + 8) < FRAME_BODY_BYTES_MAX
# And so does an answer to a watch, with a last key of 1 MiB.
assert LISTING_BYTES_MAX + (2 << 20) < FRAME_BODY_BYTES_MAX

_SIZE_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
               "k": 10**3, "m": 10**6, "g": 10**9, "kb": 10**3, "mb": 10**6, "gb": 10**9}  # fmt: skip


def parse_size(text: str, name: str) -> int:
    """Bytes of "512MiB", "1GiB", "2GB" or a plain number.

    Raises:
        ConfigError: naming `name` and the value.
    """
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    unit = _SIZE_UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{name}={text!r} is not a size; write for example 512MiB or 4GiB")
    return int(Decimal(match.group(1)) * unit)


def parse_address(text: str, name: str) -> Address:
    """An Address from "unix:/path", "host:port" or "[::1]:port".

    Raises:
        ConfigError: naming `name` and the value.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or "\0" in path:
            raise ConfigError(
                f"{name}={text!r}: a Unix socket needs an absolute path, for example unix:/run/tensorcast/w.sock"
            )
        if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
            raise ConfigError(
                f"{name}={text!r}: a socket path has at most {UNIX_PATH_BYTES_MAX} bytes; use a shorter one"
            )
        return Address("unix", path=path)
    host, colon, port = text.removeprefix("tcp:").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"{name}={text!r} is not an address; write unix:/path, host:port or [ipv6]:port")
    return Address("tcp", host=host, port=int(port))


def parse_metrics(text: str) -> Address | None:
    """Where metrics are served, from "host:port"; None for "".

    Raises:
        ConfigError: not a TCP address.
    """
    if not text:
        return None
    address = parse_address(text, "metrics")
    if address.scheme != "tcp":
        raise ConfigError(f"metrics={text!r}: Prometheus reads from HOST:PORT")
    return address


def parse_endpoints(text: str, name: str) -> list[Address]:
    """The addresses in "host:port,host:port".

    Raises:
        ConfigError: naming `name` and the value.
    """
    found = [parse_address(each.strip(), name) for each in text.split(",")]
    if not all(each.port and "/" not in each.host for each in found) or len(set(found)) < len(found):
        raise ConfigError(f"{name}={text!r} should be host:port of different servers, with commas and without http://")
    return found


def default_runtime_dir() -> Path:
    """Where sockets and the embedded store live unless told: private to the user."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tensorcast" if base else Path(tempfile.gettempdir()) / f"tensorcast-{os.getuid()}"


def default_store_dir() -> str:
    """Where `tensorcast store` keeps its database unless told."""
    return str(default_runtime_dir() / "store")


def default_cache_dir() -> Path:
    """Where digests of model files are remembered."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tensorcast"


def unknown_key(key: str, known: Iterable[str], where: str) -> ConfigError:
    """The one line for a key that does not exist, with the nearest that does."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
    return ConfigError(f"{where}: unknown key {key!r}; {hint}")


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


SHARD_HOME = "shard-home"
ROLES = ("basic", "gateway", SHARD_HOME)


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
    page_age_max_s: float = 0  # a page is evicted so long after it was saved or fetched here; 0: when room is needed
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
        if not 0 <= self.page_age_max_s < math.inf:
            raise ConfigError(f"page_age_max_s={self.page_age_max_s}: seconds above 0, or 0 for no limit")


T = TypeVar("T")
_EXPECTED: dict[str, tuple[type | UnionType, str]] = {
    "arena_bytes": (int, 'a size, for example "4GiB"'),
    "artifact_bytes": (int, 'a size, for example "4GiB"'),
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
        if key.endswith("_bytes") and isinstance(value, str):
            value = raw[key] = parse_size(value, f"config file {path}: {key}")
        expected, what = _EXPECTED.get(key, (str, "text in quotes"))
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ConfigError(f"config file {path}: {key}={value!r} should be {what}")
    return kind(**{**raw, **{key: value for key, value in overrides.items() if value is not None}})
