"""Which index answers for which instance and which request."""

from array import array

import pytest
from msgspec.structs import replace

from smetric_router.blocks import BlocksCleared, BlocksRemoved, TokenPrompt, engine_key, stored_blocks
from smetric_router.dispatch import Dispatcher
from smetric_router.policies.smetric import SMetric
from smetric_router.state.cluster import ClusterState
from smetric_router.state.exact_index import ExactIndex
from smetric_router.types import BlocksChanged, CacheCleared, Chain, FeedChanged, InstanceUp, RequestInfo

TOKENS = list(range(41))
# 82 bytes are 41 tokens: two bytes a token.
BOTH = RequestInfo("m", turn=1, est_hit=20, chain=Chain((1, 2), (40, 82)), tokens=TokenPrompt(array("I", TOKENS)))


@pytest.fixture
def state() -> ClusterState:
    made = ClusterState("abc", chunk_bytes=64, index_chunks_max=100, exact=ExactIndex(100))
    for name in "abc":
        made.apply(InstanceUp(name), 0)
    made.apply(FeedChanged("a", True), 0)
    made.apply(FeedChanged("b", True), 0)
    made.apply(BlocksChanged("a", 0, stored_blocks([1, 2], None, TOKENS[:32], 16)), 0)
    return made


def test_an_instance_that_tells_is_believed_and_for_one_that_does_not_the_observed_index_stands_in(
    state: ClusterState,
) -> None:
    dispatcher = Dispatcher(state, SMetric())
    for name in "bc":  # both are sent the prompt, but only b says that it does not hold it
        ticket = dispatcher.dispatch(BOTH, 0, exclude=set("abc") - {name})
        dispatcher.finish(ticket, 0, computed=True)
    assert state.view(BOTH).hits == {"a": 32, "c": 41}
    state.apply(FeedChanged("b", False), 0)
    assert state.view(BOTH).hits == {"a": 32, "b": 41, "c": 41}
    state.check()


def test_a_request_that_was_not_tokenised_is_placed_by_bytes(state: ClusterState) -> None:
    asked = replace(BOTH, tokens=None)
    ticket = Dispatcher(state, SMetric()).dispatch(asked, 0, exclude="ac")
    assert state.view(asked).hits == {"b": 82}
    assert ticket.decision.instance == "b"


def test_a_tokenised_prompt_is_pending_in_its_own_tokens(state: ClusterState) -> None:
    assert state.view(BOTH).bytes_per_token == 1 and state.view(replace(BOTH, tokens=None)).bytes_per_token == 4
    ticket = Dispatcher(state, SMetric()).dispatch(BOTH, 0)
    assert (ticket.decision.instance, ticket.decision.hit) == ("a", 32)
    assert state.view(BOTH).pending.tolist() == [9, 0, 0] and state.view(BOTH).context.tolist() == [41, 0, 0]
    state.check()


def test_what_an_engine_clears_is_gone(state: ClusterState) -> None:
    state.apply(BlocksChanged("a", 0, BlocksCleared()), 0)
    assert state.view(BOTH).hits == {}
    state.apply(BlocksChanged("a", 1, stored_blocks([1], None, TOKENS[:16], 16)), 0)
    assert state.view(BOTH).hits == {"a": 16}
    state.apply(CacheCleared("a"), 0)
    assert state.view(BOTH).hits == {}
    assert state.statistics(0).feeds == ("a", "b")
    state.check()


@pytest.mark.parametrize(("media", "reason"), [(("GPU", "CPU"), "sticky"), (("GPU",), "no-hit")])
def test_a_history_that_was_offloaded_is_no_reason_to_leave_where_its_medium_counts(
    media: tuple[str, ...], reason: str
) -> None:
    state = ClusterState("ab", chunk_bytes=64, index_chunks_max=100, exact=ExactIndex(100, media))
    for name in "ab":
        state.apply(InstanceUp(name), 0)
        state.apply(FeedChanged(name, True), 0)
    for medium in ("GPU", "CPU"):
        state.apply(BlocksChanged("b", 0, stored_blocks([1, 2], None, TOKENS[:32], 16, medium=medium)), 0)
    state.apply(BlocksChanged("b", 0, BlocksRemoved((engine_key(1), engine_key(2)))), 0)
    assert Dispatcher(state, SMetric()).dispatch(BOTH, 0).decision.reason == reason
