"""Which artifacts may go: compared with a model that keeps everything in plain lists, over random histories."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorcast_connector.core.residence import Residence
from tensorcast_connector.errors import Exhausted, NotFound

BYTES = 100


@dataclass
class Known:
    size: int
    keeper: bool
    pins: dict[str, float] = field(default_factory=dict)


class Model(RuleBasedStateMachine):
    """The same, slowly: `known` in the order of their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.residence = Residence(BYTES)
        self.reserved: dict[str, int] = {}
        self.known: dict[str, Known] = {}
        self.now = 0.0
        self.count = 0

    @property
    def free(self) -> int:
        return BYTES - sum(self.reserved.values()) - sum(each.size for each in self.known.values())

    def pinned(self, each: Known) -> bool:
        return any(until > self.now for until in each.pins.values())

    def touch(self, name: str) -> None:
        self.known[name] = self.known.pop(name)

    @rule(size=st.integers(0, BYTES + 5))
    def reserve(self, size: int) -> None:
        self.count += 1
        owner = f"o{self.count}"
        gone, free = [], self.free
        for name, each in self.known.items():
            if free >= size:
                break
            if not each.keeper and not self.pinned(each):
                gone.append(name)
                free += each.size
        before = list(self.residence.artifacts), self.residence.statistics()
        if free < size:
            with pytest.raises(Exhausted, match=f"{size} bytes .* do not fit"):
                self.residence.reserve(owner, size, self.now)
            assert (list(self.residence.artifacts), self.residence.statistics()) == before, "nothing has changed"
            return
        assert self.residence.reserve(owner, size, self.now) == gone
        for name in gone:
            del self.known[name]
        self.reserved[owner] = size

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), name=st.sampled_from("abcdefgh"), keeper=st.booleans())
    def commit(self, data: st.DataObject, name: str, keeper: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(self.reserved)))
        fresh = name not in self.known
        assert self.residence.commit(owner, name, keeper) is fresh
        size = self.reserved.pop(owner)
        if fresh:
            self.known[name] = Known(size, keeper)
        else:
            self.known[name].keeper |= keeper

    @rule(owner=st.integers(0, 20))
    def release(self, owner: int) -> None:
        self.reserved.pop(f"o{owner}", None)
        self.residence.release(f"o{owner}")

    @rule(name=st.sampled_from("abcdefgh"))
    def use(self, name: str) -> None:
        if name not in self.known:
            with pytest.raises(NotFound, match=f"artifact {name} is not resident"):
                self.residence.use(name)
            return
        self.residence.use(name)
        self.touch(name)

    @rule(name=st.sampled_from("abcdefgh"))
    def forget(self, name: str) -> None:
        self.known.pop(name, None)
        self.residence.forget(name)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), keeper=st.booleans())
    def keep(self, data: st.DataObject, keeper: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.residence.keep(name, keeper)
        self.known[name].keeper = keeper

    @precondition(lambda self: self.known)
    @rule(data=st.data(), pin=st.sampled_from("xy"), ttl_s=st.integers(0, 5))
    def pin(self, data: st.DataObject, pin: str, ttl_s: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.residence.pin(name, pin, self.now + ttl_s)
        self.known[name].pins[pin] = self.now + ttl_s

    @rule(name=st.sampled_from("abcdefgh"), pin=st.sampled_from("xy"))
    def unpin(self, name: str, pin: str) -> None:
        self.residence.unpin(name, pin)
        if name in self.known:
            self.known[name].pins.pop(pin, None)

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def the_same(self) -> None:
        self.residence.check()
        assert list(self.residence.artifacts) == list(self.known), "in the order of their use"
        assert self.residence.used_bytes == BYTES - self.free
        assert self.residence.statistics() == {
            "artifacts": len(self.known), "artifact_bytes_used": BYTES - self.free, "artifact_bytes_max": BYTES,
        }  # fmt: skip
        for name in "abcdefgh":
            assert (name in self.residence) is (name in self.known)
            if name in self.known:
                each = self.known[name]
                assert self.residence.keeps(name) is each.keeper
                assert set(self.residence.pins(name, self.now)) == {p for p, t in each.pins.items() if t > self.now}
            else:
                assert not self.residence.pins(name, self.now)


TestModel = pytest.mark.slow(Model.TestCase)
TestModel.settings = settings(derandomize=True, max_examples=40, stateful_step_count=30, deadline=None)


def test_what_is_kept_or_pinned_never_goes_and_the_message_says_what_to_do() -> None:
    residence = Residence(100)
    for name in "abc":
        residence.reserve(name, 30, 0)
        residence.commit(name, name, keeper=name == "a")
    residence.pin("b", "who", 10)
    with pytest.raises(Exhausted) as error:
        residence.reserve("d", 41, 0)
    assert "41 bytes for an artifact do not fit: 90 of 100 bytes are in use, and 30 of these may go" in str(error.value)
    assert "delete or unpin" in str(error.value) and "--artifacts" in str(error.value)
    assert residence.reserve("d", 40, 0) == ["c"]
    with pytest.raises(Exhausted):
        residence.reserve("e", 1, 9.9)
    assert residence.reserve("e", 30, 10) == ["b"], "a pin that has run out keeps nothing"
    residence.check()


def test_least_recently_used_goes_first() -> None:
    residence = Residence(90)
    for name in "abc":
        residence.reserve(name, 30, 0)
        residence.commit(name, name, keeper=False)
    residence.use("a")
    assert residence.reserve("d", 60, 0) == ["b", "c"]


@pytest.mark.parametrize("ask", ["keep", "keeps", "pin", "use"])
def test_what_is_not_here(ask: str) -> None:
    residence = Residence(10)
    arguments = {"keep": (True,), "pin": ("who", 5.0)}.get(ask, ())
    with pytest.raises(NotFound, match="artifact a is not resident here"):
        getattr(residence, ask)("a", *arguments)
    residence.unpin("a", "who")
    residence.forget("a")
    assert repr(residence) == "<Residence 0 artifacts, 0 of 10 bytes>"


def test_a_number_of_artifacts_is_a_limit_too() -> None:
    residence = Residence(100, count_max=2)
    for name in "ab":
        residence.reserve(name, 1, 0)
        residence.commit(name, name, keeper=name == "a")
    assert residence.reserve("c", 1, 0) == ["b"]
    with pytest.raises(Exhausted, match="2 artifacts and uploads are at this worker, of 2 that it takes; delete"):
        residence.reserve("d", 1, 0)
    residence.check()


def test_pins_that_have_run_out_take_no_memory() -> None:
    residence = Residence(100)
    residence.reserve("a", 1, 0)
    residence.commit("a", "a", keeper=True)
    for each in range(10):
        residence.pin("a", f"p{each}", each)
    residence.prune(7)
    assert set(residence._resident["a"].pins) == {"p8", "p9"}


def test_a_tenant_has_its_share_and_no_more() -> None:
    residence = Residence(100, tenant_bytes_max=50)
    residence.reserve("u1", 30, 0, "a")
    assert residence.commit("u1", "kept", keeper=True)
    residence.reserve("u2", 20, 0, "a")
    assert residence.commit("u2", "copy", keeper=False)
    residence.reserve("u3", 30, 0, "b")
    assert residence.commit("u3", "others", keeper=False)
    assert residence.reserve("u4", 20, 0, "a") == ["copy"], "its own goes, and nobody else's"
    with pytest.raises(
        Exhausted, match=r"21 bytes .* of tenant 'a' do not fit: it has 50 of the 50 .*--tenant-bytes-max"
    ):
        residence.reserve("u5", 21, 0, "a")
    residence.check()
    residence.release("u4")
    residence.forget("kept")
    assert residence.reserve("u6", 50, 0, "a") == []
    residence.check()
