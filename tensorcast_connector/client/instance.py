"""An engine that does steps of plans: its adaptor's interface, and the link to the worker of its host. See adaptor.py."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tensorcast_connector.config import CONNECT_TIMEOUT_S, PLAN_BYTES_MAX, STORE_TIMEOUT_S, WATCH_WAIT_S, parse_address
from tensorcast_connector.core.plan import unencodable
from tensorcast_connector.errors import ConfigError, DeadlineExceeded, InvalidArgument, TensorcastError, Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.transport import Network
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import encode
from tensorcast_connector.wire.messages import AttachInstance, Ok
from tensorcast_connector.wire.plan_messages import CANCEL, ReportInstance, StepEnded, StepTaken, TakeStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepContext:
    """What an adaptor is told of a step besides its arguments."""

    key: str  # the same whenever this step comes again
    trace_id: str


class InstanceAdaptor(Protocol):
    """An engine's side of the instance operations (TensorCast, section 3.2); see the module for what holds of all four.

    `arguments` are the keyword arguments of the plan's step, with the results of other steps filled in; which there are is agreed
    between who writes the plan and the adaptor. What is returned is the step's result, of which other steps can use items.
    """

    async def publish(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        """Puts tensors of the engine into the pool. `OnInstance.publish(**arguments)`.

        Returns: {"artifact": the id of what was put, ...}; with that key the step itself can be given as another's artifact.
        Raises: InvalidArgument or NotFound for arguments that name nothing; Exhausted if the pool has no room.
        """

    async def hydrate(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        """Loads the artifact `arguments["artifact"]` (an id or a name) into the engine, for example KV cache of a request.

        Returns: anything; {} is fine.
        Raises: NotFound if the artifact or its bytes are gone; Exhausted if the engine has no room just now.
        """

    async def evict_local(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        """Forgets tensors of its own; fine if they are not there. Returns and raises: as `hydrate`."""

    async def transform_into(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        """Fills its parameters from the artifact `arguments["artifact"]`, in its own layout: this rank's part, its dtype.

        Returns and raises: as `hydrate`. InvalidArgument if the artifact is none of this engine's model.
        """


class InstanceLink:
    """Attaches an engine to its worker and does the steps that come, each in a task of its own.

    Args:
        worker: the Unix socket of the host's worker.
        instance: how the engine is listed.
    """

    def __init__(
        self, network: Network, worker: Address, instance: AttachInstance, adaptor: InstanceAdaptor, chance: random.Random
    ) -> None:  # fmt: skip
        self._instance = instance
        self._adaptor = adaptor
        self._client = RpcClient(
            network, worker, "engine", instance.instance_id, chance, self._connected, self._disconnected
        )
        self._steps: dict[int, asyncio.Task[None]] = {}
        self._taking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "InstanceLink":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<InstanceLink {self._instance.instance_id}, {len(self._steps)} steps under way>"

    async def start(self) -> None:
        """Until the worker has answered; later the link keeps itself alive.

        Raises:
            Unavailable: it does not.
        """
        self._client.start()
        await self._client.wait_connected(CONNECT_TIMEOUT_S, patient=False)

    async def _connected(self, client: RpcClient) -> None:
        await client.call(self._instance, Ok, STORE_TIMEOUT_S)
        self._taking = asyncio.get_running_loop().create_task(self._take())

    def _disconnected(self, _: TensorcastError) -> None:
        """The worker has told the gateway; what is under way is not waited for any more."""
        for task in [self._taking, *self._steps.values()]:
            if task is not None:
                task.cancel()

    async def _take(self) -> None:
        while True:
            try:
                taken = await self._client.call(
                    TakeStep(int(WATCH_WAIT_S * 1000)), StepTaken, WATCH_WAIT_S + STORE_TIMEOUT_S
                )
            except DeadlineExceeded:
                continue  # the connection may still be there
            except Unavailable:
                return  # it connects again
            except TensorcastError as error:
                logger.warning("no steps of plans for %s: %s", self._instance.instance_id, error)
                return
            if taken.operation == CANCEL:
                if task := self._steps.get(taken.ticket):
                    task.cancel()
            elif taken.ticket:
                self._steps[taken.ticket] = asyncio.get_running_loop().create_task(self._do(taken))

    async def _do(self, taken: StepTaken) -> None:
        try:
            ended = StepEnded(taken.ticket, await self._call(taken))
        except TensorcastError as error:
            ended = StepEnded(taken.ticket, None, error.code, str(error))
        except Exception as error:  # the engine's own fault is the step's end, not the link's
            logger.exception("%s of %s failed", taken.operation, self._instance.instance_id)
            ended = StepEnded(taken.ticket, None, TensorcastError.code, f"{type(error).__name__}: {error}")
        finally:
            self._steps.pop(taken.ticket, None)
        if (why := _unsendable(ended)) is not None:
            message = f"the result of {taken.operation} cannot be told: {why}"
            ended = StepEnded(taken.ticket, None, InvalidArgument.code, message)
        with contextlib.suppress(TensorcastError):  # then it comes again
            await self._client.call(ended, Ok, STORE_TIMEOUT_S)

    async def _call(self, taken: StepTaken) -> Any:
        context = StepContext(taken.key, taken.trace_id)
        operations = {
            "publish": self._adaptor.publish,
            "hydrate": self._adaptor.hydrate,
            "evict_local": self._adaptor.evict_local,
            "transform_into": self._adaptor.transform_into,
        }
        if taken.operation not in operations:
            raise InvalidArgument(f"this engine does not know the operation {taken.operation!r}")
        return dict(await operations[taken.operation](taken.arguments, context))

    async def report(self, state: str, running: int, waiting: int, kv_usage: float | None) -> None:
        """Says how the engine is doing; about once a second is enough.

        Raises:
            Unavailable: the worker is away; there is nothing to do about it.
        """
        await self._client.call(ReportInstance(state, running, waiting, kv_usage), Ok, STORE_TIMEOUT_S)

    async def close(self) -> None:
        """Leaves; steps under way are cancelled."""
        tasks = [each for each in [self._taking, *self._steps.values()] if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()


async def attach_instance(
    address: str, adaptor: InstanceAdaptor, *, instance_id: str, engine: str = "custom", model: str = "", namespace: str = "",
    tenant: str = "", network: Network | None = None,
) -> InstanceLink:  # fmt: skip
    """Attaches an engine to the worker of its host, and does the steps of plans that come for it until the link is closed.

    Args:
        address: "unix:/path", the socket of that worker.
        instance_id: what plans call it; one of its own among all engines of the cluster.
        engine, model, namespace: for people, and for `tensorcast disable`.
        tenant: whose plans reach it; "" for everybody's.
        network: how to connect, instead of by sockets.

    Raises:
        ConfigError: no such address, or none of a Unix socket.
        InvalidArgument: an id or name that cannot be.
        Unavailable: no worker answers there.
    """
    at = parse_address(address, "address")
    if at.scheme != "unix":
        raise ConfigError(f"address={address!r}: an engine attaches to the worker of its own host, at unix:/path")
    listed = AttachInstance(instance_id, engine, model, namespace, tenant)
    link = InstanceLink(network or SocketNetwork(), at, listed, adaptor, random.Random())
    try:
        await link.start()
    except BaseException:
        await link.close()
        raise
    return link


def _unsendable(ended: StepEnded) -> str | None:
    """Why that answer cannot be sent, if so. Nobody would know that the step has ended."""
    if (why := unencodable(ended.result)) is not None:
        return why
    size = len(encode(ended))
    return (
        f"it has {size} bytes, and the record of a plan has at most {PLAN_BYTES_MAX}" if size > PLAN_BYTES_MAX else None
    )
