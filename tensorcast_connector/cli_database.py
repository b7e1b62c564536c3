"""The database of `tensorcast store`: opened for serving, written to a backup, made of one."""

import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from tensorcast_connector.config import parse_endpoints
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.settings import StoreConfig
from tensorcast_connector.store.backup import read_backup, restore_backup, take_backup, write_backup
from tensorcast_connector.store.kv import KvStore
from tensorcast_connector.store.sqlite_kv import SqliteKv


def boottime_s() -> float:
    """Seconds that go on during suspend and never jump."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def open_kv(stack: AsyncExitStack, config: StoreConfig) -> KvStore:
    """The database that `config` names; `stack` closes it."""
    kv: KvStore
    if config.etcd:
        from tensorcast_connector.store.etcd_kv import open_etcd  # the HTTP client takes a while to load

        kv = await open_etcd(parse_endpoints(config.etcd, "etcd"), config.etcd_prefix)
    else:
        kv = SqliteKv(_file(config), boottime_s)
    stack.push_async_callback(kv.close)
    return kv


def _file(config: StoreConfig) -> Path:
    return Path(config.data_dir) / "store.db"


def where(config: StoreConfig) -> str:
    """Which database that is, for people."""
    return f"etcd {config.etcd} {config.etcd_prefix}" if config.etcd else config.data_dir


async def back_up(config: StoreConfig, path: Path) -> None:
    """`tensorcast store backup`; raises TensorcastError."""
    if not config.etcd and not _file(config).exists():
        raise ConfigError(f"there is no store database in {config.data_dir}")
    async with AsyncExitStack() as stack:
        backup = await take_backup(await open_kv(stack, config))
    write_backup(path, backup)
    keys = f"{len(backup.entries)} key(s) at revision {backup.revision}, incarnation {backup.incarnation}"
    sys.stdout.write(f"{keys}, written to {path}\n")


async def restore(
    config: StoreConfig, path: Path, replace_all: bool, even_if_served: bool, wall: Callable[[], float] = time.time
) -> None:  # fmt: skip
    """`tensorcast store restore`; raises TensorcastError."""
    backup = read_backup(path)
    async with AsyncExitStack() as stack:
        kv = await open_kv(stack, config)
        incarnation = await restore_backup(
            kv, backup, replace=replace_all, now_unix_s=int(wall()), even_if_served=even_if_served
        )
    sys.stdout.write(f"{len(backup.entries)} key(s) restored to {where(config)}, incarnation {incarnation}\n")
