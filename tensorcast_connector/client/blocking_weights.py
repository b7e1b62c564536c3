"""Published versions for programs without an event loop (client/blocking.py): every method waits."""

from collections.abc import Mapping, Sequence
from typing import Any

from tensorcast_connector.client.artifact import Slices
from tensorcast_connector.client.caller_loop import CallerLoop
from tensorcast_connector.client.files import Tensors
from tensorcast_connector.client.publisher import WeightPublisher
from tensorcast_connector.client.tensors import Framework
from tensorcast_connector.client.weights import Weights, WeightVersion
from tensorcast_connector.config import PLAN_DEADLINE_S
from tensorcast_connector.core.weights import TensorEntry


class BlockingWeightPublisher:
    """See `WeightPublisher`. Made by `BlockingSession.weight_publisher`."""

    def __init__(self, loop: CallerLoop, publisher: WeightPublisher) -> None:
        self._loop = loop
        self._publisher = publisher

    def __repr__(self) -> str:
        return f"<Blocking {self._publisher!r}>"

    def publish(
        self, tensors: Tensors, version: int | str, *, order: int | None = None, rollback: bool = False
    ) -> WeightVersion:
        """See WeightPublisher.publish."""
        return self._loop.run(self._publisher.publish(tensors, version, order=order, rollback=rollback))


class BlockingWeights:
    """See `Weights`."""

    def __init__(self, loop: CallerLoop, weights: Weights) -> None:
        self._loop = loop
        self._weights = weights

    def __repr__(self) -> str:
        return f"<Blocking {self._weights!r}>"

    @property
    def published(self) -> WeightVersion:
        """See Weights."""
        return self._weights.published

    @property
    def version(self) -> int | str:
        """See Weights.version."""
        return self._weights.version

    @property
    def id(self) -> str:
        """See Weights.id."""
        return self._weights.id

    @property
    def reference(self) -> str:
        """See Weights.reference."""
        return self._weights.reference

    @property
    def part_ids(self) -> tuple[str, ...]:
        """See Weights.part_ids."""
        return self._weights.part_ids

    @property
    def names(self) -> tuple[str, ...]:
        """See Weights.names."""
        return self._weights.names

    @property
    def specs(self) -> Mapping[str, TensorEntry]:
        """See Weights."""
        return self._weights.specs

    def changed_since(self, other: "BlockingWeights | None") -> tuple[str, ...]:
        """See Weights.changed_since."""
        return self._weights.changed_since(other._weights if other is not None else None)

    def view(self, *, slices: Slices | None = None, names: Sequence[str] | None = None) -> "BlockingWeights":
        """See Weights.view."""
        return BlockingWeights(self._loop, self._weights.view(slices=slices, names=names))

    def tensor(self, name: str, *, framework: Framework = "numpy") -> Any:
        """See Weights.tensor."""
        return self._loop.run(self._weights.tensor(name, framework=framework))

    def tensor_dict(self, *, framework: Framework = "numpy") -> dict[str, Any]:
        """See Weights.tensor_dict."""
        return self._loop.run(self._weights.tensor_dict(framework=framework))

    def prefetch(self, to: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """See Weights.prefetch."""
        self._loop.run(self._weights.prefetch(to, timeout_s))

    def pin(self, ttl_s: float, on: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """See Weights.pin."""
        self._loop.run(self._weights.pin(ttl_s, on, timeout_s))

    def unpin(self, on: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """See Weights.unpin."""
        self._loop.run(self._weights.unpin(on, timeout_s))
