"""A checkpoint in the memory of workers on other hosts: only the boxes of its tensors that a plan needs are fetched."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from tensorcast_connector.client.blocking import BlockingArtifact, BlockingSession, connect_blocking
from tensorcast_connector.client.blocking_weights import BlockingWeights
from tensorcast_connector.core.artifact import Bounds
from tensorcast_connector.engines.weights.load_plan import Copy, Given
from tensorcast_connector.engines.weights.load_sources import Pooled, Source, Stage, torch_dtype
from tensorcast_connector.errors import TensorcastError


class Shaped(Protocol):
    """What is known of a tensor: artifacts and published versions both say it."""

    @property
    def dtype(self) -> str:
        """As artifacts spell it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A tensor of the checkpoint that lies elsewhere: as `inner` in an artifact, asked of a worker that has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    artifact: BlockingArtifact
    inner: str


class AtPeer:
    """See Source (load_sources.py).

    Args:
        what: which weights these are and where, for people.
    """

    def __init__(self, tensors: Iterable[Remote], what: str) -> None:
        self._tensors: Mapping[str, Remote] = {each.name: each for each in tensors}
        self._what = what

    @property
    def what(self) -> str:
        """See Source."""
        return self._what

    @property
    def given(self) -> Sequence[Given]:
        """See Source."""
        return [(each.name, torch_dtype(each.name, each.dtype), each.shape) for each in self._tensors.values()]

    def read(self, name: str) -> torch.Tensor:
        """See Source."""
        found = self._tensors[name]
        tensor: torch.Tensor = found.artifact.tensor(found.inner, framework="torch")
        return tensor

    def streamed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Source."""
        for name in self._tensors:
            yield name, self.read(name)

    def again(self) -> Source | None:
        """See Source: no byte comes over the network twice."""
        return None

    def fill(self, copies: Sequence[Copy], progress: Callable[[int], None]) -> int:
        """See Source. One tensor after the other, so that little memory is needed; each comes over several connections."""
        wanted: dict[str, list[Copy]] = {}
        for copy in copies:
            wanted.setdefault(copy.name, []).append(copy)
        stage = Stage()
        try:
            return self._fill(wanted, stage, progress)
        finally:
            stage.finish()

    def _fill(self, wanted: Mapping[str, Sequence[Copy]], stage: Stage, progress: Callable[[int], None]) -> int:
        done = 0
        for name, mine in wanted.items():
            spec = self._tensors[name]
            box = union([bounds(each, spec) for each in mine])
            slices = tuple(slice(*each) for each in box)
            view = spec.artifact.view(slices={spec.inner: slices} if slices else {}, names=[spec.inner])
            part = view.tensor(spec.inner, framework="torch")
            # Only what is written of it is in memory.
            whole = torch.empty(spec.shape, dtype=part.dtype)
            whole[slices] = part
            done += part.numel() * part.itemsize
            for copy in mine:
                wanted_part = whole.reshape(-1).view(copy.dtype).as_strided(copy.shape, copy.stride, copy.offset)
                if copy.target.device.type == "cpu":
                    copy.target.copy_(wanted_part)
                else:
                    stage.send(copy.target, wanted_part.to(copy.target.dtype))
            progress(done)
        return done

    def check(self) -> None:
        """See Source: nothing can change an artifact."""


class Scattered:
    """A published version of which some parts are on this host and others are not; see Source (load_sources.py).

    Args:
        order: the names of all tensors.
    """

    def __init__(self, here: Source, there: AtPeer, order: Sequence[str]) -> None:
        self._here = here
        self._there = there
        self._given = {each[0]: each for source in (here, there) for each in source.given}
        self._order = order
        self._far = {each[0] for each in there.given}

    @property
    def what(self) -> str:
        """See Source."""
        return f"{self._here.what} and {self._there.what}"

    @property
    def given(self) -> Sequence[Given]:
        """See Source."""
        return [self._given[name] for name in self._order]

    def read(self, name: str) -> torch.Tensor:
        """See Source."""
        return (self._there if name in self._far else self._here).read(name)

    def streamed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Source."""
        for name in self._order:
            yield name, self.read(name)

    def again(self) -> Source | None:
        """See Source: no byte comes over the network twice."""
        return None

    def fill(self, copies: Sequence[Copy], progress: Callable[[int], None]) -> int:
        """See Source."""
        near = [each for each in copies if each.name not in self._far]
        done = self._here.fill(near, progress)
        far = [each for each in copies if each.name in self._far]
        return done + self._there.fill(far, lambda read: progress(done + read))

    def check(self) -> None:
        """See Source: nothing can change an artifact."""


class Peers:
    """Sessions with workers of other hosts, so that what they have need not come here as a whole.

    Args:
        pool: the session with this host's worker.
        name: of the sessions, for people.
        closing: ends the sessions.
        say: one line for people.
    """

    def __init__(
        self, pool: BlockingSession, tenant: str, name: str, closing: ExitStack, say: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._tenant = tenant
        self._name = name
        self._closing = closing
        self._say = say
        self._sessions: dict[str, BlockingSession | None] = {}
        self._names: dict[str, str] = {}

    def source_of(self, reference: str) -> Source | None:
        """An artifact that is not here; None if it is, or nobody can be asked for it."""
        described = self._pool.artifact(reference).describe()
        if self._pool.worker_id in described.workers:
            return None
        found = self._worker_of(described.workers)
        if found is None:
            return None
        artifact = self._sessions_of(found).artifact(described.artifact_id)
        tensors = [Remote(each.name, each.dtype, each.shape, artifact, each.name) for each in described.tensors]
        return AtPeer(tensors, f"slices of artifact {described.artifact_id} at {self._names[found]}")

    def source_of_version(self, reference: str, weights: BlockingWeights, threads: int) -> Source | None:
        """A version of which a part is not here; None if all are, or nobody can be asked for one of them."""
        parts: list[BlockingArtifact | None] = []
        names: set[str] = set()
        for part in weights.part_ids:
            workers = self._pool.artifact(part).describe().workers
            if self._pool.worker_id in workers:
                parts.append(None)
                continue
            found = self._worker_of(workers)
            if found is None:
                return None
            parts.append(self._sessions_of(found).artifact(part))
            names.add(self._names[found])
        far = [
            Remote(each.name, each.dtype, tuple(each.shape), artifact, each.inner)
            for each in weights.specs.values()
            if (artifact := parts[each.part]) is not None
        ]
        if not far:
            return None
        there = AtPeer(far, f"slices of version {reference} at {', '.join(sorted(names))}")
        near = [name for name, each in weights.specs.items() if parts[each.part] is None]
        if not near:
            return there
        here = Pooled(reference, weights.view(names=near).tensor_dict(framework="torch"), threads)
        return Scattered(here, there, list(weights.specs))

    def _worker_of(self, workers: Collection[str]) -> str | None:
        """One of them that can be asked; those that are known first."""
        listed = {each.worker_id: each for each in self._pool.list_workers() if each.worker_id in workers}
        for worker_id in sorted(listed, key=lambda each: (not self._sessions.get(each), each)):
            if worker_id not in self._sessions:
                self._names[worker_id] = listed[worker_id].name
                self._sessions[worker_id] = self._connect(listed[worker_id].address, listed[worker_id].name)
            if self._sessions[worker_id] is not None:
                return worker_id
        return None

    def _connect(self, address: str, name: str) -> BlockingSession | None:
        try:
            return self._closing.enter_context(connect_blocking(address, tenant=self._tenant, name=self._name))
        except TensorcastError as error:
            self._say(f"no slices from {name}: {error}")
            return None

    def _sessions_of(self, worker_id: str) -> BlockingSession:
        session = self._sessions[worker_id]
        assert session is not None
        return session


def bounds(copy: Copy, spec: Shaped) -> Bounds:
    """A box of the tensor that has all that is copied: just that, if it is a box itself, else whole rows."""
    if not spec.shape:
        return ()
    steps = [math.prod(spec.shape[at + 1 :]) for at in range(len(spec.shape))]
    if str(copy.dtype).removeprefix("torch.") != spec.dtype:
        return tuple((0, size) for size in spec.shape)
    starts, left = [], copy.offset
    for step in steps:
        starts.append(left // step)
        left %= step
    counts = [1] * len(steps)
    for count, step in zip(copy.shape, copy.stride, strict=True):
        if count == 1 or step == 0:
            continue
        found = [
            at
            for at, each in enumerate(steps)
            if each == step and counts[at] == 1 and starts[at] + count <= spec.shape[at]
        ]
        if not found:
            first, last = copy.span[0] // copy.dtype.itemsize, copy.span[1] // copy.dtype.itemsize - 1
            return ((first // steps[0], last // steps[0] + 1), *((0, size) for size in spec.shape[1:]))
        counts[found[0]] = count
    return tuple((start, start + count) for start, count in zip(starts, counts, strict=True))


def union(boxes: Sequence[Bounds]) -> Bounds:
    """The smallest box that has all of them."""
    return tuple((min(start for start, _ in each), max(stop for _, stop in each)) for each in zip(*boxes, strict=True))
