"""What happened in one process to pages, holds, shards, artifacts and plans, for people: the story of one of them, line by line.

A ring: the oldest events go when there are too many, or when they name too many pages. Recording a batch costs the same
for one page and for thousands: its keys are kept as they came, and looked at only when somebody asks.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from tensorcast_connector.config import (
    STORY_CAUSE_CHARS_MAX,
    STORY_EVENTS_MAX,
    STORY_KEYS_MAX,
    STORY_LINES_MAX,
    STORY_PREFIX_DIGITS_MIN,
)
from tensorcast_connector.core.artifact import is_artifact_id
from tensorcast_connector.types import KEYSPACE_BYTES

_Event = tuple[float, str, str, Sequence[bytes], Sequence[object], Sequence[int], str, Sequence[str]]
_OUTCOMES_SHOWN_MAX = 4
_as_shard = re.compile(r"shard[ /]?(\d{1,3})").fullmatch
_as_hex = re.compile(r"[0-9a-f]+").fullmatch


class Stories:
    """See the module.

    Args:
        events_max: how many events are kept.
        keys_max: how many page keys all of them together may name.
    """

    def __init__(self, events_max: int = STORY_EVENTS_MAX, keys_max: int = STORY_KEYS_MAX) -> None:
        self._events: deque[_Event] = deque()
        self._events_max = events_max
        self._keys_max = keys_max
        self._keys = 0

    def __repr__(self) -> str:
        return f"<Stories of {len(self._events)} events that name {self._keys} pages>"

    def __len__(self) -> int:
        return len(self._events)

    def record(
        self,
        at: float,
        what: str,
        about: str = "",
        keys: Sequence[bytes] = (),
        each: Sequence[object] = (),
        shards: Sequence[int] = (),
        cause: str = "",
        names: Sequence[str] = (),
    ) -> None:
        """Something happened. The sequences are kept, not copied: nobody may change them afterwards.

        Args:
            at: when, by the clock of this process in seconds.
            what: the name of the event, the same for all of its kind.
            about: the id of the hold, worker, report or artifact that it is about, or TENANT/KEY of a plan.
            keys: of the pages concerned.
            each: what became of each of `keys`, None for nothing; empty if they are not spoken of one by one.
            shards: the shards concerned.
            cause: why, or with what result, in a few words; cut to STORY_CAUSE_CHARS_MAX.
            names: what else people may ask for it by: a name of the artifact, the key of the plan, the artifact of a step.
        """
        events = self._events
        events.append((at, what, about, keys, each, shards, cause[:STORY_CAUSE_CHARS_MAX], names))
        self._keys += len(keys)
        while len(events) > self._events_max or (self._keys > self._keys_max and len(events) > 1):
            self._keys -= len(events.popleft()[3])

    def lines(self, text: str = "", unix_offset_s: float | None = None) -> list[str]:
        """What is known of `text`, oldest first; the latest STORY_LINES_MAX lines.

        Args:
            text: hex digits that a block hash begins with (at least 4), the beginning of a hold's, a worker's or an artifact's
                id, the name of an artifact (all that is known of each that had it), the key of a plan, `shard 12`, or the name
                of an event; everything if it is empty.
            unix_offset_s: what to add to the clock of this process to get the wall time; None: its clock is shown.
        """
        found: deque[str] = deque(maxlen=STORY_LINES_MAX)
        wanted = text.strip()
        number = _as_shard(wanted)
        shard = int(number.group(1)) if number else -1
        places_in = _page_finder(wanted.lower())
        artifacts = self._artifacts_of(wanted)
        for event in self._events:
            at, what, about, keys, each, shards, _, names = event
            places = places_in(keys)
            if (
                places
                or not wanted
                or wanted == what
                or shard in shards
                or (about and about.startswith(wanted))
                or wanted in each
                or wanted in names
                or (artifacts and (about in artifacts or not artifacts.isdisjoint(names)))
            ):
                found.append(f"{_time(at, unix_offset_s)}  {_described(event, places)}")
        return list(found)

    def _artifacts_of(self, wanted: str) -> set[str]:
        """The ids of the artifacts whose id begins so, or that were named so."""
        return {
            about for _, _, about, *_, names in self._events
            if wanted and (wanted in names or about.startswith(wanted)) and is_artifact_id(about)
        }  # fmt: skip


def nothing_found(text: str) -> str:
    """What to say when there are no lines about `text`: why that may be, and what else can be asked."""
    wanted = text.strip()
    others = (
        "an artifact's id or name, a plan's key, the id of a hold or a worker, 'shard 12', the name of an event such as fetch, "
        "or '' for everything"
    )
    why = "only the latest events are kept"
    if _as_hex(wanted.lower()) and len(wanted) < STORY_PREFIX_DIGITS_MIN:
        why = f"of a page at least {STORY_PREFIX_DIGITS_MIN} hex digits of its block hash are needed"
    return f"nothing recorded about {text!r}: {why}. Other things to ask for: {others}"


def _page_finder(digits: str) -> Callable[[Sequence[bytes]], list[int]]:
    """Finds the places of the keys whose block hash begins with `digits`; none if these are no hex digits, or too few."""
    if not _as_hex(digits) or len(digits) < STORY_PREFIX_DIGITS_MIN:
        return lambda _: []
    prefix = bytes.fromhex(digits[: len(digits) // 2 * 2])

    def found(keys: Sequence[bytes]) -> list[int]:
        places = [place for place, key in enumerate(keys) if key.startswith(prefix, KEYSPACE_BYTES)]
        if len(digits) % 2:  # half a byte is left
            places = [place for place in places if keys[place][KEYSPACE_BYTES:].hex().startswith(digits)]
        return places

    return found


def _time(at: float, unix_offset_s: float | None) -> str:
    if unix_offset_s is None:
        return f"{at:.6f}"
    return datetime.fromtimestamp(at + unix_offset_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _described(event: _Event, places: Sequence[int]) -> str:
    """One line: what happened, about whom, to which of how many pages, what became of them, and why."""
    _, what, about, keys, each, shards, cause, _ = event
    parts = [f"{what} {about}".rstrip()]
    if len(places) == 1:
        parts.append(f"page {places[0] + 1} of {len(keys)} ({keys[places[0]][KEYSPACE_BYTES:].hex()[:16]})")
    elif keys:
        parts.append(f"{len(places)} of {len(keys)} pages" if places else f"{len(keys)} pages")
    if each:
        outcomes = dict.fromkeys("none" if each[at] is None else str(each[at]) for at in places or range(len(each)))
        more = len(outcomes) - _OUTCOMES_SHOWN_MAX
        parts.append(" | ".join([*outcomes][:_OUTCOMES_SHOWN_MAX]) + (f" and {more} others" if more > 0 else ""))
    if shards:
        parts.append(f"shards {ranges(sorted(shards))}")
    if cause:
        parts.append(cause)
    return ", ".join(parts)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: "0-3 7 9-10"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
