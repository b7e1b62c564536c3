"""Requests that wait for room: first come, first served within a model, each with a deadline. Time is an argument."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from smetric_router.errors import Overloaded

Waiter = TypeVar("Waiter", bound=Hashable)


class WaitingRoom(Generic[Waiter]):
    """See the module. One model's queue never holds up another's.

    Args:
        places: for so many requests in all; 0: nobody waits.
        timeout_s: the longest wait, in seconds.
    """

    def __init__(self, places: int, timeout_s: float) -> None:
        self._places = places
        self._timeout_s = timeout_s
        self._queues: dict[str, OrderedDict[Waiter, float]] = {}
        self._model_of: dict[Waiter, str] = {}

    def __repr__(self) -> str:
        return f"<WaitingRoom {len(self)} of {self._places}>"

    def __len__(self) -> int:
        return len(self._model_of)

    def has(self, model: str) -> bool:
        """Whether somebody waits for the model."""
        return model in self._queues

    def enter(self, model: str, waiter: Waiter, now: float) -> None:
        """Takes the last place for the model. Raises Overloaded when there is none."""
        if len(self) >= self._places:
            held = f"and {len(self)} wait already" if self._places else "and none may wait"
            raise Overloaded(f"no instance has room for another request, {held}", retry_after_s=1)
        assert waiter not in self._model_of
        self._model_of[waiter] = model
        self._queues.setdefault(model, OrderedDict())[waiter] = now + self._timeout_s

    def leave(self, waiter: Waiter) -> None:
        """It waits no more, whether it did or not."""
        model = self._model_of.pop(waiter, None)
        if model is not None:
            queue = self._queues[model]
            del queue[waiter]
            if not queue:
                del self._queues[model]

    def models(self) -> list[str]:
        """The models that somebody waits for; the one served longest ago first."""
        return list(self._queues)

    def first(self, model: str) -> Waiter | None:
        """Whose turn is next."""
        queue = self._queues.get(model)
        return next(iter(queue)) if queue else None

    def served(self, model: str) -> None:
        """The other models come first next time."""
        if (queue := self._queues.pop(model, None)) is not None:
            self._queues[model] = queue

    def overdue(self, now: float) -> Iterator[Waiter]:
        """Those whose deadline has passed."""
        for queue in list(self._queues.values()):
            for waiter, deadline in list(queue.items()):
                if deadline > now:
                    break
                yield waiter
