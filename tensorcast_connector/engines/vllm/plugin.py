"""Entry point `vllm.general_plugins`: makes TensorcastConnector known to vLLM.

Runs in the API server, the engine core and every worker process of every vLLM that starts in this environment, so it must
be cheap, idempotent, and harmless to engines that do not use us.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from tensorcast_connector.engines.options import ConnectorConfig
from tensorcast_connector.errors import ConfigError

NAME = "TensorcastConnector"


def check_transfer_config(config: dict[str, Any]) -> ConnectorConfig | None:
    """The connector's checked options, or None if this transfer configuration is not ours.

    Raises:
        ConfigError: a missing worker, an unknown key, or the wrong failure policy.
    """
    if config.get("kv_connector") != NAME:
        return None
    policy = config.get("kv_load_failure_policy", "fail")
    if policy != "recompute":
        raise ConfigError(
            f'kv_load_failure_policy is "{policy}": a page that cannot be loaded would fail the user\'s request; '
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ConfigError("kv_connector_extra_config should be a JSON object")
    return ConnectorConfig.from_extra(extra)


def check_command_line(argv: Sequence[str]) -> None:
    """Checks `--kv-transfer-config JSON` in the process that the user started.

    Later, inside the engine's processes, a mistake would surface below pages of tracebacks.

    Raises:
        ConfigError: it is ours and wrong.
    """
    for index, word in enumerate(argv):
        flag, equals, value = word.replace("_", "-", 2).partition("=") if word.startswith("--kv") else ("", "", "")
        if flag != "--kv-transfer-config":
            continue
        text = word.partition("=")[2] if equals else (argv[index + 1] if index + 1 < len(argv) else "")
        try:
            config = json.loads(text or value)
        except ValueError:
            return  # vLLM says what is wrong with it
        if isinstance(config, dict):
            check_transfer_config(config)


def register() -> None:
    """Registers the connector; called by vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "tensorcast_connector.engines.vllm.connector", NAME)
    try:
        check_command_line(sys.argv)
    except ConfigError as error:
        sys.exit(f"tensorcast: {error}")
