"""The tensor pool: plugins for inference engines over a light pool of tensor workers. See ARCHITECTURE.md.

What programs that use the pool need is here; nothing of it is loaded before it is used, since engines load this package too.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorcast_connector.client.artifact import Artifact, Description
    from tensorcast_connector.client.blocking import connect_blocking
    from tensorcast_connector.client.instance import InstanceAdaptor, InstanceLink, StepContext
    from tensorcast_connector.client.plan import CallContext, Plan, PlanHandle, PlanOutcome, Step
    from tensorcast_connector.client.session import Session, connect, leased
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
    )

_HOME = {
    "client.artifact": ("Artifact", "Description"),
    "client.blocking": ("connect_blocking",),
    "client.instance": ("InstanceAdaptor", "InstanceLink", "StepContext"),
    "client.plan": ("CallContext", "Plan", "PlanHandle", "PlanOutcome", "Step"),
    "client.session": ("Session", "connect", "leased"),
    "errors": (
        "Cancelled", "ConfigError", "Conflict", "DeadlineExceeded", "Exhausted", "InvalidArgument", "NotFound", "TensorcastError",
        "Unauthorized", "Unavailable",
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
    "InstanceAdaptor",
    "InstanceLink",
    "InvalidArgument",
    "NotFound",
    "Plan",
    "PlanHandle",
    "PlanOutcome",
    "Session",
    "Step",
    "StepContext",
    "TensorcastError",
    "Unauthorized",
    "Unavailable",
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
