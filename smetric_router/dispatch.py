"""The one brain: a view of the state, a decision of the policy, and the record of both.

The server and a simulator are two shells around it. Time and chance are arguments.
"""

from collections.abc import Collection

from smetric_router.policies.base import Policy
from smetric_router.state.cluster import ClusterState
from smetric_router.state.requests import with_deduced_turn
from smetric_router.types import Dispatched, Finished, FirstByte, RequestInfo, Ticket, Usage


class Dispatcher:
    """Places requests. Every ticket it hands out must be given back by `finish`, whatever happened.

    Args:
        seed: where the numbers begin that policies with chance use. The same seed gives the same decisions.
    """

    def __init__(self, state: ClusterState, policy: Policy, seed: int = 0) -> None:
        self.state = state
        self.policy = policy
        self._seed = seed
        self._tickets = 0

    def __repr__(self) -> str:
        return f"<Dispatcher {self.policy.name}, {self._tickets} tickets, {self.state!r}>"

    def dispatch(
        self, request: RequestInfo, now: float, *, policy: Policy | None = None, exclude: Collection[str] = ()
    ) -> Ticket:
        """Choose an instance and count the request there. Raises UnknownModel or NoInstance."""
        policy = policy or self.policy
        view = self.state.view(request, exclude, now, draw=_mixed(self._seed, self._tickets))
        request = with_deduced_turn(request, view)
        decision = policy.decide(request, view)
        self._tickets += 1
        ticket = Ticket(self._tickets, request, decision, policy.name)
        try:
            self.state.apply(Dispatched(ticket), now)
        except BaseException:
            self.finish(ticket, now)  # nobody else has it
            raise
        return ticket

    def first_byte(self, ticket: Ticket, now: float, *, computed: bool) -> None:
        """The answer has begun, so the prompt waits no more. `computed`: it was accepted, so it has been computed."""
        # An answer that is not a stream begins when it is complete, which tells nothing of the prompt.
        self.state.apply(FirstByte(ticket.number, computed and ticket.request.stream), now)

    def finish(self, ticket: Ticket, now: float, *, computed: bool = False, usage: Usage | None = None) -> None:
        """Release the ticket and learn from the answer. A second call for the same ticket does nothing."""
        self.state.apply(Finished(ticket.number, computed, usage or Usage()), now)


def _mixed(seed: int, count: int) -> int:
    """A number of 64 bits in which every bit depends on both (the step of splitmix64)."""
    mixed = (seed + count * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31
