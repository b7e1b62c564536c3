"""Published versions of a model's weights, as values (TensorCast, section 5.2: WeightPublisher).

A version is a *manifest*: for each tensor the digest of its bytes and where they lie, in which *part* under which name. A part is
an ordinary artifact; a version that changes few tensors has one new part with these and goes on with the parts of the former one.
Manifest and parts are artifacts of the tenant, and hold together by names:

    MODEL                                    the manifest of the newest version
    MODEL:VERSION                            the manifest of that version
    MODEL:manifest:ORDER:CONTENT:ARTIFACT    every manifest there is, so that none is forgotten
    MODEL:part:ARTIFACT                      every part

All that is under the last two and that nothing of the first two needs (nor any other name) is to be deleted. Every manifest and
every part holds a few bytes of chance, so an id that was deleted never comes again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import blake3
import msgspec

from tensorcast_connector.config import (
    NAME_CHARS_MAX,
    WEIGHT_COMPACTION_SHARE,
    WEIGHT_PARTS_MAX,
    WEIGHT_PARTS_WASTE_MAX,
    WEIGHT_VERSION_CHARS_MAX,
)
from tensorcast_connector.core.artifact import ARTIFACT_ID_CHARS, DTYPE_BYTES, TensorSpec, is_artifact_id, layout
from tensorcast_connector.errors import InvalidArgument, ProtocolError
from tensorcast_connector.wire.caller_messages import ArtifactListed, NameMove

FORMAT_VERSION = 1
DIGEST_BYTES = 16
ORDER_MAX = (1 << 63) - 1
MANIFEST_TENSOR = "tensorcast.manifest"
CHANCE_TENSOR = "tensorcast.chance"
LINEAGE = "weights-of/"
"""Under such names lie parameters that were loaded from files, beside their own (engines/weights/lineage.py)."""
_MANIFEST, _PART = "manifest", "part"

Content = tuple[str, tuple[int, ...], bytes]
"""What is equal in equal tensors: dtype, shape, digest."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a version.

    Attributes:
        digest: xxh3-128 of its bytes, contiguous and little-endian.
        part: which of the manifest's parts has them,
        inner: and under which name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes
    part: int
    inner: str

    @property
    def bytes(self) -> int:
        """Its size."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def content(self) -> Content:
        """What it is, without its name and place."""
        return self.dtype, self.shape, self.digest


class PartEntry(msgspec.Struct, frozen=True, array_like=True):
    """An artifact with tensors of a version; `bytes` of all its tensors, whether the version needs them or not."""

    artifact_id: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """A version. `tensors` by name; `moved_bytes` were put for it, of which `changed_bytes` were not in the version before."""

    model: str
    version: int | str
    order: int
    tensors: tuple[TensorEntry, ...]
    parts: tuple[PartEntry, ...]
    changed_bytes: int
    moved_bytes: int
    chance: bytes
    format: int = FORMAT_VERSION

    @property
    def part_ids(self) -> frozenset[str]:
        """The artifacts that it needs besides itself."""
        return frozenset(each.artifact_id for each in self.parts)

    @property
    def content_id(self) -> str:
        """The identity of the weights, whoever published them under whatever name, and however they lie in parts."""
        return content_id((each.name, *each.content) for each in self.tensors)


def content_id(tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> str:
    """The identity of tensors (name, dtype, shape, digest)."""
    canonical = sorted((name, dtype, tuple(shape), digest) for name, dtype, shape, digest in tensors)
    return blake3.blake3(msgspec.msgpack.encode(canonical)).hexdigest()[:ARTIFACT_ID_CHARS]


encode_manifest = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Manifest)


def decode_manifest(encoded: bytes) -> Manifest:
    """The manifest in `encoded`, which may come from anybody.

    Raises:
        ProtocolError: it is none, or contradicts itself.
    """
    try:
        manifest = _decoder.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not the manifest of a version: {error}") from error
    if manifest.format != FORMAT_VERSION:
        raise ProtocolError(f"a manifest of format {manifest.format}; this version reads {FORMAT_VERSION}")
    try:
        specs, _ = layout((each.name, each.dtype, each.shape) for each in manifest.tensors)
    except ValueError as error:
        raise ProtocolError(f"not the manifest of a version: {error}") from error
    if [each.name for each in specs] != [each.name for each in manifest.tensors]:
        raise ProtocolError("the manifest of a version is not in its canonical form")
    for each in manifest.tensors:
        if len(each.digest) != DIGEST_BYTES or not 0 <= each.part < len(manifest.parts):
            raise ProtocolError(f"the manifest of a version says nothing sensible of tensor {each.name!r}")
    if not all(is_artifact_id(each.artifact_id) for each in manifest.parts):
        raise ProtocolError("the manifest of a version names a part that is no artifact")
    return manifest


def is_manifest(tensors: Sequence[TensorSpec]) -> bool:
    """Whether an artifact with these tensors is the manifest of a version."""
    return [each.name for each in tensors] == [MANIFEST_TENSOR]


# --- names ------------------------------------------------------------------------------------------------------------


def check_model(model: str) -> str:
    """The name under which versions are published.

    Raises:
        InvalidArgument: it cannot be one.
    """
    fine = (
        isinstance(model, str) and 0 < len(model) <= NAME_CHARS_MAX and model.isprintable() and model == model.strip()
    )
    if not fine or ":" in model or is_artifact_id(model):
        raise InvalidArgument(
            f"{str(model)[:64]!r} is no name for weights: 1 to {NAME_CHARS_MAX} printable characters without ':' "
            "that are not an artifact's id"
        )
    return model


def check_version(version: Any) -> int | str:
    """A version; a text that is a whole number is that number.

    Raises:
        InvalidArgument: it cannot be one.
    """
    if isinstance(version, str) and version.isdecimal() and version.isascii() and str(int(version)) == version:
        version = int(version)
    if isinstance(version, int) and not isinstance(version, bool) and 0 <= version <= ORDER_MAX:
        return version
    sound = isinstance(version, str) and 0 < len(version) <= WEIGHT_VERSION_CHARS_MAX and version.isprintable()
    if sound and ":" not in version and version == version.strip() and version not in (_MANIFEST, _PART):
        return str(version)
    raise InvalidArgument(
        f"{str(version)[:64]!r} is no version: a whole number from 0, or 1 to {WEIGHT_VERSION_CHARS_MAX} printable "
        "characters without ':'"
    )


def version_name(model: str, version: int | str) -> str:
    """The name of one version."""
    return f"{model}:{version}"


def manifest_name(manifest: Manifest, artifact_id: str) -> str:
    """Under which a manifest is held."""
    return f"{manifest.model}:{_MANIFEST}:{manifest.order}:{manifest.content_id}:{artifact_id}"


def part_name(model: str, artifact_id: str) -> str:
    """Under which a part is held."""
    return f"{model}:{_PART}:{artifact_id}"


@dataclass(frozen=True, slots=True)
class Held:
    """A manifest as its name tells of it."""

    model: str
    order: int
    content_id: str
    artifact_id: str


def held_manifest(listed: ArtifactListed) -> Held | None:
    """What kind of manifest an artifact is; None: it is none."""
    for name in listed.names:
        fields = name.split(":")
        if len(fields) == 5 and fields[1] == _MANIFEST and fields[4] == listed.artifact_id and fields[2].isdecimal():
            return Held(fields[0], int(fields[2]), fields[3], fields[4])
    return None


@dataclass(slots=True)
class ModelState:
    """What there is of one model at the store, at one moment.

    Attributes:
        newest: the manifest that the model's name points to; "": it points to nothing.
        versions: their manifests.
        manifests: all that are held, by id.
        parts: all that are held, and the workers that have each.
        wanted: what other names point to, among manifests and parts.
        lost: manifests of which nobody has the bytes.
    """

    model: str
    newest: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    manifests: dict[str, Held] = field(default_factory=dict)
    parts: dict[str, Sequence[str]] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: str, listed: Iterable[ArtifactListed]) -> "ModelState":
        """From a list of artifacts that has at least those with names that begin with the model's."""
        state = cls(model)
        for artifact in listed:
            held = held_manifest(artifact)
            for name in artifact.names:
                kind, _, rest = name.removeprefix(f"{model}:").partition(":") if name != model else ("", "", "")
                if name == model:
                    state.newest = artifact.artifact_id
                elif not name.startswith(f"{model}:"):
                    state.wanted.add(artifact.artifact_id)
                elif kind == _MANIFEST and held is not None and held.model == model:
                    state.manifests[artifact.artifact_id] = held
                    state.lost |= set() if artifact.workers else {artifact.artifact_id}
                elif kind == _PART and rest == artifact.artifact_id:
                    state.parts[artifact.artifact_id] = artifact.workers
                elif rest:
                    state.wanted.add(artifact.artifact_id)
                else:
                    state.versions[kind] = artifact.artifact_id
        return state

    @property
    def order(self) -> int:
        """Of the newest version; -1: there is none."""
        return self.manifests[self.newest].order if self.newest in self.manifests else -1

    def superseded(self, keep_last: int) -> list[NameMove]:
        """The names of versions that are not kept: older ones, and newer ones than the one that was gone back to."""
        if self.order < 0:
            return []  # which is the newest is not known
        ordered = sorted(
            (
                (self.manifests[each].order, text, each)
                for text, each in self.versions.items()
                if each in self.manifests
            ),
            reverse=True,
        )
        kept = {each for _, _, each in [each for each in ordered if each[0] <= self.order][:keep_last]}
        kept.add(self.newest)
        return [NameMove(version_name(self.model, text), "", each) for _, text, each in ordered if each not in kept]

    @property
    def live(self) -> set[str]:
        """The manifests that a name needs."""
        return ({self.newest, *self.versions.values()} | self.wanted) & self.manifests.keys()

    def unneeded(self, manifests: Mapping[str, Manifest]) -> list[str]:
        """What is to be deleted, given all manifests that are `live`: parts first, so that no manifest outlives its name."""
        needed = self.live | self.wanted
        for each in self.live:
            needed |= manifests[each].part_ids
        return [each for each in [*self.parts, *self.manifests] if each not in needed]


# --- what is put for a version ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delta:
    """What a version is made of: `kept` of former parts, by name, and the names of tensors that are put."""

    kept: Mapping[str, tuple[PartEntry, str]]
    put: Sequence[str]
    changed_bytes: int
    moved_bytes: int


def plan_delta(tensors: Mapping[str, Content], former: Sequence[Manifest], there: Iterable[str]) -> Delta:
    """What has to be put for a version with these tensors.

    Besides what has changed, tensors of parts that are hardly used any more are put again, so that such parts can go: within
    WEIGHT_COMPACTION_SHARE of what has changed, and beyond it only to keep the number and the waste of parts bounded.

    Args:
        former: versions whose parts may be used, the best first.
        there: parts whose bytes are there.
    """
    available, places = set(there), dict[Content, tuple[PartEntry, str]]()
    for manifest in former:
        for each in manifest.tensors:
            part = manifest.parts[each.part]
            if part.artifact_id in available:
                places.setdefault(each.content, (part, each.inner))
    sizes = {name: DTYPE_BYTES[content[0]] * math.prod(content[1]) for name, content in tensors.items()}
    kept = {name: places[content] for name, content in tensors.items() if content in places}
    changed = _bytes_once(tensors, sizes, [name for name in tensors if name not in kept])
    for part in _to_rewrite(kept, sizes, changed):
        kept = {name: place for name, place in kept.items() if place[0] != part}
    put = [name for name in tensors if name not in kept]
    return Delta(kept, put, changed, _bytes_once(tensors, sizes, put))


def _bytes_once(tensors: Mapping[str, Content], sizes: Mapping[str, int], names: Iterable[str]) -> int:
    """Of equal tensors one is put."""
    return sum({tensors[name]: sizes[name] for name in names}.values())


def _to_rewrite(kept: Mapping[str, tuple[PartEntry, str]], sizes: Mapping[str, int], changed: int) -> list[PartEntry]:
    used: dict[PartEntry, dict[str, int]] = {}
    for name, (part, inner) in kept.items():
        used.setdefault(part, {})[inner] = sizes[name]
    live = {part: sum(inner.values()) for part, inner in used.items()}
    total, size = changed + sum(live.values()), changed + sum(part.bytes for part in live)
    # Of too many those with the least are put together; of those that waste, the ones that waste most.
    by_size = sorted(live, key=lambda part: (live[part], part.artifact_id))
    rewritten = by_size[: max(0, len(live) + 1 - WEIGHT_PARTS_MAX)]
    size -= sum(part.bytes - live[part] for part in rewritten)
    budget = changed * WEIGHT_COMPACTION_SHARE - sum(live[part] for part in rewritten)
    for part in sorted(live, key=lambda part: (live[part] / max(part.bytes, 1), part.artifact_id)):
        wasted = 2 * live[part] < part.bytes and live[part] <= budget
        if part not in rewritten and (wasted or size > WEIGHT_PARTS_WASTE_MAX * total):
            rewritten.append(part)
            budget -= live[part]
            size -= part.bytes - live[part]
    return rewritten


def make_manifest(
    model: str, version: int | str, order: int, tensors: Mapping[str, Content], delta: Delta, part: str, chance: bytes
) -> Manifest:
    """The manifest of a version whose new part, with what `delta` says, is the artifact `part`."""
    new = PartEntry(part, delta.moved_bytes)
    first = first_of_equals(tensors, delta.put)
    places = {name: delta.kept.get(name) or (new, first[tensors[name]]) for name in tensors}
    parts = sorted({place[0] for place in places.values()}, key=lambda each: each.artifact_id)
    numbers = {each: number for number, each in enumerate(parts)}
    entries = tuple(
        TensorEntry(name, *tensors[name], numbers[places[name][0]], places[name][1]) for name in sorted(tensors)
    )
    return Manifest(model, version, order, entries, tuple(parts), delta.changed_bytes, delta.moved_bytes, chance)


def first_of_equals(tensors: Mapping[str, Content], names: Iterable[str]) -> dict[Content, str]:
    """Of equal tensors the one that is put."""
    first: dict[Content, str] = {}
    for name in names:
        first.setdefault(tensors[name], name)
    return first
