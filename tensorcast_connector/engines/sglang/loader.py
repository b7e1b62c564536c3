"""`--load-format tensorcast` in SGLang: the weights as fast as they can be had, and SGLang's own way if anything is unusual.

    sglang serve --model-path MODEL --load-format tensorcast --model-loader-extra-config '{"worker": "unix:/run/worker.sock"}'

See engines/weights/loading.py; here is what is SGLang's about it. A running server takes a published version through its own
endpoint (updates.py):

    POST /update_weights_from_disk  {"model_path": "MODEL", "load_format": "tensorcast:policy:7"}
"""

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors
from sglang.srt.runtime_context import get_exec, get_model, get_parallel

from tensorcast_connector.engines.options import LoaderConfig
from tensorcast_connector.engines.sglang.live_weights import live
from tensorcast_connector.engines.sglang.plain_weights import plain_weights
from tensorcast_connector.engines.sglang.updates import Update
from tensorcast_connector.engines.weights.load_plan import LoadPlan
from tensorcast_connector.engines.weights.loading import Load, Ordinary
from tensorcast_connector.engines.weights.materialised import KeyDocument, Materialised, NotShared, key_document
from tensorcast_connector.engines.weights_epoch import hub_snapshot
from tensorcast_connector.errors import ConfigError

logger = logging.getLogger(__name__)
# Their tensors are renamed, or made into others, between the files and the model.
_QUANTIZATIONS_REFUSED = ("bitsandbytes", "gguf", "mxfp8", "modelopt_fp4", "auto-round-int8")
# Besides the places in the groups of tensor and pipeline parallelism, which all others follow from.
_LAYOUT = (
    "attn_dp_size", "attn_cp_size", "dcp_size", "ep_size", "moe_dp_size", "moe_dense_tp_size", "shared_experts_tp_size",
    "enable_dp_lm_head",
)  # fmt: skip
_started_with: list[LoaderConfig] = []


class TensorcastModelLoader(DefaultModelLoader):
    """See the module. Everything that is not said here is as DefaultModelLoader does it for load format auto."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = load_config.model_loader_extra_config or {}
        if extra or not _started_with:  # an update says nothing of the pool: as at the start
            _started_with[:] = [LoaderConfig.from_extra(extra)]
        self.options = _started_with[0]
        load_config.load_format = LoadFormat.AUTO  # others (adapters) read more files by the same object
        load_config.model_loader_extra_config = {}
        super().__init__(load_config)
        version = getattr(load_config, "tensorcast_version", "")
        self._update = Update(version, self.options) if version else None
        self._config: Any = None
        self.processed: threading.Event | None = None  # set when the engine has processed what is being loaded

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """See BaseModelLoader."""
        own = get_model_loader(self.load_config, model_config)
        if type(own) is not DefaultModelLoader:
            _ordinary(model_config, f"{type(own).__name__} is for models like it")
            return own.load_model(model_config=model_config, device_config=device_config)
        self._config = model_config
        model_config.tensorcast_path = model_config.model_path  # for updates, which SGLang has under another path
        return super().load_model(model_config=model_config, device_config=device_config)

    def load_weights_and_postprocess(self, model: torch.nn.Module, weights: Any, target_device: torch.device) -> None:
        """SGLang: a model's parameters get values, from `weights` if they do not come another way."""
        if self._update is not None:
            self._update.apply(model)
            try:
                self.postprocess_weights(model, target_device)
            except BaseException:
                self._update.failed()
                raise
            self._update.end()
            return
        if self._config is None:  # an update from files
            super().load_weights_and_postprocess(model, weights, target_device)
            return
        self.processed = threading.Event()
        try:
            self._load_and_postprocess(model, weights, target_device)
        finally:
            self.processed.set()

    def _load_and_postprocess(self, model: torch.nn.Module, weights: Any, target_device: torch.device) -> None:
        try:
            if why := unusual(model, self._config, self.load_config):
                raise Ordinary(why)
            with ExitStack() as stack:
                epoch = Load(_Loaded(self, model, self._config, target_device), self.options, model, stack).run()
        except Ordinary as error:
            _ordinary(self._config, str(error))
            super().load_weights_and_postprocess(model, weights, target_device)
            return
        if epoch.startswith(("version:", "artifact:")):  # not what is in the model's folder
            live.changing()
            live.declared(epoch)
            live.flushed()
        self.postprocess_weights(model, target_device)

    def _get_weights_iterator(self, source: Any, **more: Any) -> Any:
        """SGLang: the tensors of a source. An update from the pool is made ready instead, before anything is written."""
        if self._update is None:
            return super()._get_weights_iterator(source, **more)
        self._update.prepare(source.model_config)
        return iter(())

    def checkpoint_files(self, model: torch.nn.Module, model_config: Any) -> tuple[str, Sequence[str], bool]:
        """Folder and files that DefaultModelLoader would read, and whether they are safetensors."""
        source = DefaultModelLoader.Source.init_new(model_config, model)
        folder, files, safetensors = self._prepare_weights(
            source.model_or_path, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
        )
        if safetensors:
            files = maybe_add_mtp_safetensors(files, folder, "model.safetensors.index.json", model_config.hf_config)
        return folder, files, safetensors


class _Loaded:
    """See Engine (loading.py): SGLang, while it loads a model."""

    name = "sglang"

    def __init__(
        self, loader: TensorcastModelLoader, model: torch.nn.Module, model_config: Any, device: torch.device
    ) -> None:
        self._loader = loader
        self._model = model
        self._config = model_config
        self._device = device
        self.model = str(model_config.model_path)
        self.processed = loader.processed
        self.whole = model_config.quantization is None and not getattr(model_config, "is_draft_model", False)

    def folder(self) -> Path | None:
        """See Engine."""
        path = Path(self._config.model_path)
        if path.is_dir():
            return path
        try:
            return hub_snapshot(self._config.model_path, self._config.revision, self._loader.load_config.download_dir)
        except ConfigError:
            return None

    def files(self) -> tuple[str, Sequence[str], bool]:
        """See Engine."""
        return self._loader.checkpoint_files(self._model, self._config)

    def missing(self, plan: LoadPlan) -> list[str]:
        """See Engine."""
        for name in plan.left(dict(plain_weights(self._model))):
            raise Ordinary(f"its files have not all of {name}")  # which SGLang lets pass
        return []

    def loaded(self, names: Any) -> None:
        """See Engine. SGLang does not look at what `load_weights` returns."""

    def document(self, materialised: Materialised, epoch: str) -> KeyDocument:
        """See Engine."""
        exec_config = get_exec()
        for name in ("enable_eplb", "init_expert_location"):
            if _setting(exec_config, name) not in (None, False, "trivial"):
                raise NotShared("experts are placed, or moved, between ranks")
        facts = {
            "dtype": str(self._config.dtype),
            "quantization": [str(self._config.quantization), type(getattr(self._model, "quant_config", None)).__name__],
            "layout": _layout(),
            "engine": ["sglang", sglang.__version__, torch.__version__],
            "device": self._device.type,
        }
        return key_document(materialised, self._config.hf_config, epoch, facts, {"model": self.model})


def unusual(model: torch.nn.Module, model_config: Any, load_config: Any) -> str:
    """Why a model is left to SGLang's own loader; "" if it is not."""
    if model_config.quantization in _QUANTIZATIONS_REFUSED:
        return f"quantization {model_config.quantization} has files of its own kind"
    if getattr(getattr(model, "quant_config", None), "is_nvfp4_online", False):
        return "it is quantised while it is loaded"
    if list(getattr(model, "secondary_weights", ())):
        return "it has weights in a second place"
    if load_config.draft_model_idx is not None:
        return "it is one of several draft models in the same files"
    if get_model().model_checksum is not None:
        return "--model-checksum has its files verified"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return f"parameter {name} is not in memory of its own"
    return ""


def _layout() -> dict[str, Any]:
    """The ranks that this process has, and all sizes."""
    parallel = get_parallel()
    return {
        "ranks": {
            kind: [getattr(parallel, f"{kind}_rank"), getattr(parallel, f"{kind}_size")] for kind in ("tp", "pp")
        },
        "sizes": [_setting(parallel, name) for name in _LAYOUT],
    }


def _setting(of: Any, name: str) -> Any:
    """A value of SGLang's configuration; None if this release has none of that name."""
    try:
        return getattr(of, name)
    except (AttributeError, RuntimeError, ValueError):
        return None


def _ordinary(model_config: Any, why: str) -> None:
    logger.warning("weights of %s: %s; the engine's own loader reads them", model_config.model_path, why)
