"""Which weights pages belong to, in every order in which they are changed and caches are emptied."""

from tensorcast_connector.engines.sglang.live_weights import LiveWeights


def test_found_at_the_start() -> None:
    weights = LiveWeights()
    weights.flushed()
    assert weights.identity is None
    weights.found("files")
    weights.flushed()
    assert weights.identity == "files" and repr(weights) == "<LiveWeights files>"


def test_nothing_is_shared_from_a_change_until_the_caches_are_empty() -> None:
    weights = LiveWeights()
    weights.found("files")
    weights.changing()
    assert weights.identity is None
    weights.declared("declared:2")
    assert weights.identity is None
    weights.flushed()
    assert weights.identity == "declared:2"


def test_weights_that_nobody_names_are_nobody_elses() -> None:
    identities = set()
    for _ in range(2):
        weights = LiveWeights()
        weights.changing()
        weights.flushed()
        assert weights.identity is not None
        identities.add(weights.identity)
    assert len(identities) == 2


def test_another_change_makes_a_name_void() -> None:
    weights = LiveWeights()
    weights.changing()
    weights.declared("declared:2")
    weights.changing()
    weights.flushed()
    assert weights.identity is not None and weights.identity.startswith("private:")


def test_a_name_without_a_change_says_nothing() -> None:
    weights = LiveWeights()
    weights.found("files")
    weights.declared("declared:2")
    weights.flushed()
    assert weights.identity == "files"


def test_steps_of_a_change_are_over_only_with_a_flush_after_their_end() -> None:
    weights = LiveWeights()
    weights.changing()
    weights.declared("declared:2")
    weights.flushed()
    weights.settling()
    assert weights.identity is None, "what was computed between two steps is of neither weights"
    weights.flushed()
    assert weights.identity == "declared:2"


def test_files_that_were_read_too_late_are_not_what_is_computed_with() -> None:
    weights = LiveWeights()
    weights.changing()
    weights.found("files")
    assert weights.identity is None


def test_a_change_that_does_not_take_place_leaves_everything_as_it_was() -> None:
    weights = LiveWeights()
    weights.found("files")
    weights.changing()
    weights.kept()
    assert weights.identity == "files"
    weights.changing()
    weights.declared("version:2")
    weights.changing()
    weights.kept()
    weights.flushed()
    assert weights.identity == "version:2"
    late = LiveWeights()
    late.changing()
    late.found("files")
    late.kept()
    late.kept()
    assert late.identity == "files"
    unannounced = LiveWeights()
    unannounced.found("files")
    unannounced.kept()
    assert unannounced.identity == "files"


def test_the_first_name_of_a_change_counts() -> None:
    weights = LiveWeights()
    weights.changing()
    weights.declared("version:2")
    weights.declared("declared:two")
    weights.flushed()
    assert weights.identity == "version:2"
