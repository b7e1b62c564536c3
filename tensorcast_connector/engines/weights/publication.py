"""What a rank has loaded is published while the engine goes on, so that the next one like it maps it.

The engine may change or free its parameters as soon as they are loaded, so they are not looked at again: a thread of low
priority carries the plan out once more, from where the tensors are, into memory of the pool. Only what no copy of the plan
writes (padding, small tensors that the model was given for real) is taken from the parameters before the engine goes on.
"""

import atexit
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import torch

from tensorcast_connector.client.blocking import BlockingSession, BlockingUpload
from tensorcast_connector.config import PUBLISH_END_S, PUBLISH_NICE
from tensorcast_connector.core.identity import digest
from tensorcast_connector.engines.weights.lineage import Lineage
from tensorcast_connector.engines.weights.load_plan import Copy, LoadPlan
from tensorcast_connector.engines.weights.load_sources import Source
from tensorcast_connector.engines.weights.materialised import KEY_TENSOR, KeyDocument, Materialised, NotShared
from tensorcast_connector.engines.weights.shadow import Shadow, uncovered
from tensorcast_connector.errors import NotFound, TensorcastError


class _Ended(Exception):
    """The engine ends."""


class Publication:
    """One rank's parameters, from before they are loaded. Refers to no memory of theirs, nor to the model, once it has begun.

    Args:
        lineage: where they come from, if what comes from there later takes their place.
        claim: the same for all who would publish the same to the same pool.
        replace: whatever the name points to now.
        say: one line for people.
        closing: has what this needs open, the session and the source. What is opened here goes into it.

    Raises:
        NotShared: they cannot be.
        TensorcastError: the pool has no room.
    """

    def __init__(
        self, pool: BlockingSession, materialised: Materialised, document: KeyDocument, plan: LoadPlan, source: Source,
        lineage: Lineage | None, claim: str, replace: bool, say: Callable[[str], None], closing: ExitStack,
    ) -> None:  # fmt: skip
        self._pool = pool
        self._document = document
        self._lineage = lineage
        self._claim = claim
        self._replace = replace
        self._say = say
        self._slots = materialised.loaded(plan)
        self._specs = [slot.spec for slot in self._slots.values()]
        self._bytes = sum(slot.bytes for slot in self._slots.values())
        self._key = document.encode()
        self._shadows: dict[str, list[Shadow]] = {name: [] for name in self._slots}
        for copy in plan.copies:
            slot = materialised.slot_of(copy.target)
            if slot is None:
                raise NotShared(f"{copy.name} goes to memory that is no parameter's")
            self._shadows[slot.name].append(Shadow.of(copy, slot.name, slot.tensor))
        self._taken: list[tuple[str, int, torch.Tensor]] = []  # slot, first byte, bytes
        self._closing = closing
        self._ending = threading.Event()
        self._after: threading.Event | None = None
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)
        self._source = source.again()
        self._upload = self._open() if self._source is None else None
        self.beside: Sequence[Copy] = self._copies(self._upload) if self._upload is not None else ()
        """To be made together with those of the plan: the source is too far away to be read twice."""

    def begin(self, after: threading.Event | None = None) -> bool:
        """The parameters are loaded: returns as soon as they may be changed; whether they are being published then.

        What was open is closed when that has ended.

        Args:
            after: set when the engine has done what it needs the cores and the memory's speed for; at once unless given.
        """
        self._after = after
        self.beside = ()
        self._closing = self._closing.pop_all()
        try:
            for name, slot in self._slots.items():
                for start, stop in uncovered(slot.bytes, self._shadows[name]):
                    data = slot.tensor.detach().reshape(-1).view(torch.uint8)[start:stop]
                    self._taken.append((name, start, data.to("cpu", copy=True)))
            self._slots = {}
            atexit.register(self.end)
            self._thread.start()
            return True
        except Exception as error:  # no memory, no thread
            self._say(f"not shared: {type(error).__name__}: {error}")
            atexit.unregister(self.end)
            self._closing.close()
            return False

    def end(self) -> None:
        """Nothing more is read. Waits a moment, so that the thread is not in the middle of something when the process ends."""
        self._ending.set()
        if self._after is not None:
            self._after.set()
        self._thread.join(PUBLISH_END_S)

    # --- the thread ---

    def _run(self) -> None:
        try:
            with self._closing:
                if self._after is not None:
                    self._after.wait()
                    self._go_on()
                begun = time.perf_counter()
                _yield_to_others()
                with claimed(self._claim) as mine:
                    why = self._publish() if mine else "another engine is sharing the same"
            took = time.perf_counter() - begun
            self._say(why or f"shared from now on: {self._bytes / 1e9:.3f} GB in {took:.3f} s beside the engine")
        except _Ended:
            pass
        except Exception as error:  # the engine is served all the same
            self._say(f"not shared: {error}" if str(error) else f"not shared: {type(error).__name__}")
        finally:
            atexit.unregister(self.end)

    def _publish(self) -> str:
        """Why it was not necessary; "" if it is done."""
        if not self._replace and self._is_there():
            return "shared by another engine meanwhile"
        self._make_room()
        if self._upload is None:
            self._upload = self._open()
        if self._source is not None:
            self._fill(self._upload, self._source)
            self._source.check()
        self._fill_in(self._upload)
        for chunk in range(self._upload.upload.chunks):
            self._go_on()
            self._upload.upload.digest(chunk)
        self._upload.upload.seal()
        self._go_on()
        self._upload.commit(self._document.name)
        if self._lineage is not None:
            with suppress(TensorcastError):  # it is shared all the same, and stays until it is deleted
                self._pool.name(self._lineage.name(self._document.name), self._document.name)
        return ""

    def _make_room(self) -> None:
        """What was loaded from former files goes, once it is certain that these are still there."""
        if self._lineage is not None and self._source is not None:
            self._source.check()
            if freed := self._lineage.forget_former(self._pool):
                self._say(f"{freed / 1e9:.3f} GB of files that were written over are no longer in the pool")

    def _is_there(self) -> bool:
        with suppress(NotFound):
            return bool(self._pool.artifact(self._document.name).describe().workers)
        return False

    def _open(self) -> BlockingUpload:
        opened = self._pool.upload([*self._specs, (KEY_TENSOR, "uint8", (len(self._key),))])
        self._closing.callback(opened.close)
        return opened

    def _fill(self, upload: BlockingUpload, source: Source) -> None:
        source.fill(self._copies(upload), lambda _: self._go_on())

    def _fill_in(self, upload: BlockingUpload) -> None:
        memory = _parts(upload)
        memory[KEY_TENSOR].copy_(torch.from_numpy(np.frombuffer(self._key, np.uint8).copy()))
        for name, start, data in self._taken:
            memory[name][start : start + data.numel()].copy_(data)
        self._taken.clear()

    def _copies(self, upload: BlockingUpload) -> list[Copy]:
        memory = _parts(upload)
        return [each.on(memory[name]) for name, shadows in self._shadows.items() for each in shadows]

    def _go_on(self) -> None:
        if self._ending.is_set():
            raise _Ended


def _parts(upload: BlockingUpload) -> Mapping[str, torch.Tensor]:
    """The bytes of each tensor. To be let go of before the upload is sealed."""
    return {
        each.name: torch.frombuffer(upload.upload.memory, dtype=torch.uint8, count=each.bytes, offset=each.offset)
        for each in upload.upload.specs
    }


def _yield_to_others() -> None:
    """Makes this thread one of low priority, not of the lowest: who waits for Python's lock waits for it too."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(PUBLISH_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


@contextmanager
def claimed(what: str) -> Iterator[bool]:
    """Whether no other process of this host does it now. It ends with the process. Where that cannot be known: yes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        try:
            held.bind(f"\0tensorcast-{digest(what)}")
            mine = True
        except OSError as error:
            mine = error.errno != errno.EADDRINUSE
        yield mine
