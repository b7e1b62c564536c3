"""Entry point `sglang.srt.plugins`: makes `--load-format tensorcast` and updates from published versions known to SGLang.

Runs in every process of every SGLang that starts in this environment, so it must be cheap, idempotent, and harmless to servers
that do not use us. Nothing is patched: SGLang offers both the choice of load formats and the hook.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from tensorcast_connector.engines.command_line import LOAD_FORMAT
from tensorcast_connector.engines.options import LoaderConfig
from tensorcast_connector.errors import ConfigError

_PREPARE = "sglang.srt.server_args.prepare_server_args"
_VERIFY = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
_SCHEDULER = "sglang.srt.managers.scheduler"
_registered: list[bool] = []


def register() -> None:
    """Called by SGLang; again does nothing."""
    if _registered:
        return
    _registered.append(True)
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if LOAD_FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(_PREPARE, check_options, HookType.AFTER)
    HookRegistry.register(_VERIFY, verify_load_format, HookType.AROUND)
    if _SCHEDULER in sys.modules:  # a process that computes; no other one has to import all that the hooks are on
        from tensorcast_connector.engines.sglang import weight_hooks

        weight_hooks.register()


def check_options(server_args: Any, *_: Any, **__: Any) -> None:
    """After the command line was read, in the process that the user started: what is wrong with our options, in one line."""
    if str(server_args.load_format).lower() != LOAD_FORMAT:
        return
    try:
        config = json.loads(server_args.model_loader_extra_config or "{}")
    except ValueError:
        return  # SGLang says what is wrong with it
    try:
        LoaderConfig.from_extra(config)
    except ConfigError as error:
        sys.exit(f"tensorcast: {error}")


def verify_load_format(original: Callable[[Any], None], load_config: Any) -> None:
    """Around LoadConfig._verify_load_format: ours becomes our loader, which SGLang takes as a format as well.

    `tensorcast` is a start, or an update from files; `tensorcast:NAME` and `tensorcast:NAME:VERSION` are updates from the pool.
    """
    given = load_config.load_format
    if isinstance(given, str) and given.partition(":")[0].lower() == LOAD_FORMAT:
        # Only where weights are loaded: it needs all of the engine.
        from tensorcast_connector.engines.sglang.loader import TensorcastModelLoader

        load_config.load_format = TensorcastModelLoader
        load_config.tensorcast_version = given.partition(":")[2]
    else:
        original(load_config)
