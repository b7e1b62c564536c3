"""Mutual TLS: both sides of a TCP connection show a certificate of one authority, which is the cluster's own."""

import ssl
from dataclasses import dataclass

from tensorcast_connector.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """The contexts of both directions.

    Whoever has a certificate of that authority is a member; the host names in it are not compared, since members are found by
    address.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext


def load_tls(certificate: str, key: str, authority: str) -> Tls | None:
    """From PEM files; None if none is named.

    Raises:
        ConfigError: some but not all are named, or one cannot be used; says which.
    """
    files = {"tls_cert": certificate, "tls_key": key, "tls_ca": authority}
    if not any(files.values()):
        return None
    if missing := [name for name, path in files.items() if not path]:
        raise ConfigError(
            f"{' and '.join(missing)} missing: TLS needs a certificate, its key and the authority's certificate"
        )
    made = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_cert={certificate!r}, tls_key={key!r}: {_reason(error)}") from error
        try:
            context.load_verify_locations(authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_ca={authority!r}: {_reason(error)}") from error
        made.append(context)
    return Tls(*made)


def _no_password() -> str:
    """A key with a password would be asked for on the terminal, which a server does not have."""
    raise ssl.SSLError("the key is protected by a password; take that away, and protect the file")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
