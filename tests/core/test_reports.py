"""What a worker tells the homes of its pages: the state of what changed, again until it arrived, and everything to a new home."""

import itertools
import math

import pytest

from tensorcast_connector.config import REPORT_INTERVAL_S, REPORT_KEYS_PER_MESSAGE, REPORT_RETRY_S
from tensorcast_connector.core import reports
from tensorcast_connector.core.homes import Homes
from tensorcast_connector.core.reports import Reporter
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.messages import Reported, ReportKeys, ShardAt
from tests.core.made import SHARDS, A, B, C, key, token
from tests.core.made import report as said

DONE = Reported([], [])


class Teller:
    """A reporter of A, its pages, and the homes it believes in."""

    def __init__(self, *homes: WorkerId) -> None:
        self.pages: dict[bytes, None] = {}
        self.homes = Homes(SHARDS)
        for shard, home in enumerate(homes):
            self.homes.observe(shard, token(10), home)
        self.reporter = Reporter(A, self, self.homes, itertools.count(1))
        self.now = 100.0

    def inventory(self) -> list[bytes]:
        return list(self.pages)

    def resident(self, page: bytes) -> bool:
        return page in self.pages

    def save(self, *pages: bytes) -> None:
        self.pages |= dict.fromkeys(pages)
        self.reporter.changed(pages)

    def evict(self, *pages: bytes) -> None:
        for page in pages:
            del self.pages[page]
        self.reporter.changed(pages)

    def poll(self, after_s: float = 0.0) -> dict[WorkerId, ReportKeys]:
        self.now += after_s
        sent = dict(self.reporter.poll(self.now))
        self.reporter.check()
        assert self.reporter.wake_at() > self.now, "it would be polled for ever"
        return sent

    def answer(self, home: WorkerId, report: ReportKeys, reply: Reported = DONE) -> None:
        self.homes.observe_all(reply.moved)
        self.reporter.answered(home, report, reply, self.now)
        self.reporter.check()

    def fail(self, home: WorkerId, report: ReportKeys) -> None:
        self.reporter.failed(home, report, self.now)
        self.reporter.check()

    def settle(self) -> None:
        """All homes know everything."""
        while sent := self.poll():
            for home, report in sent.items():
                self.answer(home, report)


@pytest.fixture
def teller() -> Teller:
    """B is the home of all, and knows everything."""
    teller = Teller(*[B] * SHARDS)
    teller.save(key(0), key(1))
    teller.settle()
    return teller


def test_each_home_is_told_the_inventory_of_its_shards() -> None:
    teller = Teller(B, C, B, A)
    teller.save(*[key(shard, number) for shard in range(SHARDS) for number in (1, 2)])
    sent = teller.poll()
    assert set(sent) == {A, B, C}, "itself among them"
    assert sent[B] == said(
        A, sent[B].number, [(0, 1, 10), (2, 1, 10)], [0, 2], [key(0, 1), key(0, 2), key(2, 1), key(2, 2)]
    )
    assert sent[C].reset == [1] and list(sent[C].listed_added) == [key(1, 1), key(1, 2)]
    assert sent[A].reset == [3] and sent[A].shards == [(3, 1, 10)]
    assert len({report.number for report in sent.values()}) == 3
    assert teller.poll() == {}, "one report per home is under way at a time"


def test_only_what_changed_is_told_afterwards(teller: Teller) -> None:
    assert teller.poll() == {} and teller.reporter.wake_at() <= teller.now + REPORT_INTERVAL_S
    teller.save(key(2), key(3))
    teller.evict(key(0))
    [(home, report)] = teller.poll().items()
    assert home == B and report == said(A, report.number, report.shards, [], [key(2), key(3)], [key(0)])
    assert [shard for shard, *_ in report.shards] == [0, 1, 2, 3]


def test_what_happens_while_a_report_is_under_way_is_told_by_the_next(teller: Teller) -> None:
    teller.save(key(2))
    report = teller.poll()[B]
    teller.evict(key(2))
    teller.save(key(3))
    assert teller.poll() == {}
    teller.answer(B, report)
    following = teller.poll()[B]
    assert (list(following.listed_added), list(following.listed_removed)) == ([key(3)], [key(2)])
    assert following.number > report.number


def test_the_state_is_told_and_not_the_changes(teller: Teller) -> None:
    teller.save(key(2))
    teller.evict(key(2))
    teller.evict(key(1))
    teller.save(key(1))
    report = teller.poll()[B]
    assert (list(report.listed_added), list(report.listed_removed)) == ([key(1)], [key(2)])


def test_a_report_that_failed_is_said_again_as_things_are_then(teller: Teller) -> None:
    teller.save(key(2), key(3))
    teller.evict(key(0))
    report = teller.poll()[B]
    teller.evict(key(3))
    teller.fail(B, report)
    assert teller.poll() == {} and teller.reporter.wake_at() == teller.now + REPORT_RETRY_S
    again = teller.poll(after_s=REPORT_RETRY_S)[B]
    assert again.number > report.number
    assert (again.reset, list(again.listed_added), set(again.listed_removed)) == ([], [key(2)], {key(0), key(3)})


def test_an_inventory_that_failed_is_said_from_its_beginning() -> None:
    teller = Teller(B, B)
    teller.save(key(0), key(1))
    teller.fail(B, teller.poll()[B])
    again = teller.poll(after_s=REPORT_RETRY_S)[B]
    assert again.reset == [0, 1] and set(again.listed_added) == {key(0), key(1)}


def test_a_large_inventory_takes_several_messages_and_begins_once() -> None:
    teller = Teller(B, B)
    pages = [key(number % 2, number) for number in range(2 * REPORT_KEYS_PER_MESSAGE + 5)]
    teller.save(*pages)
    told: list[bytes] = []
    resets = []
    while sent := teller.poll():
        report = sent[B]
        assert len(report.listed_added) + len(report.listed_removed) <= REPORT_KEYS_PER_MESSAGE
        told += list(report.listed_added)
        resets.append(report.reset)
        if len(resets) == 2:
            teller.evict(pages[0], pages[-1])
        teller.answer(B, report)
    assert resets == [[0, 1], [], []] and set(report.listed_removed) == {pages[0], pages[-1]}
    assert sorted(told) == sorted(pages[:-1]), "each once, and what went meanwhile not at all"


def test_keys_of_several_lengths_are_told_by_several_reports() -> None:
    teller = Teller(B)
    pages = [key(0, 1), b"longer" + key(0, 2), key(0, 3), b"longer" + key(0, 4), b"the longest" + key(0, 5)]
    teller.save(*pages)
    told: list[tuple[list[int], list[bytes]]] = []
    while sent := teller.poll():
        told.append((sent[B].reset, list(sent[B].listed_added)))
        teller.answer(B, sent[B])
    assert told == [([0], [pages[0], pages[2]]), ([], [pages[1], pages[3]]), ([], [pages[4]])]
    teller.evict(*pages[:2])
    teller.answer(B, (first := teller.poll()[B]))
    second = teller.poll()[B]
    assert [list(report.listed_removed) for report in (first, second)] == [[pages[0]], [pages[1]]]
    teller.fail(B, second)
    assert list(teller.poll(after_s=REPORT_RETRY_S)[B].listed_removed) == [pages[1]]


def test_a_part_of_an_inventory_that_failed_is_said_again_without_the_others() -> None:
    teller = Teller(B)
    pages = [key(0, number) for number in range(REPORT_KEYS_PER_MESSAGE + 5)]
    teller.save(*pages)
    teller.answer(B, teller.poll()[B])
    second = teller.poll()[B]
    assert len(second.listed_added) == 5
    teller.fail(B, second)
    again = teller.poll(after_s=REPORT_RETRY_S)[B]
    assert again.reset == [] and list(again.listed_added) == list(second.listed_added)


def test_with_nothing_to_tell_it_says_so_now_and_then(teller: Teller) -> None:
    """So a home that has forgotten this worker finds out."""
    assert teller.poll(after_s=REPORT_INTERVAL_S / 2) == {}
    beat = teller.poll(after_s=REPORT_INTERVAL_S)[B]
    assert (beat.reset, list(beat.listed_added), list(beat.listed_removed)) == ([], [], []) and len(
        beat.shards
    ) == SHARDS
    teller.answer(B, beat, Reported([], [1, 3]))
    again = teller.poll()[B]
    assert again.reset == [1, 3] and list(again.listed_added) == [key(1)]


@pytest.mark.parametrize("told", [[(1, 1, 20, C)], [(1, 1, 20, C), (0, 1, 10, B)]], ids=["one", "and one that stays"])
def test_shards_that_moved_are_told_to_their_new_home(teller: Teller, told: list[ShardAt]) -> None:
    teller.save(key(1, 5))
    teller.answer(B, teller.poll()[B], Reported(told, []))
    sent = teller.poll(after_s=REPORT_RETRY_S)
    assert sent[C].reset == [1] and set(sent[C].listed_added) == {key(1), key(1, 5)}
    assert sent[C].shards == [(1, 1, 20)]
    assert B not in sent or 1 not in [shard for shard, *_ in sent[B].shards]


def test_a_home_that_cannot_take_reports_now_is_told_the_same_later(teller: Teller) -> None:
    """Its lease may have run out, and the store is away: what it lists under the token that it has is still good."""
    teller.save(key(2), key(3))
    teller.evict(key(0))
    report = teller.poll()[B]
    teller.answer(B, report, Reported([(shard, 1, 10, B) for shard in range(SHARDS)], []))
    assert teller.poll() == {} and teller.reporter.wake_at() == teller.now + REPORT_RETRY_S
    again = teller.poll(after_s=REPORT_RETRY_S)[B]
    assert (again.reset, list(again.listed_added), list(again.listed_removed)) == ([], [key(2), key(3)], [key(0)])
    teller.answer(B, again)
    assert teller.poll() == {}


def test_a_home_that_takes_some_of_it_is_told_the_rest_later(teller: Teller) -> None:
    teller.save(key(2), key(3))
    teller.answer(B, teller.poll()[B], Reported([(3, 1, 10, B)], []))
    again = teller.poll(after_s=REPORT_RETRY_S)[B]
    assert (again.reset, list(again.listed_added)) == ([], [key(3)])


def test_an_inventory_that_a_home_cannot_take_now_is_said_from_its_beginning() -> None:
    teller = Teller(B)
    teller.save(key(0))
    teller.answer(B, teller.poll()[B], Reported([(0, 1, 10, B)], []))
    assert teller.poll() == {}
    again = teller.poll(after_s=REPORT_RETRY_S)[B]
    assert again.reset == [0] and list(again.listed_added) == [key(0)]


def test_a_home_that_took_its_shard_anew_is_told_everything(teller: Teller) -> None:
    teller.homes.observe(2, token(30), B)
    report = teller.poll()[B]
    assert report.reset == [2] and (2, 1, 30) in report.shards


def test_a_home_that_asks_is_told_whatever_it_has_been_told(teller: Teller) -> None:
    teller.save(key(2))
    teller.reporter.asked([0, 2])
    report = teller.poll()[B]
    assert report.reset == [0, 2] and set(report.listed_added) == {key(0), key(2)}


def test_nobody_reports_to_a_former_home(teller: Teller) -> None:
    teller.save(key(1))
    report = teller.poll()[B]
    for shard in range(SHARDS):
        teller.homes.observe(shard, token(20), C)
    sent = teller.poll()
    assert set(sent) == {C} and sent[C].reset == [0, 1, 2, 3]
    teller.fail(B, report)
    teller.answer(B, report)
    teller.answer(C, sent[C])
    assert teller.poll() == {} and repr(teller.reporter) == "<Reporter of a/1: 4 shards told to 1 homes>"


def test_an_answer_to_a_report_that_is_not_under_way_means_nothing(teller: Teller) -> None:
    teller.save(key(2))
    first = teller.poll()[B]
    teller.fail(B, first)
    second = teller.poll(after_s=REPORT_RETRY_S)[B]
    teller.answer(B, first)
    assert teller.poll() == {}, "the second is still under way"
    teller.fail(B, second)
    assert list(teller.poll(after_s=REPORT_INTERVAL_S)[B].listed_added) == [key(2)]


def test_before_anything_is_known_of_homes_nothing_is_told_or_remembered() -> None:
    teller = Teller()
    teller.save(key(0))
    assert teller.poll() == {} and teller.reporter.wake_at() == math.inf
    teller.homes.observe(0, token(10), B)
    assert list(teller.poll()[B].listed_added) == [key(0)]
    nowhere = Reporter(A, teller, Homes(0), itertools.count(1))
    nowhere.changed([key(0)])
    assert nowhere.poll(1.0) == [] and nowhere.wake_at() == math.inf


def test_a_home_that_stays_away_is_tried_less_and_less_often(teller: Teller) -> None:
    """It may be the last one, and nobody takes its place."""
    teller.save(key(2))
    waits = []
    report = teller.poll()[B]
    for _ in range(6):
        teller.fail(B, report)
        waits.append(teller.reporter.wake_at() - teller.now)
        report = teller.poll(after_s=REPORT_INTERVAL_S)[B]
    assert waits == pytest.approx([min(REPORT_RETRY_S * 2**n, REPORT_INTERVAL_S) for n in range(6)])
    teller.answer(B, report)
    teller.save(key(3))
    teller.fail(B, teller.poll()[B])
    assert teller.reporter.wake_at() == teller.now + REPORT_RETRY_S, "it had been there meanwhile"


@pytest.mark.parametrize("failing", [True, False], ids=["it does not answer", "it cannot take reports"])
def test_what_is_evicted_while_a_home_is_away_does_not_pile_up(
    teller: Teller, failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "REPORT_BACKLOG_KEYS_MAX", 10)
    sizes = []
    for number in range(1, 40):
        teller.save(key(0, number))
        teller.evict(key(0, number))
        for home, report in teller.poll(after_s=REPORT_INTERVAL_S).items():
            if failing:
                teller.fail(home, report)
            else:
                teller.answer(home, report, Reported([(shard, 1, 10, B) for shard in range(SHARDS)], []))
        sizes.append(len(teller.reporter._streams[B].dirty))
    assert max(sizes) <= 11
    added = []
    for _ in range(3):
        sent = teller.poll(after_s=REPORT_INTERVAL_S)
        added += list(sent[B].listed_added)
        teller.answer(B, sent[B])
    assert set(added) == {key(0), key(1)}, "an inventory instead"
