"""The benchmark of decisions measures what it says it does."""

import pytest
from benchmarks import router_decision
from benchmarks.router_decision import Bodies, Scale, cluster

from smetric_router.policies.registry import POLICIES
from smetric_router.state.requests import CHAT_PATH, RequestReader


@pytest.mark.slow
def test_its_rows() -> None:
    said: list[str] = []
    rows = router_decision.run(Scale(runs=1, calls=2), said.append)
    assert [row.target for row in rows[:4]] == ["ratio <= 2", "ratio <= 1.3"] * 2
    assert [row.row.split(" of ")[1].split(" at ")[0] for row in rows[4:]] == list(POLICIES)
    assert all(row.target == "ours <= 100" for row in rows[4:])
    assert all(row.ours > 0 for row in rows) and all(row.limit for row in rows[:4])


@pytest.mark.slow
def test_everybody_holds_the_system_prompt_and_one_the_conversation() -> None:
    bodies = Bodies.make()
    dispatcher = cluster(50, bodies)
    asked = RequestReader().read(CHAT_PATH, bodies.follow_up)
    hits = dispatcher.state.view(asked).hits
    assert len(hits) == 50
    assert sorted(hit > 0.9 * asked.chain.length for hit in hits.values()) == [False] * 49 + [True]
    ticket = dispatcher.dispatch(asked, 0.0)
    assert (ticket.decision.reason, ticket.decision.hit) == ("sticky", max(hits.values()))
    dispatcher.state.check()
