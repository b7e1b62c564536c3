"""What an identical rank has loaded is mapped from the pool, and what was not there is published."""

from collections.abc import Callable
from contextlib import ExitStack

import torch

from tensorcast_connector.client.blocking import BlockingSession
from tensorcast_connector.engines.weights.lineage import Lineage
from tensorcast_connector.engines.weights.load_plan import LoadPlan
from tensorcast_connector.engines.weights.load_sources import Source
from tensorcast_connector.engines.weights.materialised import KEY_TENSOR, KeyDocument, Materialised, NotShared
from tensorcast_connector.engines.weights.publication import Publication
from tensorcast_connector.engines.weights.replica_load import device_of, load_replica
from tensorcast_connector.errors import NotFound, TensorcastError


class Shared:
    """The parameters of one rank, and their artifact.

    Args:
        tenant: of the session.
        say: one line for people.
        threads: that copy to another device than the CPU.
        lineage: see Publication.
    """

    def __init__(
        self, pool: BlockingSession, tenant: str, materialised: Materialised, document: KeyDocument,
        say: Callable[[str], None], threads: int = 1, lineage: Lineage | None = None,
    ) -> None:  # fmt: skip
        self._tenant = tenant
        self._pool = pool
        self._materialised = materialised
        self._document = document
        self._say = say
        self._threads = threads
        self._lineage = lineage
        self._unusable = False

    def replica(self, device: str) -> tuple[str, int] | None:
        """Copies from a replica on a device of this host: which one, and its bytes. None if there is none, or it goes meanwhile.

        Args:
            device: as LoaderConfig; this rank's own unless told.
        """
        name = device_of(self._materialised, device)
        if not name:
            return None
        try:
            size = load_replica(self._pool.artifact(self._document.name), self._materialised, self._document, name)
        except (TensorcastError, NotShared) as error:
            self._say(f"no replica of {self._document.name} on {name}: {error}")
            return None
        return name, size

    def map(self) -> int | None:
        """Maps what is in the pool: its bytes. None if it is not there, or is not what is wanted; nothing is changed then."""
        try:
            tensors = self._pool.artifact(self._document.name).tensor_dict(framework="torch")
            stored = tensors.pop(KEY_TENSOR, torch.empty(0, dtype=torch.uint8))
            self._document.check(stored.numpy().tobytes())
            tensors = self._materialised.matching(tensors)
        except NotFound:
            self._say(f"{self._document.name} is not in the pool")
            return None
        except (TensorcastError, NotShared) as error:
            self._say(f"{self._document.name} cannot be used: {error}")
            self._unusable = True
            return None
        self._materialised.adopt(tensors, self._threads)
        return sum(int(each.numel() * each.itemsize) for each in tensors.values())

    def publication(self, plan: LoadPlan, source: Source, closing: ExitStack) -> Publication | None:
        """Of what is about to be loaded; see there. None if it is not to be: says why."""
        claim = f"{self._pool.worker_id} {self._tenant} {self._document.name}"
        try:
            return Publication(
                self._pool, self._materialised, self._document, plan, source, self._lineage, claim, self._unusable,
                self._say, closing,
            )  # fmt: skip
        except (TensorcastError, NotShared) as error:
            self._say(f"not shared: {error}")
            return None
