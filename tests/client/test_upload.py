"""An artifact that its owner fills in place."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tensorcast_connector.client.session import Session
from tensorcast_connector.core.artifact import Header, chunk_count, encode_header, layout
from tensorcast_connector.errors import Exhausted, InvalidArgument, ProtocolError
from tensorcast_connector.wire.caller_messages import ArtifactOpened, CommitUpload, OpenMappedUpload, UploadOpened
from tests.client.callers import Pool, used

TENSORS = [("b", "uint8", (5,)), ("a", "float32", (1000, 2000))]


def fill(upload: object) -> np.ndarray:
    """Random numbers for `a`; `b` stays zero."""
    values = np.random.default_rng(1).random((1000, 2000), np.float32)
    spec = upload.specs[0]  # type: ignore[attr-defined]
    assert spec.name == "a"
    memory = np.frombuffer(upload.memory, np.uint8)  # type: ignore[attr-defined]
    memory[spec.offset : spec.range.end] = values.reshape(-1).view(np.uint8)
    return values


@pytest.mark.slow
async def test_what_is_filled_in_place_is_what_would_have_been_put(pool: Pool) -> None:
    (worker,) = await pool.start("a", artifact_bytes=32 << 20)
    session: Session = await pool.session(worker)
    upload = await session.upload(TENSORS)
    values = fill(upload)
    upload.digest(1)
    upload.seal()
    with pytest.raises(InvalidArgument, match="done"):
        upload.memory  # noqa: B018
    made = await upload.commit("n")
    put = await session.put({"a": values, "b": np.zeros(5, np.uint8)})
    assert await made.id() == await put.id() == await session.artifact("n").id()
    assert np.array_equal(await session.artifact("n").tensor("a"), values)
    await upload.close()  # does nothing


@pytest.mark.slow
async def test_memory_that_is_still_written_to_is_not_committed_and_given_back(pool: Pool) -> None:
    (worker,) = await pool.start("a", artifact_bytes=32 << 20)
    session: Session = await pool.session(worker)
    upload = await session.upload(TENSORS)
    values = fill(upload)
    held = np.frombuffer(upload.memory, np.uint8)
    upload.seal()
    with pytest.raises(InvalidArgument, match="still used"):
        await upload.commit()
    assert np.array_equal(held[: values.nbytes].view(np.float32).reshape(values.shape), values)  # still as it was
    await upload.close()
    assert used(worker) == 0


@pytest.mark.slow
async def test_what_cannot_be_filled_in_place_is_refused(pool: Pool) -> None:
    (worker,) = await pool.start("a")
    session = await pool.session(worker)
    there = await pool.session(worker, "tcp")
    for asked, tensors, words in [
        (session, [], "has bytes"), (there, TENSORS, "this host"), (session, [("a", "int7", (1,))], "int7"),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgument, match=words):
            await asked.upload(tensors)


@pytest.mark.slow
async def test_what_is_larger_than_touched_memory_is_written_the_same(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes into the memory by another way; tensors of many sizes, from this process and from a file."""
    (worker,) = await pool.start("a", artifact_bytes=200 << 20)
    here: Session = await pool.session(worker)
    elsewhere = await pool.session(worker, "tcp")
    chance = np.random.default_rng(2)
    sizes = {"a": 5, "b": 9 << 20, "c": 0, "d": (4 << 20) + 7, "e": 1 << 18}
    tensors = {name: chance.integers(0, 256, size, np.uint8) for name, size in sizes.items()}
    save_file(tensors, tmp_path / "f.safetensors")
    monkeypatch.setattr("tensorcast_connector.client.image.ARTIFACT_SPARE_BYTES", 1000)
    told: list[tuple[int, int]] = []
    made = await here.put(tensors, progress=lambda *at: told.append(at))
    assert told[-1][0] == told[-1][1]
    for name, found in (await elsewhere.artifact(await made.id()).tensor_dict()).items():  # digests are checked
        assert np.array_equal(found, tensors[name])
    assert await (await here.put(tmp_path / "f.safetensors")).id() == await made.id()
    assert await (await elsewhere.put(tensors)).id() == await made.id()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = used(worker)
    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(Exhausted, match=r"cannot write .* No space left"):
        await here.put({"x": tensors["b"] + 1})
    assert used(worker) == before


@pytest.mark.slow
async def test_memory_that_was_not_all_written_is_no_artifact(pool: Pool) -> None:
    """Whoever mapped it would be given zeros, or be killed where there is no memory for them."""
    (worker,) = await pool.start("a", artifact_bytes=32 << 20)
    session: Session = await pool.session(worker)
    specs, size = layout([("a", "uint8", (6 << 20,))])
    link = session._link
    channel = link.begin_put()
    descriptor, opened = await channel.call(OpenMappedUpload(size, True), UploadOpened, 5)
    os.pwrite(descriptor, bytes(5 << 20), 0)
    header = encode_header(Header(specs, size, bytes(16 * chunk_count(size)), tenant=link.tenant))
    with pytest.raises(ProtocolError, match="not all written"):
        await link.call(CommitUpload(opened.upload_id, header, "n"), ArtifactOpened)
    os.pwrite(descriptor, bytes(1 << 20), 5 << 20)
    os.close(descriptor)
    assert (await link.call(CommitUpload(opened.upload_id, header, "n"), ArtifactOpened)).artifact_id
    link.end_put(channel, True)
