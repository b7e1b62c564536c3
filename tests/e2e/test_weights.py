"""`--load-format tensorcast` on a real vLLM: every parameter is as the engine's own loader makes it, wherever it is from."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from demo import pool
from demo.engine import Engine, EngineOptions, cpus_of
from demo.pool import Started
from demo.processes import Supervisor
from demo.ranks import Ranks, published

from tests.e2e.probe import post, statistics, tokens

pytestmark = pytest.mark.engine
MAPPED, SHARED = "from the pool, mapped", "being shared"


@pytest.fixture(scope="module", params=[1, 2], ids=["TP=1", "TP=2"])
def ranks(supervisor: Supervisor, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The ranks of an engine."""
    with Ranks(request.param, supervisor.folder / f"ranks-{request.param}.log") as made:
        yield made


@pytest.fixture(scope="module")
def one(supervisor: Supervisor) -> Iterator[Ranks]:
    """One rank."""
    with Ranks(1, supervisor.folder / "rank.log") as made:
        yield made


@pytest.fixture(scope="module")
def worker(workers: tuple[Started, Started]) -> dict[str, Any]:
    """Options of the loader."""
    return {"worker": workers[0]["worker"]}


@pytest.fixture(scope="module")
def with_device(store: Started, supervisor: Supervisor) -> Started:
    """A worker with a device, that is memory of the machine."""
    return pool.worker(supervisor, store["store"], "device", options=["--devices", "host:0"])


def variant(
    tiny: Path, target: Path, *, tied: bool = False, vocabulary: int = 0, files: int = 1, scale: float = 1.0,
    quantised: bool = False,
) -> Path:  # fmt: skip
    """The tiny model: its head tied, its vocabulary cut (so that the engine pads it), in several files, other weights, int8."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny, target)
    config = json.loads((target / "config.json").read_text())
    tensors = {name: each * scale for name, each in load_file(target / "model.safetensors").items()}
    if tied:
        config["tie_word_embeddings"] = True
        del tensors["lm_head.weight"]
    if vocabulary:
        config["vocab_size"] = vocabulary
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                tensors[name] = tensors[name][:vocabulary].clone()
    assert all(each.dtype == torch.bfloat16 for each in tensors.values())
    if quantised:
        config["quantization_config"] = INT8
        for name in [each for each in tensors if each.endswith("_proj.weight")]:
            scales = tensors[name].float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensors[name].float() / scales).round().to(torch.int8)
            tensors[f"{name}_scale"] = scales.to(torch.bfloat16)
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").unlink()
    if files == 1:
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        return target
    names, places = sorted(tensors), {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = names[number::files]
        save_file({each: tensors[each] for each in part}, target / name, {"format": "pt"})
        places.update(dict.fromkeys(part, name))
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return target


INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, padded": {"tied": True, "vocabulary": 1990},
    "padded, in files": {"vocabulary": 1990, "files": 3},
    "quantised": {"quantised": True},
}


def said(answers: list[dict[str, Any]], words: str) -> bool:
    """Whether every rank said so."""
    return all(any(words in line for line in each["said"]) for each in answers)


@pytest.mark.parametrize("case", VARIANTS)
def test_every_parameter_is_as_the_engines_own_loader_leaves_it(
    case: str, ranks: Ranks, tiny: Path, tmp_path: Path, worker: dict[str, Any]
) -> None:
    model = variant(tiny, tmp_path / "model", **VARIANTS[case])
    expected = [each["digests"] for each in ranks.load(model, "auto")]
    assert len(expected[0]) > 40
    alone = ranks.load(model)
    assert [each["digests"] for each in alone] == expected and said(alone, "from files:")
    cold = ranks.load(model, extra=worker)
    assert [each["digests"] for each in cold] == expected and said(cold, SHARED), cold[0]["said"]
    published(cold, **worker)
    warm = ranks.load(model, extra=worker)
    assert [each["digests"] for each in warm] == expected and said(warm, MAPPED), warm[0]["said"]
    # A model that is loaded again writes over what it maps, and changes nothing for others.
    again = ranks.load(model, extra=worker, again=True)
    assert [each["digests"] for each in again] == expected and said(again, "loaded before")
    assert said(ranks.load(model, extra=worker), MAPPED)


@pytest.mark.parametrize("count", [1, 2], ids=["TP=1", "TP=2"])
def test_experts_too(count: int, tiny: Path, tmp_path: Path, worker: dict[str, Any]) -> None:
    """In ranks of its own: the engine makes the groups of experts with the first model of a process."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = tmp_path / "model"
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = Qwen3MoeConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256,
        max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    with Ranks(count, tmp_path / "ranks.log") as ranks:
        expected = [each["digests"] for each in ranks.load(model, "auto")]
        for words in (SHARED, MAPPED):
            found = ranks.load(model, extra=worker)
            assert [each["digests"] for each in found] == expected and said(found, words), found[0]["said"]
            if words == SHARED:
                published(found, **worker)


def test_files_that_were_written_over_are_read_again(
    one: Ranks, tiny: Path, tmp_path: Path, worker: dict[str, Any]
) -> None:
    from tensorcast_connector.client.blocking import connect_blocking

    def names() -> set[str]:
        with connect_blocking(worker["worker"]) as session:
            return {name for each in session.list_artifacts("weights/") for name in each.names}

    before_any = {each for each in names() if each.startswith("weights/")}
    model = variant(tiny, tmp_path / "model")
    first = one.load(model, extra=worker)
    assert said(first, SHARED)
    published(first, **worker)
    (former,) = {each for each in names() - before_any if each.startswith("weights/")}
    file, other = model / "model.safetensors", variant(tiny, tmp_path / "other", scale=2.0) / "model.safetensors"
    before = file.stat()
    assert before.st_size == other.stat().st_size
    with file.open("r+b") as target:
        target.write(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # a copy that keeps the times
    second = one.load(model, extra=worker)
    assert said(second, SHARED) and second[0]["digests"] == one.load(model, "auto")[0]["digests"]
    assert second[0]["digests"] != first[0]["digests"]
    published(second, **worker)
    now = {each for each in names() if each.startswith("weights/")}
    assert former not in now and len(now - before_any) == 1 and before_any <= now
    # The same version is declared for other files: what is said counts, for this model alone.
    declared = one.load(model, extra={**worker, "weight_version": "7"})
    assert said(declared, SHARED)
    published(declared, **worker)
    assert said(one.load(model, extra={**worker, "weight_version": "7"}), MAPPED)
    assert said(one.load(tmp_path / "other", extra={**worker, "weight_version": "7"}), SHARED)


def test_another_tenant_and_another_dtype_share_nothing(
    one: Ranks, tiny: Path, tmp_path: Path, worker: dict[str, Any]
) -> None:
    model = variant(tiny, tmp_path / "model")
    first = one.load(model, extra=worker)
    assert said(first, SHARED)
    published(first, **worker)
    assert said(one.load(model, extra={**worker, "tenant": "blue"}), SHARED)
    found = one.load(model, extra={**worker, "publish": False}, arguments={"hf_overrides": {"rms_norm_eps": 1e-4}})
    assert said(found, "is not in the pool") and not said(found, SHARED)


def test_from_an_artifact_instead_of_files(ranks: Ranks, tiny: Path, tmp_path: Path, worker: dict[str, Any]) -> None:
    from tensorcast_connector.client.blocking import connect_blocking

    model = variant(tiny, tmp_path / "model", vocabulary=1990, files=2)
    expected = [each["digests"] for each in ranks.load(model, "auto")]
    with connect_blocking(worker["worker"]) as session:
        session.put(model, name="tiny:v1")
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    options = {**worker, "source": "tiny:v1"}
    cold = ranks.load(bare, extra=options)
    assert [each["digests"] for each in cold] == expected and said(cold, "from artifact tiny:v1"), cold[0]["said"]
    published(cold, **worker)
    warm = ranks.load(bare, extra=options)
    assert [each["digests"] for each in warm] == expected and said(warm, MAPPED)
    absent = ranks.load(model, extra={**worker, "source": "tiny:v9"})
    assert [each["digests"] for each in absent] == expected and said(absent, "no artifact has the name 'tiny:v9'")


def test_from_another_host_only_the_slices_of_a_rank_come(
    ranks: Ranks, tiny: Path, tmp_path: Path, workers: tuple[Started, Started]
) -> None:
    from tensorcast_connector.client.blocking import connect_blocking

    model = variant(tiny, tmp_path / "model", vocabulary=1990, scale=3.0)
    expected = [each["digests"] for each in ranks.load(model, "auto")]
    before = statistics(workers[0])["artifact_bytes_fetched"]
    with connect_blocking(workers[1]["worker"]) as session:
        session.put(model, name=f"elsewhere:{len(expected)}")
    found = ranks.load(model, extra={"worker": workers[0]["worker"], "source": f"elsewhere:{len(expected)}"})
    assert [each["digests"] for each in found] == expected and said(found, "slices of artifact"), found[0]["said"]
    assert said(found, SHARED)
    published(found, workers[0]["worker"])
    assert (
        statistics(workers[0])["artifact_bytes_fetched"] == before
    )  # no byte came twice, nor as a part of an artifact
    mapped = ranks.load(model, extra={"worker": workers[0]["worker"], "source": f"elsewhere:{len(expected)}"})
    assert [each["digests"] for each in mapped] == expected and said(mapped, MAPPED), mapped[0]["said"]
    whole = (model / "model.safetensors").stat().st_size
    for each in found:
        size = float(each["said"][-1].partition(" GB in")[0].split()[-1]) * 1e9
        assert size < whole * 1.1 / len(expected) + 0.3e6  # norms are on every rank


def test_from_the_memory_of_a_device(ranks: Ranks, tiny: Path, tmp_path: Path, with_device: Started) -> None:
    """On a device that is memory of the machine; a GPU's is the same to all but the driver."""
    from tensorcast_connector.client.blocking import connect_blocking

    model = variant(tiny, tmp_path / "model", vocabulary=1990)
    expected = [each["digests"] for each in ranks.load(model, "auto")]
    options = {"worker": with_device["worker"], "device": "host:0"}
    cold = ranks.load(model, extra=options)
    assert [each["digests"] for each in cold] == expected and said(cold, "no replica of weights/"), cold[0]["said"]
    published(cold, with_device["worker"])
    with connect_blocking(with_device["worker"]) as session:
        lines = [line for each in cold for line in each["said"] if "no replica of weights/" in line]
        names = sorted({word for line in lines for word in line.split() if word.startswith("weights/")})
        assert len(names) == len(expected)
        for name in names:
            session.artifact(name).replicate("host:0")
        copied = ranks.load(model, extra=options)
        assert [each["digests"] for each in copied] == expected and said(copied, "a replica on host:0:"), copied[0][
            "said"
        ]
        assert not [each for name in names for each in session.artifact(name).replicas() if each.open]
        for name in names:
            os.kill(owner_of(with_device.running.process.pid), signal.SIGKILL)
            mapped = ranks.load(model, extra=options)
            assert [each["digests"] for each in mapped] == expected and said(mapped, MAPPED), (name, mapped[0]["said"])
            assert said(mapped, "no replica of weights/")


def owner_of(worker: int) -> int:
    """The process that owns its device memory; waits until it is there again."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for children in Path(f"/proc/{worker}/task").glob("*/children"):
            for child in children.read_text().split():
                if "engines.devices.process" in Path(f"/proc/{child}/cmdline").read_text():
                    return int(child)
        time.sleep(0.02)
    raise TimeoutError("it is not started again")


def test_without_a_pool_the_engine_loads(one: Ranks, tiny: Path, tmp_path: Path) -> None:
    model = variant(tiny, tmp_path / "model")
    expected = one.load(model, "auto")[0]["digests"]
    nobody = one.load(model, extra={"worker": f"unix:{tmp_path}/nobody.sock"})
    assert nobody[0]["digests"] == expected and said(nobody, "no pool:") and said(nobody, "from files")


def test_what_is_not_in_safetensors_files_is_left_to_the_engine(one: Ranks, tiny: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    model = variant(tiny, tmp_path / "model")
    expected = one.load(model, "auto")[0]["digests"]
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    found = one.load(model)
    assert found[0]["digests"] == expected and said(found, "no safetensors files; the engine's own loader")


def test_a_tensor_that_is_missing_or_cut_off_is_named(one: Ranks, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = variant(tiny, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    gone = "model.layers.1.mlp.down_proj.weight"
    save_file({name: each for name, each in tensors.items() if name != gone}, model / "model.safetensors")
    found = one.load(model)[0]
    assert "error" in found and gone in found["error"]
    save_file(tensors, model / "model.safetensors")
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 1000)
    found = one.load(model)[0]
    assert "error" in found and any("model.safetensors" in line for line in found["said"])


@pytest.mark.long
def test_servers_answer_alike(
    tiny: Path, tmp_path: Path, worker: dict[str, Any], start_engine: Callable[[str, EngineOptions], Engine]
) -> None:
    """One by the engine's own loader and one that shares what it loads, side by side; then one that maps it."""
    model = variant(tiny, tmp_path / "model", vocabulary=1990, files=2)
    ours = ("--load-format", "tensorcast", "--model-loader-extra-config", json.dumps(worker))
    first = start_engine("loads-by-default", EngineOptions(model, cpus=cpus_of(0, 2)))
    second = start_engine("loads-and-shares", EngineOptions(model, cpus=cpus_of(1, 2), args=ours))
    prompts = [tokens(seed, 100) for seed in range(3)]
    first.wait()
    expected = [continued(first, prompt) for prompt in prompts]
    second.wait()
    assert [continued(second, prompt) for prompt in prompts] == expected
    deadline = time.monotonic() + 60
    while "shared from now on" not in second.running.log.read_text():
        assert time.monotonic() < deadline, "it is not shared"
        time.sleep(0.1)
    third = start_engine("maps", EngineOptions(model, cpus=cpus_of(0, 2), args=ours))
    third.wait()
    assert MAPPED in third.running.log.read_text()
    assert [continued(third, prompt) for prompt in prompts] == expected


def continued(engine: Engine, prompt: list[int]) -> str:
    """What follows greedily."""
    asked = {"model": engine.served_name, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    found = post(f"{engine.url}/v1/completions", asked)
    return str(found["choices"][0]["text"])
