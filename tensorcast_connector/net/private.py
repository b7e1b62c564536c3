"""Where processes of one user meet on one host: folders and Unix sockets that nobody else can touch."""

import errno
import os
import socket
import stat
from pathlib import Path

from tensorcast_connector.errors import ConfigError


def bind_private(path: str) -> socket.socket:
    """A bound Unix socket that only its owner can use; one that a dead process left behind is replaced.

    Raises:
        ConfigError: somebody serves there, or something else is in the way.
        OSError: it cannot be made.
    """
    private_directory(Path(path).parent)
    _remove_stale_socket(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), 0o600)  # before bind: the file is born with this mode
        sock.setblocking(False)
        sock.bind(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale_socket(path: str) -> None:
    """Removes the socket file of a process that died; refuses if somebody answers there or it is no socket."""
    try:
        if not stat.S_ISSOCK(Path(path).lstat().st_mode):
            raise ConfigError(f"cannot listen on unix:{path}: a file that is no socket is in the way")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        answer = probe.connect_ex(path)
    if answer == errno.ECONNREFUSED:
        Path(path).unlink(missing_ok=True)
    elif answer in (0, errno.EAGAIN):  # EAGAIN: it is busy, but there
        raise ConfigError(
            f"cannot listen on unix:{path}: another process serves there; stop it or choose another socket"
        )
    elif answer != errno.ENOENT:
        raise OSError(answer, os.strerror(answer))


def check_owner_only(field: str, path: str, mode: int) -> None:
    """Raises ConfigError for a secret file, named by `field`, with a mode that lets others read it, as ssh does for its keys."""
    if mode & 0o077:
        raise ConfigError(f"{field}={path!r} can be read by others (mode {mode & 0o777:03o}); chmod 600 it")


def private_directory(path: Path) -> None:
    """Makes `path` and what is missing above it (mode 0700); one that exists must be ours and writable by us alone.

    Others could replace a socket or a database in any other folder by their own.

    Raises:
        ConfigError: it cannot be made, or is not private.
    """
    try:
        for folder in reversed([path, *path.parents]):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"cannot make the folder {path}: a file of that name is in the way")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the folder {path} belongs to another user, who could replace what is in it; choose a sub-folder of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"the folder {path} is writable by others, who could replace what is in it; choose another or chmod go-w it"
        )
