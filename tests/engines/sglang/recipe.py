"""A program: what SGLang's own argument parser makes of a configuration file, and whether it resolves.

    python -m tests.engines.sglang.recipe FILE [ARGUMENT...]

Prints the resolved arguments as a line of JSON. Further arguments win over the file, as on SGLang's command line.
"""

# ruff: noqa: E402 - SGLang reads the environment and its plugins before the rest is imported
import json
import os
import sys

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.disaggregation.kv_events import KVEventsConfig
from sglang.srt.server_args import prepare_server_args


def main() -> None:
    """See the module."""
    args = prepare_server_args(["--config", *sys.argv[1:]])
    args.resolve_once()
    resolved = args.resolved_dict()
    events = KVEventsConfig.from_cli(resolved["kv_events_config"]) if resolved["kv_events_config"] else None
    print(json.dumps({"args": resolved, "events": events and events.model_dump()}, default=str), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
