"""A caller's session with real workers: what it puts, names, finds and reads, and what it may not."""

import asyncio
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcast_connector.client import artifact as artifact_module
from tensorcast_connector.client import session as session_module
from tensorcast_connector.client.ownership import Leased, leased
from tensorcast_connector.client.session import Session, connect
from tensorcast_connector.client.writing import _in_threads
from tensorcast_connector.config import READ_PART_BYTES
from tensorcast_connector.core.artifact import CHUNK_BYTES, Header
from tensorcast_connector.errors import (
    ConfigError,
    Exhausted,
    InvalidArgument,
    NotFound,
    ProtocolError,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.wire.caller_messages import (
    EndLease,
    MapArtifact,
    NameMove,
    OpenUpload,
    RenewLease,
    UploadOpened,
    WriteUpload,
)
from tensorcast_connector.wire.messages import Ok
from tests.client.callers import Pool, equal, used, weights
from tests.cluster import plane
from tests.waiting import until

torch = pytest.importorskip("torch")


# --- put and get ---


async def test_what_was_put_is_read_as_it_was(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    assert session.worker_id == a.worker_id
    given = {**weights(), "empty": np.zeros((0, 3), np.float32), "0-d": np.array(1.5), "": np.ones(1)}
    del given[""]
    given["strided"] = np.arange(24, dtype=np.int32).reshape(4, 6)[::-1, ::2]
    made = await session.put(given, name="policy:v1")
    for reference in (made, session.artifact("policy:v1"), session.artifact(await made.id())):
        assert equal(await reference.tensor_dict(), given)
        assert (await reference.tensor("w1")).tobytes() == given["w1"].tobytes()
    as_torch = await session.artifact("policy:v1").tensor_dict(framework="torch")
    assert all(np.array_equal(as_torch[name].numpy(), given[name]) for name in given)
    described = await session.artifact("policy:v1").describe()
    assert described.artifact_id == await made.id() and described.names == ("policy:v1",) and not described.leased
    assert [each.name for each in described.tensors] == sorted(given) and described.workers == (a.worker_id,)
    assert described.bytes == used(a) and described.created_unix_s > 1e9
    assert "policy:v1" in repr(made)


async def test_torch_tensors_of_every_kind(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    whole = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bool, torch.complex64]
    given = {str(kind): whole.to(kind).mT for kind in kinds} | {"parameter": torch.nn.Parameter(whole)}
    given |= {"empty": torch.empty(0, 3), "0-d": torch.tensor(7, dtype=torch.bfloat16)}
    got = await (await session.put(given)).tensor_dict(framework="torch")
    for name, tensor in given.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        if tensor.numel():
            flat = tensor.detach().contiguous().reshape(-1)
            assert torch.equal(got[name].reshape(-1).view(torch.uint8), flat.view(torch.uint8)), name


@pytest.mark.slow
async def test_more_than_a_chunk_and_more_than_a_request(pool: Pool, scheme: str) -> None:
    [a] = await pool.start(artifact_bytes=64 << 20)
    session = await pool.session(a, scheme)
    chance = np.random.default_rng(1)
    sizes = [CHUNK_BYTES - 7, 100, 2 * CHUNK_BYTES + 1, 3, READ_PART_BYTES + 11]
    given = {f"t{number}": chance.integers(0, 256, size, np.uint8) for number, size in enumerate(sizes)}
    made = await session.put(given)
    assert equal(await session.artifact(await made.id()).tensor_dict(), given)
    part = await made.view(slices={"t4": slice(CHUNK_BYTES - 3, -5)}).tensor("t4")
    assert part.tobytes() == given["t4"][CHUNK_BYTES - 3 : -5].tobytes()


@pytest.mark.slow
async def test_three_thousand_tensors(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    given = {f"layers.{number}.weight": np.full((number % 7, 3), number, np.float32) for number in range(3000)}
    made = await session.put(given)
    assert equal(await session.artifact(await made.id()).tensor_dict(), given)


async def test_an_artifact_of_nothing(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    made = await session.put({}, name="nothing")
    assert await session.artifact("nothing").tensor_dict() == {} and (await made.describe()).bytes == 0
    empty = await session.put({"w": np.zeros((3, 0), np.int8)})
    assert (await session.artifact(await empty.id()).tensor("w")).shape == (3, 0)
    assert used(a) == 0


async def test_the_same_tensors_are_the_same_artifact(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    one, other = await pool.session(a, scheme), await pool.session(a, scheme)
    first = await one.put(weights(), name="one")
    before = used(a)
    again = await other.put(dict(reversed(weights().items())), name="other")
    assert await first.id() == await again.id() and used(a) == before
    await pool.seen()
    assert (await first.describe()).names == ("one", "other")
    [listed] = await one.list_artifacts()
    assert listed.names == ["one", "other"] and listed.tensors == 3 and listed.bytes == before
    assert await (await one.put(weights(1))).id() != await first.id()


@pytest.mark.slow
async def test_twenty_put_and_get_at_once(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    sessions = [await pool.session(a, scheme) for _ in range(4)]

    async def one(number: int) -> None:
        session = sessions[number % 4]
        given = weights(number // 2, count=4, size=5000)  # each twice
        await session.put(given, name=f"n{number}")
        got = await asyncio.gather(*(session.artifact(f"n{number}").tensor_dict() for _ in range(2)))
        assert all(equal(each, given) for each in got)

    await asyncio.gather(*(one(number) for number in range(20)))
    await pool.seen()
    assert len(await sessions[0].list_artifacts()) == 10 and len(a.artifacts._copies) == 10


async def test_what_cannot_be_put_names_the_tensor_and_leaves_nothing(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    for wrong, message in [({"w": [1]}, "'w' is a list"), ({"a\n": np.ones(1)}, "no name"), (np.ones(3), "mapping")]:
        with pytest.raises(InvalidArgument, match=message):
            await session.put(wrong)  # type: ignore[arg-type]
    assert not await session.list_artifacts() and used(a) == 0


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\0", " padded ", "x" * 300, "0" * 32])
async def test_names_that_are_none(pool: Pool, name: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    made = await session.put(weights())
    before = used(a)
    for attempt in (
        session.put(weights(1), name=name), session.name(name, await made.id()), session.unname(name),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="is no name of an artifact") as error:
            await attempt
        assert "\n" not in str(error.value) and "\x1b" not in str(error.value)
    assert used(a) == before and len(await session.list_artifacts()) == 1


@pytest.mark.parametrize("name", ["org/model@rev", "policy:v17", "Modèle 7", "a/../b", "x" * 256, "\N{SNOWMAN}"])
async def test_names_that_are_some(pool: Pool, name: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    await session.put(weights(), name=name)
    assert equal(await session.artifact(name).tensor_dict(), weights())
    await session.unname(name)
    with pytest.raises(NotFound, match="no artifact has the name"):
        await session.artifact(name).tensor_dict()


# --- views ---


async def test_views(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    cube = np.arange(3 * 4 * 5, dtype=np.int16).reshape(3, 4, 5)
    given = {"cube": cube, "flat": np.arange(7), "0-d": np.array(2.5, np.float32)}
    await session.put(given, name="n")
    whole = session.artifact("n")
    cases: list[tuple[Any, Any]] = [
        (slice(1, 2), np.s_[1:2]), (slice(-2, None), np.s_[-2:]), (slice(None, -1), np.s_[:-1]), (slice(2, 2), np.s_[2:2]),
        ([slice(None), slice(1, 3)], np.s_[:, 1:3]), ([slice(None), slice(None), slice(0, 1)], np.s_[:, :, :1]),
        ((slice(1, 3), slice(2, 3), slice(-4, -1)), np.s_[1:3, 2:3, -4:-1]), ([], np.s_[:]), (slice(0, 3, 1), np.s_[:]),
        (slice(np.int64(1), np.int32(3)), np.s_[1:3]),
    ]  # fmt: skip
    for slices, wanted in cases:
        got = await whole.view(slices={"cube": slices}).tensor_dict()
        assert list(got) == ["0-d", "cube", "flat"]
        assert got["cube"].shape == cube[wanted].shape and got["cube"].tobytes() == cube[wanted].tobytes(), slices
    only = whole.view(names=["flat"])
    assert list(await only.tensor_dict()) == ["flat"]
    assert (await only.view(slices={"flat": slice(2, 4)}).tensor("flat")).tolist() == [2, 3]
    assert list(await whole.view(names=[]).tensor_dict()) == []
    assert list(await whole.view(names=["flat", "0-d"]).tensor_dict()) == ["flat", "0-d"]
    number = await whole.view(slices={"0-d": ()}).tensor("0-d")
    assert isinstance(number, np.ndarray) and number.shape == () and number == 2.5
    part = await whole.view(slices={"cube": slice(1, 2)}).tensor_dict(framework="torch")
    assert part["cube"].tolist() == cube[1:2].tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a: a.view(names=["w9"]), "artifact 'n' has no tensor 'w9'"),
        (lambda a: a.view(slices={"w9": slice(1)}), "has no tensor 'w9'"),
        (lambda a: a.view(names=["w0"]).view(names=["w1"]), "this view of artifact 'n' has no tensor 'w1'"),
        (lambda a: a.view(slices={"w0": slice(0, 501)}), "tensor 'w0': 0:501 is not within dimension 0 of 500"),
        (lambda a: a.view(slices={"w0": slice(-501, None)}), "'w0': -501:None is not within dimension 0"),
        (lambda a: a.view(slices={"w0": slice(3, 2)}), "'w0': 3:2 is not within"),
        (lambda a: a.view(slices={"w0": [slice(1)] * 3}), "'w0' has 2 dimensions and 3 are sliced"),
        (lambda a: a.view(slices={"w0": slice(0, 4, 2)}), "'w0': dimension 0 is sliced by .* steps of 1"),
        (lambda a: a.view(slices={"w0": slice(None, None, -1)}), "'w0': dimension 0 is sliced by"),
        (lambda a: a.view(slices={"w0": slice("a", None)}), "'w0': dimension 0 is sliced by .* no whole numbers"),
        (lambda a: a.view(slices={"w0": slice(0.5, 2)}), "'w0': dimension 0 is sliced by .* no whole numbers"),
        (lambda a: a.view(slices={"w0": 3}), "tensor 'w0' is sliced by 3, which is no slice"),
        (lambda a: a.view(slices={"w0": [0, 1]}), r"tensor 'w0' is sliced by \[0, 1\]"),
        (lambda a: a.view(slices={"w0": slice(1)}).view(slices={"w0": slice(1)}), "tensor 'w0' is sliced already"),
    ],
)
async def test_views_that_cannot_be(pool: Pool, scheme: str, make: Callable[[Any], Any], message: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    await session.put(weights(), name="n")
    with pytest.raises(InvalidArgument, match=message):
        await make(session.artifact("n")).tensor_dict()


async def test_a_tensor_that_is_not_there(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    made = await session.put(weights(), name="n")
    with pytest.raises(InvalidArgument, match="artifact 'n' has no tensor 'w7'"):
        await made.tensor("w7")
    with pytest.raises(InvalidArgument, match="this view of artifact 'n' has no tensor 'w1'"):
        await made.view(names=["w0"]).tensor("w1")
    with pytest.raises(InvalidArgument, match="framework='jax'"):
        await made.tensor_dict(framework="jax")  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_view_of_very_many_runs(pool: Pool) -> None:
    """More parts than one message may name."""
    [a] = await pool.start()
    session = await pool.session(a, "tcp")
    given = {"w": np.arange(2 * 70_000, dtype=np.int16).reshape(70_000, 2)}
    made = await session.put(given)
    got = await made.view(slices={"w": [slice(None), slice(1, 2)]}).tensor("w")
    assert np.array_equal(got, given["w"][:, 1:2])


async def test_a_handle_stays_with_what_it_has_read_when_the_name_moves_on(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    await session.put(weights(1), name="n")
    handle, later = session.artifact("n"), session.artifact("n")
    view = handle.view(names=["w2"])
    assert (await handle.tensor("w0")).tobytes() == weights(1)["w0"].tobytes()
    await session.put(weights(2), name="n")
    assert (await handle.tensor("w1")).tobytes() == weights(1)["w1"].tobytes(), "tensors of one handle go together"
    assert (await view.tensor("w2")).tobytes() == weights(1)["w2"].tobytes()
    assert equal(await later.tensor_dict(), weights(2))


# --- names, lists, deletion ---


async def test_names_move(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    v1, v2 = await session.put(weights(1), name="latest"), await session.put(weights(2), name="latest")
    assert await session.artifact("latest").id() == await v2.id()
    assert (await v1.describe()).names == ()
    await session.name("latest", await v1.id())
    await session.name("stable", "latest")
    assert await session.artifact("stable").id() == await v1.id()
    assert (await v1.describe()).names == ("latest", "stable") and (await v2.describe()).names == ()
    await session.unname("latest")
    await session.unname("latest")
    with pytest.raises(NotFound, match="no artifact has the name 'latest'"):
        await session.artifact("latest").id()
    with pytest.raises(NotFound, match="no artifact has the name 'nobody'"):
        await session.name("x", "nobody")
    with pytest.raises(NotFound, match=f"artifact '{'0' * 32}' does not exist"):
        await session.name("x", "0" * 32)
    assert equal(await v1.tensor_dict(), weights(1))


async def test_listing(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    assert await session.list_artifacts() == []
    x = await (await session.put(weights(1), name="policy:v1")).id()
    y = await (await session.put(weights(2), name="policy:v2")).id()
    z = await (await session.put(weights(3))).id()
    assert [each.artifact_id for each in await session.list_artifacts()] == [z, x, y]
    assert [each.names for each in await session.list_artifacts("policy:")] == [["policy:v1"], ["policy:v2"]]
    assert [each.artifact_id for each in await session.list_artifacts(z[:8])] == [z]
    assert await session.list_artifacts("nothing like it") == []


async def test_deleting(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    made = await session.put(weights(), name="n")
    await session.name("m", "n")
    read = await made.tensor_dict()
    await session.delete("m")
    assert equal(read, weights()), "what was read stays"
    await until(lambda: used(a) == 0)
    for reference in ("n", "m", await made.id()):
        with pytest.raises(NotFound):
            await session.artifact(reference).tensor_dict()
        with pytest.raises(NotFound):
            await session.delete(reference)
    assert await session.list_artifacts() == [] and not plane(a).view.replicas
    again = await session.put(weights(), name="n")
    assert await again.id() == await made.id() and equal(await again.tensor_dict(), weights())
    await again.delete()
    await until(lambda: used(a) == 0)


@pytest.mark.slow
async def test_an_artifact_with_more_names_than_a_transaction_takes_is_deleted_too(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    made = await session.put(weights())
    identity = await made.id()
    for at in range(0, 150, 30):  # not one by one: each would be a write of its own, which disks take their time for
        await session.move_names([NameMove(f"n{number}", identity, "") for number in range(at, at + 30)])
    assert len(plane(a).view.names) == 150
    await made.delete()
    await until(lambda: used(a) == 0)
    assert not plane(a).view.names and not plane(a).view.artifacts


async def test_a_name_that_moves_while_its_artifact_is_deleted_stays(pool: Pool) -> None:
    [a] = await pool.start()
    session, other = await pool.session(a), await pool.session(a)
    old, new = await session.put(weights(1), name="n"), await session.put(weights(2))
    records = a.gateway.records
    read, moved = records.read, asyncio.Event()

    async def late(prefix: str) -> Any:
        found = await read(prefix)
        if "names" in prefix and not moved.is_set():
            moved.set()
            await other.name("n", await new.id())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "read", late)
        await old.delete()
    assert await session.artifact("n").id() == await new.id()
    with pytest.raises(NotFound):
        await session.artifact(await old.id()).describe()


# --- memory ---


async def test_what_is_shared_cannot_be_written_by_anybody(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    made = await session.put(weights())
    descriptor, _ = await session._link.descriptor(MapArtifact(await made.id()), Ok)
    try:
        size = os.fstat(descriptor).st_size
        for attempt in (
            lambda: os.pwrite(descriptor, b"x", 0), lambda: os.ftruncate(descriptor, 0),
            lambda: os.ftruncate(descriptor, 1 << 20),
        ):  # fmt: skip
            with pytest.raises(PermissionError):
                attempt()
        assert size == used(a) == os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


async def test_a_readers_writes_are_its_own(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    made = await session.put(weights(), name="n")
    mine = await session.artifact("n").tensor_dict()
    for array in mine.values():
        array[:] = 0
    again = session.artifact("n")
    as_torch = await again.tensor_dict(framework="torch")
    as_torch["w0"].zero_()
    assert equal(await again.tensor_dict(), weights()), "of the same handle too"
    assert (await again.view(slices={"w1": slice(2, 4)}).tensor("w1")).tobytes() == weights()["w1"][2:4].tobytes()
    assert not mine["w0"].any() and not as_torch["w0"].any()
    for other in (
        session.artifact("n"),
        (await pool.session(a, "unix")).artifact("n"),
        session.artifact(await made.id()),
    ):
        assert equal(await other.tensor_dict(), weights())


async def test_a_torch_tensor_has_a_storage_of_its_own(pool: Pool) -> None:
    """Who saves one of them saves its bytes only, and libraries do not take them for views of each other."""
    [a] = await pool.start()
    session = await pool.session(a, "unix")
    made = await session.put(weights())
    for tensor in (await made.tensor_dict(framework="torch")).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.storage_offset() == 0


async def test_many_handles_of_an_artifact_decode_its_header_once(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    [a] = await pool.start()
    session = await pool.session(a, "unix")
    decoded: list[int] = []
    decode = artifact_module.decode_header

    def noted(encoded: bytes) -> Header:
        decoded.append(len(encoded))
        return decode(encoded)

    monkeypatch.setattr(artifact_module, "decode_header", noted)
    given = {f"once.{number}": np.full(3, number) for number in range(5)}
    await session.put(given, name="n")
    for _ in range(3):
        assert equal(await session.artifact("n").tensor_dict(), given)
    assert len(decoded) == 1
    monkeypatch.setattr(artifact_module, "HEADER_KEPT_BYTES_MAX", 10)  # a large one is not kept
    for _ in range(2):
        assert equal(await session.artifact("n").tensor_dict(), given)
    assert len(decoded) == 3


async def test_what_was_read_outlives_everything(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    made = await session.put(weights())
    read = await made.tensor_dict()
    await made.delete()
    await until(lambda: used(a) == 0)
    await session.close()
    await pool.leave(a)
    del made
    assert equal(read, weights())


# --- a full worker ---


async def test_a_full_worker_says_so_and_keeps_nothing_half(pool: Pool, scheme: str) -> None:
    [a] = await pool.start(artifact_bytes=1 << 20)
    session = await pool.session(a, scheme)
    kept = await session.put(weights(1), name="kept")
    before = used(a)
    with pytest.raises(Exhausted, match=r"do not fit: .*--artifacts"):
        await session.put({"w": np.ones(1 << 20, np.uint8)}, name="large")
    assert used(a) == before and not a.artifacts._uploads
    assert [each.names for each in await session.list_artifacts()] == [["kept"]]
    for number in range(2, 6):
        await session.put({"w": np.full(240 << 10, number, np.uint8)}, name=f"n{number}")
    with pytest.raises(Exhausted):
        await session.put({"w": np.zeros(240 << 10, np.uint8)})
    await session.delete("n3")
    await until(lambda: used(a) < 800 << 10)
    await session.put({"w": np.zeros(240 << 10, np.uint8)})
    assert equal(await kept.tensor_dict(), weights(1)), "what the cluster relies on never goes"


async def test_memory_the_machine_does_not_have(pool: Pool, scheme: str) -> None:
    [a] = await pool.start(artifact_bytes=1 << 20)
    session = await pool.session(a, scheme)

    def no_memory(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_memory)
        with pytest.raises(Exhausted, match="no memory for an artifact of 600000 bytes: No space left"):
            await session.put({"w": np.ones(600_000, np.uint8)})
    assert used(a) == 0
    await session.put({"w": np.ones(600_000, np.uint8)})


@pytest.mark.parametrize("size", [1 << 46, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
async def test_uploads_of_any_size_are_refused_in_one_line(pool: Pool, size: int) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    with pytest.raises(Exhausted, match=f"{size} bytes for an artifact do not fit"):
        await session._link.call(OpenUpload(size), UploadOpened)
    with pytest.raises(ProtocolError, match="an upload of -5 bytes"):
        await session._link.call(OpenUpload(-5), UploadOpened)


# --- uploads ---


async def test_an_upload_is_given_up_when_its_connection_ends(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    opened = await session._link.call(OpenUpload(5000), UploadOpened)
    await session._link.call(WriteUpload(opened.upload_id, 10, b"half"), Ok)
    assert used(a) == 5000
    other = await pool.session(a)
    with pytest.raises(ProtocolError, match="are not within an upload of 5000"):
        await session._link.call(WriteUpload(opened.upload_id, 4999, b"half"), Ok)
    await pool.die(session)
    await until(lambda: used(a) == 0)
    with pytest.raises(NotFound, match="does not exist; its connection may have ended"):
        await other._link.call(WriteUpload(opened.upload_id, 10, b"half"), Ok)


async def test_a_put_that_is_cancelled_leaves_nothing(pool: Pool, scheme: str) -> None:
    [a] = await pool.start(artifact_bytes=64 << 20)
    session = await pool.session(a, scheme)
    given = {"w": np.ones(6 * CHUNK_BYTES, np.uint8)}
    putting = asyncio.get_running_loop().create_task(session.put(given))
    await until(lambda: used(a))
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    await until(lambda: used(a) == 0)
    assert not a.artifacts._uploads and await session.list_artifacts() == []
    assert equal(await (await session.put(given)).tensor_dict(), given)


async def test_a_put_that_is_cancelled_before_it_knows_its_upload_leaves_nothing(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    open_upload = a.artifacts.open_upload

    def opened(*arguments: Any) -> str:
        putting.cancel()  # the answer is still to come
        return open_upload(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a.artifacts, "open_upload", opened)
        putting = asyncio.get_running_loop().create_task(session.put(weights()))
        with pytest.raises(asyncio.CancelledError):
            await putting
    await until(lambda: used(a) == 0)
    assert not a.artifacts._uploads and equal(await (await session.put(weights())).tensor_dict(), weights())


async def test_a_tensor_that_fails_while_it_is_put_leaves_nothing(pool: Pool, scheme: str) -> None:
    [a] = await pool.start(artifact_bytes=64 << 20)
    session = await pool.session(a, scheme)
    shrinking = torch.ones(CHUNK_BYTES + 5, dtype=torch.uint8)
    given = {"a": torch.zeros(2 * CHUNK_BYTES, dtype=torch.uint8), "w": shrinking}
    open_upload = a.artifacts.open_upload

    def resized(*arguments: Any) -> str:
        shrinking.resize_(5)  # by somebody else, as soon as the put has begun
        return open_upload(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a.artifacts, "open_upload", resized)
        with pytest.raises(InvalidArgument, match="tensor 'w' has changed its size while it was put"):
            await session.put(given)
    await until(lambda: used(a) == 0)
    assert not a.artifacts._uploads


async def test_puts_and_reads_do_not_share_their_fate(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is cancelled while a put is under way, which begins while a read waits."""
    [a] = await pool.start()
    session = await pool.session(a, "unix")
    await session.put(weights(1), name="n")
    go, asked = asyncio.Event(), asyncio.Event()
    resident = a.artifacts.resident

    async def slow(identity: str) -> Any:
        asked.set()
        await go.wait()
        return await resident(identity)

    with monkeypatch.context() as patch:
        patch.setattr(a.artifacts, "resident", slow)
        reading = asyncio.create_task(session.artifact("n").tensor_dict())
        await asked.wait()
        write = session_module.write_image

        async def write_and_cancel(*given: Any) -> bytes:
            reading.cancel()
            await asyncio.wait([reading])
            return await write(*given)

        patch.setattr(session_module, "write_image", write_and_cancel)
        made = await asyncio.wait_for(session.put(weights(2)), 5.0)
        assert reading.cancelled()
        go.set()
    assert equal(await made.tensor_dict(), weights(2)) and equal(await session.artifact("n").tensor_dict(), weights(1))


async def test_puts_one_after_the_other_share_a_connection(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a, "unix")
    opened = 0
    for number in range(3):
        channel = session._link._idle
        await asyncio.gather(session.put(weights(number)), session.put(weights(10 + number)))
        opened += session._link._idle is not channel
    assert opened == 1 and not session._link._putting


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_no_thread_writes_any_more_when_a_put_has_ended(how: str) -> None:
    """What they write to is unmapped then, and touching it would end the process."""
    writing, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def work(number: int) -> bytes:
        if number == 0:
            writing.set()
            gate.wait(10)
            ended.set()
        elif how == "fails":
            writing.wait(10)
            raise InvalidArgument("it has changed its size")
        return b""

    task = asyncio.get_running_loop().create_task(_in_threads(work, 50))
    await until(writing.is_set)
    if how == "is cancelled":
        task.cancel()
    ended_early, _ = await asyncio.wait([task], timeout=0.05)
    assert not ended_early
    gate.set()
    with pytest.raises(InvalidArgument if how == "fails" else asyncio.CancelledError):
        await task
    assert ended.is_set()


# --- leases ---


async def test_what_is_leased_goes_when_the_session_closes(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    one, other = await pool.session(a, scheme), await pool.session(a)
    made = await one.put(weights(), name="mine", ownership=leased(30))
    assert (await made.describe()).leased
    assert (await other.list_artifacts())[0].lease_id, "whoever heard of it has heard of the lease"
    assert equal(await other.artifact("mine").tensor_dict(), weights())
    await one.close()
    await until(lambda: used(a) == 0)
    assert await other.list_artifacts() == []
    with pytest.raises(NotFound):
        await other.artifact("mine").tensor_dict()
    pool.sessions.remove(one)


async def test_what_is_leased_goes_some_time_after_its_owner_has_died(pool: Pool) -> None:
    [a] = await pool.start()
    one, other = await pool.session(a), await pool.session(a)
    await one.put(weights(), name="mine", ownership=leased(6))
    await pool.die(one)
    assert equal(await other.artifact("mine").tensor_dict(), weights()), "it might come back"
    await pool.expire_crashed()
    await until(lambda: used(a) == 0)
    assert await other.list_artifacts() == []


@pytest.mark.slow
async def test_a_lease_is_renewed_as_long_as_its_owner_lives(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    await session.put(weights(), name="mine", ownership=leased(2))
    [lease_id] = session._leases._shared.values()
    kv = pool.kv
    assert kv is not None
    for _ in range(3):
        pool.clock.advance(1.5)
        await until(lambda: kv._deadline[lease_id] == pool.clock() + 2)
    assert equal(await session.artifact("mine").tensor_dict(), weights())


@pytest.mark.slow
async def test_a_lease_that_has_run_out_is_told_and_another_one_is_taken(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the caller was stopped for longer than its lease."""
    [a] = await pool.start()
    session = await pool.session(a)
    await session.put(weights(1), name="mine", ownership=leased(1))
    [lease_id] = session._leases._shared.values()
    assert pool.kv is not None
    await pool.kv.lease_revoke(lease_id)
    await until(lambda: used(a) == 0)
    await until(lambda: not session._leases._shared)
    assert f"what was put with leased(1) is gone: lease {lease_id} has ended" in caplog.text
    await session.put(weights(2), name="mine", ownership=leased(1))
    assert lease_id not in session._leases._shared.values() and (await session.list_artifacts())[0].lease_id


async def test_puts_at_once_share_one_lease(pool: Pool) -> None:
    [a] = await pool.start()
    session, other = await pool.session(a), await pool.session(a)
    await asyncio.gather(*(session.put(weights(number), ownership=leased(30)) for number in range(5)))
    await pool.seen()
    assert len({each.lease_id for each in await other.list_artifacts()}) == 1
    await session.put(weights(9), ownership=leased(40))
    await pool.seen()
    assert len({each.lease_id for each in await other.list_artifacts()}) == 2
    await session.close()
    pool.sessions.remove(session)
    await until(lambda: used(a) == 0)
    assert await other.list_artifacts() == []


async def test_an_artifact_of_several_owners_lives_as_long_as_one_of_them(pool: Pool) -> None:
    [a] = await pool.start()
    one, two, looks = await pool.session(a), await pool.session(a), await pool.session(a)
    made = await one.put(weights(), name="one", ownership=leased(30))
    await two.put(weights(), name="two", ownership=leased(30))
    await pool.seen()
    identity = await made.id()
    await one.close()
    await until(lambda: ("default", "one") not in plane(a).view.names)
    assert equal(await looks.artifact("two").tensor_dict(), weights())
    await looks.put(weights())
    await two.close()
    await until(lambda: not plane(a).view.names)
    [left] = await looks.list_artifacts()
    assert left.artifact_id == identity and left.lease_id == 0
    assert equal(await looks.artifact(identity).tensor_dict(), weights())
    await looks.delete(identity)
    await until(lambda: used(a) == 0)
    pool.sessions[:] = [looks]


@pytest.mark.parametrize("ttl_s", [0, -1, 1.5, 3601, float("nan"), float("inf")])
def test_a_lease_that_cannot_be(ttl_s: float) -> None:
    with pytest.raises(InvalidArgument, match="whole seconds from 1 to 3600"):
        leased(ttl_s)  # type: ignore[arg-type]


def test_a_lease_that_can_be() -> None:
    assert leased(3600) == Leased(3600) and leased(2.0) == Leased(2)  # type: ignore[arg-type]


async def test_the_lease_of_another_tenant_or_of_a_worker_is_nobodys(pool: Pool) -> None:
    """Whoever knows the number of a lease must not end it, nor put under it."""
    [a] = await pool.start()
    one, other = await pool.session(a), await pool.session(a, tenant="other")
    await one.put(weights(), ownership=leased(30))
    [lease_id] = one._leases._shared.values()
    for number in (lease_id, plane(a).member.lease_id, 0, -1, 1 << 62):
        for message in (EndLease(number), RenewLease(number)):
            with pytest.raises(NotFound, match="has ended"):
                await other._link.call(message, Ok)
    assert (await one.list_artifacts())[0].lease_id == lease_id


# --- tenants ---


async def test_tenants_see_nothing_of_each_other(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    one, two = await pool.session(a, scheme, "one"), await pool.session(a, scheme, "two")
    made = await one.put(weights(), name="n")
    identity = await made.id()
    assert await two.list_artifacts() == []
    for reference in ("n", identity):
        for attempt in (
            two.artifact(reference).tensor_dict, two.artifact(reference).describe, lambda r=reference: two.delete(r),
            lambda r=reference: two.name("mine", r), two.artifact(reference).prefetch,
        ):  # fmt: skip
            with pytest.raises(NotFound, match=r"does not exist|no artifact has the name"):
                await attempt()
    await two.put(weights(2), name="n")
    assert equal(await one.artifact("n").tensor_dict(), weights())
    assert equal(await two.artifact("n").tensor_dict(), weights(2))
    await two.put(weights(), name="same")
    assert (await made.describe()).names == ("n",) and [each.names for each in await two.list_artifacts()] == [
        ["n"],
        ["same"],
    ]
    await one.delete("n")
    assert equal(await two.artifact("same").tensor_dict(), weights()), "it is the other's as well"
    await two.delete("same")
    await two.delete("n")
    await until(lambda: used(a) == 0)


async def test_bytes_of_another_tenant_are_not_read_in_bulk_nor_mapped(pool: Pool) -> None:
    [a] = await pool.start()
    identity = await (await (await pool.session(a, tenant="one")).put(weights())).id()
    over_tcp, here = await pool.session(a, "tcp", "two"), await pool.session(a, "unix", "two")
    memory = memoryview(bytearray(100))
    for _ in range(2):
        with pytest.raises(NotFound, match="does not exist"):
            await over_tcp._link.fetch(identity, [(0, memory)])
        with pytest.raises(NotFound, match="does not exist"):
            await over_tcp._link.prepare(identity)
        with pytest.raises(NotFound, match="does not exist"):
            await here._link.descriptor(MapArtifact(identity), Ok)
    assert bytes(memory) == bytes(100)
    own = await (await over_tcp.put(weights())).id()
    assert own != identity, "what one tenant puts never stands in for what another does"
    identity = own
    await over_tcp._link.prepare(identity)
    await over_tcp._link.fetch(identity, [(0, memory)])
    assert bytes(memory) == weights()["w0"].tobytes()[:100]
    for offset in (-1, 1 << 40, -(1 << 62)):
        with pytest.raises(ProtocolError, match="are not within"):
            await over_tcp._link.fetch(identity, [(offset, memory)])


@pytest.mark.parametrize("tenant", ["a/b", "a\nb", "x" * 200])
async def test_a_tenant_that_cannot_be(pool: Pool, scheme: str, tenant: str) -> None:
    [a] = await pool.start()
    with pytest.raises(InvalidArgument, match="tenant"):
        await pool.session(a, scheme, tenant)


# --- who is not there ---


async def test_a_closed_session(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    made = await session.put(weights(), name="n")
    fresh = session.artifact("n")
    await session.close()
    await session.close()
    for attempt in (
        lambda: session.put(weights()), session.list_artifacts, lambda: session.name("x", "n"), lambda: session.unname("n"),
        lambda: session.delete("n"), made.tensor_dict, fresh.tensor_dict, made.describe, fresh.id, made.delete,
        made.prefetch, lambda: session.put({}), lambda: session.put(weights(), ownership=leased(5)),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="the session is closed"):
            await attempt()


async def test_nobody_is_there(pool: Pool) -> None:
    await pool.start()
    with pytest.raises(Unavailable):
        await connect(f"unix:{pool.folder}/nobody.sock")
    with pytest.raises(Unavailable):
        await connect("127.0.0.1:1")
    with pytest.raises(ConfigError, match="address='nonsense' is not an address"):
        await connect("nonsense")


async def test_the_store_is_away(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    made = await session.put(weights(), name="n")
    before = used(a)
    await pool.seen()
    await pool.lose_store()
    assert equal(await session.artifact("n").tensor_dict(), weights()), "reading needs no store"
    for attempt in (
        lambda: session.put(weights(2)), lambda: session.name("x", "n"), lambda: session.delete("n"),
        lambda: session.put(weights(2), ownership=leased(5)), session.artifact("unknown").id,
    ):  # fmt: skip
        with pytest.raises(Unavailable) as error:
            await attempt()
        assert str(pool.store_address) in str(error.value), error.value
        assert re.match(
            r"the store cannot be reached for \d+ s \(.*\); what is there can be read meanwhile", str(error.value)
        )
        assert str(error.value).count("the store cannot be reached") == 1
    assert not a.artifacts._uploads
    await pool.found_store()
    await until(lambda: used(a) == before)  # what the store has no record of goes once it has said so
    await session.put(weights(2), name="n")
    assert equal(await session.artifact("n").tensor_dict(), weights(2)) and equal(await made.tensor_dict(), weights())


async def test_a_worker_that_is_started_again(pool: Pool) -> None:
    """The session finds it again by itself; bytes that were only there are gone, and that is said."""
    [a] = await pool.start()
    session = await pool.session(a)
    given = await session.put(weights(), name="n")
    read = await given.tensor_dict()
    await pool.leave(a)
    with pytest.raises(TensorcastError):
        await session.artifact("n").tensor_dict()
    again = await pool.worker("a", artifact_bytes=8 << 20)
    await pool.settled()
    await until(lambda: session._link._client.connected)
    assert equal(read, weights())
    with pytest.raises(NotFound, match=r"the bytes of artifact [0-9a-f]{32} are gone: .* put it again"):
        await session.artifact("n").tensor_dict()
    await session.put(weights(), name="n")
    assert equal(await session.artifact("n").tensor_dict(), weights())
    assert session.worker_id == again.worker_id


async def test_a_worker_that_is_not_registered_just_now_is_to_be_asked_again(pool: Pool) -> None:
    """Its own lease has run out: that is no reason that a caller could do anything about."""
    [a] = await pool.start()
    session = await pool.session(a)
    member = plane(a).member
    assert pool.kv is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(member), "lease_id", property(lambda _: 999_999))
        with pytest.raises(Unavailable, match="not registered at the store just now"):
            await session.put(weights())
    assert used(a) == 0
    await pool.settled()
    await session.put(weights())


async def test_two_commits_of_the_same_artifact_when_one_fails(pool: Pool) -> None:
    [a] = await pool.start()
    one, two = await pool.session(a), await pool.session(a)
    records, failing = a.gateway.records, asyncio.Event()
    write = records.write

    async def first_fails(*arguments: Any, **named: Any) -> int:
        if not failing.is_set():
            failing.set()
            await until(lambda: a.artifacts.counters["artifacts_put"] == 2)
            raise Unavailable("the store has gone")
        return await write(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "write", first_fails)
        results = await asyncio.gather(one.put(weights()), two.put(weights()), return_exceptions=True)
    [failed] = [each for each in results if isinstance(each, Exception)]
    assert isinstance(failed, Unavailable)
    [made] = [each for each in results if not isinstance(each, BaseException)]
    await pool.seen()
    assert equal(await made.tensor_dict(), weights()), "the other's copy is there"
    assert len(await one.list_artifacts()) == 1


async def test_what_is_put_while_it_is_deleted_is_there(pool: Pool) -> None:
    [a] = await pool.start()
    one, two = await pool.session(a), await pool.session(a)
    made = await one.put(weights())
    records = a.gateway.records
    write = records.write

    async def late(*arguments: Any, **named: Any) -> int:
        if named.get("listing") is not None:
            await made.delete()  # seen here before the other record is written
        return await write(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "write", late)
        again = await two.put(weights())
    assert equal(await two.artifact(await again.id()).tensor_dict(), weights())
    pool.check()


async def test_a_session_says_who_it_is(pool: Pool) -> None:
    [a] = await pool.start()
    async with await connect(str(a.socket), tenant="t") as session:
        assert repr(session) == f"<Session {a.socket} as t>"
        assert isinstance(session, Session)
