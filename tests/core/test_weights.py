"""What a version is made of: manifests, names, what is put and what goes."""

import random
from collections.abc import Iterable

import msgspec
import pytest

from tensorcast_connector.config import WEIGHT_COMPACTION_SHARE, WEIGHT_PARTS_MAX, WEIGHT_PARTS_WASTE_MAX
from tensorcast_connector.core.weights import (
    Content,
    Manifest,
    ModelState,
    PartEntry,
    content_id,
    decode_manifest,
    encode_manifest,
    held_manifest,
    make_manifest,
    manifest_name,
    part_name,
    plan_delta,
    version_name,
)
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.wire.caller_messages import ArtifactListed, NameMove

SIZE = 1000


def content(seed: int, size: int = SIZE) -> Content:
    return "uint8", (size,), seed.to_bytes(16, "big")


def identity(number: int) -> str:
    return f"{number:032x}"


class Trainer:
    """Publishes version after version, as the publisher does, without bytes."""

    def __init__(self) -> None:
        self.tensors: dict[str, Content] = {}
        self.manifest: Manifest | None = None
        self.parts = 0
        self.moved = self.changed = 0

    def publish(self, tensors: dict[str, Content]) -> Manifest:
        former = [self.manifest] if self.manifest else []
        there = {each.artifact_id for each in former for each in each.parts}
        delta = plan_delta(tensors, former, there)
        self.parts += 1
        self.moved, self.changed = delta.moved_bytes, delta.changed_bytes
        self.manifest = make_manifest("m", self.parts, self.parts, tensors, delta, identity(self.parts), b"c")
        assert {each.name: each.content for each in self.manifest.tensors} == tensors
        assert decode_manifest(encode_manifest(self.manifest)) == self.manifest
        return self.manifest


def test_only_what_changed_is_put_and_equal_tensors_once() -> None:
    trainer = Trainer()
    first = trainer.publish({"a": content(1), "b": content(2), "tied": content(1)})
    assert trainer.moved == 2 * SIZE and len(first.parts) == 1
    assert first.tensors[0].inner == first.tensors[2].inner == "a"
    second = trainer.publish({"a": content(1), "b": content(3), "renamed": content(2), "tied": content(1)})
    assert trainer.moved == trainer.changed == SIZE
    assert [(each.name, each.inner) for each in second.tensors] == [
        ("a", "a"), ("b", "b"), ("renamed", "b"), ("tied", "a")
    ]  # fmt: skip
    third = trainer.publish(dict(trainer.tensors))
    assert third.tensors == () and third.parts == () and trainer.moved == 0
    assert second.content_id == content_id([(each.name, *each.content) for each in second.tensors[::-1]])
    assert second.content_id != first.content_id


def test_parts_that_are_not_there_are_put_again() -> None:
    trainer = Trainer()
    first = trainer.publish({"a": content(1), "b": content(2)})
    delta = plan_delta({"a": content(1), "c": content(3)}, [first], [])
    assert list(delta.put) == ["a", "c"] and delta.moved_bytes == 2 * SIZE and not delta.kept


@pytest.mark.parametrize("seed", range(5))
def test_however_long_it_goes_on_parts_are_few_and_little_is_moved_besides(seed: int) -> None:
    """A tenth of the tensors changes each time, others each time: the bytes of all parts stay bounded."""
    chance, trainer, moved = random.Random(seed), Trainer(), 0
    tensors = {f"t{number}": content(number, 100 + number) for number in range(200)}
    trainer.publish(tensors)
    size = sum(each[1][0] for each in tensors.values())
    for version in range(1, 150):
        for name in chance.sample(sorted(tensors), 20):
            tensors[name] = "uint8", tensors[name][1], (1000 * version + int(name[1:])).to_bytes(16, "big")
        manifest = trainer.publish(dict(tensors))
        assert len(manifest.parts) <= WEIGHT_PARTS_MAX
        assert sum(each.bytes for each in manifest.parts) <= (WEIGHT_PARTS_WASTE_MAX + 1) * size
        if version < 10:
            assert trainer.moved <= (1 + WEIGHT_COMPACTION_SHARE) * trainer.changed
        moved += trainer.moved
    assert moved < 149 * 0.13 * size, "on average"


@pytest.mark.slow
def test_many_small_updates_do_not_make_many_parts() -> None:
    trainer = Trainer()
    tensors = {f"t{number}": content(number) for number in range(500)}
    trainer.publish(tensors)
    for version in range(1, 150):
        tensors[f"t{version}"] = content(1000 + version)
        manifest = trainer.publish(dict(tensors))
        assert len(manifest.parts) <= WEIGHT_PARTS_MAX and trainer.moved <= 12 * SIZE, version


# --- reading manifests ---


def a_manifest() -> Manifest:
    return Trainer().publish({"a": content(1), "b": content(2)})


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"parts": ()}, {"parts": (PartEntry("x", 1),)}, {"version": None}, {"tensors": "x"},
        {"tensors": (("b", "uint8", (1,), b"d" * 16, 0, "b"), ("a", "uint8", (1,), b"d" * 16, 0, "a"))},
        {"tensors": (("a", "uint8", (1,), b"d" * 16, 0, "a"), ("a", "uint8", (1,), b"d" * 16, 0, "a"))},
        {"tensors": (("a", "nosuch", (1,), b"d" * 16, 0, "a"),)},
        {"tensors": (("a", "uint8", (-1,), b"d" * 16, 0, "a"),)},
        {"tensors": (("a", "uint8", (1,), b"d", 0, "a"),)},
        {"tensors": (("a", "uint8", (1,), b"d" * 16, 1, "a"),)},
    ],
)  # fmt: skip
def test_a_manifest_that_makes_no_sense(change: dict[str, object]) -> None:
    fields = {name: getattr(a_manifest(), name) for name in Manifest.__struct_fields__} | change
    with pytest.raises(ProtocolError, match="manifest"):
        decode_manifest(msgspec.msgpack.encode(list(fields.values())))


def test_damaged_manifests_are_refused_or_whole() -> None:
    encoded, chance = encode_manifest(a_manifest()), random.Random(1)
    for _ in range(2000):
        damaged = bytearray(encoded)
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        for each in (bytes(damaged), bytes(damaged[: chance.randrange(len(damaged))])):
            try:
                found = decode_manifest(each)
            except ProtocolError as error:
                assert "\n" not in str(error)
            else:
                assert found.part_ids and all(each.bytes >= 0 for each in found.tensors)


# --- what there is, and what goes ---


def listing(number: int, names: Iterable[str], workers: tuple[str, ...] = ("w",)) -> ArtifactListed:
    return ArtifactListed(identity(number), list(names), 1, 1, 0, 0.0, workers)


def manifest(number: int, *names: str, part: int) -> tuple[Manifest, ArtifactListed]:
    """Version `number`, whose manifest is artifact `number`, with one tensor in a part."""
    delta = plan_delta({"a": content(part)}, [], [])
    made = make_manifest("m", number, number, {"a": content(part)}, delta, identity(part), b"c")
    own = [manifest_name(made, identity(number)), version_name("m", number), *names]
    return made, listing(number, own)


def test_what_is_kept_and_what_goes() -> None:
    made = {number: manifest(number, part=100 + number % 3) for number in range(1, 6)}
    made[5][1].names.append("m")
    made[2][1].names.append("production")
    others = [
        listing(100, [part_name("m", identity(100))]), listing(101, [part_name("m", identity(101))], ()),
        listing(102, [part_name("m", identity(102))]), listing(103, [part_name("m", identity(103))]),
        listing(104, [part_name("m", identity(104)), "mine"]), listing(200, ["other", "m2", "m2:1"]),
    ]  # fmt: skip
    state = ModelState.of("m", [each for _, each in made.values()] + others)
    assert (state.newest, state.order) == (identity(5), 5)
    assert state.versions == {str(number): identity(number) for number in made}
    assert set(state.parts) == {identity(number) for number in range(100, 105)} and not state.parts[identity(101)]
    assert state.superseded(2) == [NameMove(f"m:{number}", "", identity(number)) for number in (3, 2, 1)]
    assert state.superseded(9) == []
    for number in (1, 2, 3):
        made[number][1].names.remove(f"m:{number}")
    state = ModelState.of("m", [each for _, each in made.values()] + others)
    assert state.live == {identity(2), identity(4), identity(5)}
    live = {identity(number): made[number][0] for number in (2, 4, 5)}
    assert state.unneeded(live) == [identity(number) for number in (100, 103, 1, 3)], "parts first"
    # Another model has nothing to do with it, though its name begins like this one's.
    assert held_manifest(others[-1]) is None and ModelState.of("m2", others).newest == identity(200)


def test_after_going_back_newer_versions_go() -> None:
    made = {number: manifest(number, part=100) for number in range(1, 5)}
    made[2][1].names.append("m")
    state = ModelState.of("m", [each for _, each in made.values()])
    assert [each.name for each in state.superseded(1)] == ["m:4", "m:3", "m:1"]
    made[2][1].names.remove("m")
    assert ModelState.of("m", [each for _, each in made.values()]).superseded(1) == [], (
        "which is the newest is not known"
    )
