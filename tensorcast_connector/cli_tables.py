"""What `tensorcast status` shows to people: when it was read, and tables of workers, engines, shards and artifacts.

Names come from other processes, so they are shown letter by letter: no markup, and nothing that a terminal would obey.
"""

from datetime import datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tensorcast_connector.client.status import ClusterStatus, WorkerStatus
from tensorcast_connector.core.story import ranges


def printable(text: str) -> str:
    """`text` on one line, with an escape for each letter that has no picture."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def as_tables(status: ClusterStatus, now: float, unix_s: float, every_shard: bool = False) -> list[RenderableType]:
    """What people see.

    Args:
        now: the caller's clock in seconds.
        unix_s: the same moment in seconds since 1970.
        every_shard: one line for each shard, with its fencing token.
    """
    disabled = [
        Text(f"Disabled: {printable(what)}, {printable(note)}", style="yellow")
        for what, note in sorted(status.view.disabled.items())
    ]
    if not status.workers:
        return [
            _as_of(status, now, unix_s),
            *disabled,
            "No workers yet: start one with `tensorcast worker --store ADDRESS`.",
        ]
    return [
        _as_of(status, now, unix_s),
        *disabled,
        _workers(status, now),
        _instances(status) if status.view.instances else "Instances: none",
        _every_shard(status) if every_shard else _shards(status),
        *([_replicas(status)] if status.view.replicas else []),
    ]


def _as_of(status: ClusterStatus, now: float, unix_s: float) -> Text:
    at = datetime.fromtimestamp(unix_s - (now - status.read_at_s)).astimezone()
    view = status.view
    return Text(f"As of {at:%Y-%m-%d %H:%M:%S %z}, store revision {view.revision}, incarnation {view.incarnation}")


def _workers(status: ClusterStatus, now: float) -> Table:
    with_devices = any(_devices(each) for each in status.workers.values())
    table = new_table("Workers", "worker", "address", "roles", "protocol", "arena", "pages", "artifacts",
                   *(["devices"] if with_devices else []), "memory", "network", "queue", "shards", "age")  # fmt: skip
    for worker_id, worker in status.workers.items():
        record, signals = worker.record, worker.signals
        listed = (worker_id, record.address, " ".join(record.roles), str(record.version))
        shards = str(len(status.shards_of(worker_id)))
        size = as_size(record.arena_bytes)
        if signals is None:
            add_row(
                table, *listed, size, *("-" * (5 + with_devices)), shards, f"unreachable: {worker.error}", style="red"
            )
            continue
        used = _share(signals.values.get("arena_used_bytes", 0) / max(1, record.arena_bytes))
        pages = str(signals.values.get("pages", "-"))
        pressures = (_share(signals.memory), _share(signals.network), _share(signals.queue))
        artifacts = "-"
        if worker.artifact_bytes is not None:
            artifacts = f"{as_size(worker.artifact_bytes.used)} of {as_size(worker.artifact_bytes.most)}"
        devices = [_devices(worker) or "-"] if with_devices else []
        add_row(
            table,
            *listed,
            f"{used} of {size}",
            pages,
            artifacts,
            *devices,
            *pressures,
            shards,
            f"{worker.age_s(now):.1f} s",
        )
    return table


def _devices(worker: WorkerStatus) -> str:
    """What copies of artifacts have of the memory of its devices."""
    devices = worker.signals.values.get("devices") if worker.signals is not None else None
    if not isinstance(devices, dict):
        return ""
    return ", ".join(
        f"{name} {as_size(counts.get('bytes_used', 0))} of {as_size(counts.get('bytes_max', 0))}"
        for name, counts in devices.items()
    )


def _instances(status: ClusterStatus) -> Table:
    table = new_table("Instances", "instance", "engine", "model", "worker")
    for each in status.view.instances.values():
        add_row(table, each.instance_id, each.engine, each.model, each.worker_id)
    return table


def _shards(status: ClusterStatus) -> Table:
    table = new_table(f"Shards ({status.view.shard_count})", "home", "shards", "which")
    for home in sorted({holder.worker_id for holder in status.view.shards.values()}):
        held = status.shards_of(home)
        add_row(table, home if home in status.workers else f"{home} (has left)", str(len(held)), ranges(held))
    if vacant := status.homeless():
        add_row(table, "without a home", str(len(vacant)), ranges(vacant), style="red")
    return table


def _every_shard(status: ClusterStatus) -> Table:
    table = new_table(f"Shards ({status.view.shard_count})", "shard", "home", "token")
    for shard in range(status.view.shard_count):
        holder = status.view.shards.get(shard)
        if holder is None:
            add_row(table, str(shard), "without a home", "-", style="red")
        else:
            add_row(table, str(shard), holder.worker_id, f"{holder.token.incarnation}/{holder.token.revision}")
    return table


def _replicas(status: ClusterStatus) -> Table:
    table = new_table("Replicas", "artifact", "copies", "size", "where")
    for artifact, copies in sorted(status.view.replicas.items()):
        where = ", ".join(f"{worker_id} ({copy.tier})" for worker_id, copy in sorted(copies.items()))
        add_row(table, artifact, str(len(copies)), as_size(max(copy.bytes for copy in copies.values())), where)
    return table


def new_table(title: str, *columns: str) -> Table:
    """A table with these columns."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def add_row(table: Table, *cells: str, style: str | None = None) -> None:
    """A row, every cell as plain text."""
    table.add_row(*(Text(printable(cell)) for cell in cells), style=style)


def as_size(size_bytes: int) -> str:
    """Bytes for people, in the unit that fits: "0 B", "2.4 KiB", "64 MiB", "1.5 MiB", "8.00 GiB"."""
    if size_bytes >= 1 << 40:
        return f"{size_bytes / (1 << 40):.2f} TiB"
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    if size_bytes >= 1 << 20:
        exact = size_bytes >= 10 << 20 or not size_bytes % (1 << 20)
        return f"{size_bytes / (1 << 20):.{0 if exact else 1}f} MiB"
    return f"{size_bytes / 1024:.1f} KiB" if size_bytes >= 1024 else f"{size_bytes} B"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
