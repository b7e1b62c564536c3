"""An artifact that its owner fills in place, in the gateway's memory, instead of having tensors copied there by `Session.put`.

upload = await session.upload([("w", "bfloat16", (4096, 4096)), ...])
read_somehow_into(upload.memory, upload.specs)
upload.seal()
artifact = await upload.commit(name="policy:v1")
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from tensorcast_connector.client.artifact import Artifact
from tensorcast_connector.client.link import GatewayLink
from tensorcast_connector.config import ARTIFACT_TIMEOUT_S, PUT_THREADS
from tensorcast_connector.core.artifact import (
    CHUNK_BYTES,
    Header,
    TensorSpec,
    check_fits,
    chunk_count,
    encode_header,
    layout,
)
from tensorcast_connector.errors import Exhausted, InvalidArgument, TensorcastError
from tensorcast_connector.net.descriptors import DescriptorChannel
from tensorcast_connector.net.mapping import Mapped, map_memory
from tensorcast_connector.wire.caller_messages import (
    AbortUpload,
    ArtifactOpened,
    CommitUpload,
    OpenMappedUpload,
    UploadOpened,
)
from tensorcast_connector.wire.messages import Ok


class Upload:
    """See the module. Made by `open_upload`; end it by `commit` or `close`.

    Attributes:
        specs: the tensors, in the order of their names, and where each lies.
        size: bytes.
    """

    def __init__(
        self, link: GatewayLink, channel: DescriptorChannel, specs: tuple[TensorSpec, ...], size: int, upload_id: str,
        descriptor: int,
    ) -> None:  # fmt: skip
        self._link = link
        self._channel = channel
        self.specs = specs
        self.size = size
        self._id = upload_id
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._done: dict[int, bytes] = {}  # digests of chunks
        self._sealable = False
        try:
            self._mapped: Mapped | None = map_memory(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise Exhausted(f"cannot map {size} bytes for an artifact: {error.strerror}") from error

    @property
    def memory(self) -> Any:
        """All of it, writable, zero where nothing was written. Let go of it, and of all that was made of it, before `seal`."""
        if self._mapped is None:
            raise InvalidArgument("the memory of an upload that is done is not to be written to")
        return self._mapped.buffer

    @property
    def chunks(self) -> int:
        """How many there are of CHUNK_BYTES."""
        return chunk_count(self.size)

    def digest(self, chunk: int) -> None:
        """Digests a chunk, all of whose bytes are written. May be called by several threads; `seal` does what is left."""
        data = np.frombuffer(self.memory, np.uint8)[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        found = xxhash.xxh3_128_digest(data.data)
        with self._lock:
            self._done[chunk] = found

    def seal(self) -> None:
        """Nothing is written any more: digests what is left, and lets go of the memory."""
        left = [chunk for chunk in range(self.chunks) if chunk not in self._done]
        if left:
            with ThreadPoolExecutor(PUT_THREADS, "digesting") as pool:
                list(pool.map(self.digest, left))
        if self._mapped is not None:
            mapped, self._mapped = self._mapped, None
            self._sealable = mapped.let_go()

    async def commit(self, name: str = "") -> Artifact:
        """After `seal`: makes an artifact of it.

        Args:
            name: is made to point to it.

        Raises:
            InvalidArgument: somebody still holds what was made of `memory`.
            TensorcastError: as the gateway answers.
        """
        if not self._sealable:
            raise InvalidArgument("the memory of an upload is still used where it was written")
        digests = b"".join(self._done[chunk] for chunk in range(self.chunks))
        header = encode_header(Header(self.specs, self.size, digests, tenant=self._link.tenant))
        made = await self._link.call(CommitUpload(self._id, header, name), ArtifactOpened, ARTIFACT_TIMEOUT_S)
        self._id = ""
        self._link.revision = max(self._link.revision, made.revision)
        self._end(done=True)
        return Artifact(self._link, name, made)

    async def close(self) -> None:
        """Gives the memory back if it was not committed; fine if it was."""
        if self._id:
            upload_id, self._id = self._id, ""
            with contextlib.suppress(TensorcastError):
                await self._link.call(AbortUpload(upload_id), Ok)
            self._end(done=False)

    def _end(self, done: bool) -> None:
        self._link.end_put(self._channel, done)
        self._mapped = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


async def open_upload(link: GatewayLink, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> Upload:
    """Memory for tensors (name, dtype, shape), of the gateway on this host.

    Raises:
        InvalidArgument: something cannot be stored, or the gateway is on another host.
        Exhausted: the gateway has no room.
    """
    try:
        specs, size = layout(tensors)
        check_fits(specs, size)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    if not link.local or not size:
        raise InvalidArgument("only what has bytes can be filled in place, in the memory of a gateway on this host")
    channel = link.begin_put()
    try:
        descriptor, opened = await channel.call(OpenMappedUpload(size), UploadOpened, ARTIFACT_TIMEOUT_S)
        return Upload(link, channel, specs, size, opened.upload_id, descriptor)
    except BaseException:
        link.end_put(channel, False)
        raise
