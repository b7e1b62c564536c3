"""What a user says to the plugin of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorcast_connector.config import LOOKUP_DEADLINE_S, parse_address, unknown_key
from tensorcast_connector.errors import ConfigError


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
        for key, value in extra.items():
            if key not in types:
                raise unknown_key(key, types, where)
            if not isinstance(value, types[key]) or (isinstance(value, bool) and bool not in types[key]):
                raise ConfigError(f"{where}: {key}={value!r} should be a {types[key][-1].__name__}")
        if not extra.get("worker"):
            raise ConfigError(
                f'{where}: "worker" is missing; give the address of this host\'s worker, for example '
                '{"worker": "unix:/run/tensorcast/worker.sock"} (tensorcast up prints it)'
            )
        if parse_address(extra["worker"], f"{where}: worker").scheme != "unix":
            raise ConfigError(
                f"{where}: worker={extra['worker']!r} must be a Unix socket (unix:/path): the arena is shared memory of one host"
            )
        config = cls(**extra)
        if not config.lookup_deadline_s > 0 or config.min_load_blocks < 1:
            raise ConfigError(f"{where}: lookup_deadline_s must be above 0 and min_load_blocks at least 1")
        return config
