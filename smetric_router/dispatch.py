"""The one brain: a view of the state, a decision of the policy, and the record of both.

The server and a simulator are two shells around it. Time is an argument.
"""

from collections.abc import Collection

from smetric_router.policies.base import Policy
from smetric_router.state.cluster import ClusterState
from smetric_router.state.requests import with_deduced_turn
from smetric_router.types import Dispatched, Finished, RequestInfo, Ticket, Usage


class Dispatcher:
    """Places requests. Every ticket it hands out must be given back by `finish`, whatever happened."""

    def __init__(self, state: ClusterState, policy: Policy) -> None:
        self.state = state
        self.policy = policy
        self._tickets = 0

    def __repr__(self) -> str:
        return f"<Dispatcher {self.policy.name}, {self._tickets} tickets, {self.state!r}>"

    def dispatch(
        self, request: RequestInfo, now: float, *, policy: Policy | None = None, exclude: Collection[str] = ()
    ) -> Ticket:
        """Choose an instance and count the request there. Raises UnknownModel or NoInstance."""
        policy = policy or self.policy
        view = self.state.view(request, exclude)
        request = with_deduced_turn(request, view)
        decision = policy.decide(request, view)
        self._tickets += 1
        ticket = Ticket(self._tickets, request, decision, policy.name)
        self.state.apply(Dispatched(ticket), now)
        return ticket

    def finish(self, ticket: Ticket, now: float, *, computed: bool = False, usage: Usage | None = None) -> None:
        """Release the ticket and learn from the answer. A second call for the same ticket does nothing."""
        self.state.apply(Finished(ticket.number, computed, usage or Usage()), now)
