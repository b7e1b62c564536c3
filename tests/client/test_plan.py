"""Plans of callers over real gateways, workers and engines: what is done, in which order, how often, and what is said."""

import asyncio
import gc
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tensorcast_connector.client import plan as client_plan
from tensorcast_connector.client.instance import InstanceLink, StepContext
from tensorcast_connector.client.plan import CallContext, Plan, PlanHandle
from tensorcast_connector.client.session import Session
from tensorcast_connector.config import PLAN_BYTES_MAX, PLAN_STEPS_MAX
from tensorcast_connector.core.plan import CANCELLED, DONE, FAILED, SKIPPED, PlanRecord, encode_record
from tensorcast_connector.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Exhausted,
    InvalidArgument,
    NotFound,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import AttachInstance
from tensorcast_connector.wire.plan_messages import PlanState, StepTaken, SubmitPlan
from tensorcast_connector.worker.server import Worker
from tests.client.callers import Pool, equal, weights
from tests.cluster import plane
from tests.waiting import until


class Engine:
    """An adaptor that writes down what it was asked; `during` can make a step wait, or fail."""

    def __init__(self, during: Callable[[str, Mapping[str, Any]], Any] = lambda *_: None) -> None:
        self.done: list[tuple[str, dict[str, Any]]] = []
        self.keys: Counter[str] = Counter()
        self.cancelled: list[str] = []
        self.running = self.most = 0
        self._during = during

    async def _step(self, name: str, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        self.keys[context.key] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            result = self._during(name, arguments)
            if asyncio.iscoroutine(result):
                result = await result
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            self.running -= 1
        self.done.append((name, dict(arguments)))
        return result if isinstance(result, Mapping) else {"of": arguments.get("n")}

    async def publish(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        return await self._step("publish", arguments, context)

    async def hydrate(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        return await self._step("hydrate", arguments, context)

    async def evict_local(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        return await self._step("evict_local", arguments, context)

    async def transform_into(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        return await self._step("transform_into", arguments, context)

    @property
    def order(self) -> list[Any]:
        """The `n` of what was done."""
        return [arguments.get("n") for _, arguments in self.done]


class Host(Pool):
    """A pool with engines."""

    links: list[InstanceLink]

    async def attach(self, worker: Worker, engine: Engine, name: str = "e") -> InstanceLink:
        """Until every gateway knows it."""
        attached = AttachInstance(name, "fake", "m", "n")
        link = InstanceLink(self.network, worker.socket, attached, engine, random.Random(0))
        await link.start()
        self.links = [*getattr(self, "links", []), link]
        await until(lambda: all(plane(each).view.instances.get(name) for each in self.workers))
        return link

    async def close(self) -> None:
        for link in getattr(self, "links", []):
            await link.close()
        await super().close()


@pytest.fixture
async def host(tmp_path: Any, quick: None) -> Any:
    made = Host(SocketNetwork(), tmp_path)
    yield made
    await made.close()


def within(seconds: float, key: str = "") -> CallContext:
    """A context with that deadline."""
    return CallContext(timeout_s=seconds, idempotency_key=key) if key else CallContext(timeout_s=seconds)


async def ended(handle: PlanHandle) -> str:
    """How: its state and error, whatever `result` raises."""
    try:
        await handle.result(20)
    except TensorcastError as error:
        return f"{handle.status} {error.code}: {error}"
    return handle.status


# --- what is done, and in which order ---


async def test_results_are_inputs(host: Host, scheme: str) -> None:
    a, b = await host.start("a", "b")
    session = await host.session(a, scheme)

    async def publish(name: str, arguments: Mapping[str, Any]) -> Any:
        if name != "publish":
            return None
        made = await session.put(weights(arguments["seed"]))
        return {"artifact": await made.id(), "tokens": 7, "list": [1, "x", None, {"deep": b"bytes"}]}

    one, two = Engine(publish), Engine()
    await host.attach(a, one, "one")
    await host.attach(b, two, "two")
    plan = session.plan()
    published = plan.on_instance("one").publish(seed=3)
    there = plan.on_worker("b").prefetch(published)
    pinned = plan.on_worker(b.worker_id).pin(published["artifact"], 100).after(there)
    hydrated = (
        plan.on_instance("two").hydrate(there["artifact"], tokens=published["tokens"], all=published).after(pinned)
    )
    handle = plan.run()
    outcome = await handle.result()
    identity = outcome[published]["artifact"]
    assert outcome[there] == {"artifact": identity, "bytes": outcome[there]["bytes"]} and outcome[pinned] == {
        "artifact": identity
    }
    assert two.done == [("hydrate", {"artifact": identity, "tokens": 7, "all": outcome[published]})]
    assert outcome[hydrated] == {"of": None} and outcome.step(hydrated).attempts == 1
    assert all(
        outcome.step(each).state == DONE and outcome.step(each).seconds > 0 for each in (published, there, hydrated)
    )
    assert handle.done and handle.status == "done" and identity in b.artifacts.residence
    assert equal(await (await host.session(b)).artifact(identity).tensor_dict(), weights(3))


async def test_steps_wait_for_what_they_depend_on_and_for_nothing_else(host: Host) -> None:
    [a] = await host.start()
    gate = asyncio.Event()

    async def slow(_: str, arguments: Mapping[str, Any]) -> None:
        if arguments["n"] == "slow":
            await gate.wait()

    engine = Engine(slow)
    await host.attach(a, engine)
    session = await host.session(a)
    plan = session.plan()
    on = plan.on_instance("e")
    first = on.evict_local(n="slow")
    on.evict_local(n="after").after(first)
    chain = on.evict_local(n=0)
    for number in range(1, 6):
        chain = on.evict_local(n=number).after(chain)
    last = on.evict_local(n="last", of=first["of"]).after(chain)
    handle = plan.run()
    await until(lambda: len(engine.done) == 6)
    assert engine.order == [0, 1, 2, 3, 4, 5] and handle.status == "running" and not handle.done
    gate.set()
    outcome = await handle.result()
    assert set(engine.order[6:8]) <= {"slow", "after", "last"} and engine.order[6] == "slow" and len(engine.done) == 9
    assert outcome[last] == {"of": "last"} and engine.done[-1][1].get("of", "slow") == "slow"


@pytest.mark.parametrize("concurrency", [1, 3, 100])
async def test_no_more_run_at_once_than_were_asked_for(host: Host, concurrency: int) -> None:
    [a] = await host.start()
    turns = asyncio.Semaphore(0)

    async def wait(*_: Any) -> None:
        await turns.acquire()

    engine = Engine(wait)
    await host.attach(a, engine)
    plan = (await host.session(a)).plan()
    for number in range(12):
        plan.on_instance("e").evict_local(n=number)
    handle = plan.run(concurrency=concurrency)
    at_once = min(concurrency, 12)
    await until(lambda: engine.running == at_once)
    for _ in range(12):
        turns.release()
    await handle.result()
    assert engine.most == at_once and sorted(engine.order) == list(range(12))


@pytest.mark.slow
async def test_a_large_plan(host: Host) -> None:
    a, b = await host.start("a", "b")
    engines = {"x": Engine(), "y": Engine()}
    await host.attach(a, engines["x"], "x")
    await host.attach(b, engines["y"], "y")
    plan = (await host.session(a)).plan()
    steps = [plan.on_instance("xy"[number % 2]).evict_local(n=number) for number in range(300)]
    for number, step in enumerate(steps[10:], 10):
        step.after(steps[number - 10])
    outcome = await plan.run(concurrency=32).result()
    assert [outcome[step] for step in steps] == [{"of": number} for number in range(300)]
    assert all(count == 1 for engine in engines.values() for count in engine.keys.values())


# --- retries ---


async def test_a_step_is_tried_again_until_its_engine_is_back(host: Host) -> None:
    [a] = await host.start()
    stuck = asyncio.Event()

    async def first_hangs(*_: Any) -> None:
        if not stuck.is_set():
            stuck.set()
            await asyncio.Event().wait()

    engine = Engine(first_hangs)
    link = await host.attach(a, engine)
    session = await host.session(a)
    plan = session.plan()
    step = plan.on_instance("e").publish(n=1)
    handle = plan.run()
    await stuck.wait()
    await link.close()
    await until(lambda: engine.cancelled)
    await until(lambda: not plane(a).view.instances)
    await host.attach(a, engine)
    outcome = await handle.result()
    assert outcome[step] == {"of": 1} and outcome.step(step).attempts > 1
    assert len(engine.keys) == 1 and len(engine.done) == 1, "under the same key"


async def test_an_engine_that_attaches_again_before_its_old_connection_has_ended(host: Host) -> None:
    """As after its process was killed and started again at once: what the old one was told nobody does."""
    [a] = await host.start()
    hangs = Engine(lambda *_: asyncio.Event().wait())
    await host.attach(a, hangs)
    plan = (await host.session(a)).plan()
    step = plan.on_instance("e").publish(n=1)
    handle = plan.run()
    await until(lambda: hangs.running)
    again = Engine()
    await host.attach(a, again)
    outcome = await handle.result()
    assert outcome[step] == {"of": 1} and again.order == [1]


@pytest.mark.slow
async def test_what_may_go_better_later_is_tried_again(host: Host) -> None:
    [a] = await host.start()
    errors = iter([Unavailable("not now"), Exhausted("no room"), DeadlineExceeded("slow")])

    def fail(*_: Any) -> None:
        if (error := next(errors, None)) is not None:
            raise error

    engine = Engine(fail)
    await host.attach(a, engine)
    plan = (await host.session(a)).plan()
    step = plan.on_instance("e").publish(n=1)
    outcome = await plan.run().result()
    assert outcome.step(step).attempts == 4 and outcome[step] == {"of": 1}
    assert len(engine.keys) == 1, "always the same key"


async def test_what_will_not_go_better_is_not(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    [a] = await host.start()
    session = await host.session(a)
    for error, code in [
        (InvalidArgument("no such layer"), "invalid"), (NotFound("gone"), "not-found"), (Conflict("other"), "conflict"),
        (KeyError("oops"), "internal"),
    ]:  # fmt: skip

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        engine = Engine(fail)
        await host.attach(a, engine)
        plan = session.plan()
        plan.on_instance("e").publish(n=1)
        handle = plan.run()
        why = await ended(handle)
        assert (
            why.startswith(f"failed {code}: step 0 (publish on e): ")
            and str(error) in why
            and sum(engine.keys.values()) == 1
        )


# --- failure ---


async def test_the_step_that_fails_is_named_and_the_others_are_not_begun(host: Host) -> None:
    [a] = await host.start()

    async def fail(_: str, arguments: Mapping[str, Any]) -> None:
        if arguments["n"] == "bad":
            raise InvalidArgument("no such layer")
        if arguments["n"] == "slow":
            await asyncio.Event().wait()

    engine = Engine(fail)
    await host.attach(a, engine)
    plan = (await host.session(a)).plan()
    on = plan.on_instance("e")
    good = on.evict_local(n="good")
    slow = on.evict_local(n="slow").after(good)
    bad = on.publish(n="bad").after(good)
    later = on.hydrate(bad)
    handle = plan.run()
    with pytest.raises(InvalidArgument, match=r"^step 2 \(publish on e\): no such layer$"):
        await handle.result()
    assert handle.status == "failed"
    record = handle._record
    assert record is not None
    states = {number: each.state for number, each in record.outcomes.items()}
    assert states == {0: DONE, 1: CANCELLED, 2: FAILED, 3: SKIPPED} and good and slow and later
    await until(lambda: engine.cancelled == ["evict_local"])


@pytest.mark.parametrize("wants", ["missing", "of"])
async def test_a_result_that_does_not_have_what_is_wanted(host: Host, wants: str) -> None:
    [a] = await host.start()
    await host.attach(a, Engine())
    plan = (await host.session(a)).plan()
    made = plan.on_instance("e").publish(n=5)
    plan.on_worker("a").prefetch(made[wants])
    message = (
        r"step 1 \(prefetch on a\) wants 'missing' of step 0" if wants == "missing" else "artifact=5 should be text"
    )
    with pytest.raises(InvalidArgument, match=message):
        await plan.run().result()


@pytest.mark.slow
async def test_the_deadline(host: Host) -> None:
    [a] = await host.start()
    engine = Engine(lambda *_: asyncio.Event().wait())
    await host.attach(a, engine)
    session = await host.session(a)
    plan = session.plan(within(0.3))
    plan.on_instance("e").publish(n=1)
    handle = plan.run()
    with pytest.raises(DeadlineExceeded, match=r"has not ended within 0.01 s"):
        await handle.result(0.01)
    assert not handle.done and handle.status == "running"
    with pytest.raises(DeadlineExceeded, match=r"step 0 \(publish on e\)"):
        await handle.result()
    await until(lambda: engine.cancelled == ["publish"])
    later = session.plan()
    later.on_instance("e").evict_local()
    await later.run().cancel()


@pytest.mark.parametrize("timeout_s", [0.0, -5.0, float("nan"), 3001.0, float("inf")])
async def test_a_deadline_that_cannot_be(host: Host, timeout_s: float) -> None:
    [a] = await host.start()
    plan = (await host.session(a)).plan(within(timeout_s))
    plan.on_worker("a").prefetch("n")
    with pytest.raises((DeadlineExceeded, InvalidArgument), match="deadline"):
        plan.run()


async def test_cancelling(host: Host) -> None:
    a, b = await host.start("a", "b")
    engine = Engine(lambda name, _: asyncio.Event().wait() if name == "publish" else None)
    await host.attach(b, engine)
    session = await host.session(a)
    plan = session.plan()
    first = plan.on_instance("e").evict_local(n=0)
    plan.on_instance("e").publish(n=1).after(first)
    handle = plan.run()
    await until(lambda: engine.running)
    await handle.cancel()
    assert handle.done and handle.status == "cancelled"
    await until(lambda: engine.cancelled == ["publish"])
    with pytest.raises(Cancelled, match="cancelled"):
        await handle.result()
    await handle.cancel()
    assert engine.order == [0], "what is done stays done"


async def test_cancelling_what_has_not_begun_yet(host: Host) -> None:
    [a] = await host.start()
    engine = Engine(lambda *_: asyncio.Event().wait())
    await host.attach(a, engine)
    session = await host.session(a)
    for _ in range(5):
        plan = session.plan()
        plan.on_instance("e").publish(n=1)
        handle = plan.run()
        await handle.cancel()
        assert handle.status == "cancelled"
    await until(lambda: not engine.running)


async def test_cancelling_what_the_gateway_has_not_heard_of_yet(host: Host) -> None:
    [a] = await host.start()
    engine = Engine(lambda *_: asyncio.Event().wait())
    await host.attach(a, engine)
    session = await host.session(a)
    call, refused = session._link.call, asyncio.Event()

    async def slow(message: Any, *rest: Any) -> Any:
        if isinstance(message, SubmitPlan):
            await refused.wait()
        try:
            return await call(message, *rest)
        except NotFound:
            refused.set()
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session._link, "call", slow)
        plan = session.plan()
        plan.on_instance("e").publish(n=1)
        handle = plan.run()
        await handle.cancel()
    assert handle.status == "cancelled" and not engine.done


async def test_cancelling_from_another_gateway(host: Host) -> None:
    a, b = await host.start("a", "b")
    engine = Engine(lambda *_: asyncio.Event().wait())
    await host.attach(a, engine)
    at_a, at_b = await host.session(a), await host.session(b)

    def same(session: Session) -> PlanHandle:
        plan = session.plan(within(30, "k"))
        plan.on_instance("e").publish(n=1)
        return plan.run()

    one = same(at_a)
    await until(lambda: engine.running)
    other = same(at_b)
    await other.cancel()
    assert other.status == "cancelled" and await ended(one) == "cancelled cancelled: cancelled by its caller"
    await until(lambda: engine.cancelled)


# --- the idempotency key ---


def one_step(session: Session, key: str, n: int = 1) -> Plan:
    plan = session.plan(within(30, key))
    plan.on_instance("e").publish(n=n)
    return plan


async def test_the_same_key_is_the_same_run(host: Host) -> None:
    a, b = await host.start("a", "b")
    gate = asyncio.Event()
    engine = Engine(lambda *_: gate.wait())
    await host.attach(a, engine)
    sessions = [await host.session(each, how) for each in (a, b) for how in ("unix", "tcp")]
    handles = [one_step(session, "k").run() for session in sessions * 2]
    await until(lambda: engine.running)
    gate.set()
    assert [(await handle.result())[handle._steps[0]] for handle in handles] == [{"of": 1}] * 8
    assert engine.order == [1] and all(handle.status == "done" for handle in handles)
    for session in sessions:
        later = one_step(session, "k").run()
        await later.result()
    assert engine.order == [1], "its outcome is remembered"


async def test_the_outcome_is_had_even_when_the_engine_has_gone_since(host: Host) -> None:
    [a] = await host.start()
    link = await host.attach(a, Engine())
    session = await host.session(a)
    await one_step(session, "k").run().result()
    await link.close()
    await until(lambda: not plane(a).view.instances)
    plan = one_step(session, "k")
    assert (await plan.run().result())[plan._steps[0]] == {"of": 1}


async def test_another_plan_under_the_same_key(host: Host) -> None:
    a, b = await host.start("a", "b")
    gate = asyncio.Event()
    engine = Engine(lambda *_: gate.wait())
    await host.attach(a, engine)
    sessions = [await host.session(a), await host.session(b)]
    running = one_step(sessions[0], "k").run()
    await until(lambda: engine.running)
    for _ in range(2):
        for session in sessions:
            with pytest.raises(Conflict, match="the idempotency key 'k' belongs to another plan"):
                await one_step(session, "k", n=2).run().result()
        gate.set()
        await running.result()
    assert engine.order == [1], "nothing of the other one was done"
    assert (await (kept := one_step(sessions[0], "k")).run().result())[kept._steps[0]] == {"of": 1}


async def test_keys_of_tenants_are_their_own(host: Host) -> None:
    [a] = await host.start()
    engine = Engine()
    await host.attach(a, engine)
    for number, tenant in enumerate(("one", "two")):
        await one_step(await host.session(a, tenant=tenant), "k", number).run().result()
    assert engine.order == [0, 1]


@pytest.mark.parametrize("key", ["a\nb", "x" * 300, "\0"])
async def test_a_key_that_cannot_be(host: Host, key: str) -> None:
    [a] = await host.start()
    await host.attach(a, Engine())
    with pytest.raises(InvalidArgument, match="is no idempotency key"):
        await one_step(await host.session(a), key).run().result()


@pytest.mark.parametrize("key", ["a/b", "%2F", "x" * 256, "\N{SNOWMAN}", ".."])
async def test_a_key_that_can_be(host: Host, key: str) -> None:
    [a] = await host.start()
    await host.attach(a, Engine())
    session = await host.session(a)
    for _ in range(2):
        await one_step(session, key).run().result()


async def test_one_key_for_two_plans_at_once_is_refused_before_anything_is_sent(host: Host) -> None:
    [a] = await host.start()
    gate = asyncio.Event()
    engine = Engine(lambda *_: gate.wait())
    await host.attach(a, engine)
    session, context = await host.session(a), within(30, "k")

    def plan(n: int) -> Plan:
        made = session.plan(context)
        made.on_instance("e").publish(n=n)
        return made

    handles = [plan(1).run(), plan(1).run()]
    with pytest.raises(Conflict, match=r"'k' belongs to another plan, which this session runs just now; .* of its own"):
        plan(2).run()
    await until(lambda: engine.running)
    with pytest.raises(Conflict, match="which this session runs just now"):
        plan(2).run()
    gate.set()
    for handle in handles:
        await handle.result()
    assert engine.order == [1] and not session._link.plans
    with pytest.raises(Conflict, match=r"belongs to another plan$"):  # which the store remembers
        await plan(2).run().result()
    await until(lambda: not session._link.plans)


# --- plans that cannot run ---


async def test_who_is_not_there_is_named(host: Host) -> None:
    [a] = await host.start()
    session = await host.session(a)
    for make, message in [
        (lambda plan: plan.on_worker("nobody").prefetch("n"), r"step 0 \(prefetch on nobody\): there is no worker 'nobody'"),
        (lambda plan: plan.on_instance("nobody").publish(), r"step 0 \(publish on nobody\): there is no instance 'nobody'"),
        (lambda plan: plan.on_worker("").prefetch("n"), "there is no worker ''"),
    ]:  # fmt: skip
        plan = session.plan()
        make(plan)
        with pytest.raises(NotFound, match=message):
            await plan.run().result()
    plan = session.plan()
    plan.on_worker("a").prefetch("no such artifact")
    with pytest.raises(NotFound, match=r"step 0 \(prefetch on a\): no artifact has the name 'no such artifact'"):
        await plan.run().result()


async def test_plans_that_make_no_sense(host: Host) -> None:
    [a] = await host.start()
    session = await host.session(a)
    empty = session.plan()
    with pytest.raises(InvalidArgument, match=f"a plan has 1 to {PLAN_STEPS_MAX} steps, not 0"):
        empty.run()
    large = session.plan()
    for _ in range(PLAN_STEPS_MAX + 1):
        large.on_instance("e").evict_local()
    with pytest.raises(InvalidArgument, match=f"not {PLAN_STEPS_MAX + 1}"):
        large.run()
    cyclic = session.plan()
    one = cyclic.on_instance("e").publish()
    two = cyclic.on_instance("e").hydrate(one)
    one.after(two)
    with pytest.raises(InvalidArgument, match=r"cycle: step 0 \(publish on e\) waits for step 1 .* waits for step 0"):
        cyclic.run()
    itself = session.plan()
    own = itself.on_instance("e").publish()
    own.after(own)
    with pytest.raises(InvalidArgument, match="cycle"):
        itself.run()
    for use in (
        lambda plan: plan.on_instance("e").hydrate(one), lambda plan: plan.on_instance("e").evict_local().after(one),
        lambda plan: plan.on_worker("a").prefetch(one["artifact"]),
    ):  # fmt: skip
        plan = session.plan()
        use(plan)
        with pytest.raises(InvalidArgument, match=r"on (e|a) depends on a step of another plan .*publish on e"):
            plan.run()
    unknown = session.plan()
    unknown.add("explode", "a", {})
    with pytest.raises(InvalidArgument, match=r"step 0 \(explode on a\): no such operation; known are prefetch"):
        unknown.run()
    wrong = session.plan()
    wrong.add("pin", "a", {"artifact": "n"})
    with pytest.raises(
        InvalidArgument, match=r"step 0 \(pin on a\) takes artifact, pin, ttl_s, and was given artifact"
    ):
        wrong.run()
    assert repr(cyclic).startswith("<Plan of 2 steps") and repr(one) == "<Step publish on e>"


def looped() -> list[Any]:
    """A list that is in itself."""
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    "value",
    [np.ones(3), object(), 1 << 70, "\ud800", {"deep": [lambda: 0]}, looped(), 1j, {(1, object()): 2}, {1: 2}],
    ids=repr,
)
async def test_arguments_that_cannot_travel_name_their_step(host: Host, value: Any) -> None:
    [a] = await host.start()
    plan = (await host.session(a)).plan()
    plan.on_instance("e").publish(n=1)
    plan.on_instance("e").publish(n=value)
    with pytest.raises(InvalidArgument, match=r"^step 1 \(publish on e\): an argument is neither text, bytes, number"):
        plan.run()


async def test_arguments_come_as_they_were_given(host: Host) -> None:
    [a] = await host.start()
    engine = Engine()
    await host.attach(a, engine)
    plan = (await host.session(a)).plan()
    given = {
        "text": "ü\n",
        "bytes": b"\0\xff",
        "none": None,
        "float": 1.5,
        "large": (1 << 64) - 1,
        "list": [1, [2, {}]],
    }
    plan.on_instance("e").publish(**given)
    await plan.run().result()
    assert engine.done == [("publish", given)]


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), "long", None])
async def test_a_pin_that_cannot_be(host: Host, ttl_s: Any) -> None:
    [a] = await host.start()
    session = await host.session(a)
    made = await session.put(weights())
    with pytest.raises(InvalidArgument, match=r"step 0 \(pin on a/.*\): a pin of"):
        await made.pin(ttl_s)


# --- results that are too much ---


@pytest.mark.parametrize(
    "value", [np.ones(3), object(), 1 << 70, "\ud800", "x" * (PLAN_BYTES_MAX + 1), b"x" * (20 << 20)],
    ids=["array", "object", "number", "surrogate", "too long", "longer than a frame"],
)  # fmt: skip
async def test_a_result_that_cannot_travel_fails_its_step(host: Host, value: Any) -> None:
    [a] = await host.start()
    await host.attach(a, Engine(lambda *_: {"value": value}))
    session = await host.session(a)
    plan = session.plan(within(30))
    plan.on_instance("e").publish(n=1)
    with pytest.raises((InvalidArgument, Exhausted), match=r"the result of publish cannot be told|make a record of"):
        await plan.run().result(20)


async def test_results_that_are_too_much_together_end_the_plan(host: Host) -> None:
    [a] = await host.start()
    engine = Engine(lambda *_: {"value": "x" * (PLAN_BYTES_MAX // 4)})
    await host.attach(a, engine)
    session = await host.session(a)
    plan = session.plan(within(30))
    for number in range(6):
        plan.on_instance("e").publish(n=number)
    with pytest.raises(Exhausted, match=f"the limit is {PLAN_BYTES_MAX}"):
        await plan.run(concurrency=1).result(20)


async def test_results_that_are_much_are_kept(host: Host) -> None:
    """More than any other record in the store may have."""
    a, b = await host.start("a", "b")
    engine = Engine(lambda *_: {"value": "x" * 100_000})
    await host.attach(a, engine)
    at_a, at_b = await host.session(a), await host.session(b)
    for session in (at_a, at_b):
        plan = session.plan(within(30, "k"))
        steps = [plan.on_instance("e").publish(n=number) for number in range(3)]
        outcome = await plan.run().result(20)
        assert [len(outcome[step]["value"]) for step in steps] == [100_000] * 3
    assert len(engine.done) == 3


async def test_a_plan_that_is_too_large_is_refused(host: Host) -> None:
    [a] = await host.start()
    await host.attach(a, Engine())
    plan = (await host.session(a)).plan(within(30))
    plan.on_instance("e").publish(n="x" * PLAN_BYTES_MAX)
    with pytest.raises(InvalidArgument, match="the limit is"):
        await plan.run().result(20)


async def test_an_error_of_any_length(host: Host) -> None:
    [a] = await host.start()

    def fail(*_: Any) -> None:
        raise InvalidArgument("long " * 1_000_000)

    await host.attach(a, Engine(fail))
    plan = (await host.session(a)).plan(within(30))
    plan.on_instance("e").publish(n=1)
    with pytest.raises(TensorcastError) as error:
        await plan.run().result(20)
    assert str(error.value).startswith("step 0 (publish on e): ") and len(str(error.value)) < 5000


# --- gateways that go, sessions that go ---


async def test_a_plan_goes_on_without_the_session_that_began_it(host: Host) -> None:
    [a] = await host.start()
    gate = asyncio.Event()
    engine = Engine(lambda *_: gate.wait())
    await host.attach(a, engine)
    one, other = await host.session(a), await host.session(a)
    handle = one_step(one, "k").run()
    await until(lambda: engine.running)
    await host.die(one)
    await until(lambda: handle.done)
    with pytest.raises(InvalidArgument, match="the session is closed"):
        await handle.result()
    assert handle.status == "failed"
    gate.set()
    await one_step(other, "k").run().result()
    assert engine.order == [1]


async def test_a_handle_nobody_asks_for_its_end_is_no_noise(host: Host) -> None:
    [a] = await host.start()
    session = await host.session(a)

    async def forgotten() -> None:
        plan = session.plan()
        plan.on_worker("nobody").prefetch("n")
        handle = plan.run()
        await until(lambda: handle.done)

    await forgotten()
    gc.collect()  # asyncio would complain now, which fails the test


@pytest.mark.slow
async def test_the_gateway_dies_and_another_one_goes_on(host: Host) -> None:
    a, b, c = await host.start("a", "b", "c")
    gate = asyncio.Event()
    engine = Engine(lambda _, arguments: gate.wait() if arguments["n"] == 1 else None)
    await host.attach(c, engine)
    at_a, at_b = await host.session(a), await host.session(b)

    def chain(session: Session) -> PlanHandle:
        plan = session.plan(within(60, "k"))
        step = plan.on_instance("e").publish(n=0)
        for number in range(1, 4):
            step = plan.on_instance("e").publish(n=number).after(step)
        return plan.run()

    lost = chain(at_a)
    await until(lambda: engine.order == [0] and engine.running)
    waits = chain(at_b)
    await host.die(at_a)
    await host.crash(a)
    await host.expire_crashed()
    gate.set()
    await waits.result(30)
    assert engine.order == [0, 1, 2, 3] and set(engine.keys.values()) == {1}
    await until(lambda: lost.done)


async def test_an_orphan_is_cancelled_through_another_gateway(host: Host) -> None:
    a, b, c = await host.start("a", "b", "c")
    engine = Engine(lambda *_: asyncio.Event().wait())
    await host.attach(c, engine)
    at_a, at_b = await host.session(a), await host.session(b)
    lost = one_step(at_a, "k").run()
    await until(lambda: engine.running)
    await host.die(at_a)
    await host.crash(a)
    await host.expire_crashed()
    handle = one_step(at_b, "k").run()
    await handle.cancel()
    assert handle.status == "cancelled" and not engine.done
    await until(lambda: lost.done)


async def test_the_store_goes_and_comes_back_meanwhile(host: Host) -> None:
    [a] = await host.start()
    gate = asyncio.Event()
    engine = Engine(lambda *_: gate.wait())
    await host.attach(a, engine)
    session = await host.session(a)
    plan = session.plan(within(30))
    first = plan.on_instance("e").publish(n=0)
    plan.on_instance("e").publish(n=1).after(first)
    handle = plan.run()
    await until(lambda: engine.running)
    await host.lose_store()
    gate.set()
    await host.found_store()
    await handle.result(20)
    assert engine.order == [0, 1]


@pytest.mark.slow
async def test_without_a_store_a_plan_fails_by_its_deadline(host: Host) -> None:
    """Nothing is begun that is not written down."""
    [a] = await host.start()
    engine = Engine()
    await host.attach(a, engine)
    session = await host.session(a)
    await host.lose_store()
    plan = session.plan(within(0.5))
    plan.on_instance("e").publish(n=0)
    handle = plan.run()
    with pytest.raises(DeadlineExceeded, match="not known how it ended"):
        await handle.result(10)
    assert handle.done and not engine.done
    await host.found_store()


async def test_a_key_that_another_plan_has_since_the_store_was_lost(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_plan, "WATCH_WAIT_S", 0.02)  # it has submitted it, and asks how it is doing
    a, b = await host.start("a", "b")
    gate = asyncio.Event()
    engine = Engine(lambda name, _: gate.wait() if name == "publish" else None)
    await host.attach(a, engine)
    plan = (await host.session(a)).plan(within(30, "k"))
    plan.on_instance("e").publish(n=0)
    handle = plan.run()
    await until(lambda: engine.running and handle._record)
    await host.lose_store()
    shutil.rmtree(host.folder / "store")
    host.life += 1
    await host.found_store()
    await until(lambda: all(plane(each).view.instances.get("e") for each in (a, b)))
    other = (await host.session(b)).plan(within(30, "k"))
    other.on_instance("e").hydrate("x", n=1)
    await other.run().result()
    gate.set()
    with pytest.raises(Conflict, match="the idempotency key 'k' belongs to another plan"):
        await handle.result(20)


# --- the engine's side ---


async def test_an_operation_the_engine_does_not_know(host: Host) -> None:
    [a] = await host.start()
    engine = Engine()
    link = await host.attach(a, engine)
    with pytest.raises(InvalidArgument, match="this engine does not know the operation 'explode'"):
        await link._call(StepTaken(1, "explode"))
    assert repr(link) == "<InstanceLink e, 0 steps under way>"


async def test_a_link_without_a_worker(host: Host) -> None:
    [a] = await host.start()
    await host.leave(a)
    link = InstanceLink(host.network, a.socket, AttachInstance("e", "f", "m", "n"), Engine(), random.Random(0))
    with pytest.raises(Unavailable):
        await link.start()
    await link.close()


async def test_the_worker_is_started_again_and_the_engine_finds_it(host: Host) -> None:
    [a] = await host.start()
    engine = Engine()
    await host.attach(a, engine)
    await host.leave(a)
    again = await host.worker("a", artifact_bytes=8 << 20)
    await host.settled()
    await until(lambda: plane(again).view.instances.get("e"))
    await one_step(await host.session(again), "k").run().result(20)
    assert engine.order == [1]


async def test_a_plan_that_is_begun_anew_has_the_time_that_is_left() -> None:
    sent: list[Any] = []

    class Link:
        def __init__(self) -> None:
            self.plans: dict[str, list[bytes]] = {}

        async def call(self, message: Any, *_: Any) -> PlanState:
            sent.append(message)
            if len(sent) == 2:
                await asyncio.sleep(0.02)
                raise NotFound("its gateway has died before it was written down")
            record = PlanRecord(
                plan.spec(), plan.spec().digest(), "", 1, "", 0.0, 1, "running" if len(sent) == 1 else DONE
            )
            return PlanState(encode_record(record))

    plan = Plan(Link(), within(30, "k"))  # type: ignore[arg-type]
    plan.on_worker("w").unpin("a")
    await plan.run().result(20)
    first, _, again = sent
    assert first.key == again.key and 0 < again.timeout_s <= first.timeout_s - 0.015
