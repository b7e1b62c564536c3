"""Pages between an engine's host memory and the pool, in batches: each call is answered within its time, whatever happens.

An engine of several ranks reduces what its ranks answer, so no rank may wait for ever or raise: what cannot be had is a
miss. After a worker that was too slow the pool is left alone for a moment, longer each time, and then tried again.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from tensorcast_connector.client.attachment import Mapping
from tensorcast_connector.config import (
    STORAGE_BACKOFF_MAX_S,
    STORAGE_BACKOFF_MIN_S,
    STORAGE_COUNTS_MAX,
    STORAGE_KEYS_PER_LOOKUP,
    STORAGE_WRITE_ROUNDS,
)
from tensorcast_connector.engines.sglang.page_copies import Parts, Together, copy_in, copy_out, move_of, size_of
from tensorcast_connector.errors import DeadlineExceeded, TensorcastError, Unavailable
from tensorcast_connector.wire.messages import LookupResult

logger = logging.getLogger(__name__)


class Worker(Protocol):
    """What is needed of the attachment."""

    @property
    def connected(self) -> bool:
        """See Attachment."""

    @property
    def mapping(self) -> Mapping:
        """See Attachment."""

    def still_holds(self, mapping: Mapping) -> bool:
        """See Attachment."""

    def writing(self, mapping: Mapping) -> AbstractContextManager[None]:
        """See Attachment."""

    def lookup(
        self, lookup_id: str, keyspaces: Sequence[bytes], hashes: Sequence[bytes], timeout_s: float
    ) -> "Future[LookupResult]":
        """See Attachment."""

    def acquire(
        self, hold_id: str, keyspace: bytes, hashes: Sequence[bytes], mapping: Mapping, timeout_s: float
    ) -> list[memoryview]:
        """See Attachment."""

    def release(self, hold_ids: Sequence[str]) -> None:
        """See Attachment."""

    def reserve(
        self, keyspace: bytes, hashes: Sequence[bytes], page_bytes: int, mapping: Mapping, timeout_s: float
    ) -> list[memoryview | None]:
        """See Attachment."""

    def commit(self, keyspace: bytes, hashes: Sequence[bytes], digests: Sequence[int], timeout_s: float) -> None:
        """See Attachment."""

    def abort(self, keyspace: bytes, hashes: Sequence[bytes]) -> None:
        """See Attachment."""


class Backoff:
    """When a worker that did not answer in time is asked again. Pure; one line when it begins and one when it ends."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._until_s = 0.0

    def open(self, now: float) -> bool:
        """Whether the worker may be asked."""
        return now >= self._until_s

    def late(self, now: float) -> bool:
        """It did not answer in time; True: that is news."""
        first = not self._pause_s
        self._pause_s = min(max(2 * self._pause_s, STORAGE_BACKOFF_MIN_S), STORAGE_BACKOFF_MAX_S)
        self._until_s = now + self._pause_s
        return first

    def answered(self) -> bool:
        """It did; True: that is news."""
        news = self._pause_s > 0
        self._pause_s = self._until_s = 0.0
        return news


@dataclass(slots=True)
class Moved:
    """What was moved since somebody last asked, the last batches of it."""

    pages: deque[int] = field(default_factory=lambda: deque(maxlen=STORAGE_COUNTS_MAX))  # of each batch
    bytes_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=STORAGE_COUNTS_MAX))


class PageStore:
    """See the module. Any thread may call.

    Args:
        worker: the attachment.
        now: seconds of a monotonic clock.
        wait: sleeps.
        lookup_deadline_s, transfer_deadline_s: of one lookup, and of one batch that is read or written.
    """

    def __init__(
        self,
        worker: Worker,
        now: Callable[[], float],
        wait: Callable[[float], None],
        lookup_deadline_s: float,
        transfer_deadline_s: float,
    ) -> None:
        self._worker = worker
        self._now = now
        self._wait = wait
        self._lookup_deadline_s = lookup_deadline_s
        self._transfer_deadline_s = transfer_deadline_s
        self._hold_ids = itertools.count()
        self._together = Together()
        self._lock = threading.Lock()  # of what is below
        self._backoff = Backoff()
        self._told = False  # of an error, since something last went well
        self._read, self._written = Moved(), Moved()

    def __repr__(self) -> str:
        return f"<PageStore {self._worker}>"

    def leading(self, keyspaces: Sequence[bytes], hashes: Sequence[bytes]) -> int:
        """How many leading pages can be had in all keyspaces, here or elsewhere. Not a promise: they may go again."""
        if not hashes or not self._open():
            return 0
        hold_id = self._hold_id("look")
        step = max(1, STORAGE_KEYS_PER_LOOKUP // len(keyspaces))
        deadline = self._now() + self._lookup_deadline_s
        found = 0
        try:
            for start in range(0, len(hashes), step):
                part = hashes[start : start + step]
                found += (here := self._lookup(hold_id, keyspaces, part, deadline))
                if here < len(part):
                    break
        except TensorcastError as error:
            self._failed("looking up", error)
        finally:
            self._worker.release([hold_id])
        return found

    def scattered(self, keyspaces: Sequence[bytes], hashes: Sequence[bytes], pages_max: int) -> list[bool]:
        """Which of these pages can be had, each asked for by itself; of the last `pages_max`, the others are taken as missing."""
        there = [False] * len(hashes)
        if not self._open():
            return there
        first = max(0, len(hashes) - pages_max)
        asked: list[tuple[int, str, Future[LookupResult]]] = []
        deadline = self._now() + self._lookup_deadline_s
        try:
            for place in range(first, len(hashes)):
                hold_id = self._hold_id("look")
                future = self._worker.lookup(hold_id, keyspaces, [hashes[place]], self._lookup_deadline_s)
                asked.append((place, hold_id, future))
            for place, _, future in asked:
                there[place] = _result(future, deadline - self._now()).blocks == 1
            self._answered()
        except TensorcastError as error:
            self._failed("looking up", error)
        finally:
            self._worker.release([hold_id for _, hold_id, _ in asked])
        return there

    def _lookup(
        self, hold_id: str, keyspaces: Sequence[bytes], hashes: Sequence[bytes], deadline: float | None = None
    ) -> int:
        left = self._lookup_deadline_s if deadline is None else max(0.0, deadline - self._now())
        found = _result(self._worker.lookup(hold_id, keyspaces, hashes, self._lookup_deadline_s), left)
        self._answered()
        self._went_well()
        return found.blocks

    def until(self) -> float:
        """When a batch that begins now is given up, for all keyspaces that its pages are in."""
        return self._now() + self._transfer_deadline_s

    def _left(self, until: float) -> float:
        """Seconds for the next request of a batch.

        Raises:
            Unavailable: none; perhaps the copying took so long, so nobody is said to have been late.
        """
        left = until - self._now()
        if left <= 0:
            raise Unavailable(f"the batch has taken {self._transfer_deadline_s:g} s")
        return left

    def read(
        self, keyspace: bytes, hashes: Sequence[bytes], pages: Sequence[Parts], until: float | None = None
    ) -> int:  # fmt: skip
        """Copies pages from the pool to where they belong; returns how many leading ones are complete there.

        Args:
            until: of the batch that they are part of; see `until`.
        """
        if not hashes or not self._open():
            return 0
        hold_id = self._hold_id("read")
        began = self._now()
        until = self.until() if until is None else until
        try:
            mapping = self._worker.mapping
            slots = self._worker.acquire(hold_id, keyspace, hashes, mapping, self._left(until))
            self._answered()
            done = _fitting(slots, pages)
            size = sum(slot.nbytes for slot in slots[:done])
            move = move_of(size)
            self._together.run(lambda number: copy_in(slots[number], pages[number], move), done, size)
            if not self._worker.still_holds(mapping):
                # What was copied was no longer held, so others may have written there.
                raise Unavailable("lost the worker while pages were copied")
        except TensorcastError as error:
            self._failed(f"reading {len(hashes)} pages", error)
            return 0
        finally:
            self._worker.release([hold_id])
        self._went_well()
        self._count(self._read, done, pages, began)
        return done

    def write(
        self, keyspace: bytes, hashes: Sequence[bytes], pages: Sequence[Parts], valid: Callable[[], bool],
        until: float | None = None,
    ) -> int:  # fmt: skip
        """Copies pages into the pool; returns how many leading ones are there now, whoever has written them.

        Args:
            valid: asked when all is copied; if not, nothing of it becomes readable.
            until: of the batch that they are part of; what is copied by then is still committed.
        """
        if not hashes or not self._open():
            return 0
        began = self._now()
        until = self.until() if until is None else until
        missing = list(range(len(hashes)))  # those that are not in the pool yet
        written: list[int] = []
        try:
            # What somebody else is just writing is there a moment later, or can be written then.
            for round_ in range(STORAGE_WRITE_ROUNDS):
                if round_:
                    self._wait(self._lookup_deadline_s / 10)
                    if self._now() >= until:
                        break
                written += self._write_once(keyspace, hashes, pages, missing, valid, until)
                missing = self._not_there(keyspace, hashes, sorted(set(missing) - set(written)))
                if not missing:
                    break
        except TensorcastError as error:
            self._failed(f"writing {len(hashes)} pages", error)
            return 0
        self._went_well()
        self._count(self._written, len(written), [pages[each] for each in written], began)
        return missing[0] if missing else len(hashes)

    def _write_once(
        self, keyspace: bytes, hashes: Sequence[bytes], pages: Sequence[Parts], wanted: Sequence[int],
        valid: Callable[[], bool], until: float,
    ) -> list[int]:  # fmt: skip
        mapping = self._worker.mapping
        names = [hashes[each] for each in wanted]
        size = size_of(pages[wanted[0]])
        slots = self._worker.reserve(keyspace, names, size, mapping, self._left(until))
        self._answered()
        mine = [(each, slot) for each, slot in zip(wanted, slots, strict=True) if slot is not None]
        reserved = [hashes[each] for each, _ in mine]
        if not mine:
            return []
        digests, move = [0] * len(mine), move_of(len(mine) * size)

        def copy(number: int) -> None:
            each, slot = mine[number]
            with self._worker.writing(mapping):
                copy_out(pages[each], slot, move)
            digests[number] = xxhash.xxh3_64_intdigest(slot)

        try:
            self._together.run(copy, len(mine), len(mine) * size)
            if not valid():
                raise Unavailable("the weights have changed meanwhile")
        except BaseException:
            self._worker.abort(keyspace, reserved)
            raise
        self._worker.commit(keyspace, reserved, digests, self._transfer_deadline_s)
        return [each for each, _ in mine]

    def _not_there(self, keyspace: bytes, hashes: Sequence[bytes], asked: list[int]) -> list[int]:
        if not asked:
            return []
        hold_id = self._hold_id("look")
        try:
            return asked[self._lookup(hold_id, [keyspace], [hashes[each] for each in asked]) :]
        finally:
            self._worker.release([hold_id])

    # --- bookkeeping ---

    def take_moved(self) -> tuple[Moved, Moved]:
        """What was read and what was written since the last call."""
        with self._lock:
            taken = self._read, self._written
            self._read, self._written = Moved(), Moved()
        return taken

    def _hold_id(self, purpose: str) -> str:
        return f"{purpose}:{next(self._hold_ids)}"

    def _open(self) -> bool:
        with self._lock:
            return self._worker.connected and self._backoff.open(self._now())

    def _answered(self) -> None:
        with self._lock:
            news = self._backoff.answered()
        if news:
            logger.info("the worker answers in time again")

    def _went_well(self) -> None:
        with self._lock:
            self._told = False

    def _failed(self, what: str, error: TensorcastError) -> None:
        if isinstance(error, DeadlineExceeded):
            with self._lock:
                news = self._backoff.late(self._now())
            if news:
                logger.warning("%s: %s; the pool is left out until it answers in time", what, str(error))
        elif self._worker.connected:  # a lost worker is told by the attachment
            with self._lock:
                news, self._told = not self._told, True
            logger.log(logging.WARNING if news else logging.DEBUG, "%s: %s", what, str(error))  # not what it holds

    def _count(self, moved: Moved, pages: int, copied: Sequence[Parts], began: float) -> None:
        if not pages:
            return
        took = max(self._now() - began, 1e-6)
        total = sum(size_of(parts) for parts in copied[:pages])
        with self._lock:
            moved.pages.append(pages)
            moved.bytes_per_s.append(total / took)


def _result(asked: "Future[LookupResult]", timeout_s: float) -> LookupResult:
    try:
        return asked.result(max(0.0, timeout_s))
    except TimeoutError:
        asked.cancel()
        raise DeadlineExceeded("no answer in time") from None
    except CancelledError:
        raise Unavailable("detached from the worker") from None


def _fitting(slots: Sequence[memoryview], pages: Sequence[Parts]) -> int:
    """How many leading pages are as large as what they are for."""
    for place, (slot, parts) in enumerate(zip(slots, pages, strict=False)):
        if slot.nbytes != size_of(parts):
            logger.warning("a page of %d bytes where %d belong; it is computed instead", slot.nbytes, size_of(parts))
            return place
    return min(len(slots), len(pages))
