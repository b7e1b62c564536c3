"""Who was refused at a listener and why, for its log: each host and reason once in a while, however often it tries.

And how many connections a process has closed for which kind of reason, for its metrics.
"""

import logging
from collections import OrderedDict

from tensorcast_connector.config import REFUSALS_REMEMBERED_MAX, REFUSED_AGAIN_S

logger = logging.getLogger(__name__)
FULL, UNAUTHORIZED, PROTOCOL = "full", "unauthorized", "protocol"
KINDS = (FULL, UNAUTHORIZED, PROTOCOL)


class Refusals:
    """See the module."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()  # when, and how often since

    def __repr__(self) -> str:
        return f"<Refusals: {len(self._told)}>"

    def tell(self, peer: str, host: str, reason: str, now: float) -> None:
        """Somebody was refused.

        Args:
            peer: who, with the port.
            host: who, without it.
            now: a clock in seconds.
        """
        key = host or peer, reason
        told_at, silent = self._told.get(key, (now - REFUSED_AGAIN_S, 0))
        if now - told_at < REFUSED_AGAIN_S:
            self._told[key] = told_at, silent + 1
            return
        self._told[key] = now, 0
        self._told.move_to_end(key)
        while len(self._told) > REFUSALS_REMEMBERED_MAX:
            self._told.popitem(last=False)
        fields = {"event": "connection-refused", "peer": peer, "reason": reason, "not_told": silent}
        more = f" (and {silent} times more since this was last told)" if silent else ""
        logger.warning("connection from %s closed: %s%s", peer, reason, more, extra=fields)
