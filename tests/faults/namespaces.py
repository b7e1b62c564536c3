"""Hosts as network namespaces on one bridge, so that the link between two of them can be cut."""

import itertools
import os
import shutil
import subprocess
from dataclasses import dataclass

_switches = itertools.count()


def ip(*arguments: str) -> None:
    """Runs the `ip` command."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def possible() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "the ip command is not installed (Debian: iproute2)"
    name = f"tc{os.getpid()}probe"
    try:
        ip("netns", "add", name)
        ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return ""


@dataclass(frozen=True)
class HostNetwork:
    """One host: `prefix` runs a command on it."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What goes before a command that is to run on this host."""
        return ["ip", "netns", "exec", self.name]


class Switch:
    """A bridge with an address of its own and hosts on it. `close` takes everything away."""

    def __init__(self, hosts: int) -> None:
        # Never the same twice: the kernel takes the links of a namespace away some time after the namespace.
        self._id = os.getpid() % 10_000 * 10 + next(_switches) % 10
        self._bridge = f"tcb{self._id}"
        self._subnet = f"10.{64 + self._id % 128}.{self._id // 128 % 256}"
        self.address = f"{self._subnet}.1"
        self.hosts: list[HostNetwork] = []
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for number in range(hosts):
                self._add(number)
        except BaseException:
            self.close()
            raise

    def _add(self, number: int) -> None:
        host = HostNetwork(f"tc{self._id}h{number}", f"{self._subnet}.{number + 2}")
        cable = f"tcv{self._id}{number}"
        ip("netns", "add", host.name)
        self.hosts.append(host)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        ip("link", "set", cable, "master", self._bridge, "up")
        ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        ip("-n", host.name, "link", "set", "eth0", "up")
        ip("-n", host.name, "link", "set", "lo", "up")

    def cut(self, sender: HostNetwork, receiver: HostNetwork) -> None:
        """From now on nothing from `sender` arrives at `receiver`."""
        ip("-n", sender.name, "route", "add", "blackhole", f"{receiver.address}/32")

    def heal(self, sender: HostNetwork, receiver: HostNetwork) -> None:
        """Ends a cut."""
        ip("-n", sender.name, "route", "delete", "blackhole", f"{receiver.address}/32")

    def close(self) -> None:
        """Takes the bridge and the hosts away; their programs must have ended."""
        for host in self.hosts:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", self._bridge], check=False, capture_output=True)
