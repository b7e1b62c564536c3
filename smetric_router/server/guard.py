"""Who may call: API keys of clients and the operator's key, told from the head alone, before a body is read."""

import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

from smetric_router.config import RouterConfig
from smetric_router.errors import ConfigError, Forbidden, Unauthorized, UnknownPath
from smetric_router.server.control import is_own_path
from smetric_router.server.http1 import Headers, RequestHead

OPEN_PATHS = frozenset(("/health", "/metrics", "/docs", "/docs/oauth2-redirect", "/openapi.json"))
"""Probes and scrapers have no key; these tell nothing of prompts."""
ADMIN_PREFIX = "/admin/"
GIVEN_MAX = 4
KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))


class Guard:
    """See the module. Raises ConfigError if the file of keys is of no use."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._paths = config.paths_passed_on if "/" not in config.paths_passed_on else ()
        self._admin_key = config.admin_key.encode()
        self._keys: list[bytes] = []
        self.read_keys()

    def __repr__(self) -> str:
        return f"<Guard {len(self._keys)} keys{', admin' if self._admin_key else ''}>"

    def read_keys(self) -> None:
        """Reads the file of keys again, if there is one. Raises ConfigError, and then the former ones count."""
        keys = list(self._config.api_keys)
        if self._config.api_keys_file:
            keys += _read_keys(Path(self._config.api_keys_file))
        self._keys = [key.encode() for key in keys]

    @property
    def has_keys(self) -> bool:
        """Whether clients need one."""
        return bool(self._keys)

    def check(self, head: RequestHead) -> None:
        """Raises Unauthorized, Forbidden or UnknownPath."""
        if not (self._keys or self._admin_key or self._paths or b"admin" in head.target or b"%" in head.target):
            return  # nearly always
        path = unquote(head.target.partition(b"?")[0].decode("latin-1"))
        if path in OPEN_PATHS:
            return
        if path.startswith(ADMIN_PREFIX):
            self._check_admin(head)
        elif self._keys and head.method != b"OPTIONS" and not _among(_given(head.headers), self._keys):
            # Browsers ask with OPTIONS what they may send before they send a key; engines answer that without one.
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")
        elif self._paths and not is_own_path(path) and not self._is_passed_on(path):
            raise UnknownPath(f"{path} is not passed on to engines")

    def _is_passed_on(self, path: str) -> bool:
        # Who is behind may take /v1/x/../../sleep for /sleep.
        return path.startswith(self._paths) and not {".", ".."} & set(path.replace("\\", "/").split("/"))

    def _check_admin(self, head: RequestHead) -> None:
        if self._admin_key:
            if not _among(_given(head.headers), [self._admin_key]):
                raise Unauthorized("the operator's key (admin_key) is needed: Authorization: Bearer KEY")
        elif head.method not in (b"GET", b"HEAD"):
            raise Forbidden("the router has no admin_key, so nothing can be changed through it: set one")
        elif self._keys and not _among(_given(head.headers), self._keys):
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")


def _given(headers: Headers) -> list[bytes]:
    """The keys of a request, as OpenAI's and Anthropic's clients send them; some send one of each."""
    given = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                given.append(key.strip())
        elif name == b"x-api-key":
            given.append(value.strip())
    return given[:GIVEN_MAX]


def _among(given: Iterable[bytes], keys: Sequence[bytes]) -> bool:
    """In a time that does not tell how much of a key was right, nor which."""
    found = False
    for each in given:
        for key in keys:
            found |= hmac.compare_digest(each, key)
    return found


def _read_keys(path: Path) -> list[str]:
    """One key a line; empty lines and those that start with # are none."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"api_keys_file: cannot read {path}: {cause}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_keys_file: {path} has no key in it, so nobody could call")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError(f"api_keys_file: {path}: a key may have only printable ASCII characters without spaces")
    return keys
