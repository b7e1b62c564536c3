"""The exact hit index: which blocks of tokens each instance holds, as its own KV events say (vLLM and SGLang).

An engine names a block by a hash of its own choosing. Here a block is named by a digest of its tokens chained to its parent's,
so that instances with different hash functions agree and a prompt is looked up without knowing any of them:

    digest = xxh3(tokens as uint32, seed = digest of the parent)   the parent of a first block is the seed of the prompt

Per holder (one data-parallel rank of an instance) and medium a dictionary translates the engine's hashes; one for all says of
each digest who holds it, as a bit mask, so a prompt is matched by one pass over its blocks whatever the number of instances.

Events are a moment late: a prompt that an instance has just answered is *expected* there until its events should have come.

A block counts only while its whole prefix is there: the children of a removed parent stay, out of reach until it is back.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import groupby

from smetric_router.blocks import (
    BlockEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    TokenPrompt,
    prompt_seed,
)

TOKENS_PER_BLOCK_MAX = 65_536
BLOCK_SIZES_MAX = 8
"""An engine has one or two; more of them is no engine."""
EXPECTED_MAX = 1024
"""Prompts per holder whose events are awaited."""
MASKS_MAX = 4096
"""Masks kept to be shared by the blocks that have the same holders."""


@dataclass(slots=True)
class _Orphan:
    """A block whose parent is not known: it counts when that comes."""

    parent: int
    block: bytes
    extra: bytes


@dataclass(slots=True)
class _Tier:
    """One medium of one holder."""

    digests: dict[int, int] = field(default_factory=dict)
    """By the engine's hash."""
    copies: dict[int, int] = field(default_factory=dict)
    """How many copies there are besides the first, where there are any."""
    orphans: "OrderedDict[int, _Orphan]" = field(default_factory=OrderedDict)
    """By the engine's hash, the oldest first."""
    waiting: dict[int, dict[int, None]] = field(default_factory=dict)
    """The engine's hash of a parent that is not known -> its children's."""


@dataclass(slots=True)
class _Holder:
    instance: str
    bit: int
    tiers: dict[str, _Tier] = field(default_factory=dict)
    more: dict[int, int] = field(default_factory=dict)
    """How often a digest is held besides once: in another medium, under another of the engine's hashes, or expected."""
    expected: deque[tuple[float, list[int]]] = field(default_factory=deque)
    """(until when, digests), the oldest first."""

    def digest(self, key: int) -> int | None:
        """Of a block by the engine's hash, which is the same in all media."""
        return next((each.digests[key] for each in self.tiers.values() if key in each.digests), None)


@dataclass(frozen=True, slots=True)
class ExactStatistics:
    """Figures of the index."""

    digests: int
    blocks: dict[str, int]
    """Per instance, over its ranks and media."""
    orphans: int
    dropped: int
    """Blocks that were not taken: over the limit, or of an impossible shape."""


class ExactIndex:
    """Events in, hits out.

    Args:
        blocks_per_instance_max: more blocks of one instance are not taken.
        media: the media that count, as the events name them; others are ignored. Unnamed is "GPU".
        orphans_max: blocks whose parent is not known that are kept per holder.
    """

    def __init__(
        self, blocks_per_instance_max: int, media: Collection[str] = ("GPU",), orphans_max: int = 65_536
    ) -> None:
        self.blocks_per_instance_max = blocks_per_instance_max
        self._media = frozenset(media)
        self._orphans_max = orphans_max
        self._holders: dict[tuple[str, int], _Holder] = {}
        self._by_bit: list[_Holder] = []
        self._masks: dict[int, int] = {}  # digest -> holders
        self._shared: dict[int, int] = {}  # a mask -> the one object for it
        self._block_sizes: list[int] = []
        self._counts: dict[str, int] = {}
        self._dropped = 0

    def __repr__(self) -> str:
        return f"<ExactIndex {len(self._masks)} digests, {self._counts}>"

    @property
    def block_size(self) -> int:
        """The largest block size seen; 0 before the first."""
        return max(self._block_sizes, default=0)

    def apply(self, instance: str, rank: int, event: BlockEvent) -> None:
        """One event of one data-parallel rank of an instance."""
        match event:
            case BlocksStored():
                if event.medium in self._media:
                    self._stored(self._holder(instance, rank), event)
            case BlocksRemoved():
                if event.medium in self._media:
                    self._removed(instance, rank, event)
            case BlocksCleared():
                self.forget(instance, rank)

    def forget(self, instance: str, rank: int | None = None) -> None:
        """Drops all that is known of one rank of an instance, or of all of them."""
        for (name, number), holder in self._holders.items():
            if name != instance or rank not in (None, number):
                continue
            for tier in holder.tiers.values():
                for digest in tier.digests.values():
                    self._release(holder, digest)
                self._counts[instance] -= len(tier.digests)
            holder.tiers.clear()
            self._expire(holder, None)

    def match(self, prompt: TokenPrompt) -> dict[str, int]:
        """Hit length in tokens per instance that holds a prefix of the prompt, its best rank's. Changes nothing.

        An engine computes at least the last token, so the last block counts only if there is a token behind it.
        """
        hits: dict[str, int] = {}
        for size in self._block_sizes:
            left, position = -1, 0
            for mask, run in groupby(map(self._masks.get, prompt.digests(size))):
                here = left & mask if mask else 0
                if lost := (left ^ here) if left >= 0 else 0:
                    self._credit(hits, lost, position * size)
                left = here
                if not left:
                    break
                position += sum(1 for _ in run)
            if left > 0:
                self._credit(hits, left, position * size)
        return hits

    def expect(self, instance: str, prompt: TokenPrompt, hit: int, until: float) -> None:
        """The instance has computed the prompt, of which it held `hit` tokens; its events should have come by then."""
        holders = [holder for (name, _), holder in self._holders.items() if name == instance]
        if not holders:
            return
        for size in self._block_sizes:
            digests = prompt.digests(size)
            first = min(hit // size, len(digests))
            # Of several ranks the one with the hit computed it; without any it does not matter which.
            before = self._masks.get(digests[first - 1], 0) if first else 0
            holder = next((each for each in holders if before & each.bit), holders[0])
            new = [digest for digest in digests[first:] if not self._masks.get(digest, 0) & holder.bit]
            for digest in new:
                self._hold(holder, digest)
            if new:
                holder.expected.append((until, new))
            if len(holder.expected) > EXPECTED_MAX:
                self._expire(holder, holder.expected[0][0])

    def expire(self, now: float) -> None:
        """What was expected until now counts no more by itself."""
        for holder in self._by_bit:
            if holder.expected:
                self._expire(holder, now)

    def statistics(self) -> ExactStatistics:
        """Sizes now, and blocks not taken since the start."""
        orphans = sum(len(tier.orphans) for holder in self._by_bit for tier in holder.tiers.values())
        return ExactStatistics(len(self._masks), dict(self._counts), orphans, self._dropped)

    def _credit(self, hits: dict[str, int], mask: int, length: int) -> None:
        while length and mask:
            bit = mask & -mask
            mask ^= bit
            instance = self._by_bit[bit.bit_length() - 1].instance
            if length > hits.get(instance, 0):
                hits[instance] = length

    def _holder(self, instance: str, rank: int) -> _Holder:
        holder = self._holders.get((instance, rank))
        if holder is None:
            holder = self._holders[instance, rank] = _Holder(instance, 1 << len(self._by_bit))
            self._by_bit.append(holder)
            self._counts.setdefault(instance, 0)
        return holder

    # --- stored ---

    def _stored(self, holder: _Holder, event: BlocksStored) -> None:
        if len(event.keys) * event.block_size != len(event.tokens) or not self._possible(event.block_size):
            self._dropped += len(event.keys)
            return
        tier = holder.tiers.get(event.medium) or holder.tiers.setdefault(event.medium, _Tier())
        digest = prompt_seed(event.lora, event.salt) if event.parent is None else holder.digest(event.parent)
        if digest is None:
            self._orphaned(tier, event)
        else:
            self._chain(holder, tier, event, digest)

    def _chain(self, holder: _Holder, tier: _Tier, event: BlocksStored, digest: int) -> None:
        """Takes the blocks of one event, the first of which follows `digest`."""
        digests = event.digests(digest)
        before = len(tier.digests)
        if not self._take_new(holder, tier, event.keys, digests):
            self._take_each(holder, tier, event.keys, digests)
        self._counts[holder.instance] += len(tier.digests) - before
        for key in event.keys if tier.waiting else ():
            if key in tier.waiting:
                self._adopt(holder, tier, key)

    def _take_new(self, holder: _Holder, tier: _Tier, keys: tuple[int, ...], digests: list[int]) -> bool:
        """Takes blocks that nobody holds, as nearly all are, in bulk; False: one of them is not of that kind."""
        if tier.orphans or self._counts[holder.instance] + len(keys) > self.blocks_per_instance_max:
            return False
        if not (tier.digests.keys().isdisjoint(keys) and self._masks.keys().isdisjoint(digests)):
            return False
        new, fresh = dict(zip(keys, digests, strict=True)), dict.fromkeys(digests, self._share(holder.bit))
        if distinct := len(new) == len(fresh) == len(keys):
            tier.digests.update(new)
            self._masks.update(fresh)
        return distinct

    def _take_each(self, holder: _Holder, tier: _Tier, keys: tuple[int, ...], digests: list[int]) -> None:
        """Takes blocks of any kind."""
        known, masks, bit, share = tier.digests, self._masks, holder.bit, self._share
        room, alone = self.blocks_per_instance_max - self._counts[holder.instance], share(bit)
        for at, (key, digest) in enumerate(zip(keys, digests, strict=True)):
            held = known.get(key)
            if held == digest:  # another copy, as engines make when two requests compute the same at once
                tier.copies[key] = tier.copies.get(key, 0) + 1
                continue
            if held is not None:  # the removal was missed
                self._drop(holder, tier, key)
                room += 1
            if room <= 0:
                self._dropped += len(keys) - at
                break
            room -= 1
            known[key] = digest
            mask = masks.get(digest)
            if mask is None:
                masks[digest] = alone
            elif mask & bit:
                holder.more[digest] = holder.more.get(digest, 0) + 1
            else:
                masks[digest] = share(mask | bit)
            if key in tier.orphans:
                self._drop_orphan(tier, key)

    def _orphaned(self, tier: _Tier, event: BlocksStored) -> None:
        parent, width = event.parent, 4 * event.block_size
        assert parent is not None
        data = memoryview(event.tokens).cast("B")
        for at, key in enumerate(event.keys):
            if key not in tier.orphans and key not in tier.digests:
                extra = event.extras[at] if event.extras is not None else b""
                tier.orphans[key] = _Orphan(parent, bytes(data[at * width : (at + 1) * width]), extra)
                tier.waiting.setdefault(parent, {})[key] = None
            parent = key
        while len(tier.orphans) > self._orphans_max:
            self._drop_orphan(tier, next(iter(tier.orphans)))
            self._dropped += 1

    def _adopt(self, holder: _Holder, tier: _Tier, key: int) -> None:
        """The parent has come: its orphans count now, and theirs."""
        pending = [key]
        while pending:
            parent = pending.pop()
            digest = tier.digests.get(parent)
            if digest is None:
                continue
            for child in tier.waiting.pop(parent, ()):
                orphan = tier.orphans.pop(child, None)
                if orphan is None:
                    continue
                tokens = array("I", orphan.block)
                extras = (orphan.extra,) if orphan.extra else None
                event = BlocksStored((child,), parent, tokens, len(tokens), extras=extras)
                waiting, tier.waiting = tier.waiting, {}  # not by recursion: a chain of orphans may be long
                self._chain(holder, tier, event, digest)
                tier.waiting = waiting
                pending.append(child)

    def _drop_orphan(self, tier: _Tier, key: int) -> None:
        orphan = tier.orphans.pop(key)
        siblings = tier.waiting[orphan.parent]
        del siblings[key]
        if not siblings:
            del tier.waiting[orphan.parent]

    def _possible(self, size: int) -> bool:
        if size not in self._block_sizes:
            if not 0 < size <= TOKENS_PER_BLOCK_MAX or len(self._block_sizes) >= BLOCK_SIZES_MAX:
                return False
            self._block_sizes.append(size)
        return True

    # --- removed ---

    def _removed(self, instance: str, rank: int, event: BlocksRemoved) -> None:
        holder = self._holders.get((instance, rank))
        tier = holder.tiers.get(event.medium) if holder is not None else None
        if holder is None or tier is None:
            return
        for key in event.keys:
            copies = tier.copies.get(key)
            if copies is not None:
                if copies > 1:
                    tier.copies[key] = copies - 1
                else:
                    del tier.copies[key]
                continue
            if key in tier.digests:
                self._drop(holder, tier, key)
                self._counts[instance] -= 1
            elif key in tier.orphans:
                self._drop_orphan(tier, key)

    def _drop(self, holder: _Holder, tier: _Tier, key: int) -> None:
        tier.copies.pop(key, None)
        self._release(holder, tier.digests.pop(key))

    def _hold(self, holder: _Holder, digest: int) -> None:
        mask = self._masks.get(digest, 0)
        if mask & holder.bit:
            holder.more[digest] = holder.more.get(digest, 0) + 1
        else:
            self._masks[digest] = self._share(mask | holder.bit)

    def _expire(self, holder: _Holder, now: float | None) -> None:
        while holder.expected and (now is None or holder.expected[0][0] <= now):
            for digest in holder.expected.popleft()[1]:
                self._release(holder, digest)

    def _release(self, holder: _Holder, digest: int) -> None:
        more = holder.more.get(digest)
        if more is not None:
            if more > 1:
                holder.more[digest] = more - 1
            else:
                del holder.more[digest]
            return
        mask = self._masks[digest] & ~holder.bit
        if mask:
            self._masks[digest] = self._share(mask)
        else:
            del self._masks[digest]

    def _share(self, mask: int) -> int:
        if len(self._shared) > MASKS_MAX:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    def check(self) -> None:
        """The two directions agree, and the bounds hold."""
        expected: dict[int, int] = {}
        counts = dict.fromkeys(self._counts, 0)
        for holder in self._by_bit:
            held = [digest for tier in holder.tiers.values() for digest in tier.digests.values()]
            awaited = [digest for _, digests in holder.expected for digest in digests]
            held += awaited
            for digest in awaited:
                expected[digest] = expected.get(digest, 0) | holder.bit
            assert {digest: count - 1 for digest, count in Counter(held).items() if count > 1} == holder.more
            for tier in holder.tiers.values():
                counts[holder.instance] += len(tier.digests)
                for digest in tier.digests.values():
                    expected[digest] = expected.get(digest, 0) | holder.bit
                assert tier.copies.keys() <= tier.digests.keys()
                assert not tier.orphans.keys() & tier.digests.keys()
                assert len(tier.orphans) <= self._orphans_max
                listed = [(parent, child) for parent, children in tier.waiting.items() for child in children]
                assert sorted(listed) == sorted((orphan.parent, key) for key, orphan in tier.orphans.items())
        assert expected == self._masks
        assert counts == self._counts
        assert all(count <= self.blocks_per_instance_max for count in counts.values())
