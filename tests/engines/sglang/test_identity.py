"""What a server is identified by, read from SGLang's own settings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from demo import model

# SGLang warns of much when it is imported.
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
Identity = Callable[..., str]


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Identity:
    """The identity of the weights of a server with these settings."""
    from tensorcast_connector.engines.sglang import server

    monkeypatch.setattr(server, "default_cache_dir", lambda: tmp_path / "cache")

    def of(path: Path, declared: str = "", **settings: Any) -> str:
        known = {"model_path": str(path), "load_format": "auto", **settings}
        monkeypatch.setattr(server, "setting", known.get)
        return server.weights_at_start(declared)

    return of


def test_the_same_files_are_the_same_weights_wherever_they_lie(identity: Identity, tmp_path: Path) -> None:
    one = model.make("tiny")
    copied = Path(shutil.copytree(one, tmp_path / "copy"))
    assert identity(one) == identity(copied) != identity(model.make("tiny", seed=1))
    assert identity(one, "v1") == identity(model.make("tiny", seed=1), "v1") == "declared:v1"


@pytest.mark.parametrize("load_format", ["dummy", "remote"])
def test_weights_that_are_not_in_files_are_nobody_elses(identity: Identity, load_format: str) -> None:
    tiny = model.make("tiny")
    assert identity(tiny, load_format=load_format) != identity(tiny, load_format=load_format)


def test_a_draft_model_is_part_of_it(identity: Identity) -> None:
    tiny, other = model.make("tiny"), model.make("tiny", seed=1)
    with_draft = [
        identity(tiny, speculative_algorithm="EAGLE", speculative_draft_model_path=str(each)) for each in (tiny, other)
    ]
    assert len({identity(tiny), *with_draft}) == 3


def test_adapters_count_by_what_they_hold(identity: Identity, tmp_path: Path) -> None:
    tiny = model.make("tiny")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    reference = [SimpleNamespace(lora_id="same", lora_name="a", lora_path=str(adapter))]

    def write(weights: bytes, alpha: int) -> str:
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        (adapter / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        return identity(tiny, lora_paths=reference)

    seen = [write(b"one", 8), write(b"two", 8), write(b"two", 16), identity(tiny)]
    assert len(set(seen)) == 4 and write(b"one", 8) == seen[0]
    (adapter / "adapter_config.json").unlink()
    assert identity(tiny, lora_paths=reference) != identity(tiny, lora_paths=reference), "unknown, so nobody else's"


def test_weights_of_experts_on_the_cpu_are_part_of_it(identity: Identity) -> None:
    tiny, other = model.make("tiny"), model.make("tiny", seed=1)
    assert len({identity(tiny), *(identity(tiny, kt_weight_path=str(each)) for each in (tiny, other))}) == 3


def test_a_file_of_scales_counts_by_what_it_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tensorcast_connector.engines.sglang import server

    scales = tmp_path / "scales.json"
    known = {"model_path": str(model.make("tiny")), "quantization_param_path": str(scales)}
    monkeypatch.setattr(server, "setting", known.get)

    def facts(content: str) -> dict[str, Any]:
        scales.write_text(content)
        return server.facts()

    one = facts("1")
    assert facts("2") != one == facts("1")
    scales.unlink()
    assert server.facts() != server.facts(), "unknown, so nobody else has it"


def test_precision_that_the_environment_sets_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorcast_connector.engines.sglang import server

    monkeypatch.setattr(server, "setting", {"model_path": str(model.make("tiny"))}.get)
    before = server.facts()
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float16")
    assert server.facts() != before


def test_what_all_ranks_of_a_server_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorcast_connector.engines.sglang import server

    def seed(host: str, **settings: Any) -> str:
        monkeypatch.setattr(server, "setting", {"port": 30000, "random_seed": 7, **settings}.get)
        monkeypatch.setattr(server.socket, "gethostname", lambda: host)
        return server.common_seed()

    assert seed("a", nnodes=1) == seed("a", nnodes=1) != seed("b", nnodes=1) != seed("b", nnodes=1, port=30001)
    nodes = {"nnodes": 2, "dist_init_addr": "a:5000"}
    assert seed("a", **nodes) == seed("b", **nodes), "on whichever node"
    assert (
        len({seed("a", **nodes), seed("a", **nodes, random_seed=8), seed("a", nnodes=2, dist_init_addr="a:5001")}) == 3
    )


def test_settings_are_those_that_sglang_has_resolved() -> None:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    from tensorcast_connector.engines.sglang import server

    known = {field.name for field in msgspec.structs.fields(ServerArgs)}
    assert set(server.COMPUTES) <= known, "a setting that this release does not have says nothing"
    assert all(namespace_of(ServerArgs).get(name) for name in server.COMPUTES)
