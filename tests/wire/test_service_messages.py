"""Messages of callers and plans as bytes: the layout is fixed, everybody takes what is meant for him, and nothing else."""

import random
from types import ModuleType

import msgspec
import pytest

from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.net.bulk import _request_decoder as bulk_decoder
from tensorcast_connector.wire import caller_messages, messages, plan_messages, store_messages
from tensorcast_connector.wire.caller_messages import (
    AbortUpload,
    Arrival,
    ArtifactList,
    ArtifactListed,
    ArtifactOpened,
    AskArrival,
    CommitUpload,
    DeleteArtifact,
    EndLease,
    InstanceListed,
    LeaseOpened,
    ListArtifacts,
    ListSignals,
    MakeResident,
    MapArtifact,
    MoveNames,
    NameMove,
    NamesMoved,
    NameState,
    OpenArtifact,
    OpenLease,
    OpenMappedUpload,
    OpenUpload,
    RenewLease,
    SetName,
    SignalsListed,
    UploadOpened,
    WaitName,
    WorkerListed,
    WriteUpload,
)
from tensorcast_connector.wire.codec import EngineRequest, PeerRequest, Reply, StoreRequest, decode, encode
from tensorcast_connector.wire.messages import (
    BytesFollow,
    CopyHeader,
    FetchBytes,
    InstanceReport,
    Message,
    ReadHeader,
)
from tensorcast_connector.wire.plan_messages import (
    CancelOwnedPlan,
    CancelPlan,
    CancelSteps,
    PlanState,
    ReportInstance,
    RunStep,
    StepDone,
    StepEnded,
    StepTaken,
    SubmitPlan,
    TakeStep,
    WaitPlan,
)
from tensorcast_connector.wire.store_messages import (
    ArtifactRecord,
    Entry,
    GrantLease,
    NameRecord,
    ReadRecords,
    Records,
    RecordsWritten,
    ReplicaRecord,
    WriteRecords,
)
from tests.strange import some

# Rolling upgrades depend on it: a field may be added at the end and nothing else may change.
LAYOUT: dict[str, tuple[Message, list[object]]] = {
    "OpenUpload": (OpenUpload(5), [5]),
    "OpenMappedUpload": (OpenMappedUpload(5, True), [5, True]),
    "UploadOpened": (UploadOpened("u"), ["u"]),
    "WriteUpload": (WriteUpload("u", 5, b"d"), ["u", 5, b"d"]),
    "CommitUpload": (CommitUpload("u", b"h", "n", 7, {"k": "v"}), ["u", b"h", "n", 7, {"k": "v"}]),
    "AbortUpload": (AbortUpload("u"), ["u"]),
    "OpenArtifact": (OpenArtifact("n", 9), ["n", 9]),
    "ArtifactOpened": (
        ArtifactOpened("a", b"h", 7, 1.5, ["n"], ["w/1"], 9, {"k": "v"}), ["a", b"h", 7, 1.5, ["n"], ["w/1"], 9, {"k": "v"}]),
    "MapArtifact": (MapArtifact("a"), ["a"]),
    "MakeResident": (MakeResident("a"), ["a"]),
    "ListArtifacts": (ListArtifacts("p", 9), ["p", 9]),
    "ArtifactList": (
        ArtifactList([ArtifactListed("a", ["n"], 5, 2, 7, 1.5, ["w/1"])]), [[["a", ["n"], 5, 2, 7, 1.5, ["w/1"]]]]),
    "SetName": (SetName("n", "a"), ["n", "a"]),
    "MoveNames": (MoveNames([NameMove("n", "a", "b")], ["a"]), [[["n", "a", "b"]], ["a"]]),
    "NamesMoved": (NamesMoved(9), [9]),
    "WaitName": (WaitName("n", "a", 5, 9, 7), ["n", "a", 5, 9, 7]),
    "NameState": (NameState("a", 5, 9), ["a", 5, 9]),
    "AskArrival": (AskArrival(["a"], "w"), [["a"], "w"]),
    "Arrival": (Arrival([(1, 2)]), [[[1, 2]]]),
    "DeleteArtifact": (DeleteArtifact("a"), ["a"]),
    "OpenLease": (OpenLease(5), [5]),
    "LeaseOpened": (LeaseOpened(7), [7]),
    "RenewLease": (RenewLease(7), [7]),
    "EndLease": (EndLease(7), [7]),
    "ListSignals": (ListSignals(9, 5), [9, 5]),
    "SignalsListed": (
        SignalsListed(
            9, [WorkerListed("w/1", "w", "h:1", ["basic"], None, "away")],
            [InstanceListed("i", "w/1", "e", "m", "n", InstanceReport("i", "serving", 1, 2, 0.5, 1.5, 0.1))],
        ),
        [9, [["w/1", "w", "h:1", ["basic"], None, "away"]],
         [["i", "w/1", "e", "m", "n", ["i", "serving", 1, 2, 0.5, 1.5, 0.1]]]]),
    "SubmitPlan": (SubmitPlan("k", b"p", "t", 1.5, 2, 5), ["k", b"p", "t", 1.5, 2, 5]),
    "WaitPlan": (WaitPlan("k", 5), ["k", 5]),
    "CancelPlan": (CancelPlan("k"), ["k"]),
    "PlanState": (PlanState(b"r"), [b"r"]),
    "RunStep": (
        RunStep("t/k", "d", 1, 2, "pin", "w", {"artifact": "a"}, "t", 1.5),
        ["t/k", "d", 1, 2, "pin", "w", {"artifact": "a"}, "t", 1.5]),
    "CancelSteps": (CancelSteps("t/k", "d", 1, [2]), ["t/k", "d", 1, [2]]),
    "CancelOwnedPlan": (CancelOwnedPlan("t/k"), ["t/k"]),
    "StepDone": (StepDone({"artifact": "a"}), [{"artifact": "a"}]),
    "TakeStep": (TakeStep(5), [5]),
    "StepTaken": (StepTaken(3, "publish", {"n": 1}, "t/k/0", "t"), [3, "publish", {"n": 1}, "t/k/0", "t"]),
    "StepEnded": (StepEnded(3, [1], "invalid", "no"), [3, [1], "invalid", "no"]),
    "ReportInstance": (ReportInstance("serving", 1, 2, 0.5), ["serving", 1, 2, 0.5]),
    "ReadHeader": (ReadHeader("a"), ["a"]),
    "CopyHeader": (CopyHeader(b"h"), [b"h"]),
    "FetchBytes": (FetchBytes("a", [(5, 6)]), ["a", [[5, 6]]]),
    "BytesFollow": (BytesFollow(), []),
    "ReadRecords": (ReadRecords("plans/"), ["plans/"]),
    "Records": (Records(9, [Entry("k", b"v", 3)]), [9, [["Entry", "k", b"v", 3]]]),
    "WriteRecords": (
        WriteRecords([("k", 3)], [("k", b"v", 7)], ["d"]), [[["k", 3]], [["k", b"v", 7]], ["d"]]),
    "RecordsWritten": (RecordsWritten(True, 9), [True, 9]),
    "GrantLease": (GrantLease(5), [5]),
}  # fmt: skip
TAKEN_BY: dict[str, object] = {
    "engines' socket": EngineRequest, "workers' port": PeerRequest, "store": StoreRequest, "callers": Reply,
}  # fmt: skip


def kinds(module: ModuleType) -> list[type[Message]]:
    return [
        each for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Message) and each.__module__ == module.__name__
    ]  # fmt: skip


@pytest.mark.parametrize("name", LAYOUT)
def test_the_layout_of_a_message_does_not_change(name: str) -> None:
    message, fields = LAYOUT[name]
    assert msgspec.msgpack.decode(encode(message)) == [name, *fields]


@pytest.mark.parametrize("module", [messages, caller_messages, plan_messages, store_messages], ids=lambda m: m.__name__)
def test_every_message_is_taken_by_somebody(module: ModuleType) -> None:
    taken = {each for union in TAKEN_BY.values() for each in union.__args__}  # type: ignore[attr-defined]
    taken |= set(bulk_decoder.type.__args__) | {messages.Failure, store_messages.Entry, Message}
    assert not [each.__name__ for each in kinds(module) if each not in taken]


SERVICE = sorted(
    {type(message) for message, _ in LAYOUT.values()} | {*kinds(caller_messages), *kinds(plan_messages)}, key=str
)


@pytest.mark.parametrize("kind", SERVICE, ids=lambda each: each.__name__)
def test_what_is_written_is_read_whatever_it_holds(kind: type[Message]) -> None:
    unions = [each for each in [*TAKEN_BY.values(), bulk_decoder.type] if kind in each.__args__]  # type: ignore[attr-defined]
    assert unions
    for union in unions:
        decoder = msgspec.msgpack.Decoder(union)  # type: ignore[arg-type]
        for message in some(kind, random.Random(kind.__name__), 20):
            body = encode(message)
            assert encode(decode(decoder, body)) == body


@pytest.mark.parametrize("union", TAKEN_BY)
def test_damaged_messages_are_one_line_or_another_message(union: str) -> None:
    decoder = msgspec.msgpack.Decoder(TAKEN_BY[union])  # type: ignore[arg-type]
    chance = random.Random(union)
    for message, _ in LAYOUT.values():
        body = encode(message)
        for _ in range(40):
            damaged = bytearray(body)
            for _ in range(chance.randrange(1, 4)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            cut = bytes(damaged[: chance.randrange(len(damaged) + 1)])
            for each in (bytes(damaged), cut):
                try:
                    assert isinstance(decode(decoder, each), Message)
                except ProtocolError as error:
                    assert "\n" not in str(error)


def test_what_has_no_metadata_is_read_as_before() -> None:
    reply = msgspec.msgpack.Decoder(Reply)
    former = msgspec.msgpack.encode(["ArtifactOpened", "a", b"h", 7, 1.5, ["n"], ["w/1"], 9])
    assert decode(reply, former) == ArtifactOpened("a", b"h", 7, 1.5, ["n"], ["w/1"], 9, {})
    former = msgspec.msgpack.encode(["CommitUpload", "u", b"h", "n", 7])
    assert decode(msgspec.msgpack.Decoder(PeerRequest), former) == CommitUpload("u", b"h", "n", 7, {})


def test_records_in_the_database_are_json_that_may_grow() -> None:
    stored = msgspec.json.encode(ArtifactRecord("a", 5, 2, 1.5, 7))
    assert msgspec.json.decode(stored) == {
        "artifact_id": "a", "bytes": 5, "tensors": 2, "created_unix_s": 1.5, "lease_id": 7,
    }  # fmt: skip
    described = ArtifactRecord("a", 5, 2, 1.5, 7, {"format": "pt"})
    assert msgspec.json.decode(msgspec.json.encode(described))["metadata"] == {"format": "pt"}
    for record in (
        ArtifactRecord("a", 5, 2, 1.5, 7),
        described,
        NameRecord("a"),
        ReplicaRecord("a", "w/1", "memory", 5, True),
    ):
        grown = msgspec.json.decode(msgspec.json.encode(record)) | {"colour": "red"}
        assert msgspec.json.decode(msgspec.json.encode(grown), type=type(record)) == record
    former = {"artifact_id": "a", "worker_id": "w/1", "tier": "disk", "bytes": 9}
    assert msgspec.json.decode(msgspec.json.encode(former), type=ReplicaRecord) == ReplicaRecord("a", "w/1", "disk", 9)
