"""What a store makes of its database for those who follow it: everything there is, page by page, and what has changed."""

from collections.abc import Sequence

from tensorcast_connector.config import LISTING_BYTES_MAX
from tensorcast_connector.core.cluster import CLUSTER, INCARNATION
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.store.kv import Event, KeyValue, KvStore, weight
from tensorcast_connector.wire.store_messages import Changes, Entry, Watch


def incarnation_of(found: Sequence[KeyValue]) -> int:
    """The life of the database that these keys are of.

    Raises:
        Unavailable: they do not say.
    """
    for each in found:
        if each.key == INCARNATION:
            return int(each.value)
    raise Unavailable(f"the store's database has lost its key {INCARNATION!r}; restart the store")


async def everything(kv: KvStore, asked: Watch) -> Changes:
    """All of the cluster; the first page of it, if it is much and `asked` by somebody who knows pages."""
    if asked.after_key is None:
        more = False
        revision, found = await kv.range(CLUSTER)
    else:
        revision, found, more = await kv.page(CLUSTER, "", LISTING_BYTES_MAX)
    return Changes(incarnation_of(found), revision, True, _entries(found), [], more=more)


async def next_page(kv: KvStore, asked: Watch) -> Changes:
    """The page that a listing goes on with."""
    after = asked.after_key or ""
    revision, found, more = await kv.page(CLUSTER, after, LISTING_BYTES_MAX)
    return Changes(asked.incarnation, revision, False, _entries(found), [], after, more)


def _entries(found: Sequence[KeyValue]) -> list[Entry]:
    return [Entry(each.key, each.value, each.mod_revision) for each in found]


def news(incarnation: int, revision: int, events: Sequence[Event]) -> Changes:
    """What happened up to `revision`, or if that is much, the first of it: a revision comes as a whole."""
    size = begin = 0  # where the last revision begins
    for at, event in enumerate(events):
        if event.mod_revision != events[begin].mod_revision:
            begin = at
        size += weight(event.key, event.value or b"")
        if begin and size > LISTING_BYTES_MAX:
            return Changes(incarnation, events[begin - 1].mod_revision, False, *_latest(events[:begin]), more=True)
    return Changes(incarnation, revision, False, *_latest(events))


def _latest(events: Sequence[Event]) -> tuple[list[Entry], list[str]]:
    """Only the last state of each key counts."""
    last = {event.key: event for event in events}
    entries = [Entry(each.key, each.value, each.mod_revision) for each in last.values() if each.value is not None]
    return entries, [each.key for each in last.values() if each.value is None]
