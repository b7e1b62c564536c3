"""A program that reads an artifact of its host, and says what that costs.

    python -m benchmarks.programs.reader ADDRESS NAME

{"do": "read"} is answered with the {"seconds"} that `tensor_dict` took, once every byte was looked at; {"do": "memory"} with
the bytes that are resident in this process, {"resident": all, "private": those that no other process has}, each less what
there was before.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from tensorcast_connector.client.blocking import connect_blocking


def memory() -> tuple[int, int]:
    """Resident bytes, and those that are in no other process."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.replace(":", " ").split()
        found[name] = int(value) * 1024
    return found["Rss"], found["Private_Clean"] + found["Private_Dirty"]


def main() -> None:
    """See the module."""
    address, name = sys.argv[1:]
    with connect_blocking(address) as session:
        session.list_artifacts()  # all that is needed for a first call is there
        before = memory()
        print("{}", flush=True)
        tensors: dict[str, Any] = {}
        for line in sys.stdin:
            if json.loads(line)["do"] == "read":
                start = time.perf_counter()
                tensors = session.artifact(name).tensor_dict()
                seconds = time.perf_counter() - start
                for each in tensors.values():
                    each.max()
                answer: dict[str, Any] = {"seconds": seconds}
            else:
                resident, private = memory()
                answer = {"resident": resident - before[0], "private": private - before[1]}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
