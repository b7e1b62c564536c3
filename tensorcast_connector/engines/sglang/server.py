"""What this process's SGLang server is: its settings, its model's files, and the weights it was started with."""

import json
import logging
import socket
from pathlib import Path
from typing import Any

import blake3
import sglang
from sglang.srt import runtime_context
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.server_args import ServerArgs

from tensorcast_connector.config import default_cache_dir, environment
from tensorcast_connector.core.identity import digest, precision
from tensorcast_connector.engines.sglang.namespace import model_facts
from tensorcast_connector.engines.weights_epoch import hub_snapshot, private_epoch, weights_epoch
from tensorcast_connector.errors import ConfigError

logger = logging.getLogger(__name__)
# Settings that change what is computed or how it is laid out. Each release may have others; its version is part of it as well.
COMPUTES = (
    "device", "dtype", "quantization", "kv_cache_dtype", "quantization_param_path", "json_model_override_args",
    "model_impl", "attention_backend", "prefill_attention_backend", "decode_attention_backend",
    "speculative_algorithm", "speculative_draft_model_quantization", "enable_fp32_lm_head", "mamba_ssm_dtype",
    "qsa_indexer_dtype", "modelopt_quant", "quantize_and_serve", "rl_quant_profile", "kt_method",
)  # fmt: skip
# Their weights do not come from files, or not from those of the model's folder.
_WITHOUT_FILES = ("dummy", "remote", "remote_instance", "private")


def setting(name: str) -> Any:
    """A server argument as SGLang has resolved it; None if this release has no such argument."""
    path = namespace_of(ServerArgs).get(name)
    if path is None:
        return getattr(runtime_context.get_server_args(), name, None)
    first, *rest = path.split(".")
    bag = getattr(runtime_context, f"get_{first}")()
    for each in rest:
        bag = getattr(bag, each)
    return getattr(bag, name)


def model_folder(path: str, revision: str | None) -> Path:
    """Where the files of a model are on this host.

    Raises:
        ConfigError: they are not there.
    """
    folder = Path(path)
    return folder if folder.is_dir() else hub_snapshot(path, revision, setting("download_dir"))


def facts() -> dict[str, Any]:
    """All of the server that determines a page's bytes, except weights, pool and tokens."""
    try:
        folder = model_folder(setting("model_path"), setting("revision"))
        config = json.loads((folder / "config.json").read_text())
    except (ConfigError, OSError, ValueError):
        config = {"path": str(setting("model_path")), "revision": str(setting("revision"))}
    settings = {name: setting(name) for name in COMPUTES}
    if scales := settings["quantization_param_path"]:
        settings["quantization_param_path"] = _content(str(scales))
    return {"engine": ["sglang", sglang.__version__], **model_facts(config, settings), **precision(environment())}


def _content(path: str) -> str:
    """What a file that is named in the settings holds; two hosts may have different ones at the same place."""
    try:
        return blake3.blake3(Path(path).read_bytes()).hexdigest()
    except OSError:
        return private_epoch()


def weights_at_start(declared: str) -> str:
    """The identity of the weights that the server was started with; a private one if it cannot be known.

    Adapters of the command line are part of it: SGLang's page hashes name them by name and path, not by what they hold.
    Those that are loaded later get names there that no other server has.

    Args:
        declared: what the user says the model's weights are, or "".

    May read all weight files once.
    """
    try:
        models = f"declared:{declared}" if declared else _models()
        adapters = [_adapter(each) for each in setting("lora_paths") or ()]
    except ConfigError as error:
        logger.warning("%s; pages are shared with nobody (declare weight_version to share them)", error)
        return private_epoch()
    return f"{models} with adapters:{digest(adapters)}" if adapters else models


def _models() -> str:
    models = [(setting("model_path"), setting("revision"), setting("load_format"))]
    if setting("speculative_algorithm") and setting("speculative_draft_model_path"):
        models.append(
            (setting("speculative_draft_model_path"), setting("speculative_draft_model_revision"),
             setting("speculative_draft_load_format") or setting("load_format"))
        )  # fmt: skip
    if setting("kt_weight_path"):  # experts that are computed on the CPU
        models.append((setting("kt_weight_path"), None, "auto"))
    epochs = [_epoch(path, revision, str(load_format)) for path, revision, load_format in models]
    return epochs[0] if len(epochs) == 1 else f"models:{digest(epochs)}"


def _adapter(adapter: Any) -> list[str]:
    """What an adapter is called and what it holds: its weights, and the file that says how they are applied."""
    path = str(adapter.lora_path)
    folder = model_folder(path, None)
    try:
        applied = (folder / "adapter_config.json").read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapter {path} has no adapter_config.json that can be read") from error
    return [str(adapter.lora_id), _epoch(path, None, "auto"), digest(applied)]


def _epoch(path: str, revision: str | None, load_format: str) -> str:
    if load_format in _WITHOUT_FILES:
        raise ConfigError(f"load_format is {load_format}, so the weights are not those of the files of {path}")
    folder = model_folder(path, revision)
    return weights_epoch(folder, default_cache_dir(), lambda name: logger.info("digesting %s once", name))


def name() -> str:
    """What this server is called in the pool; all of its ranks on this host say the same."""
    return f"sglang-{socket.gethostname()}-{setting('port')}"


def common_seed() -> str:
    """The same in every rank of this server, and hardly in another server."""
    # Hosts have names of their own: on several nodes it is where the ranks meet that says which server it is.
    where = setting("dist_init_addr") if (setting("nnodes") or 1) > 1 else name()
    return digest([str(where), str(setting("random_seed"))])
