"""From which state of which folder parameters were loaded, so that those of files that are no longer there do not stay.

Loaded parameters are found by what they are (materialised.py). If they come from a plain folder of this host they have a second
name as well, `weights-of/FOLDER/STATE/KEY`: whoever is about to share another state of that folder deletes the former ones, which
nobody can ask for any more. Who has them mapped keeps them.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from tensorcast_connector.client.blocking import BlockingSession
from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.core.identity import digest
from tensorcast_connector.core.weights import LINEAGE
from tensorcast_connector.engines.weights.materialised import PREFIX
from tensorcast_connector.errors import NotFound

_CHARS = 20


@dataclass(frozen=True, slots=True)
class Lineage:
    """See the module. `folder` is the same for all states of one folder, as long as the folder itself is not replaced."""

    folder: str
    state: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Of files of this host.

        Raises:
            OSError: their folder is gone.
        """
        found = checkpoint.path.stat()
        return cls(
            digest([checkpoint.host, found.st_dev, found.st_ino])[:_CHARS], digest(checkpoint.fingerprint)[:_CHARS]
        )

    def name(self, key: str) -> str:
        """The second name of parameters that are found by `key`."""
        return f"{LINEAGE}{self.folder}/{self.state}/{key.removeprefix(PREFIX)}"

    def forget_former(self, pool: BlockingSession) -> int:
        """Deletes what was loaded from other states of the folder, unless it was given a name besides; how many bytes."""
        freed = 0
        for each in pool.list_artifacts(f"{LINEAGE}{self.folder}/"):
            if any(name.startswith(f"{LINEAGE}{self.folder}/{self.state}/") for name in each.names):
                continue
            if all(name.startswith((LINEAGE, PREFIX)) for name in each.names):
                with suppress(NotFound):  # somebody else was faster
                    pool.delete(each.artifact_id)
                    freed += each.bytes
        return freed
