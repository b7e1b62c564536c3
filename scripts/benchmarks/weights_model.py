"""A model of random weights, made on the spot for the rows of `scripts/bench weights` on a real vLLM."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from demo import model as models

from tensorcast_connector.core.artifact import layout
from tensorcast_connector.core.safetensors import encode_file_header

HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2048, 6144, 16, 8, 128
LAYER_BYTES = 2 * (3 * HIDDEN * INNER + 2 * HIDDEN * HEADS * HEAD + 2 * HIDDEN * KV_HEADS * HEAD)
VOCABULARY = 2048


def make_model(folder: Path, size: int) -> tuple[Path, int]:
    """A Qwen3 of about `size` bytes, in two files with an index; its folder and the bytes of its tensors."""
    layers = max(1, round((size - 2 * 2 * VOCABULARY * HIDDEN) / LAYER_BYTES))
    shutil.copytree(models.make("tiny"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_window_layers": layers,
    }  # fmt: skip
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:1] * layers
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }  # fmt: skip
    layer = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,), "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    names, places, made = sorted(shapes), {}, 0
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        places.update(dict.fromkeys(part, file))
        made += _write(folder / file, {name: shapes[name] for name in part})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder, made


def _write(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    header, order = encode_file_header(layout((name, "bfloat16", shape) for name, shape in shapes.items())[0])
    chance = np.random.default_rng(len(shapes))
    with path.open("wb") as file:
        file.write(header)
        for each in order:
            if "norm" in each.name:
                values: Any = np.full(each.bytes // 2, 0x3F80, np.uint16)  # ones
            else:  # of both signs, from 1/128 to 1/32
                values = chance.integers(0, 1 << 16, each.bytes // 2, np.uint16) & 0x80FF | 0x3C00
            file.write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return sum(each.bytes for each in order)
