"""The load of every instance: requests in flight, prompts that wait to be computed, and what the engines report.

This router's own counts are exact and immediate: counted when a request is sent, released whatever becomes of it. An engine also
works for others, which only it can tell; what it reports beyond this router's own requests at that time is added, so the
load is never below the own count. A report is believed for so long and no longer.
With several processes "own" is what all of them have in flight.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from smetric_router.state.shared_counts import SharedCounts
from smetric_router.types import EngineReport, PrefillCost
from smetric_router.view import ADDED, BYTES_PER_TOKEN, CONTEXT, LOAD, PENDING, RATE, WAITING, WORK, Figures, Row

# The rate of an instance is the 90th percentile of so many measurements: most requests wait for others as well, and the
# quick ones tell how fast it is.
RATE_SAMPLES = 64
RATE_SAMPLES_MIN = 8
RATE_PERCENTILE = 0.9

# A ratio of bytes to tokens outside of these is no text (an image, a prompt that was not read to its end).
RATIO_MIN, RATIO_MAX = 0.5, 32.0
# Tokens after which older prompts count half in a model's ratio.
RATIO_TOKENS = 1_000_000

_NOTHING = [0.0] * ADDED


class TokenRatio:
    """Bytes per token of one model's prompts, learnt from the answers."""

    __slots__ = ("_bytes", "_tokens")

    def __init__(self) -> None:
        self._bytes = self._tokens = 0.0

    def learn(self, length: int, tokens: int) -> None:
        """A prompt of `length` bytes had so many tokens."""
        if not RATIO_MIN * tokens <= length <= RATIO_MAX * tokens or not tokens:
            return
        self._bytes += length
        self._tokens += tokens
        if self._tokens > RATIO_TOKENS:
            self._bytes /= 2
            self._tokens /= 2

    @property
    def bytes_per_token(self) -> float:
        """The mean so far."""
        return self._bytes / self._tokens if self._tokens else BYTES_PER_TOKEN


@dataclass(slots=True)
class _Flight:
    """One request in flight. All in whole tokens, so that sums come back to exactly zero."""

    ordinal: int
    length: int
    new: int
    attention: int
    """Twice the pairs of tokens to attend: new * (2 * length - new)."""
    sent_s: float
    pending: bool = True


@dataclass(slots=True)
class _Instance:
    inflight: int = 0
    context: int = 0
    pending: int = 0
    attention: int = 0
    report: EngineReport | None = None
    reported_s: float = 0.0
    beyond: int = 0
    """Requests that the report counts beyond this router's own."""
    queued_beyond: int = 0
    """Prompt tokens, likewise."""
    samples: "deque[float] | None" = None
    """Work per second of the last requests."""
    rate: float = math.inf


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The load of one instance."""

    inflight: int
    load: int
    pending_tokens: int
    prefill_rate: float | None
    report: EngineReport | None
    report_age_s: float | None


class LoadBoard:
    """Owner of all of it. `table` is that of this process: shape (rows, instances), see view.Row.

    Args:
        shared: where other processes count theirs, and this one its own.
    """

    def __init__(
        self, count: int, *, cost: PrefillCost, report_stale_s: float, shared: SharedCounts | None = None
    ) -> None:
        self.cost = cost
        self._shared = shared
        self.table: Figures = np.zeros((len(Row), count))
        self.table[Row.RATE] = math.inf
        self._cells = cast("memoryview[float]", self.table.data)
        """The table, for single figures: in numpy's own way each takes five times as long."""
        self._report_stale_s = report_stale_s
        self._instances = [_Instance() for _ in range(count)]
        self._inflight: Figures = np.zeros(count)
        self._flights: dict[int, _Flight] = {}
        self._next_stale_s = math.inf

    def __repr__(self) -> str:
        return f"<LoadBoard {len(self._flights)} in flight at {len(self._instances)}>"

    def dispatched(self, number: int, ordinal: int, length: int, hit: int, now: float) -> None:
        """A prompt of `length` tokens is sent, of which `hit` should be cached there."""
        assert number not in self._flights, number
        new = max(0, length - hit)
        flight = self._flights[number] = _Flight(ordinal, length, new, new * (2 * length - new), now)
        instance = self._instances[ordinal]
        instance.inflight += 1
        instance.context += length
        instance.pending += new
        instance.attention += flight.attention
        self._show(ordinal)

    def first_byte(self, number: int, now: float, *, computed: bool) -> None:
        """Its prompt is computed. `computed`: and the time since it was sent was spent on that."""
        flight = self._flights.get(number)
        if flight is None or not flight.pending:
            return
        self._release_pending(flight)
        taken_s = now - flight.sent_s
        if computed and flight.new and taken_s > 0:
            work: float = self.cost.work(flight.length, flight.new)
            self._measured(self._instances[flight.ordinal], work / taken_s)
        self._show(flight.ordinal)

    def finished(self, number: int) -> None:
        """It is over, however it ended."""
        flight = self._flights.pop(number)
        if flight.pending:
            self._release_pending(flight)
        instance = self._instances[flight.ordinal]
        instance.inflight -= 1
        instance.context -= flight.length
        self._show(flight.ordinal)

    def reported(self, ordinal: int, report: EngineReport, own: int, now: float) -> None:
        """The engine says how loaded it is; `own` requests of this router were there when it was asked."""
        instance, others = self._instances[ordinal], self._others_at(ordinal)
        instance.report, instance.reported_s = report, now
        # What was sent or ended while the question was under way is this router's in doubt.
        own = max(own, instance.inflight + int(others[Row.LOAD]))
        instance.beyond = max(0, report.running + report.waiting - own)
        instance.queued_beyond = max(0, (report.queued_tokens or 0) - instance.pending - int(others[Row.PENDING]))
        self._next_stale_s = min(self._next_stale_s, now + self._report_stale_s)
        self._show(ordinal)

    def forget(self, ordinal: int) -> None:
        """The instance has gone: its reports, and how fast it was."""
        instance = self._instances[ordinal]
        instance.samples, instance.rate = None, math.inf
        self._drop_report(ordinal)

    def expire(self, now: float) -> None:
        """Lets go of reports that are too old."""
        if now < self._next_stale_s:
            return
        self._next_stale_s = math.inf
        for ordinal, instance in enumerate(self._instances):
            if instance.report is not None:
                stale_s = instance.reported_s + self._report_stale_s
                if now >= stale_s:
                    self._drop_report(ordinal)
                else:
                    self._next_stale_s = min(self._next_stale_s, stale_s)

    def inflight(self, ordinal: int) -> int:
        """Requests of this router there, whichever process has them."""
        return self._instances[ordinal].inflight + int(self._others_at(ordinal)[Row.LOAD])

    def inflight_column(self) -> Figures:
        """The same of all instances, to be read at once."""
        if self._shared is None:
            return self._inflight
        found: Figures = self._inflight + self._shared.others_flights()[Row.LOAD]
        return found

    def look(self, ordinals: NDArray[np.intp] | None) -> Figures:
        """The table's columns at these places, or all of them, as they are now and with what other processes have in flight."""
        table: Figures = self.table.copy() if ordinals is None else self.table[:, ordinals]
        if self._shared is not None:
            others = self._shared.others_flights()
            table[:ADDED] += others if ordinals is None else others[:, ordinals]
        return table

    def figures(self, ordinal: int, now: float) -> LoadFigures:
        """One instance in figures."""
        instance, others = self._instances[ordinal], self._others_at(ordinal)
        inflight, pending = instance.inflight + int(others[Row.LOAD]), instance.pending + int(others[Row.PENDING])
        return LoadFigures(
            inflight=inflight,
            load=inflight + instance.beyond,
            pending_tokens=pending + instance.queued_beyond,
            prefill_rate=None if math.isinf(instance.rate) else instance.rate,
            report=instance.report,
            report_age_s=None if instance.report is None else max(0.0, now - instance.reported_s),
        )

    def where(self) -> dict[int, int]:
        """Number -> place of every request in flight."""
        return {number: flight.ordinal for number, flight in self._flights.items()}

    def check(self) -> None:
        """Every sum is that of the requests in flight, and the table shows it."""
        for ordinal, instance in enumerate(self._instances):
            mine = [each for each in self._flights.values() if each.ordinal == ordinal]
            waiting = [each for each in mine if each.pending]
            assert instance.inflight == self._inflight[ordinal] == len(mine), ordinal
            assert instance.context == sum(each.length for each in mine), ordinal
            assert instance.pending == sum(each.new for each in waiting), ordinal
            assert instance.attention == sum(each.attention for each in waiting), ordinal
            assert self.table[Row.LOAD, ordinal] == instance.inflight + instance.beyond >= instance.inflight
            assert instance.report is not None or instance.beyond == instance.queued_beyond == 0
            before = self.table[:, ordinal].tolist()
            self._show(ordinal)
            assert before == self.table[:, ordinal].tolist(), ordinal

    def _release_pending(self, flight: _Flight) -> None:
        instance = self._instances[flight.ordinal]
        flight.pending = False
        instance.pending -= flight.new
        instance.attention -= flight.attention

    def _measured(self, instance: _Instance, rate: float) -> None:
        samples = instance.samples
        if samples is None:
            samples = instance.samples = deque(maxlen=RATE_SAMPLES)
        samples.append(rate)
        if len(samples) >= RATE_SAMPLES_MIN:
            instance.rate = sorted(samples)[math.ceil(RATE_PERCENTILE * len(samples)) - 1]

    def _drop_report(self, ordinal: int) -> None:
        instance = self._instances[ordinal]
        instance.report, instance.beyond, instance.queued_beyond = None, 0, 0
        self._show(ordinal)

    def _others_at(self, ordinal: int) -> list[float]:
        """What other processes have in flight there."""
        return _NOTHING if self._shared is None else self._shared.others_flights_at(ordinal)

    def _work(self, pending: int, attention: int) -> float:
        return self.cost.linear * pending + self.cost.attention * attention / 2

    def _show(self, ordinal: int) -> None:
        instance = self._instances[ordinal]
        pending = instance.pending + instance.queued_beyond
        self._inflight[ordinal] = instance.inflight
        cells = self._cells
        cells[LOAD, ordinal] = instance.inflight + instance.beyond
        cells[PENDING, ordinal] = pending
        cells[WORK, ordinal] = self._work(pending, instance.attention)
        cells[CONTEXT, ordinal] = instance.context
        cells[WAITING, ordinal] = instance.report.waiting if instance.report is not None else 0
        cells[RATE, ordinal] = instance.rate
        if self._shared is not None:
            work = self._work(instance.pending, instance.attention)
            self._shared.set_flights(ordinal, (instance.inflight, instance.pending, work, instance.context))
