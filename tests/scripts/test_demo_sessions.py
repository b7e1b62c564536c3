"""The sessions of the demo: the same for a seed, and shaped like an agent's."""

import itertools
import json
from typing import Any

import pytest
from demo import model, sessions
from demo.sessions import CHARS_PER_TOKEN, Session, Shape, generate


@pytest.fixture(autouse=True)
def short_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["\n".join(f"def name_{i}_{j}(): return {i * j}" for j in range(400)) for i in range(5)]
    monkeypatch.setattr(sessions, "corpus", lambda: texts)


def played(session: Session) -> list[list[dict[str, Any]]]:
    """The messages of each request, if the model always said the same."""
    return [session.history(turn, "a reply") for turn in range(len(session.turns))]


def test_a_seed_gives_the_same_sessions() -> None:
    assert generate(Shape(), 3) == generate(Shape(), 3)


def test_another_seed_gives_other_sessions() -> None:
    one, other = generate(Shape(sessions=1), 3), generate(Shape(sessions=1), 4)
    assert one[0].opening != other[0].opening


def test_more_sessions_do_not_change_the_first_ones() -> None:
    assert generate(Shape(sessions=2), 1) == generate(Shape(sessions=5), 1)[:2]


def test_sessions_share_tools_and_system_prompt_and_have_their_own_tasks() -> None:
    made = generate(Shape(sessions=4), 0)
    assert len({json.dumps(session.tools) for session in made}) == 1
    assert len({session.opening[0]["content"] for session in made}) == 1
    assert len({session.opening[1]["content"] for session in made}) == 4


def test_each_request_extends_the_one_before() -> None:
    for session in generate(Shape(sessions=3, turns=4), 0):
        requests = played(session)
        for before, after in itertools.pairwise(requests):
            assert after[: len(before)] == before
            assert after[len(before)]["role"] == "assistant"
            assert len(after) > len(before) + 1


def test_tool_results_answer_the_calls_before_them() -> None:
    calls = 0
    for session in generate(Shape(sessions=4, turns=6), 0):
        for turn in session.turns:
            if turn.scripted is None:
                assert [message["role"] for message in turn.follow_up] == ["user"]
                continue
            calls += 1
            assert [call["id"] for call in turn.scripted] == [message["tool_call_id"] for message in turn.follow_up]
            names = {tool["function"]["name"] for tool in session.tools}
            assert all(call["function"]["name"] in names for call in turn.scripted)
            assert all(json.loads(call["function"]["arguments"]) for call in turn.scripted)
    assert calls > 5


def test_sizes_are_about_what_was_asked_for() -> None:
    (session,) = generate(Shape(sessions=1, system_tokens=1000, task_tokens=100, result_sigma=0.0), 0)
    assert len(session.opening[0]["content"]) / CHARS_PER_TOKEN == pytest.approx(1000, rel=0.1)
    assert len(session.opening[1]["content"]) / CHARS_PER_TOKEN == pytest.approx(100, rel=0.3)


def test_sessions_begin_one_by_one_and_pause_between_turns() -> None:
    made = generate(Shape(sessions=3, turns=4, think_s=1.0, begin_s=5.0), 0)
    begins = {session.turns[0].think_s for session in made}
    assert len(begins) == 3
    assert max(begins) <= 5
    assert all(0 < turn.think_s <= 4 for session in made for turn in session.turns[1:])


def test_the_recipe_names_the_model_folder() -> None:
    tiny = model.RECIPES["tiny"]
    assert tiny.digest() == tiny.digest()
    assert len({model.RECIPES[name].digest() for name in model.RECIPES}) == len(model.RECIPES)


def test_an_unknown_model_is_one_line() -> None:
    with pytest.raises(SystemExit, match="no model named 'huge'; there are tiny, small"):
        model.make("huge")
