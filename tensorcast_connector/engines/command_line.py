"""What the user has written behind `vllm serve` or `sglang serve`, as far as it is ours.

It is looked at in the process that the user started: later, inside the engine's processes, a mistake would surface below pages
of tracebacks.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tensorcast_connector.engines.options import LoaderConfig

LOAD_FORMAT = "tensorcast"


def given(argv: Sequence[str], flag: str) -> Iterator[str]:
    """What is given to a flag, in any of its spellings."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            yield value if equals else (argv[index + 1] if index + 1 < len(argv) else "")


def given_json(argv: Sequence[str], flag: str) -> Iterator[Any]:
    """The same as values; what is no JSON is left to the engine, which says what is wrong with it."""
    for text in given(argv, flag):
        try:
            yield json.loads(text)
        except ValueError:
            continue


def check_loader(argv: Sequence[str]) -> None:
    """Checks `--model-loader-extra-config JSON` of `--load-format tensorcast`.

    Raises:
        ConfigError: it is wrong.
    """
    if LOAD_FORMAT in [each.lower() for each in given(argv, "--load-format")]:
        for config in given_json(argv, "--model-loader-extra-config"):
            if config is not None:
                LoaderConfig.from_extra(config)
