"""What a page of SGLang's host memory is identified by, besides its tokens: the model, and the pool that it lies in.

SGLang's page hashes name tokens (with cache_salt and adapter) and nothing else. All of the rest is here; two servers that
differ in any of it cannot hit each other's pages. Pure: SGLang's own objects are read in `hicache.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import blake3

from tensorcast_connector.core.identity import keyspace, namespace_digest
from tensorcast_connector.errors import ConfigError

_HASH_DIGITS = 64
# They name where the model was or who wrote it, not what it computes.
_IRRELEVANT = ("_name_or_path", "transformers_version", "architectures_source")
# What SGLang's host pools are described by, where they have it. The bytes of a page follow from these.
POOL_FACTS = (
    "dtype", "layout", "page_size", "layer_num", "target_layer_num", "head_num", "head_dim", "v_head_dim",
    "kv_lora_rank", "qk_rope_head_dim", "storage_format_tag", "size_per_token", "num_mamba_layers", "conv_dtype",
    "temporal_dtype", "conv_state_shapes", "temporal_state_shape",
)  # fmt: skip
# They count the heads of one rank.
_PER_RANK = ("head_num", "size_per_token")
HEAD_MAJOR = "page_head"


@dataclass(frozen=True, slots=True)
class Rank:
    """Which share of the model a process has.

    `replicated`: every tensor-parallel rank holds the same (MLA); such a page is written once.
    `stage`, of `stages`: of the pipeline. Not every pool says which layers it has.
    """

    tp_rank: int
    tp_size: int
    cp_rank: int = 0
    cp_size: int = 1
    replicated: bool = False
    stage: int = 0
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Pool:
    """A host pool: what it is called, what its pages are made of, and the layers that it spans."""

    name: str
    facts: Mapping[str, Any]
    layers: tuple[int, int]


def model_facts(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the model computes: its configuration file and what the server was told besides."""
    kept = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    return {"model": kept, "settings": {name: str(value) for name, value in settings.items()}}


def describe(pool: Any, interface: str) -> dict[str, Any]:
    """A host pool by its own attributes.

    Args:
        pool: SGLang's object.
        interface: by which calls its pages are taken; it decides in which order the parts of a page come.
    """
    facts = {name: getattr(pool, name, None) for name in POOL_FACTS}
    plain = {name: value if isinstance(value, int | None) else str(value) for name, value in facts.items()}
    return {"kind": type(pool).__name__, "interface": interface, **plain}


def chunks(pool: Pool, rank: Rank, tp_lcm_size: int | None) -> int:
    """Into how many head ranges this rank's pages are cut, so that ranks of other sizes share them; 1: not at all.

    Only where the heads come first in memory, so that a range of heads is a range of bytes.

    Raises:
        ConfigError: the heads cannot be cut so.
    """
    if not tp_lcm_size or rank.replicated or pool.facts.get("layout") != HEAD_MAJOR:
        return 1
    heads = int(pool.facts.get("head_num") or 0)
    if tp_lcm_size % rank.tp_size or heads % (tp_lcm_size // rank.tp_size):
        raise ConfigError(
            f"tp_lcm_size={tp_lcm_size} does not cut the {heads} KV heads of each of {rank.tp_size} ranks evenly; "
            "give the least common multiple of the tensor-parallel sizes that share, at most the number of KV heads"
        )
    return tp_lcm_size // rank.tp_size


def keyspaces(namespace: str, pool: Pool, rank: Rank, tp_lcm_size: int | None = None) -> list[bytes]:
    """Where this rank's pages of a pool live: one keyspace for each head range."""
    count = chunks(pool, rank, tp_lcm_size)
    group: dict[str, Any] = {"pool": pool.name, **pool.facts}
    if rank.cp_size > 1:
        group["context_parallel"] = [rank.cp_size, rank.cp_rank]
    if rank.stages > 1:
        group["pipeline"] = [rank.stages, rank.stage]
    if tp_lcm_size and not rank.replicated and pool.facts.get("layout") == HEAD_MAJOR:
        heads = int(pool.facts["head_num"]) // count
        for name in _PER_RANK:
            del group[name]
        return [
            keyspace(namespace, {**group, "heads": heads}, pool.layers, tp_lcm_size, rank.tp_rank * count + each)
            for each in range(count)
        ]
    size, place = (1, 0) if rank.replicated else (rank.tp_size, rank.tp_rank)
    return [keyspace(namespace, group, pool.layers, size, place)]


def namespace(facts: Mapping[str, Any], weights: str, tenant: str, salt: str = "") -> str:
    """The identity of all that determines bytes besides tokens and the pool.

    Args:
        weights: the identity of the weights.
        salt: changed by `clear`, so that nothing that was there before is found.
    """
    return namespace_digest({**facts, "weights": weights, "tenant": tenant, "salt": salt})


def block_hash(key: str) -> bytes:
    """SGLang's page hash as bytes; whatever else it may use as a key is digested."""
    if len(key) == _HASH_DIGITS:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return blake3.blake3(key.encode()).digest()


def block_hashes(keys: Sequence[str]) -> list[bytes]:
    """See `block_hash`."""
    return [block_hash(key) for key in keys]
