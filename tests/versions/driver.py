"""What an engine does with its worker, as a program: run with whichever version of the package is first on the path.

    python driver.py WORKER save FIRST COUNT      saves pages, prints how many
    python driver.py WORKER load FIRST COUNT      loads pages, prints how many; a page with other bytes is an error

It uses only what every version has.
"""

import random
import sys
import time

import xxhash

from tensorcast_connector.client.attachment import Attachment
from tensorcast_connector.config import parse_address
from tensorcast_connector.net.sockets import SocketNetwork

SPACE = b"v" * 16
PAGE_BYTES = 10_000


def content(block_hash: bytes) -> bytes:
    """The bytes of a page."""
    return random.Random(block_hash).randbytes(PAGE_BYTES)


def main() -> None:
    """See the module."""
    worker, action, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    hashes = [b"%031d" % number + bytes([number % 256]) for number in range(first, first + count)]
    attachment = Attachment(SocketNetwork(), parse_address(worker, "worker"), "driver")
    deadline = time.monotonic() + 10
    while not attachment.connected:
        assert time.monotonic() < deadline, "not attached"
        time.sleep(0.01)
    mapping = attachment.mapping
    if action == "save":
        slots = attachment.reserve(SPACE, hashes, PAGE_BYTES, mapping)
        for each, slot in zip(hashes, slots, strict=True):
            assert slot is not None
            slot[:] = content(each)
        attachment.commit(SPACE, hashes, [xxhash.xxh3_64_intdigest(content(each)) for each in hashes])
        done = count
    else:
        attachment.lookup("l", [SPACE], hashes, 5.0).result(10)
        pages = attachment.acquire("h", SPACE, hashes, mapping)
        for each, page in zip(hashes, pages, strict=False):
            assert bytes(page) == content(each), "other bytes than were saved"
        done = len(pages)
    attachment.close()
    print(done)


main()
