"""Publishes versions of a model's weights (TensorCast, section 5.2); what a version is made of is in core/weights.py.

publisher = WeightPublisher(session, "policy")
await publisher.publish(model.state_dict(), version=7)

Nothing of a version is seen before one transaction at the store, which makes its artifacts the system's and moves the names.
What was put before belongs to a lease of the publisher and goes if it dies. What comes after is tidying up, which the next
publisher does if this one dies.
"""

import asyncio
import contextlib
import functools
import os
import secrets
from collections.abc import Mapping, Sequence

from tensorcast_connector.client.files import Tensors
from tensorcast_connector.client.given import FilesGiven, Given, MemoryGiven
from tensorcast_connector.client.ownership import Leased
from tensorcast_connector.client.session import Session
from tensorcast_connector.client.tensors import RawTensor
from tensorcast_connector.client.threads import in_thread
from tensorcast_connector.client.weights import WeightVersion, describe, read_manifest
from tensorcast_connector.config import (
    NAME_MOVES_MAX,
    WEIGHT_LEASE_S,
    WEIGHT_PUBLISH_ATTEMPTS_MAX,
    WEIGHT_VERSIONS_KEPT,
)
from tensorcast_connector.core.weights import (
    CHANCE_TENSOR,
    MANIFEST_TENSOR,
    ORDER_MAX,
    Content,
    Held,
    Manifest,
    ModelState,
    check_model,
    check_version,
    content_id,
    encode_manifest,
    first_of_equals,
    make_manifest,
    manifest_name,
    part_name,
    plan_delta,
    version_name,
)
from tensorcast_connector.errors import Conflict, InvalidArgument, NotFound, TensorcastError
from tensorcast_connector.wire.caller_messages import NameMove

CHANCE_BYTES = 16


class WeightPublisher:
    """See the module. Several publishers may publish one model, in one process or on several hosts.

    Args:
        model: the name that points to the newest version; `model:version` to each that is kept.
        keep_last: how many versions are kept, the newest among them; those that other names point to stay as well.

    Raises:
        InvalidArgument: no such name or number.
    """

    def __init__(self, session: Session, model: str, *, keep_last: int = WEIGHT_VERSIONS_KEPT) -> None:
        if keep_last < 1:
            raise InvalidArgument(f"keep_last={keep_last}: at least the newest version is kept")
        self.session = session
        self._keep_last = keep_last
        self._manifests: dict[str, Manifest] = {}  # by their artifacts
        self._turn = asyncio.Lock()
        self.model = check_model(model)

    def __repr__(self) -> str:
        return f"<WeightPublisher {self.model}>"

    async def publish(
        self, tensors: Tensors, version: int | str, *, order: int | None = None, rollback: bool = False
    ) -> WeightVersion:
        """Publishes a version, and deletes those that are not kept any more.

        Only what the newest version does not have is copied. Publishing the same again is fine and moves nothing. The tensors
        must not change before this returns.

        Args:
            tensors: all of the model's, by name; or the path of a safetensors file, or of a folder with such files.
            version: a number, or a text.
            order: what makes a text newer than others; one more than the newest unless told. Of a number it is the number.
            rollback: it may be older than the newest, and is the newest from then on; versions above it are deleted.

        Raises:
            Conflict: the version was published with other content, or is older than the newest; names it.
            InvalidArgument: something cannot be published; names it.
            Exhausted: the gateway has no room.
        """
        version = check_version(version)
        if isinstance(version, int) and order not in (None, version):
            raise InvalidArgument(f"version {version} has the order {version}, not {order}")
        if order is not None and not 0 <= order <= ORDER_MAX:
            raise InvalidArgument(f"order={order}: a whole number from 0 to {ORDER_MAX}")
        given: Given
        if isinstance(tensors, str | os.PathLike):
            given = await in_thread(functools.partial(FilesGiven, tensors), drop=lambda late: late.close())
        else:
            given = MemoryGiven(tensors)
        try:
            content = await given.digest()
            if CHANCE_TENSOR in content:
                raise InvalidArgument(f"tensor {CHANCE_TENSOR!r} has a name that is taken")
            async with self._turn:
                return await _Attempt(self, version, order, rollback, given, content).run()
        finally:
            given.close()

    async def remove(self, version: int | str | None = None) -> int:
        """Deletes a version, or all that there are and the model's name; how many. What other names point to stays.

        Raises:
            Conflict: it is the newest of several, to which the model's name points.
        """
        state = await self.state()
        chosen = state.versions
        if version is not None:
            text = str(check_version(version))
            chosen = {text: state.versions[text]} if text in state.versions else {}
            if state.newest in chosen.values() and len(state.versions) > 1:
                raise Conflict(
                    f"{version_name(self.model, text)} is the newest version of {self.model!r}; publish another one, go back "
                    "to another one, or delete all"
                )
        moves = [
            NameMove(version_name(self.model, text), "", each)
            for text, each in chosen.items()
            if each in state.manifests
        ]
        if state.newest in chosen.values():
            moves.insert(0, NameMove(self.model, "", state.newest))
        for at in range(0, len(moves), NAME_MOVES_MAX // 4):
            await self.session.move_names(moves[at : at + NAME_MOVES_MAX // 4])
        await self.tidy(await self.state())
        return sum(each.name != self.model for each in moves)

    # --- what there is ---

    async def state(self) -> ModelState:
        """What there is of the model now."""
        return ModelState.of(self.model, await self.session.list_artifacts(self.model))

    async def manifest(self, artifact_id: str) -> Manifest:
        """A manifest; raises NotFound if its bytes are gone."""
        if artifact_id not in self._manifests:
            self._manifests[artifact_id] = await read_manifest(self.session.artifact(artifact_id))
        return self._manifests[artifact_id]

    async def tidy(self, state: ModelState) -> ModelState:
        """Deletes what is not kept; what there is then."""
        superseded = state.superseded(self._keep_last)
        with contextlib.suppress(Conflict):  # somebody else is at it
            for at in range(0, len(superseded), NAME_MOVES_MAX // 4):
                still = NameMove(self.model, state.newest, state.newest)  # nobody has gone back to one of these
                await self.session.move_names([*superseded[at : at + NAME_MOVES_MAX // 4], still])
        if superseded:
            state = await self.state()
        live: dict[str, Manifest] = {}
        try:
            for each in state.live:
                live[each] = await self.manifest(each)
        except (NotFound, InvalidArgument):
            return state  # what it needs is not known, so nothing is deleted before it is superseded
        self._manifests = live
        unneeded = state.unneeded(live)
        for each in unneeded:
            with contextlib.suppress(NotFound):
                await self.session.delete(each)
        return await self.state() if unneeded else state


class _Overtaken(Exception):
    """Somebody has moved a name meanwhile."""


class _Attempt:
    """One call of `publish`, which begins anew while others are faster."""

    def __init__(
        self, publisher: WeightPublisher, version: int | str, order: int | None, rollback: bool,
        given: Given, content: Mapping[str, Content],
    ) -> None:  # fmt: skip
        self._publisher = publisher
        self._session = publisher.session
        self._model = publisher.model
        self._version = version
        self._order = order
        self._rollback = rollback
        self._given = given
        self._content = content
        self._identity = content_id((name, *each) for name, each in content.items())
        self._name = version_name(publisher.model, version)

    async def run(self) -> WeightVersion:
        """See WeightPublisher.publish."""
        for _ in range(WEIGHT_PUBLISH_ATTEMPTS_MAX):
            state = await self._publisher.tidy(await self._publisher.state())
            try:
                published = await self._publish(state)
            except _Overtaken:
                continue
            with contextlib.suppress(TensorcastError):  # else the next one does it
                await self._publisher.tidy(await self._publisher.state())
            return published
        raise Conflict(f"{self._name}: others publish versions of {self._model!r} all the time; try again")

    async def _publish(self, state: ModelState) -> WeightVersion:
        """Raises _Overtaken if somebody was faster."""
        there = state.versions.get(str(self._version), "")
        held = self._check(state, there)
        order = self._order_in(state, held)
        older = bool(state.newest) and there != state.newest and order <= state.order
        if older and held is None and not self._rollback:
            raise Conflict(
                f"{self._name} is older than the newest version, whose order is {state.order} (this one's {order}); "
                "rollback=True goes back to it"
            )
        newest = not older or self._rollback  # whether it is from now on
        manifest = await self._whole(there, state) if there else None
        if manifest is not None:
            if newest and there != state.newest:
                await self._move([NameMove(self._name, there, there), NameMove(self._model, there, state.newest)])
            return describe(manifest, there)
        async with self._session.lease(WEIGHT_LEASE_S) as lease:
            manifest, made, names = await self._put(state, there, order, lease)
            points_to = made if newest else state.newest
            names += [NameMove(self._name, made, there), NameMove(self._model, points_to, state.newest)]
            await self._move(names, [each.artifact_id for each in names if each.artifact_id != state.newest])
        return describe(manifest, made)

    def _check(self, state: ModelState, there: str) -> Held | None:
        """The version, if it was published before."""
        for name, artifact_id in ((self._model, state.newest), (self._name, there)):
            if artifact_id and artifact_id not in state.manifests:
                raise Conflict(f"the name {name!r} is that of an artifact which is no published version; take it away")
        held = state.manifests[there] if there else None
        if held is not None and held.content_id != self._identity:
            raise Conflict(f"{self._name} was published before with other content; choose another version")
        return held

    def _order_in(self, state: ModelState, held: Held | None) -> int:
        if held is not None:
            return held.order
        if isinstance(self._version, int):
            return self._version
        return state.order + 1 if self._order is None else self._order

    async def _whole(self, artifact_id: str, state: ModelState) -> Manifest | None:
        """A manifest, if all bytes that it needs are there."""
        try:
            manifest = await self._publisher.manifest(artifact_id)
        except (NotFound, InvalidArgument):
            return None
        there = artifact_id not in state.lost and all(state.parts.get(each) for each in manifest.part_ids)
        return manifest if there else None

    async def _put(
        self, state: ModelState, there: str, order: int, lease: Leased
    ) -> tuple[Manifest, str, list[NameMove]]:  # fmt: skip
        """The manifest, its artifact, and the names under which what was put is held."""
        former: list[Manifest] = []
        for each in dict.fromkeys(each for each in (state.newest, there) if each):
            with contextlib.suppress(NotFound, InvalidArgument):  # then everything is put
                former.append(await self._publisher.manifest(each))
        available = [part for part, workers in state.parts.items() if workers]
        delta = plan_delta(self._content, former, available)
        names: list[NameMove] = []
        part = ""
        if delta.put:
            others = {CHANCE_TENSOR: _raw(secrets.token_bytes(CHANCE_BYTES))}
            image = self._given.image(list(first_of_equals(self._content, delta.put).values()), others)
            part = await (await self._session.put_image(image, ownership=lease)).id()
            names.append(NameMove(part_name(self._model, part), part, ""))
        chance_bytes = secrets.token_bytes(CHANCE_BYTES)
        manifest = make_manifest(self._model, self._version, order, self._content, delta, part, chance_bytes)
        encoded = {MANIFEST_TENSOR: _raw(encode_manifest(manifest))}
        made = await (await self._session.put(encoded, ownership=lease)).id()
        names.append(NameMove(manifest_name(manifest, made), made, ""))
        return manifest, made, names

    async def _move(self, moves: Sequence[NameMove], adopt: Sequence[str] = ()) -> None:
        try:
            await self._session.move_names(moves, adopt)
        except Conflict as error:
            raise _Overtaken from error


def _raw(data: bytes) -> RawTensor:
    return RawTensor("uint8", (len(data),), memoryview(data))
