"""For every test: what it started has ended and what it opened is closed when it is over."""

import asyncio
import gc
import inspect
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

ENDING_S = 10.0
# The interpreter's own helper of multiprocessing, which lives as long as the interpreter.
ALLOWED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# An engine starts in a minute or more, and the first test that wants it waits for that.
ENGINE_TIMEOUT_S = 900
UNMARKED_S_MAX = 0.25
_slow: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the engine tests their time, and those with a loop the look at its connections."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.fixturenames.insert(0, "connections_end")  # set up before the test's own, and so over after them
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the tests that should have the marker `slow`."""
    marked = "slow" in report.keywords or "engine" in report.keywords
    if report.when == "call" and report.duration > UNMARKED_S_MAX and not marked:
        _slow.append(f"{report.duration:.2f} s  {report.nodeid}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name them. It fails nothing: a busy machine makes any test slow."""
    if _slow:
        terminalreporter.section(f"longer than {UNMARKED_S_MAX} s and not marked slow")
        terminalreporter.write_line("\n".join(sorted(_slow, reverse=True)))


def children() -> dict[int, str]:
    """The live child processes of this one, by id, with their command lines."""
    found: dict[int, str] = {}
    for task in Path("/proc/self/task").iterdir():
        for pid in _read(task / "children").split():
            state = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1]
            command = _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
            if state and not any(name in command for name in ALLOWED):
                found[int(pid)] = command or "a process that was never waited for"
    return found


def named_sockets() -> set[str]:
    """Unix sockets with an address that this process holds open."""
    mine = {os.path.basename(target) for target in _open_files() if target.startswith("socket:")}  # noqa: PTH119
    found = set()
    for line in _read(Path("/proc/net/unix")).splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and f"socket:[{fields[6]}]" in mine:
            found.add(fields[7])
    return found


def shared_memory() -> int:
    """How many shared-memory files this process holds open."""
    return sum(target.startswith(("/memfd:", "/dev/shm/")) for target in _open_files())


def _open_files() -> list[str]:
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:  # The one of this listing itself.
            continue
    return targets


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # It ended meanwhile.
        return ""


@pytest.fixture
async def connections_end() -> AsyncIterator[None]:
    """No connection outlives the loop of its test, where a later test would be blamed for it.

    The end of a connection takes its loop a few turns after `close()`, and longer at the side that only hears of it.
    """
    yield
    loop = asyncio.get_running_loop()
    transports = getattr(loop, "_transports", {})

    def left() -> list[asyncio.Transport]:
        return [each for each in list(transports.values()) if each.get_extra_info("socket").fileno() >= 0]

    deadline = loop.time() + ENDING_S
    while (found := left()) and loop.time() < deadline:  # noqa: ASYNC110 - the ends of connections are no events
        await asyncio.sleep(0.002)
    named = [f"{each!r} at {each.get_extra_info('sockname')}" for each in found]
    for each in found:
        each.abort()
    await asyncio.sleep(0)
    assert not found, "connections left open by the test: " + "; ".join(named)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No child process, no Unix socket and no shared memory outlives its test. Wider fixtures are set up before this one."""
    processes, sockets, memory = set(children()), named_sockets(), shared_memory()
    yield

    def left() -> list[str]:
        found = [f"process {pid}: {command}" for pid, command in children().items() if pid not in processes]
        found += [f"socket {path}" for path in named_sockets() - sockets]
        if (more := shared_memory() - memory) > 0:
            found.append(f"{more} shared-memory files")
        return found

    deadline = time.monotonic() + ENDING_S
    while (found := left()) and time.monotonic() < deadline:
        gc.collect()  # What only a cycle of garbage still holds is not a leak of the test's.
        time.sleep(0.01)
    assert not found, "left behind by the test: " + "; ".join(found)
