"""The circuit breaker of one instance."""

import random

from smetric_router.state.breaker import OUTCOMES_MAX, Breaker, BreakerState


def breaker(failures_min: int = 3) -> Breaker:
    return Breaker(failures_min=failures_min, window_s=10, open_s=5)


def failing(times: int = 3, now: float = 0.0) -> Breaker:
    made = breaker()
    for _ in range(times):
        made.ended(failed=True, now=now)
    return made


def test_it_opens_after_failures_and_closes_after_one_success():
    made = failing(2)
    assert made.admits
    made.ended(failed=True, now=1)
    assert (made.state, made.admits) == (BreakerState.OPEN, False)
    made.tick(5.9)
    assert not made.admits
    made.tick(6)
    assert (made.state, made.admits) == (BreakerState.HALF_OPEN, True)
    made.sent()
    assert not made.admits, "one request at a time"
    made.ended(failed=False, now=7)
    assert made.state is BreakerState.CLOSED
    made.ended(failed=True, now=7)
    assert made.admits, "what was before is forgotten"


def test_a_probe_that_fails_opens_it_again():
    made = failing()
    made.tick(5)
    made.sent()
    made.ended(failed=True, now=6)
    made.tick(10.9)
    assert not made.admits
    made.tick(11)
    assert made.admits


def test_a_probe_whose_client_leaves_is_given_back():
    made = failing()
    made.tick(5)
    made.sent()
    made.ended(failed=None, now=6)
    assert made.state is BreakerState.HALF_OPEN


def test_what_ends_while_it_is_open_says_nothing():
    made = failing()
    made.ended(failed=False, now=1)
    made.ended(failed=True, now=2)
    assert made.state is BreakerState.OPEN
    made.tick(5)
    assert made.admits


def test_rare_failures_of_a_busy_instance_do_not_open_it():
    made = breaker()
    for n in range(1000):
        made.ended(failed=n % 3 == 0, now=n / 1000)
    assert made.admits


def test_old_failures_do_not_count():
    made = breaker()
    for n in range(100):
        made.ended(failed=True, now=n * 5.1)
    assert made.admits


def test_none_opens_it_at_zero():
    made = breaker(0)
    for _ in range(100):
        made.ended(failed=True, now=0)
    assert made.admits


def test_it_is_bounded_and_its_count_right():
    chance = random.Random(1)
    made, now = Breaker(failures_min=1000, window_s=1e9, open_s=1), 0.0
    for _ in range(5 * OUTCOMES_MAX):
        now += chance.random()
        made.ended(failed=chance.random() < 0.4, now=now)
        assert made._failures == sum(failed for _, failed in made._outcomes)
    assert len(made._outcomes) == OUTCOMES_MAX
