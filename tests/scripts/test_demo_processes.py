"""The supervisor: it notices deaths, and stops what it started, whatever happens to it."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo import guard
from demo.processes import DemoError, Supervisor, ready_file

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FOREVER = "import signal; signal.pause()"
pytestmark = pytest.mark.slow


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), *arguments]


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "this never happened"
        select.select([], [], [], 0.01)


def gone(pid: int) -> bool:
    return not guard.members(pid)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "run", grace_s=5.0) as made:
        yield made


def announcing(path: Path, then: str = FOREVER) -> list[str]:
    return python(f"import pathlib, sys; pathlib.Path(sys.argv[1]).touch()\n{then}", str(path))


def test_leaving_stops_everything(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "run") as made:
        pids = [made.start(f"child-{n}", python(FOREVER)).process.pid for n in range(3)]
    assert all(gone(pid) for pid in pids)


def test_programs_stand_still_and_go_on(supervisor: Supervisor) -> None:
    """With what they have started, and whatever happens meanwhile."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    one, two = (supervisor.start(name, python(code)) for name in ("one", "two"))
    until(lambda: all(len(guard.members(each.process.pid)) == 2 for each in (one, two)))

    def stopped(pid: int) -> bool:
        states = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[0] for each in guard.members(pid)]
        return set(states) == {"T"}

    with contextlib.suppress(KeyboardInterrupt), supervisor.standing_still(one):
        until(lambda: stopped(one.process.pid))
        assert not stopped(two.process.pid)
        raise KeyboardInterrupt
    until(lambda: not stopped(one.process.pid))
    with supervisor.standing_still(one, two):
        two.process.kill()
        two.process.wait()
        supervisor.stop(two)


def test_leaving_by_an_error_stops_everything(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), Supervisor(tmp_path / "run") as made:
        pid = made.start("child", python(FOREVER)).process.pid
        raise KeyboardInterrupt
    assert gone(pid)


def test_grandchildren_are_stopped_too(supervisor: Supervisor, tmp_path: Path) -> None:
    code = f"""
        import os, pathlib, signal, subprocess, sys
        subprocess.Popen([sys.executable, "-I", "-S", "-c", {FOREVER!r}], process_group=0)
        pathlib.Path(sys.argv[1]).touch()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.pause()
        """
    child = supervisor.start("child", python(code, str(tmp_path / "ready")))
    child.wait(ready_file(tmp_path / "ready"), 20)
    assert len(guard.members(child.process.pid)) == 2
    supervisor.grace_s = 0.05
    supervisor.stop(child)
    assert gone(child.process.pid)


def test_a_program_that_ignores_sigterm_is_killed(
    supervisor: Supervisor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ignoring = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FOREVER}"
    code = f"import pathlib, sys\n{ignoring.splitlines()[0]}; pathlib.Path(sys.argv[1]).touch()\n{FOREVER}"
    child = supervisor.start("stubborn", python(code, str(tmp_path / "ready")))
    child.wait(ready_file(tmp_path / "ready"), 20)
    supervisor.grace_s = 0.1
    supervisor.stop(child)
    assert child.process.returncode == -signal.SIGKILL
    assert "stubborn did not stop within" in capsys.readouterr().err


def test_a_death_is_noticed_at_once_and_explained(supervisor: Supervisor) -> None:
    child = supervisor.start("fragile", python("import sys; print('no such model'); sys.exit(3)"))
    started = time.monotonic()
    with pytest.raises(DemoError, match=r"(?s)fragile ended with status 3.*no such model"):
        child.wait(lambda: False, timeout_s=600)
    assert time.monotonic() - started < 60


def test_a_death_by_a_signal_is_named(supervisor: Supervisor) -> None:
    child = supervisor.start("child", python(FOREVER))
    child.process.kill()
    with pytest.raises(DemoError, match="child ended with signal SIGKILL"):
        child.wait(lambda: False, timeout_s=600)
    with pytest.raises(DemoError, match="child ended with signal SIGKILL"):
        supervisor.check()


def test_waiting_has_an_end(supervisor: Supervisor) -> None:
    child = supervisor.start("slow", python(FOREVER))
    with pytest.raises(DemoError, match=r"slow not ready after 0\.1 s"):
        child.wait(lambda: False, timeout_s=0.1)


def test_a_reserved_port_can_be_bound_by_the_program_and_is_given_to_nobody_else(supervisor: Supervisor) -> None:
    ports = [supervisor.port() for _ in range(20)]
    assert len(set(ports)) == 20
    with socket.socket() as server, socket.socket() as visitor:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
        visitor.connect(("127.0.0.1", ports[0]))


PARENT = """
    import pathlib, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell starts in the background
    sys.path.insert(0, sys.argv[1])
    from demo.processes import Supervisor, ready_file, terminated_as_exit
    with terminated_as_exit(), Supervisor(pathlib.Path(sys.argv[2]), grace_s=5.0) as supervisor:
        folder = pathlib.Path(sys.argv[2]) / "sockets"
        folder.mkdir()
        supervisor.cleanup(folder)
        for name in ("one", "two"):
            ready = pathlib.Path(sys.argv[2]) / name
            code = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).touch(); signal.pause()"
            child = supervisor.start(name, [sys.executable, "-I", "-S", "-c", code, str(ready)])
            child.wait(ready_file(ready), 20)
            print(child.process.pid, flush=True)
        import signal
        signal.pause()
    """


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_survives_its_supervisor(tmp_path: Path, number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(SCRIPTS), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert not any(gone(pid) for pid in pids)
        os.kill(parent.pid, number)
        assert parent.wait(30) == status
    until(lambda: all(gone(pid) for pid in pids) and not (tmp_path / "sockets").exists())
