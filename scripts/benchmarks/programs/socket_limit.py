"""The limit of reading from another host: bytes over two bare TCP connections of the loopback interface, into touched memory.

    python -m benchmarks.programs.socket_limit BYTES

{"do": "send"} is answered with the {"seconds"} that they took. The sender is a process of its own.
"""

import json
import mmap
import os
import socket
import sys
import threading
import time

STREAMS = 2
BLOCK_BYTES = 1 << 20


def send(port: int, count: int) -> None:
    """One stream of so many bytes, again and again when it is told so by a byte."""
    block = bytes(BLOCK_BYTES)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv(1):
            for at in range(0, count, BLOCK_BYTES):
                connection.sendall(memoryview(block)[: count - at])


def receive(connection: socket.socket, target: memoryview) -> None:
    """Asks for the bytes and takes them."""
    connection.sendall(b"x")
    while target:
        target = target[connection.recv_into(target, min(len(target), BLOCK_BYTES)) :]


def main() -> None:
    """See the module."""
    size = int(sys.argv[1]) // STREAMS
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not os.fork():
            senders = [threading.Thread(target=send, args=(port, size)) for _ in range(STREAMS)]
            for each in senders:
                each.start()
            for each in senders:
                each.join()
            os._exit(0)
        connections = [listener.accept()[0] for _ in range(STREAMS)]
    print("{}", flush=True)
    for _ in sys.stdin:
        view = memoryview(mmap.mmap(-1, size * STREAMS))  # not kept: others need the memory in between
        for at in range(0, len(view), mmap.PAGESIZE):
            view[at] = 1
        before = time.perf_counter()
        threads = [
            threading.Thread(target=receive, args=(each, view[number * size : (number + 1) * size]))
            for number, each in enumerate(connections)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        print(json.dumps({"seconds": time.perf_counter() - before}), flush=True)


if __name__ == "__main__":
    main()
