"""Tensors for a running model: checked without touching it, then loaded into the layers that change, as a start would."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from demo import model as demo_model

from tensorcast_connector.errors import InvalidArgument
from tests.engines.vllm.models import Models, models

__all__ = ["models"]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]
Tensors = dict[str, Any]
UP = "model.layers.1.mlp.up_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
NORM = "model.layers.0.self_attn.q_norm.weight"


def tensors_in(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def specs(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()}


def checked(model: Any, tensors: Tensors, expected: Tensors, tied: bool = False) -> Any:
    from tensorcast_connector.engines.vllm.weight_check import check, check_taken

    uses = check(model, tensors, specs(expected))
    check_taken({name: each.shape for name, each in tensors.items()}, [uses.taken], tied)
    return uses


def reload(model: Any, config: Any, uses: Any, tensors: Tensors, changed: list[str]) -> list[str]:
    from tensorcast_connector.engines.vllm.weight_reload import reload_layers

    names, layers = uses.closure(changed)
    reload_layers(model, config.model_config, layers, [(name, tensors[name]) for name in names])
    return list(names)


@pytest.fixture(scope="module")
def folders() -> tuple[Path, Path]:
    return demo_model.make("tiny"), demo_model.make("tiny", seed=1)


@pytest.fixture(scope="module")
def loaded(models: Models, folders: tuple[Path, Path]) -> tuple[Any, Any]:
    return models.load(folders[0])


def replaced(name: str, make: Callable[[Any], Any]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize("known", [True, False], ids=["with-its-files", "without-its-files"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tensors: tensors.pop(UP), ["missing", "layers.1.mlp.gate_up_proj"]),
        (lambda tensors: tensors.update(other=tensors[UP]), ["'other'"]),
        (replaced(UP, lambda each: each[:4]), [UP]),
        (replaced(UP, lambda each: each.repeat(2, 1)), [UP, "shape"]),
        (replaced("model.layers.1.self_attn.k_proj.weight", lambda each: each.repeat(2, 1)), ["k_proj", "shape"]),
        (replaced("model.embed_tokens.weight", lambda each: each[:-1]), ["embed_tokens"]),
        (replaced(NORM, lambda each: each[:1]), [NORM, "shape"]),
        (replaced(UP, lambda each: each.float()), [UP, "float32", "bfloat16"]),
        (replaced("model.norm.weight", lambda each: each.float()), ["model.norm.weight", "float32", "bfloat16"]),
    ],
)
def test_what_is_no_checkpoint_of_the_model_is_refused_by_name_and_changes_nothing(
    models: Models, folders: tuple[Path, Path], loaded: tuple[Any, Any], known: bool, spoil: Any, words: list[str]
) -> None:
    model, config = loaded
    before, tensors = models.computes(model), tensors_in(folders[1])
    spoil(tensors)
    with models.configured(config), pytest.raises(InvalidArgument) as caught:
        checked(model, tensors, tensors_in(folders[0]) if known else {})
    for word in words:
        assert word in str(caught.value)
    if known and "missing" in words:
        assert UP in str(caught.value)
    assert models.differ(before, models.computes(model)) == []


def test_a_reload_makes_what_a_start_from_these_tensors_makes_and_may_be_repeated(
    models: Models, folders: tuple[Path, Path], loaded: tuple[Any, Any]
) -> None:
    model, config = loaded
    first, second = tensors_in(folders[0]), tensors_in(folders[1])
    before, wanted = models.computes(model), models.computes(models.load(folders[1])[0])
    assert models.differ(before, wanted)
    places = {name: each.data_ptr() for name, each in model.named_parameters()}
    with models.configured(config):
        uses = checked(model, second, first)
        assert reload(model, config, uses, second, list(second))
        assert models.differ(wanted, models.computes(model)) == []
        reload(model, config, uses, first, list(first))
    assert models.differ(before, models.computes(model)) == []
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == places, "the engine may hold these"


def test_only_the_layers_of_changed_tensors_are_made_anew(
    models: Models, folders: tuple[Path, Path], loaded: tuple[Any, Any]
) -> None:
    model, config = loaded
    tensors = tensors_in(folders[0])
    before = models.computes(model)
    with models.configured(config):
        uses = checked(model, tensors, tensors)
        assert reload(model, config, uses, tensors, []) == []
        changed = {**tensors, UP: tensors[UP] * 2, NORM: tensors[NORM] * 2}
        assert sorted(reload(model, config, uses, changed, [UP, NORM])) == sorted([UP, GATE, NORM])
        assert models.differ(before, models.computes(model)) == [
            "model.layers.0.self_attn.q_norm.weight",
            "model.layers.1.mlp.gate_up_proj (packed)",
        ]
        reload(model, config, uses, tensors, [UP, NORM])
    assert models.differ(before, models.computes(model)) == []


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_an_output_layer_tied_to_the_embeddings_follows_them(
    models: Models, folders: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    first = tied(kind, 0, tmp_path / "first")
    second = tied(kind, 1, tmp_path / "second")
    model, config = models.load(first)
    wanted = models.computes(models.load(second)[0])
    tensors = tensors_in(second)
    assert "lm_head.weight" not in tensors
    with models.configured(config):
        given = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}  # as a state_dict has it
        uses = checked(model, given, {}, tied=True)
        reload(model, config, uses, given, list(given))
    assert models.differ(wanted, models.computes(model)) == []


def tied(kind: str, seed: int, folder: Path) -> Path:
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = getattr(transformers, f"{kind}ForCausalLM")(config)
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder
