"""A rank's parameters copied from a replica in the memory of its device, which the worker's child process owns.

There is no copy-on-write between processes on a device, and vLLM changes its parameters, so they stay its own and are copied to.
That needs no memory of the host and happens at the speed of the device. What was copied counts only once the worker has said
that the replica was there all the time.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch

from tensorcast_connector.client.blocking import BlockingArtifact
from tensorcast_connector.core.artifact import TensorSpec, decode_header
from tensorcast_connector.engines.devices.memory import DeviceMemory
from tensorcast_connector.engines.devices.opening import open_device
from tensorcast_connector.engines.weights.materialised import KEY_TENSOR, KeyDocument, Materialised, NotShared
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.wire.caller_messages import ReplicaOpened


def device_of(materialised: Materialised, told: str) -> str:
    """The device whose replicas a rank can copy: the one that was told, else its own; "" if it has none."""
    own = materialised.device
    if told or own.type != "cuda":
        return told
    return f"cuda:{torch.cuda.current_device() if own.index is None else own.index}"


def load_replica(artifact: BlockingArtifact, materialised: Materialised, document: KeyDocument, name: str) -> int:
    """Copies the replica on a device to the parameters: its bytes.

    Args:
        name: of the device, as this process counts.

    Raises:
        TensorcastError: there is none, or it is not there any more. Then some parameters may have the right bytes already.
        NotShared: it is not of this rank; nothing is changed.
    """
    device = open_device(name)
    try:
        opened = artifact.open_replica(device.identity)
        try:
            size = _copy(device, opened, materialised, document)
        except BaseException:
            with suppress(TensorcastError):  # it goes with the session, if it has to
                artifact.close_replica(opened)
            raise
        artifact.close_replica(opened)
        return size
    finally:
        device.close()


def _copy(device: DeviceMemory, opened: ReplicaOpened, materialised: Materialised, document: KeyDocument) -> int:
    header = decode_header(opened.header)
    specs = {each.name: each for each in header.tensors}
    key = specs.pop(KEY_TENSOR, None)
    placed = materialised.placed(specs)
    source = device.open(opened.handle, header.size)
    try:
        document.check(device.copy_out(source + key.offset, key.bytes) if key is not None else b"")
        if placed and placed[0][0].device.type == "cuda":
            torch.cuda.synchronize(placed[0][0].device)  # what the model has filled in may be under way
        return _copy_all(device, source, placed)
    finally:
        device.shut(source)


def _copy_all(device: DeviceMemory, source: int, placed: Sequence[tuple[torch.Tensor, TensorSpec]]) -> int:
    try:
        for tensor, spec in placed:
            if not tensor.is_contiguous() or tensor.numel() * tensor.itemsize != spec.bytes:
                raise NotShared(f"{spec.name} has {tensor.numel() * tensor.itemsize} bytes here and {spec.bytes} there")
            device.copy(tensor.data_ptr(), source + spec.offset, spec.bytes)
    finally:
        device.synchronise()  # before anything is let go of
    return sum(spec.bytes for _, spec in placed)
