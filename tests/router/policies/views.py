"""Views and requests for the tests of policies."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from smetric_router.types import Chain, PrefillCost, RequestInfo
from smetric_router.view import ClusterView, InstanceView

NAMES = "abcdefgh"
FIRST = RequestInfo(turn=0)


def view(
    loads: Sequence[float], hits: Mapping[str, int] | None = None, placed: Sequence[float] | None = None, **options: Any
) -> ClusterView:
    """Instances a, b, c ... with these loads. Options: a column by its name, or a field of the view."""
    columns = {name: options.pop(name) for name in ("pending", "work", "waiting", "context", "rate") if name in options}
    instances = [
        InstanceView(NAMES[at], load, **{name: column[at] for name, column in columns.items()})
        for at, load in enumerate(loads)
    ]
    return ClusterView.of(instances, hits, placed, **options)


def request(length: int, *, turn: int = 0, est_hit: int = 0, session: str = "") -> RequestInfo:
    """A prompt of so many bytes."""
    return RequestInfo(turn=turn, est_hit=est_hit, chain=Chain((1,), (length,)) if length else Chain(), session=session)


def follow_up(est_hit: int) -> RequestInfo:
    return RequestInfo(turn=3, est_hit=est_hit)


@st.composite
def views(draw: st.DrawFn) -> tuple[RequestInfo, ClusterView]:
    """Any request, and a view with hits that are no longer than its prompt."""
    count = draw(st.integers(1, len(NAMES)))
    length = draw(st.integers(0, 5000))
    small = st.integers(0, 6)
    instances = [
        InstanceView(
            name,
            load=draw(small),
            pending=draw(small) * 100,
            work=draw(small) * 50.0,
            waiting=draw(small),
            context=draw(small) * 300,
            rate=draw(st.sampled_from([100.0, 1000.0, float("inf")])),
        )
        for name in NAMES[:count]
    ]
    hits = {each.id: draw(st.integers(0, length)) for each in instances if draw(st.booleans())}
    seen = ClusterView.of(
        instances,
        {name: hit for name, hit in hits.items() if hit},
        [draw(st.integers(0, 3)) for _ in instances],
        bytes_per_token=draw(st.sampled_from([1.0, 4.0])),
        cost=PrefillCost(1.0, draw(st.sampled_from([0.0, 0.001]))),
        draw=draw(st.integers(0, 2**64 - 1)),
    )
    asked = request(
        length,
        turn=draw(st.integers(0, 2)),
        est_hit=draw(st.integers(0, length)),
        session=draw(st.sampled_from(["", "one", "two"])),
    )
    return asked, seen
