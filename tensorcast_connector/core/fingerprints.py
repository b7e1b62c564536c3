"""Page keys as numbers of 64 bits, hundreds at once: what a home's index keeps of a key.

    bits 0 to 55    from the whole key: keyspace, block hash, and how long it is
    bits 56 to 63   the last byte of the key, from which its shard comes

Two keys with the same fingerprint are one page to the index, and then it may name a worker that has the other page only, or
forget one that is there. That is a miss at worst: locations are advice, and every page that is fetched is checked by key and
digest. It happens to one pair of keys in 2**64, since the last byte is from a digest too: of a million pages in an index, a
strange key is taken for one of them once in 10**13 lookups. No page has the fingerprint 0; one that would is not listed.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tensorcast_connector.wire.keys import Keys, by_length, pack

Fingerprints = NDArray[np.uint64]

_KEY_BITS = np.uint64((1 << 56) - 1)
_LAST_BYTE = np.uint64(0xFF << 56)
_LAST_BYTE_AT = np.uint64(56)
_HALF = np.uint64(32)
_WORD_BYTES = 8
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, as all multipliers here: no two values become one


@cache
def _multipliers(key_bytes: int) -> tuple[Fingerprints, np.uint64]:
    """A number for each word of a key, and what is added for its length."""
    words = -(-key_bytes // _WORD_BYTES)
    mixed = np.arange(1, words + 2, dtype=np.uint64) * _SPREAD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed |= np.uint64(1)
    return mixed[:-1], np.uint64(int(mixed[-1]) * key_bytes % (1 << 64))


def of(keys: Sequence[bytes]) -> Fingerprints:
    """Of any keys; those that came packed are not looked at one by one."""
    if isinstance(keys, Keys):
        return _of_packed(keys.packed, keys.key_bytes)
    found = np.zeros(len(keys), dtype=np.uint64)
    for places in by_length(keys):
        found[places] = of(pack([keys[at] for at in places]))
    return found


def _of_packed(keys: bytes, key_bytes: int) -> Fingerprints:
    if not keys:
        return np.zeros(0, dtype=np.uint64)
    words = -(-key_bytes // _WORD_BYTES)
    if key_bytes == words * _WORD_BYTES:
        read = np.frombuffer(keys, dtype="<u8").reshape(-1, words)
        last = read[:, -1] & _LAST_BYTE
    else:
        raw = np.frombuffer(keys, dtype=np.uint8).reshape(-1, key_bytes)
        padded = np.zeros((len(raw), words * _WORD_BYTES), dtype=np.uint8)
        padded[:, :key_bytes] = raw
        read = padded.view("<u8")
        last = raw[:, -1].astype(np.uint64) << _LAST_BYTE_AT
    factors, length = _multipliers(key_bytes)
    # One round is enough for digests. Of keys with counters the upper half is even and the lower one not quite.
    folded = read >> _HALF
    folded ^= read  # a product depends on the lower bits only, and counters may be in the upper ones
    mixed = folded @ factors
    mixed += length
    mixed ^= mixed >> _HALF
    mixed *= _SPREAD
    mixed &= _KEY_BITS
    mixed |= last
    return mixed


def last_bytes(fingerprints: Fingerprints) -> NDArray[np.int64]:
    """What the keys end with."""
    return (fingerprints >> _LAST_BYTE_AT).view(np.int64)


def distinct(fingerprints: Fingerprints) -> Fingerprints:
    """Each once, in order, and no 0."""
    ordered = np.sort(fingerprints)
    first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    first &= ordered != 0
    once: Fingerprints = ordered[first]
    return once
