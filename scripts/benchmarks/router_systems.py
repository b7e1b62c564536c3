"""What `scripts/bench router` measures: fake engines, the router, its peers and the bare ASGI proxy, as processes."""

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from demo.processes import DemoError, Running, Supervisor, answers, read_ready, ready_file

from benchmarks.driver import Driver, python_path
from benchmarks.environments import python_of
from benchmarks.face import OURS, BenchError
from benchmarks.programs.load import family

BARE, DIRECT = "bare ASGI proxy", "direct"
PYTHON_PEER = "production-stack"
COMPILED_PEERS = ("sglang-router", "smg", "vllm-router")
START_TIMEOUT_S = 60.0


@contextlib.contextmanager
def on_cpus(cpus: Sequence[int]) -> Iterator[None]:
    """What is started in here stays on these CPUs, and counts no others when it chooses its number of threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def module(name: str, *arguments: str) -> list[str]:
    """The command line of one of our programs."""
    return [sys.executable, "-m", f"benchmarks.programs.{name}", *arguments]


@dataclass(frozen=True, slots=True)
class Engine:
    """A fake engine."""

    name: str
    running: Running
    url: str

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class Router:
    """A router, or whatever stands in its place."""

    name: str
    running: Running
    url: str

    def pids(self) -> list[int]:
        """All its processes."""
        return family(self.running.process.pid)


@dataclass(slots=True)
class Machine:
    """Starts and stops all processes. Routers have a CPU of their own, engines and the load another.

    Attributes:
        missing: peers that cannot run here, and why.
    """

    supervisor: Supervisor
    stack: ExitStack
    router_cpus: Sequence[int]
    other_cpus: Sequence[int]
    missing: dict[str, str] = field(default_factory=dict)
    _serial: int = 0

    def _name(self, what: str) -> str:
        self._serial += 1
        return f"{self._serial}-{what.replace(' ', '-')}"

    def engine(self, name: str, port: int = 0) -> Engine:
        """A fake engine, on a certain port if it is to come back where it was."""
        run = self._name(name)
        path = self.supervisor.folder / f"{run}.ready"
        path.unlink(missing_ok=True)
        with on_cpus(self.other_cpus):
            running = self.supervisor.start(run, module("engine", str(path), name, str(port)), env=python_path())
        running.wait(ready_file(path), START_TIMEOUT_S)
        return Engine(name, running, f"http://127.0.0.1:{read_ready(path)['port']}")

    def engines(self, count: int) -> list[Engine]:
        """So many."""
        return [self.engine(f"engine-{number}") for number in range(count)]

    def router(self, name: str, engines: Sequence[Engine], settings: Sequence[str] = ()) -> Router:
        """A router in front of these engines.

        Args:
            name: "ours", a peer, or BARE.
            settings: of ours, KEY=VALUE.

        Raises:
            BenchError: it cannot be installed or does not start.
        """
        return self._up(self._begun(name, engines, settings))

    def _begun(self, name: str, engines: Sequence[Engine], settings: Sequence[str] = ()) -> Router:
        port = self.supervisor.port()
        urls = [engine.url for engine in engines]
        command, env = command_of(name, port, self.supervisor.port(), urls, settings)
        with on_cpus(self.router_cpus):
            running = self.supervisor.start(self._name(name), command, env={**python_path(), **env})
        return Router(name, running, f"http://127.0.0.1:{port}")

    def _up(self, router: Router) -> Router:
        path = "/v1/models" if router.name == BARE else "/health"
        try:
            router.running.wait(answers(router.url + path), START_TIMEOUT_S)
        except DemoError as error:
            self.supervisor.stop(router.running)
            raise BenchError(f"{router.name} does not start: {str(error).splitlines()[-1].strip(' |')}") from None
        return router

    def routers(self, names: Sequence[str], engines: Sequence[Engine]) -> list[Router]:
        """Those that run here, in front of the same engines; why others do not is in `missing`."""
        begun: list[Router] = []
        started: list[Router] = []
        for name in names:
            if name not in self.missing:
                try:
                    begun.append(self._begun(name, engines))
                except BenchError as error:
                    self.missing[name] = str(error)
        for each in begun:
            try:
                started.append(self._up(each))
            except BenchError as error:
                self.missing[each.name] = str(error)
        return started

    def sharing(self, count: int) -> list[list[str]]:
        """The settings of so many routers that tell each other what they learn."""
        addresses = [f"127.0.0.1:{self.supervisor.port()}" for _ in range(count)]
        token = f"peer_token={secrets.token_hex(16)}"
        return [
            [f"peer_listen={mine}", f"peers={json.dumps([each for each in addresses if each != mine])}", token]
            for mine in addresses
        ]

    def replicas(self, engines: Sequence[Engine], settings: Sequence[Sequence[str]]) -> list[Router]:
        """Routers of ours in front of the same engines, each with its settings; several, which share, have met.

        Raises:
            BenchError: one does not start.
        """
        begun = [self._begun(OURS, engines, each) for each in settings]
        made = [self._up(each) for each in begun]
        for router in made if len(made) > 1 else ():
            router.running.wait(_hears(router, made), START_TIMEOUT_S)
        return made

    def missing_of(self, names: Sequence[str]) -> dict[str, str]:
        """Why some of these peers do not run here."""
        return {name: why for name, why in self.missing.items() if name in names}

    def stop(self, *what: Router | Engine) -> None:
        """Ends them."""
        self.supervisor.stop(*(each.running for each in what))

    def driver(self, name: str, cpus: Sequence[int] | None = None) -> Driver:
        """One of our measuring programs."""
        log = self.supervisor.folder / f"{name}.log"
        return self.stack.enter_context(Driver(name, module(name), log, cpus or self.other_cpus)).ready()


def _hears(router: Router, all_of_them: Sequence[Router]) -> Callable[[], bool]:
    """A readiness condition: it has heard of a prompt that another one has sent to an engine; each look sends one more."""

    def ready() -> bool:
        for number, each in enumerate(all_of_them):
            if each is not router:
                body = {"model": "fake", "messages": [{"role": "user", "content": f"{number} {router.name}" * 200}]}
                asked = urllib.request.Request(
                    f"{each.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
                )
                urllib.request.urlopen(asked, timeout=5).close()
        with urllib.request.urlopen(f"{router.url}/metrics", timeout=5) as answer:
            found = re.search(rb'smetric_router_shared_total\{kind="heard"\} (\S+)', answer.read())
        return found is not None and float(found[1]) > 0

    return ready


def command_of(
    name: str, port: int, metrics_port: int, urls: Sequence[str], settings: Sequence[str]
) -> tuple[list[str], Mapping[str, str]]:
    """How a router is started, with what in its environment. Installs it first if it is a peer.

    Raises:
        BenchError: it cannot be installed.
    """
    if name == OURS:
        command = [sys.executable, "-m", "smetric_router.cli", "serve", "--port", str(port), "--log-level", "warning"]
        command += [word for url in urls for word in ("--engine", url)]
        return command + [word for each in settings for word in ("--set", each)], {}
    if name == BARE:
        return module("asgi_proxy", str(port), *urls), {}
    requirements = Path(__file__).with_name(f"router.{name}.requirements.txt")
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if name == PYTHON_PEER:
        python = python_of(name, requirements, interpreter=newer_python())
        return [
            str(python), "-m", "vllm_router.app", *where, "--service-discovery", "static",
            "--static-backends", ",".join(urls), "--static-models", ",".join(["fake"] * len(urls)),
            "--routing-logic", "prefixaware", "--log-level", "warning",
        ], {"PYTHONPATH": ""}  # fmt: skip
    bin_folder = python_of(name, requirements).parent
    launch = [] if name == "vllm-router" else ["launch"]
    level = "warning" if name == "vllm-router" else "warn"
    return [
        str(bin_folder / name), *launch, *where, "--worker-urls", *urls, "--policy", "cache_aware",
        "--prometheus-port", str(metrics_port), "--log-level", level,
    ], {"PYTHONPATH": ""}  # fmt: skip


def newer_python() -> str:
    """A Python that the Python peer runs on.

    Raises:
        BenchError: there is none.
    """
    for name in ("python3.12", "python3.13"):
        for folder in os.get_exec_path():
            # The first of that name may only say which versions there are, as pyenv's does.
            path = shutil.which(name, path=folder)
            if path is not None and subprocess.run([path, "-V"], capture_output=True, check=False).returncode == 0:
                return path
    raise BenchError("it needs Python 3.12 or 3.13, and none that runs is on the path")


def machine(stack: ExitStack, folder: Path | None) -> Machine:
    """The processes of one run; leaving the stack stops them.

    Raises:
        BenchError: there are not two CPUs.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise BenchError("it needs two CPUs, one for routers and one for engines and load")
    supervisor = stack.enter_context(Supervisor(folder, grace_s=5.0))
    return Machine(supervisor, stack, cpus[-1:], cpus[:-1])
