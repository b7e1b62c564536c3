"""How the workers and engines of the cluster are doing, for callers: all workers are asked at once (TensorCast, section 3.4)."""

import asyncio
import logging
from collections.abc import Callable, Collection

import msgspec

from tensorcast_connector.config import NAME_CHARS_MAX, SIGNALS_TIMEOUT_S
from tensorcast_connector.errors import InvalidArgument, TensorcastError, Unavailable
from tensorcast_connector.types import InstanceId, WorkerId
from tensorcast_connector.wire.caller_messages import InstanceListed, SignalsListed, WorkerListed
from tensorcast_connector.wire.messages import ForgetTenant, GetSignals, InstanceReport, PagesForgotten, Signals
from tensorcast_connector.wire.plan_messages import ReportInstance
from tensorcast_connector.wire.store_messages import WorkerRecord
from tensorcast_connector.worker.peers import Peers
from tensorcast_connector.worker.retention import Retention

logger = logging.getLogger(__name__)


class Reports:
    """What the engines attached to this worker last said of themselves.

    Args:
        now: this worker's clock in seconds.
        wall: seconds since 1970, for people.
    """

    def __init__(self, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self._now = now
        self._wall = wall
        self._last: dict[InstanceId, tuple[float, InstanceReport]] = {}

    def take(self, instance_id: InstanceId, message: ReportInstance) -> None:
        """An engine says how it is doing."""
        report = InstanceReport(
            instance_id, message.state, message.running, message.waiting, message.kv_usage, self._wall(), 0.0
        )
        self._last[instance_id] = self._now(), report

    def forget(self, instance_id: InstanceId) -> None:
        """It has gone."""
        self._last.pop(instance_id, None)

    def all(self) -> list[InstanceReport]:
        """With their age now."""
        now = self._now()
        return [msgspec.structs.replace(report, age_s=max(0.0, now - at)) for at, report in self._last.values()]


def check_switch(what: str) -> str:
    """The id of an engine, a model or a namespace.

    Raises:
        InvalidArgument: it cannot be one.
    """
    most = 2 * NAME_CHARS_MAX
    if not 0 < len(what) <= most or not what.isprintable() or what != what.strip():
        raise InvalidArgument(f"{what[:64]!r} is no engine, model or namespace: 1 to {most} printable characters")
    return what


class Census:
    """See the module.

    Args:
        signals: this worker's own.
    """

    def __init__(self, me: WorkerId, peers: Peers, retention: Retention, signals: Callable[[], Signals]) -> None:
        self._me = me
        self._peers = peers
        self._retention = retention
        self._signals = signals

    async def take(self, tenant: str = "") -> SignalsListed:
        """Everybody's state now; who does not answer in time is listed without.

        Args:
            tenant: engines of others are left out; "" for all.
        """
        view = self._peers.metadata.view
        workers = list(
            await asyncio.gather(*(self._ask(worker_id, record) for worker_id, record in sorted(view.workers.items())))
        )
        reports = {each.instance_id: each for worker in workers if worker.signals for each in worker.signals.instances}
        instances = [
            InstanceListed(
                instance_id, record.worker_id, record.engine, record.model, record.namespace, reports.get(instance_id)
            )
            for instance_id, record in sorted(view.instances.items())
            if not tenant or record.tenant in ("", tenant)
        ]
        if tenant:
            workers = [_only(worker, {each.instance_id for each in instances}) for worker in workers]
        return SignalsListed(view.revision, workers, instances)

    async def forget_pages(self, tenant: str) -> PagesForgotten:
        """Every worker evicts the pages of a tenant."""
        others = sorted(set(self._peers.metadata.view.workers) - {self._me})
        answers = await asyncio.gather(*(self._forget_at(each, tenant) for each in others))
        told = [self.forget_here(tenant), *(each for each in answers if each is not None)]
        return PagesForgotten(
            sum(each.evicted for each in told), sum(each.in_use for each in told),
            [str(each) for each, answer in zip(others, answers, strict=True) if answer is None],
            sum(each.nobodys for each in told),
        )  # fmt: skip

    def forget_here(self, tenant: str) -> PagesForgotten:
        """The same of this worker's own."""
        evicted, in_use = self._retention.forget(tenant)
        return PagesForgotten(evicted, in_use, nobodys=self._retention.nobodys())

    async def _forget_at(self, worker_id: WorkerId, tenant: str) -> PagesForgotten | None:
        try:
            if (why := self._peers.without_service(worker_id)) is not None:
                raise Unavailable(why)
            return await self._peers.client(worker_id)[0].call(ForgetTenant(tenant), PagesForgotten, SIGNALS_TIMEOUT_S)
        except TensorcastError as error:
            logger.info("%s keeps its pages of tenant %s: %s", worker_id, tenant, error)
            return None

    async def _ask(self, worker_id: WorkerId, record: WorkerRecord) -> WorkerListed:
        signals, error = None, ""
        try:
            if worker_id == self._me:
                signals = self._signals()
            else:
                client, _ = self._peers.client(worker_id)
                asked_at = self._peers.now()
                signals = await client.call(GetSignals(), Signals, SIGNALS_TIMEOUT_S)
                # At most so old: it was measured before the answer was sent, and that is at most this long ago.
                signals = msgspec.structs.replace(signals, age_s=signals.age_s + self._peers.now() - asked_at)
        except TensorcastError as failure:
            error = str(failure)
        return WorkerListed(worker_id, record.name, record.address, record.roles, signals, error)


def _only(worker: WorkerListed, engines: Collection[str]) -> WorkerListed:
    """The same without what other engines say."""
    if worker.signals is None:
        return worker
    told = [each for each in worker.signals.instances if each.instance_id in engines]
    return msgspec.structs.replace(worker, signals=msgspec.structs.replace(worker.signals, instances=told))
