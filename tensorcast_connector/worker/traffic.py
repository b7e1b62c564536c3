"""What is counted and recorded of the metadata messages between this worker and the others, for metrics and stories."""

from tensorcast_connector.core.lookup import Ask
from tensorcast_connector.core.member import StoreCall
from tensorcast_connector.core.metadata import Call, PeerCall
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.net.histogram import Histogram
from tensorcast_connector.wire.messages import AskInventory, Find, Message, PagesFound, Report, Reported, ReportKeys
from tensorcast_connector.worker.recorder import Record


class Traffic:
    """See the module. Each method costs the same however many pages a message names."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.find_seconds = Histogram()  # of lookups of locations, from the first question to the last answer
        self.counters = {
            "reports_applied": 0,
            "reports_refused": 0,
            "reports_failed": 0,
            "finds_failed": 0,
            "redirects_followed": 0,
            "redirects_given": 0,
        }

    # --- what this worker asks ---

    def sent(self, call: Call) -> None:
        """A request is about to be sent."""
        if isinstance(call, PeerCall):
            if isinstance(call.message, ReportKeys):
                self._report("report", call.to, call.message)
            else:
                self._record("ask inventory", call.to, shards=[shard for shard, *_ in call.message.shards])

    def answered(self, call: Call, reply: Message) -> None:
        """It was answered."""
        if isinstance(reply, Reported) and isinstance(call, PeerCall) and isinstance(call.message, ReportKeys):
            refused = sorted({shard for shard, *_ in reply.moved}.union(reply.unknown))
            self.counters["reports_refused" if refused else "reports_applied"] += 1
            cause = f"refused for shards {refused}" if refused else "applied"
            self._report("report answered", call.to, call.message, cause)

    def failed(self, call: Call, error: TensorcastError) -> None:
        """It failed."""
        if isinstance(call, StoreCall):
            return  # the state of the store is told by state_log.py
        if isinstance(call.message, ReportKeys):
            self.counters["reports_failed"] += 1
            self._report("report failed", call.to, call.message, str(error))
        else:
            shards = [shard for shard, *_ in call.message.shards]
            self._record("ask inventory failed", call.to, shards=shards, cause=str(error))

    def find_failed(self, ask: Ask, error: TensorcastError) -> None:
        """A home did not say where pages are."""
        self.counters["finds_failed"] += 1
        self._record("find failed", ask.home, ask.message.listed, cause=str(error))

    def following(self, ask: Ask) -> None:
        """A home said that some of its pages' shards are elsewhere; `ask` goes there."""
        self.counters["redirects_followed"] += 1
        self._record("redirect", ask.home, ask.message.listed, shards=ask.message.shards)

    # --- what others ask this worker ---

    def redirected(self, who: str, message: Find, reply: PagesFound) -> None:
        """Another worker was told that some of the shards it asked for are elsewhere."""
        self.counters["redirects_given"] += 1
        self._record("redirected", who, message.listed, shards=[shard for shard, *_ in reply.moved])

    def told(self, message: Report | AskInventory) -> None:
        """Another worker has reported its pages, or asks for ours."""
        if isinstance(message, Report):
            self._report("told", message.worker_id, message)
        else:
            self._record("asked for inventory", message.home, shards=[shard for shard, *_ in message.shards])

    def _report(self, what: str, who: str, message: Report, cause: str = "") -> None:
        """A report that says nothing is not worth a line: there is one a second to each home."""
        if message.added:
            self._record(what, who, message.listed_added, cause=f"held; {cause}" if cause else "held")
        if message.removed:
            self._record(
                what, who, message.listed_removed, cause=f"no longer held; {cause}" if cause else "no longer held"
            )
