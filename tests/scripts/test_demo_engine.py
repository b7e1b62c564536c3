"""The demo's engines: what they share and what they do not."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from demo import engine
from demo.engine import EngineOptions
from demo.processes import Supervisor


class Recording:
    """Writes down what would be started."""

    def __init__(self) -> None:
        self.environments: list[Mapping[str, str]] = []

    def port(self) -> int:
        return 1

    def cleanup(self, folder: Path) -> None:
        folder.rmdir()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Any:
        self.environments.append(env)
        return SimpleNamespace()


def test_engines_share_what_torch_compiled_though_not_their_temporary_folder() -> None:
    # Torch compiles into the temporary folder unless told otherwise. An engine with a new one was silent for 26 to 31 s at
    # the first request for log probabilities; a router that was stopped within that time cut the request off.
    recording = Recording()
    for name in "ab":
        engine.start(cast(Supervisor, recording), name, EngineOptions(Path("model")))
    first, second = recording.environments
    assert first["TMPDIR"] != second["TMPDIR"]
    assert first["TORCHINDUCTOR_CACHE_DIR"] == second["TORCHINDUCTOR_CACHE_DIR"] == str(engine.COMPILED)
    # These would lie under TMPDIR all the same.
    assert first["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"
