"""What a user says to the plugins of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorcast_connector.config import (
    ENGINE_DEADLINE_MAX_S,
    LOOKUP_DEADLINE_S,
    READ_THREADS,
    READ_THREADS_MAX,
    STORAGE_TRANSFER_DEADLINE_S,
    TENANT,
    parse_address,
    parse_devices,
    unknown_key,
)
from tensorcast_connector.core.artifact import check_tenant
from tensorcast_connector.errors import ConfigError, InvalidArgument


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """`kv_connector_extra_config` of the vLLM connector."""

    worker: str
    tenant: str = "default"
    weight_version: str = ""  # a declared version; the content digest of the weight files unless told
    lookup_deadline_s: float = LOOKUP_DEADLINE_S
    save_decode: bool = True  # also save blocks filled by generated tokens
    min_load_blocks: int = 1  # shorter hits are recomputed

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "ConnectorConfig":
        """Checked configuration.

        Raises:
            ConfigError: missing worker, unknown key, or a value of the wrong type or range.
        """
        where = "kv_connector_extra_config"
        types: dict[str, tuple[type, ...]] = {
            "worker": (str,), "tenant": (str,), "weight_version": (str,), "lookup_deadline_s": (int, float),
            "save_decode": (bool,), "min_load_blocks": (int,),
        }  # fmt: skip
        _check_types(extra, types, where)
        if not extra.get("worker"):
            raise ConfigError(
                f'{where}: "worker" is missing; give the address of this host\'s worker, for example '
                '{"worker": "unix:/run/tensorcast/worker.sock"} (tensorcast up prints it)'
            )
        _check_worker(extra["worker"], where)
        config = cls(**extra)
        _check_deadlines({"lookup_deadline_s": config.lookup_deadline_s}, where)
        if config.min_load_blocks < 1:
            raise ConfigError(f"{where}: min_load_blocks at least 1 is needed, not {config.min_load_blocks}")
        return config


@dataclass(frozen=True, slots=True)
class LoaderConfig:
    """`--model-loader-extra-config` of `--load-format tensorcast`."""

    worker: str = ""  # this host's; none: the files are read by the engine itself, and nothing is shared
    tenant: str = TENANT
    source: str = ""  # name or id of an artifact with the checkpoint's tensors, instead of files
    publish: bool = True  # what was loaded, for the next engine like this one
    weight_version: str = ""  # says which weights the files hold, on every host; else that follows from the files
    threads: int = READ_THREADS
    device: str = ""  # whose replicas are copied; the rank's own device, if that is a GPU, unless told

    @classmethod
    def from_extra(cls, extra: Any) -> "LoaderConfig":
        """Checked configuration.

        Raises:
            ConfigError: unknown key, or a value of the wrong type or range.
        """
        where = "model_loader_extra_config"
        types: dict[str, tuple[type, ...]] = {
            "worker": (str,), "tenant": (str,), "source": (str,), "publish": (bool,), "weight_version": (str,),
            "threads": (int,), "device": (str,),
        }  # fmt: skip
        if not isinstance(extra, Mapping):
            raise ConfigError(f"{where} should be a JSON object")
        _check_types(extra, types, where)
        config = cls(**extra)
        if config.worker:
            _check_worker(config.worker, where)
        elif config.source:
            raise ConfigError(f"{where}: source={config.source!r} is in the pool: give this host's worker as well")
        if len(parse_devices(config.device, f"{where}: device")) > 1:
            raise ConfigError(
                f"{where}: device={config.device!r} should be one device; a rank's own is found without it"
            )
        if not 1 <= config.threads <= READ_THREADS_MAX:
            raise ConfigError(f"{where}: threads={config.threads} should be from 1 to {READ_THREADS_MAX}")
        try:
            check_tenant(config.tenant)
        except InvalidArgument as error:
            raise ConfigError(f"{where}: {error}") from None
        return config


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """`--hicache-storage-backend-extra-config` of SGLang, without what SGLang itself reads there."""

    worker: str
    tenant: str = TENANT
    weight_version: str = ""  # a declared version; the content digest of the weight files unless told
    lookup_deadline_s: float = LOOKUP_DEADLINE_S
    transfer_deadline_s: float = STORAGE_TRANSFER_DEADLINE_S  # of a batch of pages, read or written

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "StorageConfig":
        """Checked configuration.

        Raises:
            ConfigError: missing worker, unknown key, or a value of the wrong type or range.
        """
        where = "hicache_storage_backend_extra_config"
        types: dict[str, tuple[type, ...]] = {
            "worker": (str,), "tenant": (str,), "weight_version": (str,), "lookup_deadline_s": (int, float),
            "transfer_deadline_s": (int, float),
        }  # fmt: skip
        ours = {key: value for key, value in extra.items() if key not in _SGLANG_KEYS}
        _check_types(ours, types, where)
        if not ours.get("worker"):
            raise ConfigError(
                f'{where}: "worker" is missing; give the address of this host\'s worker, for example '
                '"worker": "unix:/run/tensorcast/worker.sock" (tensorcast up prints it)'
            )
        _check_worker(ours["worker"], where)
        config = cls(**ours)
        deadlines = {"lookup_deadline_s": config.lookup_deadline_s, "transfer_deadline_s": config.transfer_deadline_s}
        _check_deadlines(deadlines, where)
        try:
            check_tenant(config.tenant)
        except InvalidArgument as error:
            raise ConfigError(f"{where}: {error}") from None
        return config


# What SGLang reads of the same object.
_SGLANG_KEYS = (
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold", "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys", "tp_lcm_size",
)  # fmt: skip


def _check_types(extra: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], where: str) -> None:
    for key, value in extra.items():
        if key not in types:
            raise unknown_key(key, types, where)
        if not isinstance(value, types[key]) or (isinstance(value, bool) and bool not in types[key]):
            raise ConfigError(f"{where}: {key}={value!r} should be a {types[key][-1].__name__}")


def _check_deadlines(deadlines: Mapping[str, float], where: str) -> None:
    """Also against what JSON takes for a number, `Infinity`, and what no thread can wait for."""
    for name, seconds in deadlines.items():
        if not 0 < seconds <= ENGINE_DEADLINE_MAX_S:
            raise ConfigError(f"{where}: {name} must be above 0 and at most {ENGINE_DEADLINE_MAX_S:g}, not {seconds}")


def _check_worker(worker: str, where: str) -> None:
    if parse_address(worker, f"{where}: worker").scheme != "unix":
        raise ConfigError(
            f"{where}: worker={worker!r} must be a Unix socket (unix:/path): the arena is shared memory of one host"
        )
