"""What a decision sees of the cluster: one column of figures per instance, in arrays.

A decision looks at every instance, and in a cluster of a thousand an object for each would cost more than reading the
request. The arrays also let a policy be written as its formula.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from smetric_router.types import PREFILL_COST, PrefillCost

Figures: TypeAlias = NDArray[np.float64]

# Until a model's answers have told: English text in JSON.
BYTES_PER_TOKEN = 4.0


class Row(IntEnum):
    """The rows of the table of figures. Of the first ones several processes' figures add up."""

    LOAD = 0
    PENDING = 1
    WORK = 2
    CONTEXT = 3
    WAITING = 4
    RATE = 5


# As plain numbers: a member of an enum takes three times as long to be an index.
LOAD, PENDING, WORK, CONTEXT, WAITING, RATE = map(int, Row)
ADDED = len((Row.LOAD, Row.PENDING, Row.WORK, Row.CONTEXT))
"""So many."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One column: an instance that may take the request."""

    id: str
    load: float = 0
    """Requests in flight: this router's, and those of others that the engine has reported."""
    pending: float = 0
    """Prompt tokens sent there and not computed yet."""
    work: float = 0
    """The same as work, by the cost of prefill."""
    context: float = 0
    """Prompt tokens of the requests that this router has in flight there."""
    waiting: float = 0
    """Requests in the engine's queue when it last reported."""
    rate: float = np.inf
    """Work per second when it computes prompts; infinite until that is known."""


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Instances that may take a request, in the order of the columns; the same until one comes or goes."""

    names: tuple[str, ...]
    positions: Mapping[str, int]
    digests: NDArray[np.uint64]
    """A number per instance that depends on its name alone."""
    ordinals: NDArray[np.intp]
    """Their places among all instances."""

    @classmethod
    def of(cls, names: Iterable[str], ordinals: Iterable[int] | None = None) -> "Members":
        """The members with these names."""
        names = tuple(names)
        return cls(
            names,
            {name: at for at, name in enumerate(names)},
            np.array([xxh3_64_intdigest(name.encode()) for name in names], dtype=np.uint64),
            np.array(range(len(names)) if ordinals is None else list(ordinals), dtype=np.intp),
        )

    def without(self, names: Collection[str]) -> "Members":
        """The rest of them."""
        kept = [at for at, name in enumerate(self.names) if name not in names]
        rest = tuple([self.names[at] for at in kept])
        return Members(rest, {name: at for at, name in enumerate(rest)}, self.digests[kept], self.ordinals[kept])


class ClusterView(Struct, frozen=True, eq=False):
    """The instances that may take one request, as they are at this moment. Nothing in it changes any more."""

    members: Members
    table: Figures
    """Shape (rows, members); see Row."""
    hit: Figures
    """Hit length of the prompt in each one's local tier, in the unit of the index."""
    placed: Figures
    """How often each was given a new placement: the counter by which ties go round."""
    bytes_per_token: float = BYTES_PER_TOKEN
    """Of the unit in which this prompt and its hits are measured: 1 where that is tokens."""
    cost: PrefillCost = PREFILL_COST
    """By which WORK and RATE are counted."""
    draw: int = 0
    """Chance, for a policy that needs it: a number of 64 bits that is different for every decision."""

    @classmethod
    def of(
        cls,
        instances: Iterable[InstanceView],
        hits: Mapping[str, int] | None = None,
        placed: Iterable[float] | None = None,
        *,
        bytes_per_token: float = BYTES_PER_TOKEN,
        cost: PrefillCost = PREFILL_COST,
        draw: int = 0,
    ) -> "ClusterView":
        """A view of these instances. `hits`: hit length by id; `placed`: in their order."""
        instances = list(instances)
        table = np.array(
            [[getattr(each, row.name.lower()) for each in instances] for row in Row], dtype=np.float64
        ).reshape(len(Row), len(instances))
        counts = np.zeros(len(instances)) if placed is None else np.array(list(placed), dtype=np.float64)
        hit = np.array([(hits or {}).get(each.id, 0) for each in instances], dtype=np.float64)
        return cls(Members.of(each.id for each in instances), table, hit, counts, bytes_per_token, cost, draw)

    @property
    def names(self) -> tuple[str, ...]:
        """Their ids."""
        return self.members.names

    @property
    def load(self) -> Figures:
        """Requests in flight."""
        return self._row(LOAD)

    @property
    def pending(self) -> Figures:
        """Prompt tokens sent and not computed yet."""
        return self._row(PENDING)

    @property
    def work(self) -> Figures:
        """The same as work."""
        return self._row(WORK)

    @property
    def waiting(self) -> Figures:
        """Requests in the engines' queues as last reported."""
        return self._row(WAITING)

    @property
    def context(self) -> Figures:
        """Prompt tokens of this router's requests in flight."""
        return self._row(CONTEXT)

    @property
    def rate(self) -> Figures:
        """Work per second; infinite where it is not known."""
        return self._row(RATE)

    def _row(self, row: int) -> Figures:
        found: Figures = self.table[row]
        return found

    @property
    def instances(self) -> tuple[InstanceView, ...]:
        """The columns one by one, to look at."""
        return tuple(
            InstanceView(name, *column) for name, column in zip(self.names, self.table.T.tolist(), strict=True)
        )

    @property
    def hits(self) -> dict[str, int]:
        """The hit lengths by id, of those that have one, to look at."""
        return {name: int(hit) for name, hit in zip(self.names, self.hit.tolist(), strict=True) if hit}

    @property
    def longest_hit(self) -> int:
        """0: no instance holds any of the prompt."""
        return int(self.hit[self.hit.argmax()]) if len(self.hit) else 0


class Scores(Mapping[str, float]):
    """Figures by instance, kept as the array they were computed in: most are never looked at."""

    __slots__ = ("_members", "_values")

    def __init__(self, members: Members, values: Figures) -> None:
        self._members = members
        self._values = values

    def __getitem__(self, name: str) -> float:
        return float(self._values[self._members.positions[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._members.names)

    def __len__(self) -> int:
        return len(self._members.names)

    def __repr__(self) -> str:
        return repr(dict(self))
