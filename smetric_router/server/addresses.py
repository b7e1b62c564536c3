"""Where engines are: names are looked up now and then, and what was found is remembered for when nobody answers.

A name service that fails takes no engine out that can still be reached where it was.
"""

import asyncio
import socket
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

FRESH_S = 5.0
"""For so long what was found is used without asking again."""
PATIENCE = 0.5
"""Share of the time for a connection after which a lookup is given up, where an older answer is known."""


class EngineAddress:
    """One engine's.

    Args:
        url: its base URL.
        clock: time in seconds.
    """

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        parts = urlsplit(url)
        self.secure = parts.scheme == "https"
        self.name = parts.hostname or ""
        self.port = parts.port or (443 if self.secure else 80)
        self.host = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        self.prefix = parts.path.rstrip("/").encode()
        self._clock = clock
        self._found: list[str] = [self.name] if _is_literal(self.name) else []
        self._fresh_until_s = float("inf") if self._found else float("-inf")
        self._literal = bool(self._found)

    def __repr__(self) -> str:
        return f"<EngineAddress {self.name}:{self.port} {self._found}>"

    async def resolved(self, timeout_s: float) -> list[str]:
        """IP addresses, at least one. Raises OSError, UnicodeError or TimeoutError when none was ever found."""
        if self._clock() < self._fresh_until_s:
            return self._found
        try:
            async with asyncio.timeout(timeout_s * (PATIENCE if self._found else 1)):
                found = await asyncio.get_running_loop().getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            if not self._found:
                raise
        else:
            self._found = list(dict.fromkeys(str(address[0]) for *_, address in found))
            self._fresh_until_s = self._clock() + FRESH_S
        return self._found

    def failed(self) -> None:
        """Nobody could be reached there: it is looked up again next time."""
        if not self._literal:
            self._fresh_until_s = float("-inf")


def _is_literal(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
