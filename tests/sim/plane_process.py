"""The metadata plane of a worker process: the production Metadata and what worker/peers.py does around it.

Written a second time without an event loop, and to be kept the same by hand: `pump`, `_send` and `_finish` are Peers._pump,
_send and _exchange; `holders` is Peers.holders. WorkerProcess.fetch is Pages.fetch with Peers.fetch, except that it makes one
attempt, remembers no sources from the lookup, and asks for all pages of one source at once. test_mirror.py sends both through
the same conversations.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tensorcast_connector.config import FIND_TIMEOUT_S, PUMP_INTERVAL_MAX_S, STORE_TIMEOUT_S
from tensorcast_connector.core.lookup import Ask
from tensorcast_connector.core.member import StoreCall
from tensorcast_connector.core.metadata import Call, Metadata, PeerCall
from tensorcast_connector.errors import TensorcastError, Unavailable
from tensorcast_connector.types import Token
from tensorcast_connector.wire.codec import decode
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    AskInventory,
    Failure,
    Fenced,
    Fetch,
    FindKeys,
    Message,
    PagesFound,
    Reported,
    ReportKeys,
)
from tensorcast_connector.wire.store_messages import Changes, ReplicaRecord, RevokeLease, WorkerRecord
from tensorcast_connector.worker.pages import Pages
from tensorcast_connector.worker.service import PeerService
from tests.sim.network import Answer, Network
from tests.sim.plan_service import MESSAGES, PlanService
from tests.sim.store_process import STORE
from tests.sim.world import Clock, Process, World


class PlaneProcess(Process):
    """See the module. Its name is the worker's id.

    Args:
        run: which run of the worker on this host.
        pages: what can be read here.
    """

    def __init__(
        self, world: World, network: Network, host: str, run: int, clock: Clock, roles: tuple[str, ...], pages: Pages
    ) -> None:  # fmt: skip
        super().__init__(world, f"{host}/{run}", host, clock)
        self.network = network
        self.pages = pages
        self.pages.elsewhere = self  # type: ignore[assignment]  # only `changed` of it is called
        self.roles = roles
        self.metadata = Metadata(WorkerRecord(self.name, host, "10.0.0.1:7701", 1, PROTOCOL_VERSION, roles), pages)
        self.artifacts: dict[str, ReplicaRecord] = {}
        self.plans: PlanService | None = None  # if this world has plans
        self._alarm = float("inf")
        self._woken = False
        self.touched = True  # something may have changed in the arena since this was last reset
        world.note(self.name, "started")
        self.after(0.0, self.pump)

    def serve_fetch(self, message: Fetch, answer: Answer) -> None:
        """Another worker wants the bytes of pages."""
        raise NotImplementedError

    # --- sending ---

    def pump(self) -> None:
        """Sends what the metadata plane wants to send, and sets the alarm for the next time."""
        metadata = self.metadata
        self._woken = False
        now = self.clock()
        while True:
            calls = metadata.poll(now)
            for call in calls:
                self._send(call, now)
            wake_at = metadata.wake_at()
            if wake_at > now:
                break
            self.world.require(calls, f"{self.name} wants to be woken at {wake_at} and has nothing to do at {now}")
        if wake_at < self._alarm:
            self._set_alarm(wake_at)

    def _set_alarm(self, local: float) -> None:
        self._alarm = local
        self.world.schedule(max(self.clock.when(local), self.world.now) + 1e-6, self, self._ring, local)

    def _ring(self, local: float) -> object:
        if local != self._alarm:
            return False
        self._alarm = float("inf")
        wake_at = self.metadata.wake_at()
        if wake_at > self.clock():  # something that was to be done has been done already
            if wake_at < float("inf"):
                self._set_alarm(wake_at)
            return False
        self.pump()
        return True

    def clock_jumped(self) -> None:
        """The alarm was set for another time; the real pump looks at the clock at least so often."""
        self._alarm = float("inf")
        self.after(self.world.random.random() * PUMP_INTERVAL_MAX_S, self.pump)

    def store_connected(self) -> None:
        """A connection to the store is up (again)."""
        self.metadata.member.connected(self.clock())
        self.pump()

    def _send(self, call: Call, now: float) -> None:
        if isinstance(call, PeerCall) and call.to == self.name:
            self.metadata.answered(call, self._serve(call.message), now)
            return
        if isinstance(call, StoreCall):
            to = STORE
        elif call.to in self.metadata.view.workers:
            to = call.to
        else:
            self.after(0.001, self._failed, call, Unavailable("it has left"))
            return
        self.network.call(self, to, call.message, call.timeout_s, lambda result, _: self._finish(call, result))

    def _finish(self, call: Call, result: Message | TensorcastError) -> None:
        if isinstance(result, TensorcastError):
            self._failed(call, result)
            return
        self.world.note(self.name, "is told", result)
        try:
            self.metadata.answered(call, result, self.clock())
        except TensorcastError as error:
            self.world.note(self.name, "does not understand", str(error))
        if isinstance(result, Changes):
            for shard, holder in self.metadata.view.shards.items():
                self.world.tell("learned", self, shard, holder.token)
        elif isinstance(result, Reported | Fenced):
            self._learn(result.moved if isinstance(result, Reported) else result.shards)
        self.pump()
        if self.plans is not None and isinstance(call, StoreCall):
            self.plans.view_changed()

    def _learn(self, shards: Sequence[tuple[int, int, int, str]]) -> None:
        for shard, incarnation, revision, home in shards:
            if home and shard < self.metadata.homes.shards:
                self.world.tell("learned", self, shard, Token(incarnation, revision))

    def _failed(self, call: Call, error: TensorcastError) -> None:
        self.world.note(self.name, "fails", type(call.message).__name__, type(error).__name__, str(error))
        self.metadata.failed(call, error, self.clock())
        self.pump()

    def receive(self, body: bytes, answer: Answer) -> object:
        """A request of another worker has arrived."""
        message: Any = decode(PeerService.decoder, body)
        if isinstance(message, Fetch):
            self.serve_fetch(message, answer)
            return True
        if self.plans is not None and isinstance(message, MESSAGES):
            return self.plans.receive(message, answer)
        try:
            reply = self._serve(message)
        except TensorcastError as error:
            reply = Failure(error.code, str(error))
        self.world.note(self.name, "answers", message, reply)
        answer(reply)
        if not isinstance(message, FindKeys):
            self.pump()
        return True

    def _serve(self, message: Message) -> Message:
        reply = self.metadata.serve(message, self.clock())
        counts = self.world.counts
        if isinstance(reply, Reported):
            assert isinstance(message, ReportKeys)
            counts["report refused"] += bool(reply.moved)
            counts["report of an unknown worker"] += bool(reply.unknown)
            refused = {shard for shard, *_ in reply.moved}
            self._effects("report", message.shards, refused)
        elif isinstance(reply, Fenced):
            assert isinstance(message, AskInventory)
            counts["inventory refused"] += bool(reply.shards)
            self._effects("inventory", message.shards, {shard for shard, *_ in reply.shards})
        return reply

    def _effects(self, what: str, grants: Sequence[tuple[int, int, int]], refused: set[int]) -> None:
        for shard, incarnation, revision in grants:
            if shard not in refused:
                token = Token(incarnation, revision)
                self.world.counts[f"{what} accepted"] += 1
                self.world.tell("effect", self, what, shard, token)
                self.world.tell("learned", self, shard, token)

    def leave(self) -> None:
        """Leaves the cluster in order: the lease is given back at once, and then the process ends."""
        if self.metadata.member.lease_id:
            message = RevokeLease(self.metadata.member.lease_id)
            self.network.call(self, STORE, message, STORE_TIMEOUT_S, lambda *_: None)
        self.die()

    # --- pages ---

    def changed(self, keys: Sequence[bytes]) -> None:
        """See worker.pages.Elsewhere."""
        if keys:
            self.world.counts["page evicted"] += any(not self.pages.resident(key) for key in keys)
            self.metadata.changed(keys)
            self._woken = True

    def pump_if_woken(self) -> None:
        """After something that may have changed the pages here."""
        self.touched = True
        if self._woken:
            self.pump()

    def holders(self, keys: Sequence[bytes], done: Callable[[list[Sequence[str]]], None]) -> None:
        """As Peers.holders: who holds each key, as far as the homes know and answer in time."""
        lookup, homes = self.metadata.lookup(keys), self.metadata.homes
        deadline_s = self.clock() + FIND_TIMEOUT_S
        open_asks = 0

        def ask(each: Ask) -> None:
            nonlocal open_asks
            if each.home == self.name:
                answered(each, self.metadata.serve(each.message, self.clock()))
            elif each.home in self.metadata.view.workers and (left_s := deadline_s - self.clock()) > 0:
                open_asks += 1
                self.network.call(self, each.home, each.message, left_s, lambda got, _: came(each, got))

        def answered(each: Ask, reply: Message) -> None:
            assert isinstance(reply, PagesFound)
            try:
                more = lookup.answered(each, reply)
            except TensorcastError as error:
                self.world.note(self.name, "does not understand", str(error))
                more = []
            self.world.counts["lookup redirected"] += bool(more)
            if homes is self.metadata.homes:  # else the pages are cut into another number of shards meanwhile
                self._learn(reply.moved)
            for one in more:
                ask(one)

        def came(each: Ask, got: Message | TensorcastError) -> None:
            nonlocal open_asks
            open_asks -= 1
            if not isinstance(got, TensorcastError):
                answered(each, got)
            if not open_asks:
                done(lookup.holders)

        for each in lookup.first():
            ask(each)
        if not open_asks:
            done(lookup.holders)

    # --- artifacts ---

    def put_artifact(self, artifact_id: str) -> None:
        """A copy of an artifact is here now."""
        record = self.artifacts[artifact_id] = ReplicaRecord(artifact_id, self.name, "memory", 1)
        self.metadata.member.add(record)
        self.pump()

    def remove_artifact(self, artifact_id: str) -> None:
        """It is not here any more."""
        self.metadata.member.remove(self.artifacts.pop(artifact_id))
        self.pump()
