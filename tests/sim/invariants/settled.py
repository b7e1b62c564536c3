"""After the faults have ended and some time has passed, everything agrees. Not an event's invariant: asked at the end."""

from typing import Any

from tensorcast_connector.core import fingerprints
from tensorcast_connector.core.leases import SHARD_HOME
from tensorcast_connector.core.placement import shard_of
from tensorcast_connector.core.plan import decode_record


def unsettled(world: Any) -> str:
    """What does not agree yet; empty if everything does."""
    store = world.processes.get("store")
    workers = {name: each for name, each in world.processes.items() if hasattr(each, "metadata")}
    for problem in (
        _plans(world, store, workers), _views(store, workers), _homes(store, workers), _catalogs(workers), _leaks(workers),
    ):  # fmt: skip
        if problem:
            return problem
    return ""


def _plans(world: Any, store: Any, workers: dict[str, Any]) -> str:
    """Every plan has ended, everybody who wants to know how knows it, and nothing is done for it any more."""
    rows = store.read().rows.items()
    running = [key for key, (value, _, _) in rows if key.startswith("plans/") and not decode_record(value).finished]
    if running:
        return f"the plans {running} run"
    if markers := [key for key, _ in rows if key.startswith("running/")]:
        return f"no plan runs, and there are the markers {markers}"
    for caller in world.processes.values():
        if any(not each.over for each in getattr(caller, "conversations", [])):
            return f"{caller.name} does not know yet how a plan has ended"
    for name, worker in workers.items():
        if worker.plans is not None and worker.plans.doing:
            return f"{name} still does {worker.plans.doing}"
    return ""


def _views(store: Any, workers: dict[str, Any]) -> str:
    """Every worker knows what the store has, and the store what the workers have listed."""
    snapshot = store.read()
    keys = {key for key in snapshot.rows if key.startswith("cluster/")}
    listed = {key.split("/", 2)[2] for key in keys if key.startswith("cluster/workers/")}
    if listed != set(workers):
        return f"the store lists {sorted(listed)}, and {sorted(workers)} are there"
    instances = {key.split("/", 2)[2] for key in keys if key.startswith("cluster/instances/")}
    attached = {each for worker in workers.values() for each in worker.instances()}
    if instances != attached:
        return f"the store lists the engines {sorted(instances)}, and {sorted(attached)} are attached"
    replicas = {key for key in keys if key.startswith("cluster/replicas/")}
    copies = {f"cluster/replicas/{each}/{name}" for name, worker in workers.items() for each in worker.artifacts}
    if replicas != copies:
        return f"the store lists the copies {sorted(replicas)}, and {sorted(copies)} are there"
    for name, worker in workers.items():
        view = worker.metadata.view
        # Plans are written without anybody's watch being told.
        revision = min(view.revision, snapshot.revision) if worker.plans is not None else snapshot.revision
        if (view.incarnation, view.revision) != (snapshot.incarnation, revision):
            return f"{name} is at {view.incarnation}/{view.revision}, not {snapshot.incarnation}/{snapshot.revision}"
        if set(view.workers) != listed or set(view.instances) != instances:
            return f"{name} knows {sorted(view.workers)} and {sorted(view.instances)}"
        if {f"cluster/replicas/{each}/{who}" for each, by in view.replicas.items() for who in by} != replicas:
            return f"{name} knows other copies than the store"
        holders = {shard: (holder.token, holder.worker_id) for shard, holder in view.shards.items()}
        if holders != snapshot.shards():
            return f"{name} knows the homes {holders}, the store {snapshot.shards()}"
    return ""


def _homes(store: Any, workers: dict[str, Any]) -> str:
    """Every shard has one live home, which knows it, and everybody sends questions there."""
    homes = {name for name, each in workers.items() if SHARD_HOME in each.roles}
    shards = store.read().shards()
    for shard in range(store.shards if homes else 0):
        token, holder = shards.get(shard, (None, None))
        if holder not in homes:
            return f"shard {shard} is with {holder}"
        metadata = workers[holder].metadata
        if metadata.leases.held.get(shard) != token or not metadata.leases.may_write(workers[holder].clock()):
            return f"{holder} does not know that it has shard {shard}"
        for name, worker in workers.items():
            if worker.metadata.homes.home(shard) != holder or worker.metadata.homes.token(shard) != token:
                return f"{name} asks {worker.metadata.homes.home(shard)} for shard {shard}, and {holder} has it"
    return ""


def _catalogs(workers: dict[str, Any]) -> str:
    """Every home lists for its shards exactly what is where."""
    for name, home in workers.items():
        for shard, listed in home.metadata.catalog.holdings().items():
            count = home.metadata.homes.shards
            there = {
                other: [key for key in worker.pages.inventory() if shard_of(key, count) == shard]
                for other, worker in workers.items()
            }
            names = {page: _name(key) for keys in there.values() for page, key in _by_fingerprint(keys).items()}
            if listed != {other: set(_by_fingerprint(keys)) for other, keys in there.items()}:
                has = {other: [names.get(page, f"{page:x}") for page in pages] for other, pages in listed.items()}
                should = {other: list(map(_name, keys)) for other, keys in there.items()}
                return f"{name} lists {_counts(has)} of shard {shard}, and there are {_counts(should)}"
    return ""


def _by_fingerprint(keys: list[bytes]) -> dict[int, bytes]:
    """No two of them have the same, or the worlds would be too small to tell."""
    found = dict(zip(fingerprints.of(keys).tolist(), keys, strict=True))
    assert len(found) == len(keys)
    return found


def _name(key: bytes) -> str:
    return key[:1].decode() + str(key[-1])


def _counts(pages: dict[str, list[str]]) -> str:
    return ", ".join(f"{worker}: {' '.join(sorted(names))}" for worker, names in sorted(pages.items()))


def _leaks(workers: dict[str, Any]) -> str:
    """Engines are idle and fetches are over: nothing is reserved or held."""
    for name, worker in workers.items():
        worker.segments.check()
        counts = worker.pages.statistics()
        if counts["pages_reserved"] or counts["pages_held"]:
            return f"{name} still has {counts['pages_reserved']} pages reserved and {counts['pages_held']} held"
        if any(each.held or each.reserved for each in worker.sessions.values()):
            return f"{name} still has connections with holds or reservations"
    return ""


def expected_holders(world: Any, keys: list[bytes]) -> list[set[str]]:
    """Where each page can be read: what every lookup should find."""
    workers = [each for each in world.processes.values() if hasattr(each, "metadata")]
    return [{each.name for each in workers if each.segments.resident(key)} for key in keys]
