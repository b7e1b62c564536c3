"""What processes and replicas tell each other of their observed indices: what was done to one is done to the others.

Everything may be lost or come twice: the price is a missed hit, or one that is none, which the answer corrects.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from smetric_router.state.prefix_index import PrefixIndex, Use
from smetric_router.types import Chain, Forgotten, Recorded, Settled, Told, Wanted

FLIGHTS_HEARD_MAX = 4096
"""Attempts of others of which it may still be heard that they came to nothing."""


class Telling:
    """Tells of one index, and hears of others.

    Args:
        names: of the instances, in the order that all share.
        process: tells attempts of this process from those of others.
    """

    def __init__(self, index: PrefixIndex, names: list[str], process: int) -> None:
        self.tell: Callable[[Told | Wanted], None] | None = None
        """Is told what others should hear."""
        self._index = index
        self._names = names
        self._process = process << 32
        self._heard: OrderedDict[int, Use] = OrderedDict()  # by flight

    def __repr__(self) -> str:
        return f"<Telling {len(self._heard)} flights of others>"

    def recorded(self, number: int, instance: int, use: Use) -> None:
        """A prompt is sent to an instance."""
        if self.tell is not None and use.chain.digests:
            digests, known = use.chain.digests, use.known
            before = digests[known - 1] if known else 0
            self.tell(Recorded(self._process | number, instance, before, digests[known:]))

    def settled(self, number: int, use: Use, *, computed: bool, resident: int | None) -> None:
        """An attempt is over; that it went as expected is not worth a word."""
        if self.tell is not None and use.chain.digests and (resident is not None or not computed):
            held = -1 if not computed or resident is None else use.chain.chunks_within(resident)
            self.tell(Settled(self._process | number, held))

    def forgotten(self, instance: int) -> None:
        """An instance lost its cache."""
        if self.tell is not None:
            self.tell(Forgotten(instance))

    def hear(self, told: Recorded | Settled | Forgotten) -> None:
        """Does to this index what another process has done to its own."""
        match told:
            case Recorded():
                self._hear_recorded(told)
            case Settled():
                use = self._heard.pop(told.flight, None)
                if use is not None:
                    resident = None if told.resident < 0 else told.resident
                    self._index.settle(use, computed=resident is not None, resident=resident)
            case Forgotten():
                if 0 <= told.instance < len(self._names):
                    self._index.forget(self._names[told.instance])

    def _hear_recorded(self, told: Recorded) -> None:
        if not 0 <= told.instance < len(self._names):
            return
        before = self._index.prefix(told.parent) if told.parent else ()
        if before is None:
            if self.tell is not None:
                self.tell(Wanted(told.instance, told.digests[-1] if told.digests else told.parent))
            return
        digests = before + told.digests
        # Measured in chunks instead of bytes, as what is heard of it later is.
        use = self._index.record(self._names[told.instance], Chain(digests, tuple(range(1, len(digests) + 1))))
        self._index.settle(use, computed=True)
        if told.flight:
            self._heard[told.flight] = use
            if len(self._heard) > FLIGHTS_HEARD_MAX:
                self._heard.popitem(last=False)

    def known(self, chunks_max: int) -> Iterator[Recorded]:
        """The index as what makes it, for somebody who begins: about so many chunks, the last used ones."""
        each_max = max(1, chunks_max // len(self._names))
        for ordinal, name in enumerate(self._names):
            for before, digests in self._index.chains(name, each_max):
                yield Recorded(0, ordinal, before, digests)

    def wanted(self, wanted: Wanted) -> Recorded | None:
        """The whole chain that somebody asks for."""
        digests = self._index.prefix(wanted.leaf)
        return None if digests is None else Recorded(0, wanted.instance, 0, digests)
