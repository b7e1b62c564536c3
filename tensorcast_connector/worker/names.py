"""The names of artifacts, as callers list, set, move and follow them."""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from tensorcast_connector.config import NAME_MOVES_MAX, WATCH_WAIT_S
from tensorcast_connector.core.artifact import check_name, is_artifact_id
from tensorcast_connector.core.cluster import ARTIFACTS, artifact_key, decode_artifact, decode_name, name_key
from tensorcast_connector.errors import Conflict, NotFound, ProtocolError
from tensorcast_connector.wire.caller_messages import (
    ArtifactListed,
    MoveNames,
    NameMove,
    NamesMoved,
    NameState,
    WaitName,
)
from tensorcast_connector.wire.store_messages import ArtifactRecord, Entry, NameRecord
from tensorcast_connector.worker.records import StoreRecords

_Puts = list[tuple[str, bytes, int]]
_Compares = list[tuple[str, int]]


class Names:
    """See the module."""

    def __init__(self, records: StoreRecords) -> None:
        self._records = records
        self._put_here: dict[tuple[str, str], tuple[int, int]] = {}  # when in the store's history

    def put_here(self, tenant: str, name: str, revision: int) -> None:
        """A name was put through here: until this worker sees that, the store is asked what it stands for."""
        now = self._records.view.incarnation, self._records.view.revision
        self._put_here = {key: at for key, at in self._put_here.items() if at > now}
        self._put_here[tenant, name] = now[0], revision

    def known(self, tenant: str, reference: str, fresh: bool = False) -> str:
        """What `resolve` says, if the store need not be asked; else nothing."""
        view = self._records.view
        fresh = fresh or self._put_here.get((tenant, reference), (0, 0)) > (view.incarnation, view.revision)
        named = "" if fresh else view.names.get((tenant, reference), "")
        identity = reference if is_artifact_id(reference) else named
        return identity if (tenant, identity) in view.artifacts else ""

    async def resolve(self, tenant: str, reference: str, fresh: bool = False) -> str:
        """The id that a name or an id of a tenant stands for; `fresh`: a name as the store has it now.

        Raises:
            NotFound: there is no such artifact.
        """
        if identity := self.known(tenant, reference, fresh):
            return identity
        view, identity, known = self._records.view, reference, is_artifact_id(reference)
        # This worker may not have heard of it yet.
        if not known:
            key = name_key(tenant, check_name(reference))
            found = [each for each in await self._records.read(key) if each.key == key]
            if not found:
                raise NotFound(f"no artifact has the name {reference!r}")
            identity = decode_name(found[0].value).artifact_id
            if (tenant, identity) in view.artifacts:
                return identity
        entries = await self._records.read(f"{ARTIFACTS}{tenant}/{identity}/")
        if not entries:
            raise NotFound(
                f"artifact {reference!r} does not exist" if known else f"what {reference!r} points to was deleted"
            )
        await self._records.seen(max(each.revision for each in entries))
        return identity

    def of(self, tenant: str, identity: str) -> list[str]:
        """All names of an artifact, as this worker knows them."""
        return sorted(
            name for (whose, name), target in self._records.view.names.items()
            if target == identity and whose == tenant
        )  # fmt: skip

    def listed(self, tenant: str, prefix: str) -> list[ArtifactListed]:
        """The artifacts of which a name or the id begins like that, as this worker knows them."""
        view = self._records.view
        names: dict[str, list[str]] = {}
        for (whose, name), target in view.names.items():
            if whose == tenant:
                names.setdefault(target, []).append(name)
        found = []
        for (whose, identity), owners in view.artifacts.items():
            own = sorted(names.get(identity, []))
            if whose == tenant and any(each.startswith(prefix) for each in [identity, *own]):
                record = min(owners.values(), key=lambda each: each.lease_id)
                workers = sorted(view.replicas.get(identity, {}))
                found.append(ArtifactListed(
                    identity, own, record.bytes, record.tensors, record.lease_id, record.created_unix_s, workers
                ))  # fmt: skip
        return sorted(found, key=lambda each: (each.names, each.artifact_id))

    async def point(self, tenant: str, name: str, identity: str, owners: Iterable[ArtifactRecord]) -> None:
        """Wherever it points now; it goes with the artifact's lease, if that has no other owner."""
        lease_id = min(each.lease_id for each in owners)
        record = name_key(tenant, check_name(name)), msgspec.json.encode(NameRecord(identity)), lease_id
        await self._records.seen(await self._records.write_name([record], tenant, name))

    async def take_away(self, tenant: str, name: str) -> None:
        """Fine if there is none."""
        await self._records.seen(await self._records.delete(name_key(tenant, check_name(name))))

    async def move(self, tenant: str, message: MoveNames) -> NamesMoved:
        """See MoveNames."""
        identities = sorted({each.artifact_id for each in message.moves if each.artifact_id} | set(message.adopt))
        if len(message.moves) + 2 * len(identities) > 2 * NAME_MOVES_MAX or len(message.moves) > NAME_MOVES_MAX:
            raise ProtocolError(f"{len(message.moves)} names of {len(identities)} artifacts are moved in one request")
        keys = [name_key(tenant, check_name(each.name)) for each in message.moves]
        if len(set(keys)) < len(keys):
            raise ProtocolError("one name is moved twice in one request")
        found = await asyncio.gather(
            *map(self._records.read, [*keys, *(_owners_of(tenant, each) for each in identities)])
        )
        try:
            puts, compares, leases = _artifacts(tenant, identities, found[len(keys) :], message.adopt)
            deletes: list[str] = []
            for move, key, entries in zip(message.moves, keys, found, strict=False):
                compares.append((key, _expected(move, key, entries)))
                if not move.artifact_id:
                    deletes.append(key)
                elif move.artifact_id != move.expected:
                    record = NameRecord(move.artifact_id)
                    puts.append((key, msgspec.json.encode(record), leases[move.artifact_id]))
            revision = await self._records.write(puts, deletes, compares)
        except Conflict:
            await self._records.caught_up()  # whoever looks now sees why
            raise
        await self._records.seen(revision)
        return NamesMoved(revision)

    async def wait(self, tenant: str, message: WaitName) -> NameState:
        """See WaitName."""
        after = message.incarnation, message.revision
        if message.wait_ms:
            wait_s = min(message.wait_ms / 1000, WATCH_WAIT_S)
            await self._records.name_moved(tenant, message.name, message.known, after, wait_s)
        view, key = self._records.view, (tenant, message.name)
        return NameState(view.names.get(key, ""), view.incarnation, view.name_revisions.get(key, view.revision))


def _owners_of(tenant: str, identity: str) -> str:
    return f"{ARTIFACTS}{tenant}/{identity}/"


def _expected(move: NameMove, key: str, entries: Iterable[Entry]) -> int:
    """The revision of a name that points where it is expected to."""
    found = next((each for each in entries if each.key == key), None)
    now = decode_name(found.value).artifact_id if found is not None else ""
    if now != move.expected:
        raise Conflict(
            f"the name {move.name!r} points to {now or 'nothing'} and not to {move.expected or 'nothing'} any more"
        )
    return found.revision if found is not None else 0


def _artifacts(
    tenant: str, identities: Sequence[str], found: Sequence[Sequence[Entry]], adopt: Iterable[str]
) -> tuple[_Puts, _Compares, dict[str, int]]:
    """The records of those that the system adopts, what must not change meanwhile, and the lease under which each is."""
    puts: _Puts = []
    compares: _Compares = []
    leases: dict[str, int] = {}
    adopted = set(adopt)
    for identity, entries in zip(identities, found, strict=True):
        if not entries:
            raise NotFound(f"artifact {identity[:64]!r} does not exist, or the lease that it was put under has ended")
        owner, record = min(
            ((each, decode_artifact(each.value)) for each in entries), key=lambda found: found[1].lease_id
        )
        compares.append((owner.key, owner.revision))
        leases[identity] = record.lease_id
        if identity in adopted and record.lease_id:
            leases[identity] = 0
            puts.append(
                (artifact_key(tenant, identity), msgspec.json.encode(msgspec.structs.replace(record, lease_id=0)), 0)
            )
    return puts, compares, leases
