"""Which weights this process computes with just now: what the pages it shares belong to.

SGLang changes weights in place and empties its caches by a call of its own, in either order. So after a change nothing is
shared until the caches were emptied: what they hold until then may be of the former weights.
"""

import threading

from tensorcast_connector.engines.weights_epoch import private_epoch


class LiveWeights:
    """See the module. One per process; any thread may ask.

    `identity` is None while it is not known; two equal ones are the same weights, in every process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = False
        self._next: str | None = None
        self._before: tuple[bool, str | None, str | None] | None = (
            None  # the three of them before a change that may end
        )
        self.identity: str | None = None

    def __repr__(self) -> str:
        return f"<LiveWeights {self.identity}>"

    def found(self, identity: str) -> None:
        """What the engine was started with. Comes from a thread that read the files, so a change may have been faster."""
        with self._lock:
            if not self._changed:
                self.identity = identity
            elif self._before is not None and not self._before[0]:
                self._before = False, None, identity

    def changing(self) -> None:
        """Some weight is about to be written. Whatever was declared before does not hold any more."""
        with self._lock:
            self._before = self._changed, self._next, self.identity
            self._changed = True
            self._next = self.identity = None

    def kept(self) -> None:
        """The change that was announced last does not take place: no weight was written."""
        with self._lock:
            if self._before is not None:
                self._changed, self._next, self.identity = self._before
                self._before = None

    def settling(self) -> None:
        """A change of several steps is over. What was computed between them is of neither weights, so a flush must follow."""
        with self._lock:
            self._changed = True
            self.identity = None

    def declared(self, identity: str) -> None:
        """What the weights are now, said by who has changed them; takes effect with the next flush. The first word counts."""
        with self._lock:
            if self._changed and self.identity is None and self._next is None:
                self._next = identity

    def flushed(self) -> None:
        """The caches hold nothing of former weights. If nobody has said what the weights are, nobody else has them."""
        with self._lock:
            if self._changed and self.identity is None:
                self.identity = self._next or private_epoch()


live = LiveWeights()
