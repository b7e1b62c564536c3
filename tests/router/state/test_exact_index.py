"""The exact index against a plain model of what engines hold."""

import random
from array import array
from hashlib import sha256

import pytest

from smetric_router.blocks import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    TokenPrompt,
    engine_key,
    prompt_seed,
    stored_blocks,
)
from smetric_router.state.exact_index import BLOCK_SIZES_MAX, ExactIndex

SIZE = 4


def prompt(tokens: list[int], seed: int = 0) -> TokenPrompt:
    return TokenPrompt(array("I", tokens), seed)


def hashes(tokens: list[int], how: str = "a", size: int = SIZE) -> list[bytes]:
    """What an engine calls the blocks; engines that hash in another way call them otherwise."""
    return [sha256(f"{how}:{tokens[:end]}".encode()).digest() for end in range(size, len(tokens) + 1, size)]


def stored(tokens: list[int], first: int = 0, how: str = "a", **fields: object) -> BlocksStored:
    """The blocks of a prompt from the block `first` on."""
    names = hashes(tokens, how)
    parent = names[first - 1] if first else None
    return stored_blocks(names[first:], parent, tokens[first * SIZE : len(names) * SIZE], SIZE, **fields)  # type: ignore[arg-type]


def removed(*names: bytes, medium: str = "GPU") -> BlocksRemoved:
    return BlocksRemoved(tuple(engine_key(each) for each in names), medium)


def index(**fields: object) -> ExactIndex:
    return ExactIndex(1000, **fields)  # type: ignore[arg-type]


TOKENS = list(range(100, 121))


def test_instances_with_different_hash_functions_agree() -> None:
    made = index()
    made.apply("x", 0, stored(TOKENS))
    made.apply("y", 0, stored(TOKENS[:9], how="b"))
    as_int64 = stored_blocks([-1, 5, 1 << 63], None, TOKENS[:12], SIZE)
    made.apply("z", 0, as_int64)
    assert made.match(prompt(TOKENS)) == {"x": 20, "y": 8, "z": 12}
    assert made.match(prompt([*TOKENS[:6], 0, 0, 0])) == {"x": 4, "y": 4, "z": 4}
    assert made.match(prompt([1, *TOKENS])) == {}
    made.check()


def test_the_last_token_is_always_computed() -> None:
    made = index()
    made.apply("x", 0, stored(TOKENS[:8]))
    assert made.match(prompt(TOKENS[:8])) == {"x": 4}
    assert made.match(prompt(TOKENS[:9])) == {"x": 8}
    assert made.match(prompt([])) == {}


def test_adapters_salts_and_images_keep_prompts_apart() -> None:
    made = index()
    made.apply("x", 0, stored(TOKENS))
    made.apply("y", 0, stored(TOKENS, lora="l"))
    made.apply("z", 0, stored(TOKENS, salt="s"))
    made.apply("w", 0, stored(TOKENS, extras=(b"", b"image", b"", b"", b"")))
    assert made.match(prompt(TOKENS)) == {"x": 20, "w": 4}
    assert made.match(prompt(TOKENS, prompt_seed("l"))) == {"y": 20}
    assert made.match(prompt(TOKENS, prompt_seed("", "s"))) == {"z": 20}


def test_a_removed_block_hides_what_is_behind_it_until_it_is_back() -> None:
    made = index()
    made.apply("x", 0, stored(TOKENS))
    made.apply("x", 0, removed(hashes(TOKENS)[1]))
    assert made.match(prompt(TOKENS)) == {"x": 4}
    made.apply("x", 0, stored(TOKENS[:8], 1))
    assert made.match(prompt(TOKENS)) == {"x": 20}
    made.check()


def test_children_that_come_before_their_parents_count_when_these_come() -> None:
    made = index()
    made.apply("x", 0, stored(TOKENS, 3))
    made.apply("x", 0, stored(TOKENS[:12], 2))
    assert made.match(prompt(TOKENS)) == {}
    assert made.statistics().orphans == 3
    made.check()
    made.apply("x", 0, removed(hashes(TOKENS)[4]))
    made.apply("x", 0, stored(TOKENS[:8]))
    assert made.match(prompt(TOKENS)) == {"x": 16}
    assert made.statistics().orphans == 0
    made.check()


def test_orphans_are_bounded_and_the_oldest_go_first() -> None:
    made = index(orphans_max=2)
    made.apply("x", 0, stored(TOKENS, 1))
    assert made.statistics().orphans == 2
    made.check()
    made.apply("x", 0, stored(TOKENS[:12]))
    assert made.match(prompt(TOKENS)) == {"x": 20}


def test_a_copy_counts_until_both_are_removed() -> None:
    made = index()
    made.apply("x", 0, stored(TOKENS))
    made.apply("x", 0, stored(TOKENS[:4]))
    made.apply("x", 0, removed(hashes(TOKENS)[0]))
    assert made.match(prompt(TOKENS)) == {"x": 20}
    made.apply("x", 0, removed(hashes(TOKENS)[0]))
    assert made.match(prompt(TOKENS)) == {}
    made.check()


def test_media_that_do_not_count_are_ignored_and_those_that_do_are_one() -> None:
    made = index(media=("GPU", "CPU"))
    made.apply("x", 0, stored(TOKENS))
    made.apply("x", 0, stored(TOKENS, medium="CPU"))
    made.apply("y", 0, stored(TOKENS, medium="DISK"))
    assert made.match(prompt(TOKENS)) == {"x": 20}
    made.apply("x", 0, removed(*hashes(TOKENS)))
    assert made.match(prompt(TOKENS)) == {"x": 20}
    made.apply("x", 0, removed(*hashes(TOKENS), medium="CPU"))
    assert made.match(prompt(TOKENS)) == {}
    made.check()


def test_ranks_are_apart_and_the_best_one_counts() -> None:
    made = index()
    made.apply("x", 0, stored(TOKENS[:8]))
    made.apply("x", 1, stored(TOKENS[:16]))
    assert made.match(prompt(TOKENS)) == {"x": 16}
    made.apply("x", 1, BlocksCleared())
    assert made.match(prompt(TOKENS)) == {"x": 8}
    made.forget("x")
    assert made.match(prompt(TOKENS)) == {}
    assert made.statistics().digests == 0
    made.check()


def test_a_hash_that_means_something_else_now_is_believed() -> None:
    made = index()
    made.apply("x", 0, stored_blocks([7], None, [1, 2, 3, 4], SIZE))
    made.apply("x", 0, stored_blocks([7], None, [5, 6, 7, 8], SIZE))
    assert made.match(prompt([1, 2, 3, 4, 0])) == {}
    assert made.match(prompt([5, 6, 7, 8, 0])) == {"x": 4}
    made.check()


def test_more_blocks_than_the_limit_are_not_taken() -> None:
    made = ExactIndex(3)
    made.apply("x", 0, stored(TOKENS))
    made.apply("y", 0, stored(TOKENS[:8]))
    assert made.match(prompt(TOKENS)) == {"x": 12, "y": 8}
    assert made.statistics().dropped == 2
    made.check()


def test_impossible_shapes_are_dropped() -> None:
    made = index()
    for size, tokens in ((0, []), (-4, [1] * 4), (4, [1] * 5), (1 << 40, [1] * 4)):
        made.apply("x", 0, stored_blocks([1], None, tokens, size))
    for size in range(1, BLOCK_SIZES_MAX + 5):
        made.apply("x", 0, stored_blocks([size], None, [1] * size, size))
    assert made.statistics().blocks == {"x": BLOCK_SIZES_MAX}
    made.check()


def test_what_was_just_computed_is_expected_until_its_events_have_come() -> None:
    made = index()
    made.expect("x", prompt(TOKENS), 0, 5.0)
    assert made.match(prompt(TOKENS)) == {}, "an engine that tells nothing"
    made.apply("x", 0, stored(TOKENS[:4]))
    made.apply("x", 1, stored([1, 2, 3, 4]))
    made.expect("x", prompt(TOKENS), 4, 5.0)
    assert made.match(prompt(TOKENS)) == {"x": 20}
    made.check()
    made.apply("x", 0, stored(TOKENS[:12], 1))
    made.expire(4.9)
    assert made.match(prompt(TOKENS)) == {"x": 20}
    made.expire(5.0)
    assert made.match(prompt(TOKENS)) == {"x": 12}, "the events said so much"
    made.check()
    made.expect("x", prompt(TOKENS), 12, 9.0)
    made.apply("x", 0, BlocksCleared())
    assert made.match(prompt(TOKENS)) == {}
    made.check()


def test_blocks_taken_in_bulk_are_taken_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    texts = [[draw.randrange(3) for _ in range(SIZE * draw.randrange(1, 9))] for _ in range(60)]
    events = [stored(text, extras=draw.choice((None, (b"image", *[b""] * (len(text) // SIZE - 1))))) for text in texts]
    events += [stored_blocks([1, 2, 1], None, list(range(3 * SIZE)), SIZE), stored_blocks([], None, [], SIZE)]
    bulk, single = ExactIndex(90), ExactIndex(90)
    for event in events:
        bulk.apply("x", 0, event)
    monkeypatch.setattr(ExactIndex, "_take_new", lambda *_: False)
    for event in events:
        single.apply("x", 0, event)
    assert bulk.statistics() == single.statistics() and bulk.statistics().dropped > 0
    assert all(bulk.match(prompt([*text, 0])) == single.match(prompt([*text, 0])) for text in texts)
    bulk.check()
    single.check()


@pytest.mark.parametrize("seed", range(8))
def test_against_a_plain_model(seed: int) -> None:
    draw = random.Random(seed)
    made, plain = index(), Plain()
    for _ in range(400):
        who, rank = draw.choice("xyz"), draw.randrange(2)
        tokens = [draw.randrange(2) for _ in range(SIZE * draw.randrange(1, 5) + 1)]
        names = hashes(tokens, who)
        match draw.randrange(12):
            case 0:
                made.apply(who, rank, BlocksCleared())
                plain.held.pop((who, rank), None)
            case 5 if plain.held.get((who, rank)):
                made.expect(who, prompt([*tokens, 0]), 0, 1.0)
                made.check()
                made.expire(1.0)
            case 1 | 2 | 3 | 4:
                name = draw.choice(names)
                made.apply(who, rank, removed(name))
                plain.remove(who, rank, name)
            case _:
                first = draw.randrange(len(names))
                if first and not plain.counts(who, rank, names[first - 1]):
                    first = 0
                made.apply(who, rank, stored(tokens, first, who))
                plain.store(who, rank, names[first:])
        asked = [draw.randrange(2) for _ in range(SIZE * 5)]
        assert made.match(prompt(asked)) == plain.match(asked)
    made.check()


class Plain:
    """What each engine holds, by its own names."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], dict[bytes, int]] = {}

    def counts(self, who: str, rank: int, name: bytes) -> bool:
        return bool(self.held.get((who, rank), {}).get(name))

    def store(self, who: str, rank: int, names: list[bytes]) -> None:
        mine = self.held.setdefault((who, rank), {})
        for name in names:
            mine[name] = mine.get(name, 0) + 1

    def remove(self, who: str, rank: int, name: bytes) -> None:
        mine = self.held.setdefault((who, rank), {})
        if mine.get(name):
            mine[name] -= 1

    def match(self, asked: list[int]) -> dict[str, int]:
        hits: dict[str, int] = {}
        for who, rank in self.held:
            length = 0
            for name in hashes(asked[:-1], who):
                if not self.counts(who, rank, name):
                    break
                length += SIZE
            if length:
                hits[who] = max(length, hits.get(who, 0))
        return hits


def test_a_block_may_lie_in_another_medium_than_its_parent() -> None:
    """SGLang brings pages from storage to host memory behind ones that are on the device alone."""
    made = index(media=("GPU", "CPU_PINNED"))
    made.apply("x", 0, stored(TOKENS[:8]))
    made.apply("x", 0, stored(TOKENS, first=2, medium="CPU_PINNED"))
    assert made.match(prompt(TOKENS)) == {"x": 20}
    made.apply("x", 0, removed(hashes(TOKENS)[1]))
    assert made.match(prompt(TOKENS)) == {"x": 4}
    made.check()
