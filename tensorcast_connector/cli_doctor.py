"""`tensorcast doctor`: checks this host, its worker and the workers and the store of the cluster, and says what to change."""

import argparse
import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorcast_connector.cli_callers import as_age, sockets_of_workers, write_json, write_line
from tensorcast_connector.cli_doctor_host import (
    SHARING,
    Finding,
    Machine,
    check_disk,
    check_huge_pages,
    check_memory,
    check_open_files,
    check_socket_file,
    check_versions,
    ok,
    problem,
    warning,
)
from tensorcast_connector.cli_network import access_flags, network_of_flags
from tensorcast_connector.client.session import connect
from tensorcast_connector.config import (
    DOCTOR_CLOCK_PROBLEM_S,
    DOCTOR_CLOCK_WARNING_S,
    DOCTOR_SIGNALS_AGE_S,
    SIGNALS_TIMEOUT_S,
    default_runtime_dir,
    parse_address,
)
from tensorcast_connector.errors import DeadlineExceeded, TensorcastError, Unauthorized
from tensorcast_connector.net.descriptors import receive_arena
from tensorcast_connector.net.mapping import map_memory
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Network
from tensorcast_connector.settings import WorkerConfig
from tensorcast_connector.store.client import read_cluster
from tensorcast_connector.types import Address
from tensorcast_connector.wire.messages import PROTOCOL_VERSION, GetSignals, GetStatistics, Signals, Statistics
from tensorcast_connector.worker.signals import find_interface

NAME = "tensorcast doctor"
STORE = WorkerConfig().store


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker said, and the middle of the time in which it was asked, by our clock in seconds since 1970."""

    server_id: str
    version: int
    signals: Signals
    statistics: Statistics
    at_unix_s: float


class Doctor:
    """Goes through everything once.

    Args:
        worker: address of a worker; the only one of this user and host if empty.
        store: addresses of stores with commas; if empty the usual one, which need not be there.
    """

    def __init__(self, worker: str, store: str, machine: Machine, network: Network, chance: random.Random) -> None:
        self._worker = worker
        self._store = store
        self._machine = machine
        self._network = network
        self._chance = chance
        self._findings: list[Finding] = []
        self._address: Address | None = None  # of the worker, if it answers
        self._disabled: dict[str, str] = {}  # what serves without the pool, and since when, by whom and why

    async def examine(self) -> list[Finding]:
        """All that was found, in the order it was looked at."""
        add = self._findings.append
        self._findings += check_versions(self._machine)
        pid = await self._check_worker()
        add(check_open_files(self._machine, pid))
        add(check_huge_pages(self._machine))
        members = await self._check_store()
        if self._address is not None and not (members and self._store):
            members = await self._members_of_gateway() or members
        await self._check_members(members)
        self._findings += [
            warning("disabled", f"{what} serves without the pool, {note}: `tensorcast enable {what}` when that is over")
            for what, note in sorted(self._disabled.items())
        ]
        return self._findings

    # --- the worker of this host ---

    async def _check_worker(self) -> int:
        """Its process id; 0 if that is not known."""
        add = self._findings.append
        text = self._worker or self._only_socket()
        if not text:
            return 0
        address = parse_address(text, "worker")
        if address.scheme == "unix":
            add(check_socket_file(Path(address.path), self._machine))
            if self._findings[-1].text.startswith("there is no"):
                return 0
        try:
            answer = await self._ask(address)
        except TensorcastError as error:
            what = f"start the worker again if it has died; {SHARING}" if address.scheme == "unix" else _REACH
            add(_unanswered("worker", str(address), error, what))
            return 0
        self._address = address
        add(_version("worker", answer.server_id, answer.version))
        if address.scheme != "unix":
            return 0
        add(await self._check_mapping(address))
        values = {**answer.statistics.values, **answer.signals.values}
        add(check_memory(self._machine, int(values.get("arena_total_bytes", 0)), values))
        return peer_pid(address.path)

    def _only_socket(self) -> str:
        folder = default_runtime_dir()
        found = sockets_of_workers(folder)
        if len(found) == 1:
            return f"unix:{found[0]}"
        several = f"{len(found)} workers have their sockets" if found else "no worker has its socket"
        how = warning if self._store else problem
        self._findings.append(how("worker", f"{several} in {folder}: say which with --worker unix:/path; {SHARING}"))
        return ""

    async def _check_mapping(self, address: Address) -> Finding:
        """Really maps the worker's memory: what engines and callers of this host do first."""
        try:
            descriptor, info = await receive_arena(address.path, NAME)
            try:
                mapped = map_memory(descriptor, info.arena_bytes)
                bytes(mapped.buffer[:1])  # it is read, too
                mapped.close()
            finally:
                os.close(descriptor)
        except (TensorcastError, OSError) as error:
            return problem(
                "memory sharing", f"the worker's memory cannot be mapped here ({error}): nothing but the socket itself "
                f"may be between, no proxy and no other kernel; {SHARING}",
            )  # fmt: skip
        return ok("memory sharing", f"the worker's {info.arena_bytes >> 20} MiB of pages can be mapped here")

    # --- the cluster ---

    async def _check_store(self) -> dict[str, str]:
        """The addresses of the workers that it lists, by id."""
        stores = [parse_address(each.strip(), "store") for each in (self._store or STORE).split(",")]
        members: dict[str, str] = {}
        for address in stores:
            client = RpcClient(self._network, address, "client", NAME, self._chance)
            client.start()
            try:
                await client.wait_connected(SIGNALS_TIMEOUT_S, patient=False)
                if client.server != "store":
                    raise TensorcastError(f"it is a {client.server}")
                view = await read_cluster(self._network, [address], NAME, self._chance)
            except TensorcastError as error:
                if self._store or isinstance(error, Unauthorized):
                    self._findings.append(_unanswered("store", str(address), error, _REACH))
                else:
                    self._findings.append(
                        ok("store", f"none at {address}; say with --store where it is to have it checked")
                    )
                continue
            finally:
                await client.close()
            members |= {each.worker_id: each.address for each in view.workers.values()}
            self._disabled |= view.disabled
            self._findings.append(_version("store", str(address), client.version))
            local = address.is_loopback or await find_interface(address.host) is not None
            if local and client.server_id.startswith("/"):
                self._findings.append(check_disk(self._machine, client.server_id))
        return members

    async def _members_of_gateway(self) -> dict[str, str]:
        """As our worker lists them."""
        assert self._address is not None
        try:
            async with await connect(str(self._address), name=NAME, network=self._network) as session:
                listed = {each.worker_id: each.address for each in await session.list_workers()}
                with contextlib.suppress(Unauthorized):  # a tenant's token
                    self._disabled |= await session.list_disabled()
                me = session.worker_id
        except TensorcastError as error:
            self._findings.append(warning("workers", f"the worker does not say who else there is ({error})"))
            return {}
        if me not in listed:
            text = f"{me} is in no cluster: it does not reach its store; look at its --store and its log"
            self._findings.append(problem("workers", text))
        return listed

    async def _check_members(self, members: dict[str, str]) -> None:
        """Everybody at once, where the other workers reach it."""
        if not members:
            return

        async def check(worker_id: str, text: str) -> list[Finding]:
            try:
                answer = await self._ask(parse_address(text, "address"))
            except TensorcastError as error:
                return [_unanswered("workers", f"{worker_id} at {text}", error, _REACH)]
            if answer.server_id != worker_id:
                other = f"{answer.server_id} answers at {text}, where {worker_id} should"
                return [problem("workers", f"{other}: start it with an --advertise of its own that all hosts reach")]
            return [_version("workers", f"{worker_id} at {text}", answer.version), check_clock(worker_id, answer)]

        for each in await asyncio.gather(*(check(*member) for member in sorted(members.items()))):
            self._findings += each

    async def _ask(self, address: Address) -> Answer:
        """What a worker says of itself. Raises TensorcastError."""
        client = RpcClient(self._network, address, "client", NAME, self._chance)
        client.start()
        try:
            async with asyncio.timeout(SIGNALS_TIMEOUT_S):
                await client.wait_connected(2 * SIGNALS_TIMEOUT_S, patient=False)
                if client.server != "worker":
                    raise TensorcastError(f"it is a {client.server}")
                asked = self._machine.wall()
                signals = await client.call(GetSignals(), Signals, 2 * SIGNALS_TIMEOUT_S)
                at = (asked + self._machine.wall()) / 2
                statistics = await client.call(GetStatistics(), Statistics, 2 * SIGNALS_TIMEOUT_S)
                return Answer(client.server_id, client.version, signals, statistics, at)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {SIGNALS_TIMEOUT_S:g} s") from None
        finally:
            await client.close()


_REACH = "is it running, is its address one that all hosts reach (--listen, --advertise), and does no firewall close the port?"


_SAME = (
    "it is there; run doctor with the --token-file, --tls-cert, --tls-key and --tls-ca that it was started with, or with none if "
    "it has none"
)


def _unanswered(check: str, who: str, error: TensorcastError, reach: str) -> Finding:
    """It does not answer. One that refuses can be reached: then it is not the network that has to be looked at."""
    if isinstance(error, Unauthorized):
        return problem(check, f"{who} refuses this command ({error}): {_SAME}")
    return problem(check, f"{who} does not answer ({error}): {reach}")


def _version(check: str, who: str, version: int) -> Finding:
    if version < PROTOCOL_VERSION:
        return warning(check, f"{who} answers and speaks protocol {version}, this is {PROTOCOL_VERSION}: upgrade it")
    return ok(check, f"{who} answers, protocol {version}")


def check_clock(worker_id: str, answer: Answer) -> Finding:
    """A worker's clock against ours, and whether it still measures itself."""
    signals = answer.signals
    if signals.age_s > DOCTOR_SIGNALS_AGE_S:
        age = as_age(signals.age_s)
        return warning("clock", f"{worker_id} has not measured itself for {age}: it is overloaded, or was stopped")
    off_s = signals.as_of_unix_s + signals.age_s - answer.at_unix_s
    text = f"the clock of {worker_id} is {as_age(abs(off_s))} {'ahead of' if off_s > 0 else 'behind'} ours"
    if abs(off_s) > DOCTOR_CLOCK_PROBLEM_S:
        return problem(
            "clock", f"{text}: deadlines of plans and ages are wrong by that; run an NTP client on both hosts"
        )
    if abs(off_s) > DOCTOR_CLOCK_WARNING_S:
        return warning("clock", f"{text}: run an NTP client on both hosts")
    return ok("clock", f"{worker_id} has our time, give or take {max(0.1, abs(off_s)):.1f} s")


def peer_pid(path: str) -> int:
    """The process that serves a Unix socket, as it is numbered here; 0 if it is not seen from here."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        probe.connect(path)
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])
    return 0


# --- the command ------------------------------------------------------------------------------------------------------


def doctor_flags(sub: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    """The flags of `tensorcast doctor`."""
    sub.set_defaults(run=run)
    access_flags(sub)
    sub.add_argument("--worker", metavar="ADDRESS", default="", help="default: the one of this user and host")
    sub.add_argument("--store", metavar="HOST:PORT,...", default="", help=f"default: {STORE}, if there is one")
    sub.add_argument("--json", action="store_true", help="one object, described in docs/commands.md")


def run_doctor(args: argparse.Namespace, machine: Machine | None = None) -> None:
    """`tensorcast doctor`; exits with status 1 if there is a problem."""
    doctor = Doctor(args.worker, args.store, machine or Machine(), network_of_flags(args), random.Random())
    findings = asyncio.run(doctor.examine())
    show_findings(findings, args.json)
    if any(each.level == "problem" for each in findings):
        raise SystemExit(1)


def show_findings(findings: Sequence[Finding], as_json: bool) -> None:
    """One line each."""
    if as_json:
        levels = [each.level for each in findings]
        write_json({"problems": levels.count("problem"), "warnings": levels.count("warning"),
                    "findings": [each._asdict() for each in findings]})  # fmt: skip
        return
    for each in findings:
        write_line(f"{each.level:8} {each.check}: {each.text}")
