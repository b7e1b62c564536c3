"""`session-hash`: the client's session key decides."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from xxhash import xxh3_64_intdigest

from smetric_router.policies.base import least_loaded, place_at
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView

# Odd, with bits all over: multiplying by it carries every bit of a digest to the highest ones.
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class SessionHash:
    """argmax hash(key, instance): consistent (rendezvous) hashing of the session key that the client sends.

    When an instance goes, only its sessions move, evenly to all others; when it comes back, they come back. Every
    router makes the same choice, whatever it knows.

    Inputs: the session key of the request (`session_header`), the names of the instances. A request without a key goes
    to the least loaded.

    Reasons: `session-key`, `no-session-key`.

        policy = "session-hash"
        session_header = "x-session-id"
    """

    name: ClassVar[str] = "session-hash"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the instance that the key belongs to."""
        if not request.session:
            return least_loaded(view, "no-session-key")
        key = xxh3_64_intdigest(request.session.encode("utf-8", "surrogateescape"))
        mixed = (view.members.digests ^ np.uint64(key)) * _MIX
        mixed = (mixed ^ mixed >> _HALF) * _MIX
        return place_at(view, int(mixed.argmax()), "session-key", placement=False)
