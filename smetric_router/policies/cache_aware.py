"""`cache-aware`: the longest prefix decides, whatever the turn."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import follow, least_loaded, longest_holder
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class CacheAware:
    """argmax c if max c / L > match_threshold, otherwise the round-robin argmin of l.

    As other routers' policies of this name, without session: first turns follow a shared system prompt as well, so it can send
    everything to one instance. A baseline. Of several longest hits the least loaded one is taken.

    Inputs: per instance the hit length c and the requests in flight l; L.

    Reasons: `match`, `no-match`.

        policy = "cache-aware"
        [policies.cache-aware]
        match_threshold = 0.5
    """

    name: ClassVar[str] = "cache-aware"

    match_threshold: float = 0.5

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Follow the longest prefix if it is long enough."""
        longest = view.longest_hit
        if not longest or longest <= self.match_threshold * request.length:
            return least_loaded(view, "no-match")
        return follow(view, longest_holder(view, view.load), "match")
