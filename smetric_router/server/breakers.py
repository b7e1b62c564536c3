"""The circuit breakers of all instances: told of each request's end, they tell the state who may be given more."""

from collections.abc import Callable, Iterable

from smetric_router.config import RouterConfig
from smetric_router.server.logs import log
from smetric_router.state.breaker import Breaker, BreakerState
from smetric_router.state.cluster import ClusterState
from smetric_router.types import BreakerChanged


class Breakers:
    """See the module."""

    def __init__(
        self, state: ClusterState, config: RouterConfig, instances: Iterable[str], clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._clock = clock
        self._breakers = {
            name: Breaker(
                failures_min=config.breaker_failures_min,
                window_s=config.breaker_window_s,
                open_s=config.breaker_open_s,
            )
            for name in instances
        }
        self._not_closed: set[str] = set()

    def __repr__(self) -> str:
        return f"<Breakers, not closed: {sorted(self._not_closed)}>"

    def sent(self, instance: str) -> None:
        """A request is sent there."""
        if instance in self._not_closed:
            self._breakers[instance].sent()
            self._tell(instance)

    def began(self, instance: str) -> None:
        """An answer has begun there that is no failure."""
        if instance in self._not_closed:
            self._breakers[instance].began()
            self._tell(instance)

    def ended(self, instance: str, *, failed: bool | None) -> None:
        """A request has ended there; None: without saying anything of the instance."""
        breaker = self._breakers[instance]
        breaker.ended(failed=failed, now=self._clock())
        if breaker.state is not BreakerState.CLOSED or instance in self._not_closed:
            self._tell(instance)

    def check(self, now: float) -> None:
        """Call it now and then."""
        for instance in list(self._not_closed):
            self._breakers[instance].tick(now)
            self._tell(instance)

    def _tell(self, instance: str) -> None:
        breaker = self._breakers[instance]
        was_closed = instance not in self._not_closed
        if breaker.state is BreakerState.CLOSED:
            self._not_closed.discard(instance)
        else:
            self._not_closed.add(instance)
        if was_closed != (breaker.state is BreakerState.CLOSED):
            event = "breaker opens" if was_closed else "breaker closes"
            log.warning(event, extra={"fields": {"instance": instance}})
        self._state.apply(BreakerChanged(instance, not breaker.admits), self._clock())
