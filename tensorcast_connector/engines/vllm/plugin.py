"""Entry point `vllm.general_plugins`: makes TensorcastConnector, `--load-format tensorcast` and weight updates known to vLLM.

Runs in the API server, the engine core and every worker process of every vLLM that starts in this environment, so it must
be cheap, idempotent, and harmless to engines that do not use us.
"""

import sys
from collections.abc import Sequence
from typing import Any

from tensorcast_connector.engines.command_line import LOAD_FORMAT, check_loader, given_json
from tensorcast_connector.engines.options import ConnectorConfig
from tensorcast_connector.errors import ConfigError

NAME = "TensorcastConnector"
WEIGHT_TRANSFER = "tensorcast"


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
    """Checks `--kv-transfer-config JSON` and `--model-loader-extra-config JSON` in the process that the user started.

    Later, inside the engine's processes, a mistake would surface below pages of tracebacks.

    Raises:
        ConfigError: it is ours and wrong.
    """
    for config in given_json(argv, "--kv-transfer-config"):
        if isinstance(config, dict):
            check_transfer_config(config)
    check_loader(argv)


def register() -> None:
    """Registers the connector, the loader and the weight transfer engine; called by vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "tensorcast_connector.engines.vllm.connector", NAME)
    try:
        check_command_line(sys.argv)
    except ConfigError as error:
        sys.exit(f"tensorcast: {error}")
    register_loader()
    register_weight_transfer()


def register_loader() -> None:
    """Registers the loader; again does nothing."""
    from vllm.model_executor import model_loader

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        from tensorcast_connector.engines.vllm.loader import TensorcastModelLoader

        model_loader._LOAD_FORMAT_TO_MODEL_LOADER[LOAD_FORMAT] = TensorcastModelLoader


def register_weight_transfer() -> None:
    """Registers `--weight-transfer-config '{"backend": "tensorcast"}'`; again does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER, "tensorcast_connector.engines.vllm.weight_transfer", "TensorcastWeightTransferEngine"
        )
