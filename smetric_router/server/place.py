"""Where a process stands among those that it shares with: its siblings on the port, and the routers on other hosts."""

import socket
from dataclasses import dataclass
from pathlib import Path

from smetric_router.config import RouterConfig
from smetric_router.errors import ConfigError
from smetric_router.server.sharing import Sharing
from smetric_router.state.shared_counts import SharedCounts

KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3


@dataclass(frozen=True, slots=True)
class Place:
    """One process's place.

    `counts` is None for a process without siblings. `own` is a Unix socket that listens, `siblings` are the names of theirs. Only
    the first process of a router listens to `peers`, and they to it.
    """

    counts: SharedCounts | None = None
    own: socket.socket | None = None
    siblings: tuple[Path, ...] = ()
    peers: tuple[str, ...] = ()
    peer_listener: socket.socket | None = None

    @classmethod
    def alone(cls, config: RouterConfig) -> "Place":
        """That of a router of one process. Raises ConfigError when it cannot listen to its peers."""
        return cls(peers=config.peers, peer_listener=peer_listener(config))

    @property
    def shares(self) -> bool:
        """Whether there is anybody."""
        return bool(self.own or self.peers or self.peer_listener)

    async def begin(self, sharing: Sharing) -> None:
        """Serves whoever wants to hear, begins to listen, and waits until it knows what the others know."""
        if self.own is not None:
            await sharing.serve_unix(self.own)
        if self.peer_listener is not None:
            await sharing.serve_tcp(self.peer_listener)
        sharing.listen_to(self.siblings, self.peers)
        await sharing.learn()


def peer_listener(config: RouterConfig) -> socket.socket | None:
    """The socket for other routers. Raises ConfigError."""
    if not config.peer_listen:
        return None
    host, _, port = config.peer_listen.rpartition(":")
    return listen(host.strip("[]"), int(port))


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket; `shared`: others may be bound to the same address. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _keep_alive(listener)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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


def listen_unix(path: Path) -> socket.socket:
    """A Unix socket of that name: who connects before it is served waits. Raises ConfigError.

    It is bound under another name, since Python 3.13 removes a server's own name when the server ends.
    """
    bound = path.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(bound))
        bound.rename(path)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot make the socket {path}: {error.strerror or error}; set TMPDIR to a folder that is there and has a short name"
        ) from None
    return listener


def _keep_alive(listener: socket.socket) -> None:
    """Who connects inherits it: a client whose host has gone without a word is found out while it waits for its answer."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
