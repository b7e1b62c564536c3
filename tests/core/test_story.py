"""Stories: what is found, in which words, and what keeping them costs."""

from collections.abc import Iterator, Sequence
from typing import overload

import pytest

from tensorcast_connector.config import STORY_CAUSE_CHARS_MAX, STORY_LINES_MAX
from tensorcast_connector.core.story import Stories, nothing_found, ranges
from tensorcast_connector.types import page_key

SPACE = b"k" * 16
KEYS = [page_key(SPACE, bytes([0xAB, 0xC0 + number]) + bytes(30)) for number in range(6)]


@pytest.fixture
def stories() -> Stories:
    """Six pages: saved, looked up, one of them elsewhere, a shard that moves."""
    stories = Stories()
    stories.record(1.0, "reserve", "", KEYS[:3], [4096, None, 8192], cause="by session 7")
    stories.record(2.0, "hold", "req-1", KEYS, cause="3 of them are not here")
    stories.record(3.0, "located", "req-1", KEYS[3:], ["b/1", None, "b/1"])
    stories.record(4.0, "fetch", "b/1", [KEYS[3], KEYS[5]])
    stories.record(5.0, "shards lost", "a/1", shards=[1, 2, 3, 9])
    stories.record(6.0, "release", "req-1")
    return stories


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("abc0", ["1.000000  reserve, page 1 of 3 (abc0000000000000), 4096, by session 7",
                  "2.000000  hold req-1, page 1 of 6 (abc0000000000000), 3 of them are not here"]),
        ("ABC1", ["1.000000  reserve, page 2 of 3 (abc1000000000000), none, by session 7",
                  "2.000000  hold req-1, page 2 of 6 (abc1000000000000), 3 of them are not here"]),
        ("abc40", ["2.000000  hold req-1, page 5 of 6 (abc4000000000000), 3 of them are not here",
                   "3.000000  located req-1, page 2 of 3 (abc4000000000000), none"]),
        ("abc5" + "0" * 60, ["2.000000  hold req-1, page 6 of 6 (abc5000000000000), 3 of them are not here",
                             "3.000000  located req-1, page 3 of 3 (abc5000000000000), b/1",
                             "4.000000  fetch b/1, page 2 of 2 (abc5000000000000)"]),
        ("abc41", []),
        ("abc5" + "0" * 62, []),
        ("abc", []),
        ("req", ["2.000000  hold req-1, 6 pages, 3 of them are not here", "3.000000  located req-1, 3 pages, b/1 | none",
                 "6.000000  release req-1"]),
        ("b/1", ["3.000000  located req-1, 3 pages, b/1 | none", "4.000000  fetch b/1, 2 pages"]),
        ("shard 9", ["5.000000  shards lost a/1, shards 1-3 9"]),
        ("shard/2", ["5.000000  shards lost a/1, shards 1-3 9"]),
        ("shard 4", []),
        ("release", ["6.000000  release req-1"]),
        ("nobody", []),
    ],
)  # fmt: skip
def test_the_story_of_one_thing(stories: Stories, text: str, found: list[str]) -> None:
    assert stories.lines(text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("abc", "of a page at least 4 hex digits of its block hash are needed"),
        (" F ", "of a page at least 4 hex digits of its block hash are needed"),
        ("abcd", "only the latest events are kept"),
        ("req", "only the latest events are kept"),
        ("", "only the latest events are kept"),
    ],
)
def test_what_is_said_of_nothing(text: str, why: str) -> None:
    said = nothing_found(text)
    assert said.startswith(f"nothing recorded about {text!r}: {why}. Other things") and "\n" not in said
    assert "a hold or a worker, 'shard 12', the name of an event" in said


ONE, TWO = "0123456789abcdef" * 2, "0123" + "f" * 28


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ONE, [1, 2, 3, 6, 8]), (ONE[:6], [1, 2, 3, 6, 8]), (ONE[:4], [1, 2, 3, 4, 5, 6, 7, 8]), ("policy:v1", [1, 2, 3, 6, 8]),
        ("policy:v2", [4, 5, 7]), ("m", [6]), ("step done", [6, 7]), ("move-18", [10]),
        ("012", [1, 2, 3, 4, 5, 6, 7, 8]), ("move-17", [6, 7, 9]), ("t/move-17", [6, 7, 9]), ("t", [6, 7, 9, 10]),
        ("policy", []), ("1234", []), ("policy:v", []), ("17", []),
    ],
)  # fmt: skip
def test_the_story_of_an_artifact_and_of_a_plan(text: str, found: list[int]) -> None:
    stories = Stories()
    stories.record(1, "artifact recorded", ONE, cause="5 bytes")
    stories.record(2, "name given", ONE, names=["policy:v1"])
    stories.record(3, "copy", ONE, cause="at a/1")
    stories.record(4, "name given", TWO, names=["policy:v2"])
    stories.record(5, "copy", TWO, cause="at b/1")
    stories.record(6, "step done", "t/move-17", names=["move-17", "m", ONE])
    stories.record(7, "step done", "t/move-17", names=["move-17", TWO])
    stories.record(8, "artifact deleted", ONE)
    stories.record(9, "plan ended", "t/move-17", names=["move-17"])
    stories.record(10, "plan run", "t/move-18", names=["move-18"])
    assert [int(line.split(".")[0]) for line in stories.lines(text)] == found


def test_a_long_cause_is_cut() -> None:
    stories = Stories()
    stories.record(1, "plan ended", "t/k", cause="x" * 10_000)
    assert stories.lines("t/k") == [f"1.000000  plan ended t/k, {'x' * STORY_CAUSE_CHARS_MAX}"]


def test_everything_and_with_wall_time(stories: Stories) -> None:
    assert [line.split()[1].rstrip(",") for line in stories.lines()] == [
        "reserve", "hold", "located", "fetch", "shards", "release",
    ]  # fmt: skip
    assert stories.lines("release", 1_700_000_000.0) == ["2023-11-14T22:13:26.000000Z  release req-1"]


def test_several_pages_that_begin_alike_are_one_line() -> None:
    stories = Stories()
    same = bytes.fromhex("feed") + bytes(30)
    keys = [page_key(bytes([rank]) * 16, same) for rank in range(6)] + KEYS
    stories.record(1.0, "located", "x", keys, [*"abcdef", *KEYS])
    assert stories.lines("feed") == ["1.000000  located x, 6 of 12 pages, a | b | c | d and 2 others"]


def test_the_oldest_events_go() -> None:
    stories = Stories(events_max=3, keys_max=1000)
    for number in range(5):
        stories.record(number, f"e{number}")
    assert [line.split()[1] for line in stories.lines()] == ["e2", "e3", "e4"] and len(stories) == 3


def test_events_that_name_too_many_pages_go() -> None:
    stories = Stories(events_max=1000, keys_max=10)
    for number in range(4):
        stories.record(number, f"e{number}", keys=KEYS[:4])
    assert [line.split()[1].rstrip(",") for line in stories.lines()] == ["e2", "e3"]
    stories.record(9, "large", keys=KEYS * 4)
    assert len(stories) == 1 and stories.lines("abc0"), "one event alone may be larger than the limit"
    stories.record(10, "small", keys=KEYS[:1])
    assert "1 pages" in repr(stories) and len(stories) == 1


def test_an_answer_is_bounded_and_of_the_latest() -> None:
    stories = Stories()
    for number in range(STORY_LINES_MAX + 5):
        stories.record(number, "e")
    lines = stories.lines("e")
    assert len(lines) == STORY_LINES_MAX and lines[-1].startswith(f"{STORY_LINES_MAX + 4}.")


class Untouched(Sequence[bytes]):
    """Keys that may be counted, and not looked at."""

    def __len__(self) -> int:
        return 50_000

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        raise AssertionError("recording looks at the keys one by one")

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("recording looks at the keys one by one")


def test_recording_a_batch_does_not_look_at_its_pages() -> None:
    stories = Stories()
    for number in range(20):
        stories.record(number, "hold", "h", Untouched(), Untouched())
    assert len(stories) == 8, "400,000 keys"


@pytest.mark.parametrize(
    ("numbers", "short"), [([], ""), ([4], "4"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7, 9, 10], "0 2-3 7 9-10")]
)
def test_ranges(numbers: list[int], short: str) -> None:
    assert ranges(numbers) == short
