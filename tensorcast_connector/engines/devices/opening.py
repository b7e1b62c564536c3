"""A device by its name."""

from tensorcast_connector.config import parse_devices
from tensorcast_connector.engines.devices.cuda import CudaMemory
from tensorcast_connector.engines.devices.host import HostMemory
from tensorcast_connector.engines.devices.memory import DeviceMemory
from tensorcast_connector.errors import ConfigError


def open_device(name: str) -> DeviceMemory:
    """The device with that name, as this process counts them.

    Raises:
        ConfigError: there is none, or no driver for it; says what is missing.
    """
    if parse_devices(name, "device") != (name,):
        raise ConfigError(f"device={name!r} should be one device, for example cuda:0")
    kind, _, number = name.partition(":")
    return CudaMemory(name, int(number)) if kind == "cuda" else HostMemory(name)
