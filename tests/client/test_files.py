"""Tensors in safetensors files: what others wrote is read, what we write they read, and no lie of a header is believed."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.client import files
from tensorcast_connector.client.blocking import connect_blocking
from tensorcast_connector.client.files import read_tensors, write_file
from tensorcast_connector.client.ownership import leased
from tensorcast_connector.client.session import connect
from tensorcast_connector.client.tensors import RawTensor, sources
from tensorcast_connector.config import METADATA_BYTES_MAX
from tensorcast_connector.core.artifact import DTYPE_BYTES, layout
from tensorcast_connector.core.safetensors import INDEX, encode_file_header
from tensorcast_connector.errors import ConfigError, Exhausted, InvalidArgument, NotFound
from tests.client.callers import Pool, weights
from tests.client.checkpoints import entry, file_of, random_file, random_folder
from tests.waiting import until

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
safetensors_open = pytest.importorskip("safetensors").safe_open

KINDS = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn",
    "float8_e5m2", "complex64", "uint16", "uint32", "uint64",
]  # fmt: skip


def tensors() -> dict[str, Any]:
    """Of every kind, empty and 0-d ones too."""
    made = {kind: torch.arange(6).remainder(2).to(getattr(torch, kind)).reshape(2, 3) for kind in KINDS}
    return {**made, "empty": torch.zeros((0, 3)), "0-d": torch.tensor(1.5), "odd": torch.ones(3, dtype=torch.uint8)}


# --- reading ---


def test_a_file_of_the_library_is_read_bit_by_bit(tmp_path: Path) -> None:
    wanted = tensors()
    safetensors_torch.save_file(wanted, tmp_path / "x.safetensors", {"format": "pt"})
    found = read_tensors(str(tmp_path / "x.safetensors"))
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        raw = found[name]
        assert (raw.dtype, raw.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        flat = tensor.reshape(-1)
        assert bytes(raw.data) == (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    assert "uint8" in repr(found["odd"])


def test_nothing_is_copied(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.safetensors", {"a": entry()}, b"ab")
    raw = read_tensors(path)["a"]
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"z")
    assert bytes(raw.data) == b"az" and raw.data.readonly
    assert bytes(sources({"a": raw})[0].contiguous()) == b"az"


def test_a_folder_without_an_index_is_all_its_files(tmp_path: Path) -> None:
    file_of(tmp_path / "1.safetensors", {"a": entry()}, b"ab")
    file_of(tmp_path / "2.safetensors", {"b": entry()}, b"cd")
    (tmp_path / ".3.safetensors").write_bytes(b"of somebody else")
    (tmp_path / "config.json").write_text("{}")
    assert {name: bytes(raw.data) for name, raw in read_tensors(tmp_path).items()} == {"a": b"ab", "b": b"cd"}


def test_an_index_says_which_tensors_count(tmp_path: Path) -> None:
    file_of(tmp_path / "1.safetensors", {"a": entry(), "b": entry(offsets=(2, 4))}, b"abXX")
    file_of(tmp_path / "2.safetensors", {"b": entry()}, b"cd")
    (tmp_path / "other.safetensors").write_bytes(b"not named")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert {name: bytes(raw.data) for name, raw in read_tensors(tmp_path).items()} == {"a": b"ab", "b": b"cd"}


LIES = {
    "overlap": ({"a": entry(), "b": entry(offsets=(1, 3))}, b"abc", "tensor 'b' overlaps with 'a'"),
    "hole": ({"a": entry(), "b": entry(offsets=(3, 5))}, b"abcde", "before tensor 'b' are 1 bytes that are of no"),
    "more than it says": ({"a": entry()}, b"abc", "1 bytes at its end are of no tensor"),
    "cut off": ({"a": entry(shape=[20], offsets=(0, 20))}, b"ab", "tensor 'a' ends at byte 20 of 2 .*cut off"),
    "another size": ({"a": entry(shape=[3])}, b"ab", r"tensor 'a': 2 bytes are no U8 of the shape \[3\]"),
    "dtype": ({"a": entry("F4")}, b"ab", "tensor 'a' has dtype 'F4'; known are BOOL"),
    "dtype that is no text": ({"a": entry([1])}, b"ab", "tensor 'a' has dtype"),  # type: ignore[arg-type]
    "negative": ({"a": entry(shape=[-2])}, b"ab", "tensor 'a' has the shape"),
    "huge": ({"a": entry(shape=[1 << 80, 0], offsets=(0, 0))}, b"", "tensor 'a' has the shape"),
    "empty and huge": ({"a": entry(shape=[1 << 60, 0], offsets=(0, 0))}, b"", "tensor 'a' has the shape"),
    "dimensions": ({"a": entry(shape=[1] * 65, offsets=(0, 1))}, b"a", "tensor 'a' has the shape"),
    "shape of truths": ({"a": entry(shape=[True, 2])}, b"ab", "tensor 'a' has the shape"),
    "fractions": ({"a": entry(offsets=(0, 2.0))}, b"ab", "tensor 'a' has the data_offsets"),
    "backwards": ({"a": entry(offsets=(2, 0))}, b"ab", "tensor 'a' has the data_offsets"),
    "three offsets": ({"a": entry(offsets=(0, 1, 2))}, b"ab", "tensor 'a' has the data_offsets"),
    "no entry": ({"a": 5}, b"", "tensor 'a' is not described by"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 1]}}, b"a", "tensor 'a' is not described by"),
    "name": ({"a\n": entry()}, b"ab", "is no name of a tensor"),
    "twice": (b'{"a": {}, "a": {}}', b"", "'a' is there twice"),
    "a list": (b"[]", b"", "its header is not an object"),
    "no JSON": (b'{"a": ', b"", "its header is not JSON"),
    "deep": (b'{"a":' + b"[" * 100_000, b"", "its header is not JSON"),
    "no text": (b"\xff\xfe", b"", "its header is not JSON"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused_by_name(name: str, tmp_path: Path) -> None:
    header, data, message = LIES[name]
    path = file_of(tmp_path / "x.safetensors", header, data)
    with pytest.raises(InvalidArgument, match=message) as refused:
        read_tensors(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "0 bytes are no safetensors file"), (b"1234567", "7 bytes are no"),
     (b"\xff" * 8, "says that its header has"), ((100).to_bytes(8, "little") + b"{}", "100 bytes, and has 10 in all"),
     ((1 << 62).to_bytes(8, "little") + b"{}", "no safetensors file")],
)  # fmt: skip
def test_what_is_no_such_file(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(InvalidArgument, match=message):
        read_tensors(tmp_path / "x")


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_no_damage_of_a_file_is_more_than_refused(data: Any) -> None:
    whole = encode_file_header(layout([("a", "int16", (3,)), ("b", "bool", (2, 2))])[0])[0] + bytes(10)
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = Path(f"/proc/self/fd/{(memory := os.memfd_create('damaged'))}")
    try:
        os.write(memory, damaged)
        for raw in read_tensors(path).values():
            assert raw.data.nbytes == DTYPE_BYTES[raw.dtype] * int(np.prod(raw.shape))
    except InvalidArgument:
        pass
    finally:
        os.close(memory)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in {"none": "No such file", "pipe": "neither a file nor a folder", "": "without any"}.items():
        with pytest.raises(InvalidArgument, match=message) as refused:
            read_tensors(tmp_path / path)
        assert str(tmp_path) in str(refused.value)
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(InvalidArgument, match="circle: Too many levels"):
        read_tensors(tmp_path / "circle")
    with pytest.raises(InvalidArgument, match="null"):
        read_tensors("a\0b")


def test_a_name_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    for name in ("1.safetensors", "2.safetensors"):
        file_of(tmp_path / name, {"a": entry()}, b"ab")
    with pytest.raises(InvalidArgument, match=r"2\.safetensors: tensor 'a' is in 1\.safetensors too"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [("{}", "no object weight_map"), ("[", "not JSON"), ('{"weight_map": {"b": "1.safetensors"}}', "does not have it"),
     ('{"weight_map": {"a": "../1.safetensors"}}', "no file of this folder"), ('{"weight_map": {"a": 5}}', "no file of"),
     ('{"weight_map": {"a": "2.safetensors"}}', r"2\.safetensors: No such file")],
)  # fmt: skip
def test_an_index_that_lies(index: str, message: str, tmp_path: Path) -> None:
    file_of(tmp_path / "1.safetensors", {"a": entry()}, b"ab")
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(InvalidArgument, match=message):
        read_tensors(tmp_path)


def test_raw_tensors_are_checked_when_they_are_put() -> None:
    with pytest.raises(InvalidArgument, match="tensor 'a' has dtype float4"):
        sources({"a": RawTensor("float4", (1,), memoryview(b"a"))})
    with pytest.raises(InvalidArgument, match=r"tensor 'a': 3 bytes are no int16 \(2,\)"):
        sources({"a": RawTensor("int16", (2,), memoryview(b"abc"))})
    with pytest.raises(InvalidArgument, match="tensor 'a'"):
        sources({"a": RawTensor("uint8", (2,), memoryview(b"abcd")[::2])})


# --- through the pool ---


async def test_files_go_through_the_pool_unchanged(pool: Pool, scheme: str, tmp_path: Path) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    wanted = tensors()
    safetensors_torch.save_file(wanted, tmp_path / "x.safetensors")
    made = await session.put(tmp_path / "x.safetensors", name="m")
    assert await made.id() == await (await session.put(wanted)).id(), "the same tensors are the same artifact"
    told: list[tuple[int, int]] = []
    size = await write_file(session.artifact("m"), tmp_path / "y.safetensors", progress=lambda *at: told.append(at))
    assert (tmp_path / "y.safetensors").stat().st_size == size == told[-1][0] == told[-1][1]
    found = safetensors_torch.load_file(tmp_path / "y.safetensors")
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    assert await (await session.put(str(tmp_path / "y.safetensors"))).id() == await made.id()
    await write_file(session.artifact("m"), tmp_path / "y.safetensors", ["odd", "bfloat16"])
    assert set(safetensors_torch.load_file(tmp_path / "y.safetensors")) == {"odd", "bfloat16"}
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_file() and "safetensors" in each.name) == [
        "x.safetensors", "y.safetensors",
    ]  # fmt: skip


def metadata_of(path: Path) -> dict[str, str] | None:
    """As the library reads it."""
    with safetensors_open(path, "numpy") as file:
        return file.metadata()  # type: ignore[no-any-return]


async def test_the_metadata_of_a_file_is_kept_and_no_part_of_its_identity(
    pool: Pool, scheme: str, tmp_path: Path
) -> None:
    a, b = await pool.start("a", "b")
    session = await pool.session(a, scheme)
    one, two, out = (tmp_path / name for name in ("1.safetensors", "2.safetensors", "out"))
    said = {"format": "np", "trained on": "überall \N{SNOWMAN}", "empty": ""}
    safetensors_torch.save_file(tensors(), one, said)
    safetensors_torch.save_file(tensors(), two, {"format": "pt", "step": "7"})
    made = await session.put(one, name="m")
    assert (await made.describe()).metadata == said
    assert await write_file(session.artifact("m"), out, ["odd"]) and metadata_of(out) == said
    await pool.seen()
    elsewhere = await pool.session(b, scheme)
    assert await write_file(elsewhere.artifact(await made.id()), out) and metadata_of(out) == said
    assert await (await session.put(tensors())).id() == await made.id()
    assert (await made.describe()).metadata == said, "to put the tensors alone takes nothing away"
    await pool.seen()
    leased_ = await elsewhere.put(tensors(), ownership=leased(60))
    assert (await leased_.describe()).metadata == said
    assert await (await session.put(two)).id() == await made.id()
    assert (await made.describe()).metadata == {"format": "pt", "step": "7"}, "what was put last counts"
    await write_file(await session.put({"w": np.zeros(3)}), out)
    assert metadata_of(out) == {"format": "pt"}
    await session.delete("m")
    assert (await (await session.put(tensors())).describe()).metadata == {}, "it goes with the artifact"


def test_the_metadata_of_several_files_is_that_in_which_they_agree(tmp_path: Path) -> None:
    file_of(
        tmp_path / "1.safetensors", {"__metadata__": {"format": "pt", "part": "1", "only": "x"}, "a": entry()}, b"ab"
    )
    file_of(tmp_path / "2.safetensors", {"__metadata__": {"format": "pt", "part": "2"}, "b": entry()}, b"cd")
    assert read_tensors(tmp_path).metadata == {"format": "pt", "only": "x"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"b": "2.safetensors"}}))
    assert read_tensors(tmp_path).metadata == {"format": "pt", "part": "2"}


@pytest.mark.parametrize("given", [[], "text", {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"a": "\ud800"}])
def test_metadata_that_is_none(given: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.safetensors", {"__metadata__": given, "a": entry()}, b"ab")
    with pytest.raises(InvalidArgument, match=r"x.safetensors: its __metadata__ is not text by text"):
        read_tensors(path)


async def test_more_metadata_than_is_kept(pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    for size in (METADATA_BYTES_MAX, METADATA_BYTES_MAX + 1):
        path = file_of(tmp_path / "x.safetensors", {"__metadata__": {"k": "v" * (size - 8)}, "a": entry()}, b"ab")
        made = await session.put(path)
        assert bool((await made.describe()).metadata) == (size == METADATA_BYTES_MAX)
        await made.delete()
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == [
        f"{path}: its metadata has {size} bytes, more than {METADATA_BYTES_MAX}, and is not kept"
    ]
    given = read_tensors(path)
    given.metadata["k"] = "v" * size
    with pytest.raises(InvalidArgument, match=f"{size + 8} bytes of metadata; at most {METADATA_BYTES_MAX} are kept"):
        await session.put(given)
    assert not a.artifacts.statistics()["uploads"]


async def test_a_large_artifact_is_written_part_by_part(
    pool: Pool, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SAVE_PART_BYTES", 1500)
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    made = await session.put({**weights(count=5), "large": np.arange(5000)})
    told: list[int] = []
    await write_file(made, tmp_path / "x", progress=lambda done, size: told.append(done))
    assert await (await session.put(tmp_path / "x")).id() == await made.id() and told == sorted(told)


async def test_raw_views_are_the_bytes_of_the_box(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    made = await session.put({"w": array, "e": np.zeros((0, 2))})
    raw = await made.view(slices={"w": [slice(1, 3), slice(2, 5)]}).tensor_dict(framework="raw")
    assert raw["w"].shape == (2, 3) and bytes(raw["w"].data) == array[1:3, 2:5].tobytes()
    assert bytes((await made.tensor("w", framework="raw")).data) == array.tobytes()
    assert raw["e"] == RawTensor("float64", (0, 2), memoryview(b""))


async def test_what_cannot_be_written_leaves_nothing_behind(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    made = await session.put(weights(), name="m")
    (folder := tmp_path / "out").mkdir()
    (folder / "taken").mkdir()
    (folder / "kept").write_text("mine")
    for path, message in {"taken": "no file is in the way", "none/x": "No such file", "a\0b": "null"}.items():
        with pytest.raises(InvalidArgument, match=message):
            await write_file(made, folder / path)
    with pytest.raises(InvalidArgument, match="has no tensor 'zz'"):
        await write_file(made, folder / "x", ["w0", "zz"])
    wide = await session.put({"w": np.zeros(2, np.complex128)})
    with pytest.raises(InvalidArgument, match="tensor 'w' of dtype complex128 cannot be in a safetensors file"):
        await write_file(wide, folder / "x")

    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "_flush", full)
        with pytest.raises(Exhausted, match="kept: No space left"):
            await write_file(made, folder / "kept")
    await session.delete("m")
    with pytest.raises(NotFound):
        await write_file(made, folder / "kept")
    assert sorted(each.name for each in folder.iterdir()) == ["kept", "taken"]
    assert (folder / "kept").read_text() == "mine"


async def test_a_file_whose_writing_is_cancelled_is_not_there(
    pool: Pool, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SAVE_PART_BYTES", 1000)
    [a] = await pool.start()
    made = await (await pool.session(a, scheme)).put(weights())
    (folder := tmp_path / "out").mkdir()
    writing = asyncio.create_task(write_file(made, folder / "x", progress=lambda done, size: writing.cancel() and None))
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert not list(folder.iterdir())


async def test_a_path_that_cannot_be_put_is_told_before_anything_is_uploaded(pool: Pool, tmp_path: Path) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    with pytest.raises(InvalidArgument, match="No such file"):
        await session.put(tmp_path / "none")
    assert not a.artifacts.statistics()["uploads"]


async def test_the_blocking_face_puts_paths_too(pool: Pool, tmp_path: Path) -> None:
    [a] = await pool.start()
    file_of(tmp_path / "x.safetensors", {"a": entry("BF16", (1,))}, b"\x80\x3f")

    def work() -> Any:
        with connect_blocking(str(a.socket)) as session:
            return session.put(tmp_path / "x.safetensors").tensor("a", framework="torch")

    assert (await asyncio.to_thread(work)).item() == 1.0


async def test_the_address_of_a_store_is_told_apart(pool: Pool) -> None:
    await pool.start()
    with pytest.raises(ConfigError, match="is a store; give the address that `tensorcast worker`"):
        await connect(str(pool.store_address))


# --- a path that is put is read straight to where it is to be ---


async def test_a_put_of_a_path_tells_how_far_it_is(pool: Pool, scheme: str, tmp_path: Path) -> None:
    [a] = await pool.start(artifact_bytes=64 << 20)
    session = await pool.session(a, scheme)
    wanted = random_folder(tmp_path, {"a": 5 << 20, "b": 3, "c": 4 << 20, "d": 0})
    told: list[tuple[int, int]] = []
    made = await session.put(tmp_path, progress=lambda *at: told.append(at))
    size = (await made.describe()).bytes
    assert told == sorted(told) and told[-1] == (size, size) and len(told) == 3, "once for each chunk of 4 MiB"
    got = await made.tensor_dict(framework="raw")
    assert {name: bytes(each.data) for name, each in got.items()} == wanted
    again = await session.put({name: np.frombuffer(data, np.uint8) for name, data in wanted.items()})
    assert await again.id() == await made.id()


@pytest.mark.parametrize("change", ["shorter", "written to"])
async def test_a_file_that_changes_while_it_is_put_is_refused(
    change: str, pool: Pool, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = await pool.start(artifact_bytes=64 << 20)
    session = await pool.session(a, scheme)
    random_file(path := tmp_path / "x.safetensors", {"a": 20 << 20})

    def progress(done: int, size: int) -> None:
        if change == "shorter":
            os.truncate(path, 10 << 20)
        else:
            os.utime(path)

    message = "tensor 'a': the file ends at byte" if change == "shorter" else "changed while it was put; put it again"
    with pytest.raises(InvalidArgument, match=message) as refused:
        await session.put(path, name="m", progress=progress)
    assert str(path) in str(refused.value)
    assert not await session.list_artifacts()
    await until(lambda: not a.artifacts.statistics()["uploads"])
    assert not [each.name for each in Path("/proc/self/fd").iterdir() if str(path) in os.path.realpath(each)]


async def test_what_progress_raises_ends_a_put(pool: Pool, tmp_path: Path) -> None:
    [a] = await pool.start(artifact_bytes=64 << 20)
    session = await pool.session(a)
    random_file(tmp_path / "x", {"a": 20 << 20})

    def progress(done: int, size: int) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        await session.put(tmp_path / "x", progress=progress)
    await until(lambda: not a.artifacts.statistics()["uploads"])


KILLED_WHILE_IT_WRITES = """
import asyncio, os, signal, sys
from tensorcast_connector.client.files import write_file
from tensorcast_connector.client.session import connect

async def main():
    async with await connect(sys.argv[1]) as session:
        await write_file(session.artifact("m"), sys.argv[2], progress=lambda *_: os.kill(os.getpid(), int(sys.argv[3])))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_reader_that_is_killed_while_it_writes_leaves_nothing(
    pool: Pool, tmp_path: Path, number: signal.Signals
) -> None:
    """As by `timeout`, again and again: files without names would fill the disk."""
    [a] = await pool.start()
    await (await pool.session(a)).put(weights(), name="m")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "y.safetensors").write_bytes(b"what was there")
    nameless = files._nameless(folder)
    if nameless is None:
        pytest.skip("this file system has no files without a name")
    nameless.close()
    command = [
        sys.executable,
        "-c",
        KILLED_WHILE_IT_WRITES,
        str(a.socket),
        str(folder / "y.safetensors"),
        str(int(number)),
    ]
    reader = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL)
    assert await reader.wait() == -number
    assert [each.name for each in folder.iterdir()] == ["y.safetensors"]
    assert (folder / "y.safetensors").read_bytes() == b"what was there"


async def test_a_file_system_without_nameless_files(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    await session.put(weights(), name="m")
    await write_file(session.artifact("m"), tmp_path / "one.safetensors")
    monkeypatch.setattr(files, "_nameless", lambda _: None)
    await write_file(session.artifact("m"), tmp_path / "two.safetensors")
    one, two = [tmp_path / f"{name}.safetensors" for name in ("one", "two")]
    assert one.read_bytes() == two.read_bytes() and one.stat().st_mode == two.stat().st_mode
    assert not list(tmp_path.glob(".*.partial"))
