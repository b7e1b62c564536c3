"""Who may talk over the network: the cluster's token, the tokens of tenants made of it, and the proof of having one.

    cluster token   any text of at least TOKEN_CHARS_MIN characters; whoever has it may do everything
    tenant token    "tct-", a digest of the cluster token and the tenant, ":" and the tenant, for which whoever has it may act

A token never travels. Each side proves that it has it by a keyed digest of what both have chosen at random for this connection,
the server first, so that a caller does not even try with somebody who is no member:

    client -> server   MAGIC, 32 bytes of chance, length (1 byte) and text of the tenant ("": the cluster)
    server -> client   32 bytes of chance, 32 bytes of proof
    client -> server   32 bytes of proof

The first message is at least as long as the header of a frame, and begins like one of a version that does not exist, so that a
server without a token answers it with an error at once; no random bytes of a server begin like a frame.

Without TLS this keeps strangers out; it does not hide what is said, nor protect it on its way.
"""

import hashlib
import hmac
from dataclasses import dataclass, field

from tensorcast_connector.errors import ConfigError, Unauthorized

MAGIC = b"TCA1"
NONCE_BYTES = 32
PROOF_BYTES = 32
TENANT_BYTES_MAX = 255
TOKEN_CHARS_MIN = 16
TENANT_TOKEN_PREFIX = "tct-"


def tenant_token(cluster_token: str, tenant: str) -> str:
    """What to give to a tenant.

    Raises:
        ConfigError: no such tenant can be.
    """
    if not 0 < len(tenant.encode()) <= TENANT_BYTES_MAX or not tenant.isprintable():
        raise ConfigError(f"tenant={tenant[:40]!r}: printable text of at most {TENANT_BYTES_MAX} bytes")
    return f"{TENANT_TOKEN_PREFIX}{_digest(cluster_token.encode(), b'tenant', tenant.encode()).hex()}:{tenant}"


def _digest(key: bytes, *parts: bytes) -> bytes:
    """Keyed; each part with its length, so that no two lists of parts are one."""
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(len(part).to_bytes(4, "big") + part)
    return made.digest()


@dataclass(frozen=True, slots=True)
class Access:
    """One token, and what can be proven with it.

    Raises:
        ConfigError: too short to be one.
    """

    token: str = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.token, str):
            raise ConfigError(f"a token is text, not {type(self.token).__name__}")
        if len(self.token) < TOKEN_CHARS_MIN or not self.token.isprintable():
            raise ConfigError(f"a token has at least {TOKEN_CHARS_MIN} printable characters, all on one line")

    @property
    def tenant(self) -> str:
        """Whose it is; "" if it is the cluster's."""
        return self.token.partition(":")[2] if self.of_tenant else ""

    @property
    def of_tenant(self) -> bool:
        """Whether it is a tenant's."""
        return self.token.startswith(TENANT_TOKEN_PREFIX)

    def acts_for(self, tenant: str) -> None:
        """Raises Unauthorized if this is the token of another tenant."""
        if self.of_tenant and tenant != self.tenant:
            raise Unauthorized(f"this is the token of tenant {self.tenant!r}, and not of {tenant!r}")

    def key(self, tenant: str) -> bytes:
        """What proves that somebody acts for `tenant`; for the cluster if that is "".

        Raises:
            Unauthorized: this token is a tenant's, and does not prove that.
        """
        if self.of_tenant:
            if not tenant:
                raise Unauthorized("a tenant's token does not open what only the cluster's members may do")
            self.acts_for(tenant)
            return self.token.encode()
        return tenant_token(self.token, tenant).encode() if tenant else self.token.encode()


def proof(key: bytes, who: bytes, client_nonce: bytes, server_nonce: bytes, tenant: str) -> bytes:
    """What shows that `who` (b"client" or b"server") has the key."""
    return _digest(key, who, client_nonce, server_nonce, tenant.encode())


def same(left: bytes, right: bytes) -> bool:
    """Whether two proofs are the same, in a time that tells nothing."""
    return hmac.compare_digest(left, right)
