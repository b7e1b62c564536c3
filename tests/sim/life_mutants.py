"""Deliberate faults of a store whose database had a former life; mutants.py lists them with the others."""

from typing import Any

import pytest

from tensorcast_connector.core.cluster import RESTORED, SHARDS
from tensorcast_connector.store import backup, incarnation, server
from tensorcast_connector.store.kv import Compare, Delete

Patch = pytest.MonkeyPatch


def restored_store_grants_at_once(patch: Patch) -> None:
    """It does not wait until nobody believes in the leases of its former life."""
    patch.setattr(backup, "MEMBER_TTL_S", 0)


def former_life_is_nothing_to_the_store(patch: Patch) -> None:
    """A store that has taken its database for new goes on so when somebody knows better."""

    async def nothing(_: Any) -> None:
        pass

    patch.setattr(server, "seen_former_life", nothing)


def grants_of_before_stand(patch: Patch) -> None:
    """What was granted before it was known that there was a former life is not taken back."""
    patch.setattr(incarnation, "begin_wait", lambda kv: incarnation.end_later(kv, RESTORED))


def grants_taken_back_under_a_lease_that_lives(patch: Patch) -> None:
    """They are deleted, and who does not hear of it can renew its lease."""

    async def delete(kv: Any) -> None:
        for each in (await kv.range(SHARDS))[1]:
            await kv.txn([Compare(each.key, each.mod_revision)], [Delete(each.key)])
        await incarnation.end_later(kv, RESTORED)

    patch.setattr(incarnation, "begin_wait", delete)
    patch.setattr(server, "begin_wait", delete)
