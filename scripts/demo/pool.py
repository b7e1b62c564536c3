"""The project's own programs, started as a user would start them: store, workers, router."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.processes import Running, Supervisor, program, read_ready, ready_file

START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Started:
    """A program that serves, and the addresses it wrote into its ready file."""

    running: Running
    addresses: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.addresses[name]


def store(
    supervisor: Supervisor, name: str = "store", address: str = "127.0.0.1:0", options: Sequence[str] = (),
    prefix: Sequence[str] = (),
) -> Started:  # fmt: skip
    """Start a store, by the command `prefix` if any: `["store"]` is its address.

    Its data are in the run's folder, or where `options` say.
    """
    where = options or ["--data", str(supervisor.folder / name)]
    return _start(supervisor, name, ["tensorcast", "store", "--listen", address, *where], prefix)


def worker(
    supervisor: Supervisor, store_address: str, name: str = "worker", arena: str = "1GiB", socket: str = "",
    listen: str = "127.0.0.1:0", prefix: Sequence[str] = (), options: Sequence[str] = (),
) -> Started:  # fmt: skip
    """Start a worker: `["worker"]` is what an engine attaches to, `["peer"]` what other workers ask.

    Args:
        supervisor: owns it.
        store_address: the store it joins.
        name: of the worker, and of its log.
        arena: its size.
        socket: `unix:PATH` of its socket, to stand in for a worker that died; else in a folder of its own, since a path
            of more than 107 bytes cannot be a Unix socket.
        listen: where other workers reach it.
        prefix: a command that runs it, for example in another network namespace.
        options: further ones of the command.
    """
    if not socket:
        folder = Path(tempfile.mkdtemp(prefix="tensorcast-"))
        supervisor.cleanup(folder)
        socket = f"unix:{folder}/worker.sock"
    command = ["tensorcast", "worker", "--store", store_address, "--name", name, "--listen", listen]
    return _start(
        supervisor, name, [*command, "--socket", socket.removeprefix("unix:"), "--arena", arena, *options], prefix
    )


def up(supervisor: Supervisor, name: str = "up", arena: str = "1GiB") -> Started:
    """Start a store and a worker in one process."""
    folder = Path(tempfile.mkdtemp(prefix="tensorcast-"))
    supervisor.cleanup(folder)
    return _start(
        supervisor, name, ["tensorcast", "up", "--dir", str(folder), "--store-listen", "127.0.0.1:0", "--arena", arena]
    )


def router(supervisor: Supervisor, engines: Sequence[str], policy: str, name: str = "router", port: int = 0) -> Started:
    """Start a router in front of these engines: `["url"]` is its address."""
    command = ["smetric-router", "serve", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    for url in engines:
        command += ["--engine", url]
    return _start(supervisor, name, command)


def connector(worker_address: str, **settings: Any) -> dict[str, Any]:
    """The engine's `--kv-transfer-config` that attaches it to a worker, with further settings of the connector."""
    return {
        "kv_connector": "TensorcastConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"worker": worker_address, **settings},
    }


def _start(supervisor: Supervisor, name: str, command: list[str], prefix: Sequence[str] = ()) -> Started:
    ready = supervisor.folder / f"{name}.ready.json"
    ready.unlink(missing_ok=True)
    line = [*prefix, program(command[0]), *command[1:], "--ready-file", str(ready)]
    running = supervisor.start(name, line)
    running.wait(ready_file(ready), START_TIMEOUT_S)
    return Started(running, {key: str(value) for key, value in read_ready(ready).items()})
