"""The values that pass between the parts: what is known of a request, what a decision says, and the events that change the state.

All are frozen; those that are made for every request are structs, which take a fifth of the time of dataclasses. Lengths of
prompts and hits are in canonical bytes (see `state/requests.py`), or in tokens for a request that was tokenised. What a
decision sees is in `view.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from smetric_router.blocks import BlockEvent, TokenPrompt


class Chain(Struct, frozen=True):
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


class RequestInfo(Struct, frozen=True):
    """What is known of a request before it is placed, from the request alone."""

    model: str = ""
    tenant: str = ""
    turn: int | None = 0
    """Answers the conversation already holds. None: not told by the request, to be deduced from the prefix hit."""
    est_hit: int = 0
    """What the history should hit: bytes up to the last assistant message, or tokens up to its end."""
    chain: Chain = Chain()
    stream: bool = False
    session: str = ""
    """The client's own name for its conversation; empty: it gave none."""
    tokens: TokenPrompt | None = None
    """The prompt as its engine will see it, where the router could tell; `est_hit` and hits are then in tokens."""

    @property
    def length(self) -> int:
        """Of the prompt, in the unit of its hits."""
        return self.chain.length if self.tokens is None else len(self.tokens.tokens)


class Decision(Struct, frozen=True):
    """Where a request goes, and why."""

    instance: str
    reason: str
    """One word from a small set: it is a metric label and a response header."""
    scores: Mapping[str, float]
    """The figures that were compared, per instance."""
    placement: bool
    """Whether this was a new placement, which counts for the next tie, or followed the cache."""
    hit: int = 0
    """What is expected to be found in the chosen instance's local tier."""


class Usage(Struct, frozen=True):
    """What an engine reported of one answer; None where it said nothing."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """What computing a prompt costs: a token through the linear layers, and its attention to each token before it.

    With `linear` at 1 a unit of work is a token of a short prompt, and `1 / attention` the context at which a token's
    attention costs as much as the rest: about active parameters / (2 * layers * query heads * head dimension).
    """

    linear: float = 1.0
    attention: float = 0.0001

    def work(self, length: Any, new: Any) -> Any:
        """Of the last `new` of `length` tokens: linear * new + attention * new * (length - new / 2).

        Numbers, or arrays of them.
        """
        return self.linear * new + self.attention * new * (length - new / 2)


PREFILL_COST = PrefillCost()
"""Unless it is set."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine says of its load, whoever sent the requests."""

    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    queued_tokens: int | None = None
    """Prompt tokens that wait to be computed."""


class Ticket(Struct, frozen=True):
    """One attempt of one request at one instance. Its number is unique in the process."""

    number: int
    request: RequestInfo
    decision: Decision
    policy: str


class Dispatched(Struct, frozen=True):
    """A request is about to be sent: it counts as load from now on."""

    ticket: Ticket


class FirstByte(Struct, frozen=True):
    """The first byte of an attempt's answer has come, so its prompt waits no more."""

    number: int
    computed: bool = False
    """Whether the prompt was computed for it, and nothing more: only then does the time taken tell how fast that is."""


class Finished(Struct, frozen=True):
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
class BreakerChanged:
    """An instance is to be left alone because requests fail there, or no more."""

    instance: str
    open: bool


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """An instance dropped its local tier."""

    instance: str


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """A data-parallel rank of an instance says what it holds."""

    instance: str
    rank: int
    event: BlockEvent


@dataclass(frozen=True, slots=True)
class FeedChanged:
    """From now on an instance tells what it holds, or does so no more."""

    instance: str
    live: bool


@dataclass(frozen=True, slots=True)
class EngineReported:
    """An instance answered how loaded it is."""

    instance: str
    report: EngineReport
    own: int
    """Requests of this router that were in flight there when it was asked."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A process has sent a prompt to an instance: the chunks behind one that is known."""

    flight: int
    """Names the attempt among all processes; 0: it names none."""
    instance: int
    """Its ordinal among the instances, which all processes and replicas list alike."""
    parent: int
    """The digest before the first; 0: the prompt begins here."""
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """What an attempt has shown: it came to nothing, or the instance held no more than so many chunks."""

    flight: int
    resident: int
    """-1: it came to nothing."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """An instance has lost its cache."""

    instance: int


@dataclass(frozen=True, slots=True)
class DrainingTold:
    """An instance is to take no new requests, or may again."""

    instance: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody does not know the digest before some chunks, and asks for the whole up to `leaf`."""

    instance: int
    leaf: int


Told = Recorded | Settled | Forgotten | DrainingTold


@dataclass(frozen=True, slots=True)
class Heard:
    """Another process or router tells what was done to its index."""

    told: Told


Event = (
    Dispatched
    | FirstByte
    | Finished
    | InstanceUp
    | InstanceDown
    | ModelsSeen
    | DrainingChanged
    | BreakerChanged
    | CacheCleared
    | BlocksChanged
    | FeedChanged
    | EngineReported
    | Heard
)
