"""An engine that computes nothing: requests with a KV cache of random numbers, parameters of one rank, an adaptor.

For tests and examples of plans; what it moves through the pool is real.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorcast_connector.client.instance import StepContext
from tensorcast_connector.client.session import Session
from tensorcast_connector.client.weights import Weights
from tensorcast_connector.errors import InvalidArgument, NotFound


class FakeEngine:
    """An InstanceAdaptor.

    Args:
        session: with the worker of its host.
        tp_rank, tp_size: of its parameters it has this share of the first dimension.
        step_s: how long each step takes, besides its work.
    """

    def __init__(self, session: Session, tp_rank: int = 0, tp_size: int = 1, step_s: float = 0.0) -> None:
        self._session = session
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._step_s = step_s
        self.kv: dict[str, Any] = {}  # by request: (layers, tokens, width)
        self.parameters: dict[str, Any] = {}
        self.version = ""
        self.steps: list[tuple[str, str]] = []  # (operation, key), as they were begun

    def compute(self, request: str, tokens: int, seed: int = 0) -> Any:
        """The KV cache of a prompt; the same for the same arguments."""
        self.kv[request] = np.random.default_rng(seed).standard_normal((4, tokens, 64), np.float32)
        return self.kv[request]

    def extend(self, request: str, branch: str, tokens: int, seed: int) -> None:
        """Another request that goes on from what `request` has."""
        own = np.random.default_rng(seed).standard_normal((4, tokens, 64), np.float32)
        self.kv[branch] = np.concatenate([self._of(request), own], axis=1)

    def _of(self, request: object) -> Any:
        if request not in self.kv:
            raise NotFound(f"request {request!r} is not in this engine")
        return self.kv[str(request)]

    async def _begin(self, operation: str, context: StepContext) -> None:
        self.steps.append((operation, context.key))
        await asyncio.sleep(self._step_s)

    async def publish(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        """`request` -> {"artifact", "tokens"}."""
        await self._begin("publish", context)
        kv = self._of(arguments.get("request"))
        made = await self._session.put({f"kv.{layer}": kv[layer] for layer in range(len(kv))})
        return {"artifact": await made.id(), "tokens": kv.shape[1]}

    async def hydrate(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        """`artifact`, `request` -> {"tokens"}."""
        await self._begin("hydrate", context)
        request = arguments.get("request")
        if not isinstance(request, str):
            raise InvalidArgument(f"hydrate: request={request!r} should be text")
        layers = await self._session.artifact(arguments["artifact"]).tensor_dict()
        self.kv[request] = np.stack([layers[f"kv.{layer}"] for layer in range(len(layers))])
        return {"tokens": self.kv[request].shape[1]}

    async def evict_local(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        """`request`; fine if it is gone already."""
        await self._begin("evict_local", context)
        self.kv.pop(str(arguments.get("request")), None)
        return {}

    async def transform_into(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        """`artifact`, `version` -> {"tensors"}: this rank's share of each tensor, copied into its parameters."""
        await self._begin("transform_into", context)
        given = await self._session.stored(arguments["artifact"])
        specs = given.specs.values() if isinstance(given, Weights) else (await given.describe()).tensors
        slices: dict[str, slice] = {}
        for spec in specs:
            share = spec.shape[0] // self._tp_size
            slices[spec.name] = slice(self._tp_rank * share, (self._tp_rank + 1) * share)
        found = await given.view(slices=slices).tensor_dict()
        self.parameters = {name: np.array(tensor) for name, tensor in found.items()}
        self.version = str(arguments.get("version", ""))
        return {"tensors": len(found)}
