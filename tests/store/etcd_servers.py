"""Real etcd processes: one cluster of one or three nodes on free ports, that tests may kill, stop and start again."""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.types import Address
from tests.waiting import until_blocking

# A tenth of etcd's usual intervals: a new leader within a second, and leases from one second on.
INTERVALS = ["--heartbeat-interval", "50", "--election-timeout", "500"]


def etcd_program() -> str:
    """Where etcd is. Without it the tests are skipped, unless REQUIRE_ETCD is set, as it is in the continuous integration."""
    found = shutil.which("etcd")
    if found is None and os.environ.get("REQUIRE_ETCD"):
        pytest.fail("REQUIRE_ETCD is set and there is no etcd; on Debian: apt-get install etcd-server")
    if found is None:
        pytest.skip("no etcd here; on Debian: apt-get install etcd-server")
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class EtcdCluster:
    """Started when made, and healthy unless told not to wait for it. Nodes are named by their index."""

    def __init__(self, nodes: int, folder: Path, *more: str, wait: bool = True) -> None:
        self._program = etcd_program()
        self._folder = folder
        self._more = more
        ports = free_ports(2 * nodes)
        self._clients, self._peers = ports[:nodes], ports[nodes:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for node in range(nodes):
            self.start(node, wait=False)
        if wait:
            self.wait_healthy()

    @property
    def addresses(self) -> list[Address]:
        return [Address("tcp", host="127.0.0.1", port=port) for port in self._clients]

    @property
    def flag(self) -> str:
        return ",".join(map(str, self.addresses))

    def start(self, node: int, wait: bool = True) -> None:
        peer, client = (f"http://127.0.0.1:{ports[node]}" for ports in (self._peers, self._clients))
        cluster = ",".join(f"n{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peers))
        command = [
            self._program, "--name", f"n{node}", "--data-dir", str(self._folder / f"n{node}"), *INTERVALS, *self._more,
            "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster,
        ]  # fmt: skip
        with (self._folder / f"n{node}.log").open("ab") as log:
            self._processes[node] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        if wait:
            self.wait_healthy()

    def signal(self, node: int, number: signal.Signals) -> None:
        process = self._processes[node]
        process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all of its threads

    def kill(self, node: int) -> None:
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def post(self, node: int, path: str, body: object, timeout_s: float = 5.0) -> Any:
        url = f"http://{self.addresses[node]}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=timeout_s) as got:
            return json.loads(got.read())

    def healthy(self, node: int) -> bool:
        """It has a leader and reads through it."""
        try:
            self.post(node, "/v3/kv/range", {"key": base64.b64encode(b"x").decode()}, 1.0)
        except (OSError, urllib.error.HTTPError):
            assert self._processes[node].poll() is None, (self._folder / f"n{node}.log").read_text()[-2000:]
            return False
        return True

    def wait_healthy(self) -> None:
        for node in self._processes:
            until_blocking(lambda node=node: self.healthy(node), 30)

    def leader(self) -> int:
        """The node that leads, once there is one."""
        found: list[int] = []

        def look() -> bool:
            for node in self._processes:
                status = self.post(node, "/v3/maintenance/status", {})
                if status.get("leader") == status["header"]["member_id"]:
                    found.append(node)
            return bool(found)

        until_blocking(look, 10)
        return found[0]

    def followers(self) -> Sequence[int]:
        leader = self.leader()
        return [node for node in self._processes if node != leader]

    def close(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self._processes.values():
            process.wait()
