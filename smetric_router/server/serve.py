"""Runs the application in a web server until it is told to stop."""

import contextlib
import json
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from smetric_router.config import RouterConfig
from smetric_router.errors import ConfigError
from smetric_router.server.app import RouterApp
from smetric_router.server.logs import log

_BACKLOG = 2048


class Server(uvicorn.Server):
    """uvicorn's server, which announces itself and leaves quietly on SIGTERM and SIGINT."""

    def __init__(self, config: uvicorn.Config, url: str, ready_file: Path | None) -> None:
        super().__init__(config)
        self._url = url
        self._ready_file = ready_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        log.info("listening", extra={"fields": {"url": self._url}})
        if self._ready_file is not None:
            _write_atomically(self._ready_file, json.dumps({"url": self._url}))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal asks to stop, a second one to stop now. The base class would then die of it; this is a clean end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(config: RouterConfig, ready_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT; then take no more, and give what runs `drain_timeout_s` to end.

    Raises ConfigError when it cannot listen on the address or write the ready file.
    """
    app = RouterApp(config)
    _raise_descriptor_limit()
    if ready_file is not None:
        _make_writable(ready_file)
    listener = _listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    server = Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=config.drain_timeout_s,
        ),
        f"http://{host}:{port}",
        ready_file,
    )
    try:
        server.run(sockets=[listener])
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, ValueError) as error:
        # A name that cannot be one is a ValueError.
        cause = error.strerror if isinstance(error, OSError) else error
        shown = host if host.isprintable() else repr(host)
        raise ConfigError(f"cannot listen on {shown}:{port}: {cause}") from None
    return listener


def _raise_descriptor_limit() -> None:
    """Every request takes two descriptors, and the usual soft limit is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("descriptor limit not raised", extra={"fields": {"limit": soft, "cause": str(error)}})


def _make_writable(ready_file: Path) -> None:
    """Remove an old ready file, and find out now whether the new one can be written."""
    try:
        ready_file.unlink(missing_ok=True)
        _write_partial(ready_file, "").unlink()
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--ready-file: cannot write {ready_file}: {cause}") from None


def _write_atomically(path: Path, text: str) -> None:
    _write_partial(path, text).replace(path)


def _write_partial(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    return partial
