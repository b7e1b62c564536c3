"""Runs the router until it is told to stop."""

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import uvloop

from smetric_router.config import RouterConfig
from smetric_router.errors import ConfigError
from smetric_router.server.app import RouterApp
from smetric_router.server.logs import log
from smetric_router.server.place import listen
from smetric_router.server.workers import Supervisor, Worker

_BACKLOG = 2048


class Server:
    """Listens for a router, announces itself, and leaves quietly.

    Args:
        listener: a socket that is bound.
        ready_file: written when it listens, {"url": ...}.
    """

    def __init__(self, app: RouterApp, listener: socket.socket, ready_file: Path | None = None) -> None:
        self._tls = _tls_context(app.config)
        self.url = _url(listener, app.config)
        self.on_started: Callable[[], None] | None = None
        self._app = app
        self._listener = listener
        self._ready_file = ready_file
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        self.started = asyncio.Event()

    def stop(self) -> None:
        """Asks it to stop; the second time, to stop now."""
        (self._now if self._stop.is_set() else self._stop).set()

    def read_again(self) -> None:
        """Certificate, key and API keys; what is wrong with them is told, and the former ones stay."""
        for what, read in (("keys", self._app.read_keys), ("certificate", self._read_certificate)):
            try:
                read()
            except ConfigError as error:
                log.error("not read again", extra={"fields": {"what": what, "cause": error.message}})
            else:
                log.info("read again", extra={"fields": {"what": what}})

    def _read_certificate(self) -> None:
        if self._tls is not None:
            _tls_context(self._app.config)  # a pair that does not belong together would leave half of itself behind
            self._tls.load_cert_chain(self._app.config.tls_cert, self._app.config.tls_key)

    async def serve(self) -> None:
        """Until `stop`; then it takes no more, and what runs has `drain_timeout_s` to end."""
        await self._app.start()
        server = await asyncio.get_running_loop().create_server(
            self._app.connection,
            sock=self._listener,
            backlog=_BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=self._app.config.request_timeout_s if self._tls else None,
        )
        try:
            log.info("listening", extra={"fields": {"url": self.url}})
            if self._ready_file is not None:
                _write_atomically(self._ready_file, json.dumps({"url": self.url}))
            self.started.set()
            if self.on_started is not None:
                self.on_started()
            await self._stop.wait()
            server.close()
            draining = asyncio.create_task(self._app.drain(self._app.config.drain_timeout_s))
            hurrying = asyncio.create_task(self._now.wait())
            await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            hurrying.cancel()
        finally:
            server.close()
            await self._app.stop()


def serve(config: RouterConfig, ready_file: Path | None = None, folder: Path | None = None) -> None:
    """Serves until SIGTERM or SIGINT. `folder` is that of `workers.prepare`, for several processes.

    Raises:
        ConfigError: it cannot listen on the address or write the ready file.
    """
    if folder is not None:
        _serve_with_workers(config, ready_file, folder)
        return
    app = RouterApp(config)
    _raise_descriptor_limit()
    if ready_file is not None:
        _make_writable(ready_file)
    listener = listen(config.host, config.port)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_told(Server(app, listener, ready_file)))
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def _serve_with_workers(config: RouterConfig, ready_file: Path | None, folder: Path) -> None:
    """The same with several processes. Raises ConfigError, or SystemExit when they fail."""
    RouterApp(replace(config, workers=1, peer_listen="", peers=()))  # what is wrong is told once
    _tls_context(config)
    _raise_descriptor_limit()
    if ready_file is not None:
        _make_writable(ready_file)

    def main(worker: Worker) -> None:
        app = RouterApp(config, place=worker.place)
        server = Server(app, worker.listener)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_told(server, worker))

    def announce(listener: socket.socket) -> None:
        url = _url(listener, config)
        log.info("all processes listen", extra={"fields": {"url": url, "processes": config.workers}})
        if ready_file is not None:
            _write_atomically(ready_file, json.dumps({"url": url}))

    try:
        status = Supervisor(config, folder, main, announce).run()
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
    if status:
        raise SystemExit(status)


async def _until_told(server: Server, worker: Worker | None = None) -> None:
    # What is there now stays for good: looking through it again would stop all streams for some milliseconds each time.
    gc.collect()
    gc.freeze()
    loop = asyncio.get_running_loop()
    if worker is not None:
        orphaned = worker.orphaned

        def stop_now() -> None:
            loop.remove_reader(orphaned)
            server.stop()

        loop.add_reader(orphaned, stop_now)
        ready = worker.ready
        server.on_started = lambda: _say(ready)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    if not sys.stderr.isatty():  # a terminal that is closed sends it too
        loop.add_signal_handler(signal.SIGHUP, server.read_again)
    await server.serve()


def _tls_context(config: RouterConfig) -> ssl.SSLContext | None:
    if not config.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # ssl.SSLError is one
        names = f"tls_cert = {config.tls_cert!r}, tls_key = {config.tls_key!r}"
        raise ConfigError(f"{names}: {error.strerror or error}") from None
    return context


def _say(ready: int) -> None:
    os.write(ready, b"r")


def _url(listener: socket.socket, config: RouterConfig) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
