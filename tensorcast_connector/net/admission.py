"""Who makes room when a listener is full, so that nobody is locked out by connections that do nothing."""

import enum
import resource
from collections import Counter
from collections.abc import Collection
from typing import Protocol, TypeVar

from tensorcast_connector.config import OPEN_FILES_MIN, SILENCE_MAX_S


class Stage(enum.IntEnum):
    """How far a conversation has come, as far as the transport sees it."""

    UNGREETED = 0  # nothing was answered yet
    GREETED = 1  # the hello was, and nothing was asked since
    ASKED = 2


class Accepted(Protocol):
    """An accepted connection."""

    host: str  # of a TCP peer; "" on a Unix socket: whoever can open that is this user
    heard_at: float  # when something last arrived, or was taken by the peer
    stage: Stage


A = TypeVar("A", bound=Accepted)


def least_missed(accepted: Collection[A], newcomer: A, now: float) -> A | None:
    """Whose place a new connection gets; None: there is nobody to be closed for it.

    Silence comes first, since callers of ours ping. On a Unix socket an engine may hold memory, which no time ends: only
    those that never asked for anything go. On TCP nothing is held that a caller would miss, so without silence it is one of
    the host that has the most, unless the newcomer's has about as many.
    """
    silent = [each for each in accepted if now - each.heard_at >= SILENCE_MAX_S]
    silent = [each for each in silent if each.host or each.stage < Stage.ASKED]
    if silent:
        return min(silent, key=_patience)
    shares = Counter(each.host for each in accepted if each.host)
    host, most = max(shares.items(), key=lambda share: share[1], default=("", 0))
    if not newcomer.host or most <= shares[newcomer.host] + 1:
        return None
    return min((each for each in accepted if each.host == host), key=_patience)


def _patience(accepted: Accepted) -> tuple[Stage, float]:
    return accepted.stage, accepted.heard_at


def allow_open_files() -> None:
    """Raises this process's limit, where it may: else the kernel refuses connections before a listener can choose."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES_MIN and soft != resource.RLIM_INFINITY:
        wanted = OPEN_FILES_MIN if hard == resource.RLIM_INFINITY else min(OPEN_FILES_MIN, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
