"""A checkpoint says where its tensors lie, and whether its files are still those that were opened."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tensorcast_connector.client import checkpoint as module
from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.config import FILE_CLOCK_TICK_S, FILE_CLOCK_WAIT_S, METADATA_BYTES_MAX
from tensorcast_connector.core.safetensors import INDEX
from tensorcast_connector.errors import InvalidArgument
from tests.client.checkpoints import entry, file_of, random_file, random_folder

SIZES = {"a": 3000, "b": 0, "c": 5, "d": 70_000}


def test_tensors_are_where_it_says(tmp_path: Path) -> None:
    wanted = random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(SIZES) and len(checkpoint.files) == 2
        for name, each in checkpoint.tensors.items():
            assert (each.name, each.dtype, each.shape, each.bytes) == (name, "uint8", (SIZES[name],), SIZES[name])
            assert os.pread(checkpoint.descriptor(each.file), each.bytes, each.offset) == wanted[name]
            assert checkpoint.files[each.file].path.read_bytes()[each.offset :][: each.bytes] == wanted[name]
        places = [(each.file, each.offset) for each in checkpoint.tensors.values()]
        assert places == sorted(places), "in the order of the files"
        assert [each.size for each in checkpoint.files] == [each.path.stat().st_size for each in checkpoint.files]


def opened() -> list[str]:
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_its_files_are_closed_with_it(tmp_path: Path) -> None:
    random_folder(tmp_path, SIZES)
    before = opened()
    with Checkpoint.open(tmp_path) as checkpoint:
        assert len(opened()) == len(before) + 2
    checkpoint.close()
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"no longer one")
    with pytest.raises(InvalidArgument):
        Checkpoint.open(tmp_path)
    assert opened() == before, "those that were open when another one was refused too"


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def replace(path: Path) -> None:
    """By the same bytes, with the same times."""
    found, copy = path.stat(), path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))
    copy.rename(path)


def write_and_turn_back_the_clock(path: Path) -> None:
    found = path.stat()
    write_in_place(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "written to": write_in_place,
    "written to, with its time set back": write_and_turn_back_the_clock,
    "shorter": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "replaced": replace,
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_however_soon(change: str, tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00002.safetensors"
    random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.unchanged()
        before = checkpoint.fingerprint
        CHANGES[change](path)
        assert not checkpoint.unchanged()
    if change in ("written to", "written to, with its time set back", "replaced"):
        with Checkpoint.open(tmp_path) as again:
            assert again.fingerprint != before and again.unchanged()


def test_the_index_and_new_files_are_part_of_it(tmp_path: Path) -> None:
    random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        random_file(tmp_path / "other.safetensors", {"x": 1})
        assert checkpoint.unchanged(), "the index does not name it"
        (tmp_path / INDEX).write_text((tmp_path / INDEX).read_text() + " ")
        assert not checkpoint.unchanged()
    (tmp_path / INDEX).unlink()
    with Checkpoint.open(tmp_path) as checkpoint:
        assert "x" in checkpoint.tensors and checkpoint.unchanged()
        random_file(tmp_path / "third.safetensors", {"y": 1})
        assert not checkpoint.unchanged()


def test_the_fingerprint_stays_and_is_of_this_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_folder(tmp_path, SIZES)

    def fingerprint() -> str:
        with Checkpoint.open(tmp_path) as checkpoint:
            return checkpoint.fingerprint

    assert fingerprint() == fingerprint()
    other = tmp_path / "boot"
    other.write_text("another host")
    before = fingerprint()
    monkeypatch.setattr(module, "_BOOT", other)
    assert fingerprint() != before


def test_which_tensors_count_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as whole:
        (tmp_path / INDEX).write_text('{"weight_map": {"a": "%s"}}' % "model-00001-of-00002.safetensors")  # noqa: UP031
    with Checkpoint.open(tmp_path) as part:
        assert list(part.tensors) == ["a"] and part.fingerprint != whole.fingerprint


def test_headers_that_are_too_long_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for length, message in ((100_000_000, "no safetensors file has more than 99999999"), (1 << 40, "cut off")):
        path.write_bytes(length.to_bytes(8, "little"))
        os.truncate(path, 200_000_000)
        with pytest.raises(InvalidArgument, match=message) as refused:
            Checkpoint.open(path)
        assert str(path) in str(refused.value)


def test_entries_of_a_folder_that_are_no_files(tmp_path: Path) -> None:
    random_file(tmp_path / "1.safetensors", {"a": 1})
    os.mkfifo(tmp_path / "2.safetensors")
    with pytest.raises(InvalidArgument, match=r"2\.safetensors: neither a file nor a folder"):
        Checkpoint.open(tmp_path)
    (tmp_path / "2.safetensors").unlink()
    (tmp_path / "2.safetensors").mkdir()
    with pytest.raises(InvalidArgument, match=r"2\.safetensors: neither a file nor a folder"):
        Checkpoint.open(tmp_path)
    (tmp_path / "2.safetensors").rmdir()
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(InvalidArgument, match=r"index\.json: neither a file nor a folder"):
        Checkpoint.open(tmp_path)


def test_the_same_entry_may_be_reached_by_a_link(tmp_path: Path) -> None:
    random_file(tmp_path / "blob", {"a": 1})
    (folder := tmp_path / "snapshot").mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.unchanged()
        random_file(tmp_path / "blob", {"a": 1}, seed=1)
        assert not checkpoint.unchanged(), "what the link points to counts"


@pytest.mark.parametrize("number", ["-1", "1" + "0" * 5000, "1e400", "NaN", "18446744073709551616", '"2"', "null"])
@pytest.mark.parametrize("field", ["shape", "data_offsets"])
def test_numbers_that_are_no_sizes(field: str, number: str, tmp_path: Path) -> None:
    said = {"dtype": '"U8"', "shape": "[2]", "data_offsets": "[0, 2]"}
    said[field] = f"[{number}]" if field == "shape" else f"[0, {number}]"
    text = ", ".join(f'"{key}": {value}' for key, value in said.items())
    file_of(tmp_path / "x", ('{"a": {%s}}' % text).encode(), b"ab")  # noqa: UP031
    with pytest.raises(InvalidArgument) as refused:
        Checkpoint.open(tmp_path / "x")
    message = str(refused.value)
    assert str(tmp_path / "x") in message and ("tensor 'a'" in message or "not JSON" in message) and len(message) < 400


def test_a_metadata_entry_is_no_tensor(tmp_path: Path) -> None:
    file_of(tmp_path / "x", {"__metadata__": {"format": "pt"}, "a": entry()}, b"ab")
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        assert list(checkpoint.tensors) == ["a"]
        assert checkpoint.metadata == checkpoint.metadata_to_keep() == {"format": "pt"}


def test_large_metadata_is_told_and_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever only reads the tensors hears nothing of it."""
    said = {"k": "v" * METADATA_BYTES_MAX}
    file_of(tmp_path / "x", {"__metadata__": said, "a": entry()}, b"ab")
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        assert checkpoint.metadata == said and not caplog.records
        assert not checkpoint.metadata_to_keep()
    assert "is not kept" in caplog.text


@pytest.mark.parametrize(
    ("ticks", "waits"), [([-1, 0, 0, 1], 3), ([1], 0), ([-5], int(FILE_CLOCK_WAIT_S / FILE_CLOCK_TICK_S))]
)
def test_a_file_is_looked_at_until_its_next_change_would_show(
    ticks: list[int], waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the file system, in nanoseconds after the file's last change, each time it is looked at; then it stands."""
    random_file(tmp_path / "x", {"a": 1})
    changed = (tmp_path / "x").stat().st_ctime_ns
    slept: list[float] = []
    clock = iter(ticks)
    last = ticks[-1]
    monkeypatch.setattr(
        module, "time",
        SimpleNamespace(clock_gettime_ns=lambda number: changed + next(clock, last), sleep=slept.append),
    )  # fmt: skip
    with Checkpoint.open(tmp_path / "x"):
        assert waits - 1 <= len(slept) <= waits + 1 if ticks == [-5] else len(slept) == waits
