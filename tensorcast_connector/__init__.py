"""The tensor pool: plugins for inference engines over a light pool of tensor workers. See ARCHITECTURE.md.

What programs that use the pool need is here; who brings an engine of its own finds more in `tensorcast_connector.adaptor`.
Nothing of it is loaded before it is used, since engines load this package too.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorcast_connector.client.artifact import Artifact, Description
    from tensorcast_connector.client.blocking import connect_blocking
    from tensorcast_connector.client.ownership import leased
    from tensorcast_connector.client.plan import CallContext, Plan, PlanHandle, PlanOutcome, Step
    from tensorcast_connector.client.publisher import WeightPublisher
    from tensorcast_connector.client.session import Session, connect
    from tensorcast_connector.errors import (
        Cancelled,
        ConfigError,
        Conflict,
        DeadlineExceeded,
        Exhausted,
        InvalidArgument,
        NotFound,
        TensorcastError,
        Unauthorized,
        Unavailable,
        WrongRole,
    )

_HOME = {
    "client.artifact": ("Artifact", "Description"),
    "client.blocking": ("connect_blocking",),
    "client.ownership": ("leased",),
    "client.plan": ("CallContext", "Plan", "PlanHandle", "PlanOutcome", "Step"),
    "client.publisher": ("WeightPublisher",),
    "client.session": ("Session", "connect"),
    "errors": (
        "Cancelled", "ConfigError", "Conflict", "DeadlineExceeded", "Exhausted", "InvalidArgument", "NotFound", "TensorcastError",
        "Unauthorized", "Unavailable", "WrongRole",
    ),
}  # fmt: skip

__all__ = [
    "Artifact",
    "CallContext",
    "Cancelled",
    "ConfigError",
    "Conflict",
    "DeadlineExceeded",
    "Description",
    "Exhausted",
    "InvalidArgument",
    "NotFound",
    "Plan",
    "PlanHandle",
    "PlanOutcome",
    "Session",
    "Step",
    "TensorcastError",
    "Unauthorized",
    "Unavailable",
    "WeightPublisher",
    "WrongRole",
    "connect",
    "connect_blocking",
    "leased",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"tensorcast_connector.{module}"), name)
    raise AttributeError(f"module 'tensorcast_connector' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
