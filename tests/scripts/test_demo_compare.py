"""The rule by which tokens are compared, without an engine."""

import pytest
from demo.compare import Comparison, Position, Reference, _positions, compare, compare_position

CLEAR = Position(1, {1: -0.5, 2: -1.0})
TIE = Position(1, {1: -0.70, 2: -0.72})


def reference(*positions: Position) -> Reference:
    return Reference((7, 8, 9), tuple(position.token for position in positions), positions)


def test_the_margin_is_the_lead_of_the_best() -> None:
    assert CLEAR.margin == pytest.approx(0.5)


def test_of_equal_candidates_the_chosen_one_comes_first() -> None:
    tied = {3: -1.0, 5: -1.0, 7: -2.0}
    assert [token for token, _ in Position(5, tied).ranked()] == [5, 3, 7]
    assert [token for token, _ in Position(3, tied).ranked()] == [3, 5, 7]
    assert Position(5, tied).margin == 0


def test_an_answer_is_read_with_the_token_that_was_chosen() -> None:
    answer = {"tokens": ["token_id:5"], "top_logprobs": [{"token_id:3": -1.0, "token_id:5": -1.0}]}
    assert _positions(answer) == [Position(5, {3: -1.0, 5: -1.0})]


def test_the_same_token_at_a_clear_position_is_right_however_far_the_numbers_are_apart() -> None:
    wrong, apart = compare_position(CLEAR, Position(1, {1: -0.3, 2: -1.4}))
    assert wrong is None
    assert apart == pytest.approx(0.4)


def test_another_token_at_a_clear_position_is_wrong() -> None:
    wrong, _ = compare_position(CLEAR, Position(2, {2: -0.6, 1: -0.7}))
    assert wrong == "token 2 instead of 1, which led by 0.500"


def test_another_token_at_a_near_tie_is_right_when_the_numbers_agree() -> None:
    assert compare_position(TIE, Position(2, {2: -0.70, 1: -0.71, 3: -4.0}))[0] is None


def test_a_near_tie_is_wrong_when_the_numbers_do_not_agree() -> None:
    assert compare_position(TIE, Position(1, {1: -0.60, 2: -0.72}))[0] == "log probabilities 0.100 apart at a near tie"


def test_a_near_tie_is_wrong_when_a_candidate_is_gone() -> None:
    wrong, _ = compare_position(TIE, Position(1, {1: -0.70, 3: -0.72}))
    assert wrong == "token 2 is not among the best 8"


def test_a_comparison_counts_the_clear_positions() -> None:
    found = compare("x", reference(CLEAR, CLEAR, TIE), [CLEAR, CLEAR, TIE])
    assert found.same
    assert (found.positions, found.compared) == (3, 2)
    assert str(found) == "yes (67% of 3 positions compared)"


def test_differences_name_prompt_and_position() -> None:
    found = compare("prompt 4", reference(CLEAR, CLEAR), [CLEAR, Position(9, {9: -0.1, 1: -2.0})])
    assert not found.same
    assert found.differences == ("prompt 4, position 1: token 9 instead of 1, which led by 0.500",)


def test_too_many_near_ties_prove_nothing() -> None:
    found = compare("x", reference(CLEAR, TIE, TIE), [CLEAR, TIE, TIE])
    assert not found.differences
    assert not found.same
    assert not Comparison().same


def test_comparisons_add_up() -> None:
    parts = [compare("x", reference(CLEAR), [CLEAR]), Comparison(prompt_tokens=10, cached_tokens=8)]
    total = sum(parts, Comparison())
    assert (total.positions, total.cached_share) == (1, 0.8)


def test_forcing_gives_the_tokens_before_a_position() -> None:
    made = reference(CLEAR, CLEAR, CLEAR)
    assert made.forced(0) == [7, 8, 9]
    assert made.forced(2) == [7, 8, 9, 1, 1]
