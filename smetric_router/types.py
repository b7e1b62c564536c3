"""The values that pass between the parts: what a decision sees, what it says, and the events that change the state.

All are frozen. Lengths of prompts are in canonical bytes (see `state/requests.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt as chained digests: `digests[i]` stands for the first `ends[i]` canonical bytes."""

    digests: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """All canonical bytes of the prompt."""
        return self.ends[-1] if self.ends else 0

    def chunks_within(self, length: int) -> int:
        """How many whole chunks lie within the first `length` bytes."""
        low, high = 0, len(self.ends)
        while low < high:
            middle = (low + high) // 2
            if self.ends[middle] <= length:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What is known of a request before it is placed, from the request alone."""

    model: str = ""
    tenant: str = ""
    turn: int | None = 0
    """Answers the conversation already holds. None: not told by the request, to be deduced from the prefix hit."""
    est_hit: int = 0
    """Bytes that the history should hit: up to, not including, the last assistant message."""
    chain: Chain = Chain()
    stream: bool = False


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance that may take the request."""

    id: str
    ordinal: int
    """Its fixed place among all instances."""
    load: int
    """Requests in flight."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The instances that may take one request, as they are at this moment."""

    instances: tuple[InstanceView, ...]
    hits: Mapping[str, int]
    """Hit length per instance in its local tier; an instance without a hit is left out."""
    placed: Mapping[str, float] = field(default_factory=dict)
    """How often each instance was given a new placement: the counter by which ties go round."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why."""

    instance: str
    reason: str
    """One word from a small set: it is a metric label and a response header."""
    scores: Mapping[str, float]
    """The figures that were compared, per instance."""
    placement: bool
    """Whether this was a new placement, which counts for the next tie, or followed the cache."""
    hit: int = 0
    """Bytes expected to be found in the chosen instance's local tier."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine reported of one answer; None where it said nothing."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """One attempt of one request at one instance. Its number is unique in the process."""

    number: int
    request: RequestInfo
    decision: Decision
    policy: str


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A request is about to be sent: it counts as load from now on."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt is over, however it ended."""

    number: int
    computed: bool = False
    """Whether the instance computed the prompt, so that it now holds it."""
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class InstanceUp:
    """An instance answered its health check."""

    instance: str


@dataclass(frozen=True, slots=True)
class InstanceDown:
    """An instance cannot be used."""

    instance: str
    cause: str


@dataclass(frozen=True, slots=True)
class ModelsSeen:
    """An instance listed its models: id -> the entry as the JSON bytes received."""

    instance: str
    models: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrainingChanged:
    """An instance is to take no new requests, or may again."""

    instance: str
    draining: bool


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """An instance dropped its local tier."""

    instance: str


Event = Dispatched | Finished | InstanceUp | InstanceDown | ModelsSeen | DrainingChanged | CacheCleared
