"""What each instance holds of a prompt: one column, whichever index knows it."""

from collections.abc import Collection, Mapping

import numpy as np

from smetric_router.state.exact_index import ExactIndex
from smetric_router.state.prefix_index import PrefixIndex
from smetric_router.types import RequestInfo
from smetric_router.view import Figures


def hit_column(
    request: RequestInfo,
    ordinals: Mapping[str, int],
    observed: PrefixIndex,
    exact: ExactIndex | None,
    live: Collection[str],
) -> Figures:
    """Hit lengths by ordinal, 0 without one, in the unit of the request's length.

    A request in tokens is answered by the exact index for the instances that tell what they hold (`live`), and by the
    observed one, its bytes turned into tokens by the request's own ratio, for those that do not.
    """
    if request.tokens is None or exact is None:
        return observed.match_column(request.chain)
    column = np.zeros(len(ordinals))
    if len(live) < len(ordinals) and request.chain.length:
        column = np.floor(observed.match_column(request.chain) * (request.length / request.chain.length))
        column[[ordinals[name] for name in live]] = 0
    for name, hit in exact.match(request.tokens).items():
        if name in live:
            column[ordinals[name]] = hit
    return column
