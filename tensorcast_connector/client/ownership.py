"""Whose an artifact is: the pool's, until it is deleted, or its caller's (TensorCast, section 3.1). And whose a session is."""

import os
from dataclasses import dataclass

from tensorcast_connector.config import LEASE_TTL_MAX_S
from tensorcast_connector.errors import InvalidArgument

SYSTEM = None
"""The ownership of what the pool keeps until it is deleted."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The ownership of what goes `ttl_s` seconds after its owner has stopped renewing it: closed its session, or died."""

    ttl_s: int


def leased(ttl_s: int) -> Leased:
    """Ownership by the caller (Caller-Leased); whole seconds.

    Raises:
        InvalidArgument: no such time.
    """
    if not isinstance(ttl_s, int | float) or not 1 <= ttl_s <= LEASE_TTL_MAX_S or ttl_s != int(ttl_s):
        raise InvalidArgument(f"leased({ttl_s!r}): whole seconds from 1 to {LEASE_TTL_MAX_S}")
    return Leased(int(ttl_s))


def check_process(maker: int) -> None:
    """Whether a session is this process's: who is forked has the memory of its connections, and would speak on another's.

    Raises:
        InvalidArgument: the process that made it, `maker`, is another one.
    """
    if os.getpid() != maker:
        raise InvalidArgument(
            f"this session is of process {maker}, which has forked this one: connect anew here. Tensors that were read stay valid"
        )
