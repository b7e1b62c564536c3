"""Connections for what callers cause, beside those that keep the cluster together: whatever callers do, these stay usable."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from tensorcast_connector.config import LANE_REQUESTS_MAX
from tensorcast_connector.core.cluster import ARTIFACTS, CALLERS, NAMES, PLANS
from tensorcast_connector.errors import DeadlineExceeded, TensorcastError, Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.wire.messages import SERVICE_VERSION, Message
from tensorcast_connector.wire.plan_messages import CancelOwnedPlan, CancelSteps, RunStep
from tensorcast_connector.wire.store_messages import ReadRecords, WriteRecords

R = TypeVar("R", bound=Message)


def whose(message: Message) -> str:
    """The tenant that a request is for, by the keys that it names; "" if it names none."""
    if isinstance(message, RunStep | CancelSteps | CancelOwnedPlan):
        return message.key.partition("/")[0]
    keys: list[str] = []
    if isinstance(message, ReadRecords):
        keys = [message.prefix]
    elif isinstance(message, WriteRecords):
        keys = [key for key, _ in message.compares] + [key for key, _, _ in message.puts] + message.deletes
    for key in keys:
        for prefix in (PLANS, ARTIFACTS, NAMES, CALLERS):
            if key.startswith(prefix):
                return key.removeprefix(prefix).partition("/")[0]
    return ""


def without_service(worker_id: str, version: int) -> str | None:
    """Why another worker has no artifacts and does no steps of plans, if so, by the version in its welcome (0: not yet)."""
    if not 0 < version < SERVICE_VERSION:
        return None
    return f"worker {worker_id} speaks protocol version {version}, and artifacts and plans need {SERVICE_VERSION}: upgrade it"


class FairRoom:
    """Room for so many at once; who waits is let in by tenant, one after the other, and of one tenant in order."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    def taken(self) -> bool:
        """Takes room if there is some now, as nearly always; give it back by `release`."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    async def acquire(self, tenant: str) -> None:
        """Until there is room; give it back by `release`."""
        if self.taken():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # it was let in, and does not come
            else:
                self._forget(tenant, turn)
            raise

    def _forget(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        waiting = self._waiting.get(tenant)
        if waiting is not None and turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[tenant]

    def release(self) -> None:
        """One has gone."""
        while self._waiting:
            tenant, waiting = self._waiting.popitem(last=False)
            turn = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Lane:
    """Requests of one kind on such a connection. Only so many are under way; more wait for their turn.

    Args:
        client: the connection, which lanes can share; started, and closed by who made it.
        main: the connection to the same server that tells whether it is there.
        another: whether to try its next address after Unavailable.
        explain: what callers are told instead of such an error.
    """

    def __init__(
        self, client: RpcClient, main: RpcClient, another: bool = False,
        explain: Callable[[Unavailable], Unavailable] = lambda error: error,
    ) -> None:  # fmt: skip
        self._client = client
        self._main = main
        self._another = another
        self._explain = explain
        self._room = FairRoom(LANE_REQUESTS_MAX)

    def __repr__(self) -> str:
        return f"<Lane on {self._client!r}>"

    async def call(self, message: Message, expected: type[R], timeout_s: float) -> R:
        """As RpcClient.call; the time is also for the waiting."""
        if self._room.taken():  # without the timer that waiting would need
            try:
                return await self.call_now(message, expected, timeout_s)
            finally:
                self._room.release()
        async with self.turn(timeout_s, whose(message)) as left_s:
            return await self.call_now(message, expected, left_s)

    def send(
        self, message: Message, expected: type[R], timeout_s: float, done: Callable[[R | TensorcastError], None]
    ) -> Callable[[], bool] | None:
        """As RpcClient.send, if there is room and a connection just now. None: `call` waits for them."""
        if not self._client.connected or not self._room.taken():
            return None

        def answered(result: R | TensorcastError) -> None:
            self._room.release()
            if isinstance(result, Unavailable):
                result = self._failed(result)
            done(result)

        try:
            take_back = self._client.send(message, expected, timeout_s, answered)
        except BaseException as error:
            self._room.release()
            if isinstance(error, Unavailable):
                return None
            raise

        def taken_back() -> bool:
            if not take_back():
                return False
            self._room.release()
            return True

        return taken_back

    def _failed(self, error: Unavailable) -> Unavailable:
        if self._another:
            self._client.try_another(error)
        return self._explain(error)

    @asynccontextmanager
    async def turn(self, timeout_s: float, tenant: str = "") -> AsyncIterator[float]:
        """Until it is this request's turn, which ends with the block; how much time is left.

        Tenants are served one after the other, so that many requests of one do not hold up those of another.

        Raises:
            DeadlineExceeded: none.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.acquire(tenant)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer of {self._client.address} within {timeout_s:g} s: too much is asked of it from here"
            ) from None
        try:
            yield max(until - loop.time(), 0.001)
        finally:
            self._room.release()

    async def call_now(self, message: Message, expected: type[R], timeout_s: float) -> R:
        """As `call`, by who has the turn.

        Raises:
            Unavailable: the main connection says that the server is not there.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        try:
            if not self._client.connected:
                if not self._main.connected:
                    raise Unavailable(str(self._main.error))
                await self._client.wait_connected(timeout_s)
        except Unavailable as error:
            raise self._explain(error) from None
        try:
            return await self._client.call(message, expected, max(until - loop.time(), 0.001))
        except Unavailable as error:
            raise self._failed(error) from None


class StepLanes:
    """What a gateway asks of another worker for plans, on one connection: no kind of request waits for another.

    Args:
        client, main: as for a Lane.
    """

    def __init__(self, client: RpcClient, main: RpcClient) -> None:
        self.client = client
        self.steps = Lane(client, main)
        self.cancels = Lane(client, main)
        self.plans = Lane(client, main)
