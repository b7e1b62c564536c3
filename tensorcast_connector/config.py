"""Every limit and every configuration value, units last. The only module that reads the environment."""

import difflib
import os
import re
import tempfile
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

from tensorcast_connector.errors import ConfigError
from tensorcast_connector.types import Address
from tensorcast_connector.wire.frames import FRAME_BODY_BYTES_MAX

# --- wire and RPC (what one frame may hold is part of the format: wire/frames.py) ---------------------------------------
HELLO_BYTES_MAX = 64 << 10  # from a peer that has not said who it is
REQUESTS_IN_FLIGHT_MAX = 1024  # per connection; more wait until one has ended
REQUESTS_WAITING_BYTES_MAX = 64 << 10  # of one connection; when more wait, nothing is read from it
SHARE_REQUESTS = 16  # of one connection that are served in one turn of the event loop, if others want theirs too,
SHARE_S = 0.002  # and for so long
ANSWERS_UNREAD_BYTES_MAX = 64 << 20  # that a peer has not read, and then its connection is ended;
ANSWERS_UNREAD_MAX_S = 10.0  # or when it has read nothing for so long
ACCEPT_RETRY_S = 0.5  # a process without free descriptors tries to accept connections so often
LANE_REQUESTS_MAX = 256  # of one kind that callers cause, on a connection of their own; more wait
KEY_BYTES_MAX = 256  # of a page's key; those that engines make have at most 16 + 64
KEYS_PER_MESSAGE_MAX = 65_536  # 65,536 keys of 48 bytes are 3 MiB, well inside one frame
# Per listener. For one more a silent one is closed (net/admission.py), or else the new one.
CONNECTIONS_MAX = 1024
OPEN_FILES_MIN = 4 * CONNECTIONS_MAX + 1024  # of a process: listeners, what it dials, files
HELLO_TIMEOUT_S = 5.0
REFUSED_AGAIN_S = 600.0  # who is refused for the same reason is told in the log so often,
REFUSALS_REMEMBERED_MAX = 1000  # and so many hosts and reasons are remembered for it
CONNECT_TIMEOUT_S = 2.0
PING_INTERVAL_S = 1.0
# A side that has not even answered a ping for so long is stopped or gone: the connection is given up.
SILENCE_MAX_S = 3.0
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
# Memory that a worker keeps allocated for the next artifact, at most an eighth of its limit.
ARTIFACT_SPARE_BYTES = 64 << 20
ARTIFACT_SPARE_DELAY_S = 0.05  # after one was used
ARTIFACT_SOURCES_MAX = 4  # workers from which one artifact is fetched at once
FENCE_LEASE_S = 10  # what a worker has written for callers can be done so late, if it died before it was answered
FENCE_LEASE_USED_S = 5.0  # for what it writes it takes another lease after so long
FENCE_LEASE_AHEAD_S = 1.0  # or so much sooner, while what is to be written is still being copied
CONFLICTS_MAX = 8  # how often a write is tried again since somebody else has written meanwhile
COMMIT_FOLLOW_INTERVAL_S = 0.5  # how often the store is asked whether a write was done that it did not answer
ARTIFACT_TENSORS_MAX = 100_000
ARTIFACT_HEADER_BYTES_MAX = 4 << 20  # names, shapes and the digests of its chunks
HEADERS_KEPT = 4  # that a caller's process has decoded, for the next handles of the same artifacts
HEADER_KEPT_BYTES_MAX = 1 << 20  # of some ten thousand tensors
ARTIFACT_BYTES_MIN = 4096  # what the smallest one counts as
ARTIFACTS_MAX = 2048  # at one worker, uploads included: each is an open file
SESSION_UPLOADS_MAX = 64  # of one connection at once
ARTIFACT_TIMEOUT_S = 120.0  # for what may have to fetch one
RECORDS_BYTES_MAX = 64 << 10  # of one record in the store
TENANT = "default"  # of a caller who names none
READ_PART_BYTES = 16 << 20  # of an artifact that is read from another host, in one request
PUT_THREADS = 2  # that copy and digest what is put: memory is not faster for more
UPLOAD_PART_BYTES = 4 << 20  # of an artifact that is put from another host, in one request
METADATA_BYTES_MAX = 16 << 10  # of the metadata of a file as JSON, which every worker has in its view
FILE_HEADER_BYTES_MAX = 99_999_999  # of a safetensors file; other readers refuse 100 MB and more as well
FILE_INDEX_BYTES_MAX = 100 << 20  # of the index of a folder of them
FILE_CLOCK_TICK_S = 0.002  # a file that was changed a moment ago is looked at again after so long,
FILE_CLOCK_WAIT_S = 0.05  # and for so long in all
TENSOR_READ_BYTES = 8 << 20  # of a file in one read
READ_THREADS = max(2, min(8, os.cpu_count() or 2))  # that read files; more than cores only wait for one another
READ_AHEAD_BYTES = 128 << 20  # that a disk is asked for beyond what is being read,
READ_AHEAD_STEP_MIN_BYTES = 128 << 10  # in requests as large as the kernel takes them for that disk, of at least this,
READ_AHEAD_STEP_MAX_BYTES = 4 << 20  # and at most this
READ_BUFFERS_MAX = 512  # that one read fills; the kernel takes 1024
STREAM_RING_BYTES = 32 << 20  # of tensors that are read ahead; as much as stays in a cache that cores share
SAVE_PART_BYTES = 64 << 20  # of an artifact that is written to a file, in memory at once
WEIGHT_VERSIONS_KEPT = 2  # of a model, unless told
WEIGHT_VERSION_CHARS_MAX = 64
WEIGHT_PARTS_MAX = 64  # artifacts that one version is made of
WEIGHT_PARTS_WASTE_MAX = 3.0  # how many times the bytes of a version its parts may have together
WEIGHT_COMPACTION_SHARE = 0.05  # of the bytes that change, that may be put besides to get rid of parts hardly used
WEIGHT_LEASE_S = 60  # what a publisher has put and not published goes so long after it died
WEIGHT_PUBLISH_ATTEMPTS_MAX = 20  # while others publish the same model at the same time
WEIGHT_RETRY_MIN_S = 0.1  # between attempts of a subscriber to reach its gateway, or to read a version
WEIGHT_RETRY_MAX_S = 2.0
PROGRESS_INTERVAL_S = 0.25  # how often a worker is asked how far it is with what it fetches
NAME_MOVES_MAX = 32  # of one request; each is a compare and a write of the store's transaction

# --- device memory ----------------------------------------------------------------------------------------------------
DEVICE_KINDS = ("cuda", "host")  # host: memory of the machine, to try without a GPU what is done with one
DEVICE_MEMORY_BYTES = 8 << 30  # for replicas, of each device, unless told
DEVICE_PAGE_BYTES = 2 << 20  # what an allocation is rounded up to: nothing else lies in what others map
DEVICE_REPLICAS_MAX = 1024  # at one worker
DEVICE_STAGE_BYTES = 32 << 20  # of pinned memory, through which bytes go to a device;
DEVICE_STAGES = 2  # while one is on its way, the next is filled
DEVICE_START_TIMEOUT_S = 60.0  # of the process that owns device memory; a driver may take long
DEVICE_CALL_TIMEOUT_S = 300.0  # it is ended if it has not answered then
DEVICE_RESTART_MIN_S = 0.5  # before it is started again, twice as long each time it does not stay,
DEVICE_RESTART_MAX_S = 30.0
DEVICE_STAYS_S = 60.0  # which it does after so long
DEVICE_MESSAGE_BYTES_MAX = 64 << 10  # between it and its worker

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
DEAD_WORKER_LOOK_S = 0.5  # after so long without an end a caller of one worker looks whether that is alive,
DEAD_WORKER_LOOKS = 2  # and gives up when it has not been so often, one after the other
LEDGER_PLANS_MAX = 10_000  # whose steps an executor remembers

# --- signals, metrics, stories ----------------------------------------------------------------------------------------
SIGNALS_INTERVAL_S = 1.0  # how often a worker measures itself
SIGNALS_TIMEOUT_S = 2.0  # how long `tensorcast status` waits for each worker, all at once
PEER_UNREACHABLE_AFTER_S = 1.0  # a member that is not connected for so long is told in the log
LATENCY_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
ARTIFACT_LOOK_S = 0.25  # so often at most a worker looks for its stories what has become of artifacts
STORY_EVENTS_MAX = 20_000  # about 200 bytes each
STORY_KEYS_MAX = 400_000  # that all kept events name together; at most 100 bytes each, and mostly shared
STORY_CAUSE_CHARS_MAX = 400  # of why something happened; what is behind them is left out
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
SHARD_HOME = "shard-home"
ROLES = ("basic", "gateway", SHARD_HOME)
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
ENGINE_DEADLINE_MAX_S = 3600.0  # that a user may set for an engine's calls
STORAGE_TRANSFER_DEADLINE_S = 5.0  # a batch of pages between an engine's host memory and the pool
STORAGE_BACKOFF_MIN_S = 0.5  # a worker that did not answer in time is left alone for so long,
STORAGE_BACKOFF_MAX_S = 30.0  # twice as long each time up to this
STORAGE_WRITE_ROUNDS = 3  # in which pages are written that somebody else was just writing
STORAGE_KEYS_PER_LOOKUP = 16_384  # a long prompt in small pages is looked up in several requests,
STORAGE_PAGES_PER_BATCH = 128  # and read and written so many pages at a time
STORAGE_COPY_THREADS = 2  # that copy one batch: one does not get all that memory gives,
STORAGE_COPY_SHARED_BYTES = 8 << 20  # unless the batch is smaller: that is copied in a millisecond, keeping the GIL
STORAGE_COUNTS_MAX = 1024  # batches whose figures are kept until they are asked for
STORAGE_SCATTERED_PAGES_MAX = (
    512  # of the end of a prompt, that are looked up one by one: states are kept at some places only
)
READ_THREADS_MAX = 256  # that read weights, of one engine
TRACE_REAL_BYTES = 64 << 10  # smaller tensors (scales, norms) are read for the trace of a load: models compute on them
PUBLISH_NICE = 10  # of the thread that shares what was loaded
PUBLISH_END_S = 1.0  # for which a process that ends waits for that thread, which ends in milliseconds
SNAPSHOT_GAP_BYTES = 64 << 10  # between bytes that no copy of a plan writes; what is closer is taken together
SHADOW_RUNS_MAX = 1 << 16  # of bytes that one copy writes; one with more is taken from what was loaded
STAGE_BYTES = 32 << 20  # of a tensor that is converted or cut out, in one buffer
STAGE_RUN_BYTES = 256 << 10  # longer runs are read to where they belong one by one, shorter ones with what is between
LOAD_REPORT_INTERVAL_S = 5.0  # how often a load says how far it is

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


def parse_address(text: str, name: str, other_hosts: bool = False) -> Address:
    """An Address from "unix:/path", "host:port" or "[::1]:port".

    Args:
        other_hosts: whether they are to reach it, so that a Unix socket is nothing to suggest.

    Raises:
        ConfigError: naming `name` and the value.
    """
    forms = "host:port or [ipv6]:port" if other_hosts else "unix:/path, host:port or [ipv6]:port"
    if not isinstance(text, str):
        raise ConfigError(f"{name}={text!r:.64} is not an address; write {forms}")
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
        raise ConfigError(f"{name}={text!r} is not an address; write {forms}")
    return Address("tcp", host=host, port=int(port))


def parse_devices(text: str, name: str) -> tuple[str, ...]:
    """Devices from "cuda:0,cuda:1"; none from "".

    Raises:
        ConfigError: naming `name` and the value.
    """
    found = tuple(each.strip() for each in text.split(",")) if text.strip() else ()
    kinds = " or ".join(f"{kind}:0" for kind in DEVICE_KINDS)
    for each in found:
        if not re.fullmatch(f"({'|'.join(DEVICE_KINDS)}):(0|[1-9][0-9]{{0,2}})", each):
            raise ConfigError(f"{name}={text!r}: {each!r} is no device; write for example {kinds}")
        if found.count(each) > 1:
            raise ConfigError(f"{name}={text!r} names {each} twice")
    return found


def parse_metrics(text: str) -> Address | None:
    """Where metrics are served, from "host:port"; None for "".

    Raises:
        ConfigError: not a TCP address.
    """
    if not text:
        return None
    address = parse_address(text, "metrics", other_hosts=True)
    if address.scheme != "tcp":
        raise ConfigError(f"metrics={text!r}: Prometheus reads from HOST:PORT")
    return address


def parse_endpoints(text: str, name: str) -> list[Address]:
    """The addresses in "host:port,host:port".

    Raises:
        ConfigError: naming `name` and the value.
    """
    found = [parse_address(each.strip(), name, other_hosts=True) for each in text.split(",")]
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
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tensorcast"
    except RuntimeError:  # a user without a home, in a container
        return default_runtime_dir() / "cache"


def unknown_key(key: str, known: Iterable[str], where: str) -> ConfigError:
    """The one line for a key that does not exist, with the nearest that does."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
    return ConfigError(f"{where}: unknown key {key!r}; {hint}")


def environment() -> dict[str, str]:
    """The environment of this process, which engines take settings from."""
    return dict(os.environ)
