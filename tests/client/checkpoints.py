"""Safetensors files for tests: with any header, or with tensors of random bytes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tensorcast_connector.core.artifact import layout
from tensorcast_connector.core.safetensors import INDEX, encode_file_header


def file_of(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with that header, as JSON unless it is bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "U8", shape: Any = (2,), offsets: Any = (0, 2)) -> dict[str, Any]:
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def random_file(path: Path, sizes: Mapping[str, int], seed: int = 0) -> dict[str, bytes]:
    """A file of uint8 tensors of these sizes; returns their bytes."""
    header, order = encode_file_header(layout((name, "uint8", (size,)) for name, size in sizes.items())[0])
    chance = np.random.default_rng(seed)
    made = {each.name: chance.bytes(each.bytes) for each in order}
    path.write_bytes(header + b"".join(made.values()))
    return made


def random_folder(folder: Path, sizes: Mapping[str, int], files: int = 2) -> dict[str, bytes]:
    """The same, over some files with an index."""
    names = list(sizes)
    tensors: dict[str, bytes] = {}
    places = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        mine = names[number::files]
        tensors |= random_file(folder / file, {name: sizes[name] for name in mine}, number)
        places |= dict.fromkeys(mine, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tensors
