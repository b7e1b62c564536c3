"""Hears when SGLang changes weights and when it empties its caches, by the hooks that SGLang offers to plugins."""

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from tensorcast_connector.engines.sglang.live_weights import live
from tensorcast_connector.engines.sglang.server import setting

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
# Every way in which weights are written after the start.
CHANGES = tuple(
    f"{_UPDATER}.{name}"
    for name in (
        "begin_weight_update", "update_weights_from_disk", "load_weights_from_distributed",
        "update_weights_from_tensor", "update_weights_from_ipc",
    )
)  # fmt: skip
END = f"{_UPDATER}.end_weight_update"
# Right before the memory of weights is given back; not the request's handler, which a running scheduler has in a table.
RELEASE = "sglang.srt.managers.scheduler_components.weight_updater._export_static_state"
CHECK = "sglang.srt.utils.weight_checker.WeightChecker.handle"
VERSION = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"
FLUSH = "sglang.srt.managers.cache_controller.HiCacheController.reset"
_SOURCE = HookSource("tensorcast", "tensorcast-connector")
_installed: list[bool] = []


def _changing(*_: Any, **__: Any) -> None:
    live.changing()


def _settling(*_: Any, **__: Any) -> None:
    live.settling()


def _released(*_: Any, **__: Any) -> None:
    """Weights whose memory is given back have any bytes afterwards, unless SGLang keeps a copy of them."""
    if setting("enable_memory_saver") and not setting("enable_weights_cpu_backup"):
        live.changing()


def _checked(_checker: Any, action: str = "", *_: Any, **__: Any) -> None:
    """What checks updates of weights can also make them random, to see that all of them are written."""
    if action == "reset_tensors":
        live.changing()


def _declared(_result: Any, _scheduler: Any, new_version: str | None = None) -> None:
    if new_version is not None:
        live.declared(f"declared:{new_version}")


def _flushed(*_: Any, **__: Any) -> None:
    live.flushed()


HOOKS = (
    *((target, _changing, HookType.BEFORE) for target in CHANGES),
    (END, _settling, HookType.BEFORE),
    (RELEASE, _released, HookType.BEFORE),
    (CHECK, _checked, HookType.BEFORE),
    (VERSION, _declared, HookType.AFTER),
    (FLUSH, _flushed, HookType.AFTER),
)


def register() -> None:
    """From a plugin's entry point: SGLang applies the hooks of all plugins together. Again does nothing."""
    if not _installed:
        _installed.append(True)
        for target, hook, kind in HOOKS:
            HookRegistry.register(target, hook, kind, source=_SOURCE)


def install() -> None:
    """In a process that computes and has loaded its plugins, this perhaps not among them. Again does nothing."""
    if _installed:
        return
    # A target that another plugin has hooked is not looked at again, so it is wrapped once more.
    hooked = set(HookRegistry._patched)
    register()
    HookRegistry.apply_hooks()
    for target, hook, kind in HOOKS:
        if target in hooked:
            HookRegistry._apply_target(target, [(kind, hook, _SOURCE)])
