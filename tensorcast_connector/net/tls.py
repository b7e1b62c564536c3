"""Mutual TLS: both sides of a TCP connection show a certificate of one authority, which is the cluster's own.

A handshake that fails says little to people, and the side whose certificate is refused often only sees the connection end. So
what is wrong is put into words here, for the caller and for the listener.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from tensorcast_connector.errors import ConfigError, TensorcastError, Unauthorized, Unavailable
from tensorcast_connector.net.private import check_owner_only

FLAGS = "--tls-cert, --tls-key and --tls-ca (tls= of connect)"
HELLO = b"\x16"  # what TLS begins with
_ALERT = "ALERT"
_TURNS_MAX = 8  # of a handshake, which has two or three


@dataclass(frozen=True, slots=True)
class Tls:
    """The contexts of both directions.

    Whoever has a certificate of that authority is a member; the host names in it are not compared, since members are found by
    address.

    Attributes:
        certificate: the file that it was read from.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: str = ""

    def own_fault(self) -> str:
        """What is wrong with this side's own certificate in the eyes of its own authority; empty if nothing is."""
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = [
            self.client.wrap_bio(back, there, server_side=False),
            self.server.wrap_bio(there, back, server_side=True),
        ]
        for _ in range(_TURNS_MAX):
            for side in sides:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLCertVerificationError as error:
                    return error.verify_message
                except ssl.SSLError as error:
                    return _reason(error)
        return ""

    def unheard(self, address: str) -> TensorcastError:
        """Why a listener ends the connection when the handshake is over, before it has said anything."""
        own = self.own_fault()
        why = f" ({own})" if own else ": is it of the same authority as the listener's?"
        return Unauthorized(
            f"{address} ended the connection right after the TLS handshake: it does not accept the certificate of this process, "
            f"--tls-cert {self.certificate}{why}"
        )


def load_tls(certificate: str, key: str, authority: str) -> Tls | None:
    """From PEM files; None if none is named.

    Raises:
        ConfigError: some but not all are named, or one cannot be used, or others can read the key; says which.
    """
    files = {"tls_cert": certificate, "tls_key": key, "tls_ca": authority}
    if not any(files.values()):
        return None
    if missing := [name for name, path in files.items() if not path]:
        raise ConfigError(
            f"{' and '.join(missing)} missing: TLS needs a certificate, its key and the authority's certificate"
        )
    made: list[ssl.SSLContext] = []
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
    check_owner_only("tls_key", key, Path(key).stat().st_mode)
    return Tls(made[0], made[1], certificate)


def _no_password() -> str:
    """A key with a password would be asked for on the terminal, which a server does not have."""
    raise ssl.SSLError("the key is protected by a password; take that away, and protect the file")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


# --- a handshake that fails, in words ---------------------------------------------------------------------------------


def seen_by_caller(address: str, error: OSError) -> TensorcastError:
    """What a caller is told whose handshake with `address` has failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unauthorized(
            f"the certificate of {address} is not accepted here ({error.verify_message}): is --tls-ca the authority of that "
            "cluster, has the listener's certificate expired, and is this host's clock right?"
        )
    if not isinstance(error, ssl.SSLError):
        return Unavailable(
            f"{address} broke off the TLS handshake: {error.strerror or error}; is that a port with TLS?"
        )
    reason = error.reason or str(error)
    if _ALERT in reason:
        return Unauthorized(f"{address} does not accept the certificate of this process, --tls-cert ({_words(reason)})")
    return Unauthorized(
        f"{address} does not speak TLS, and this side does: leave out {FLAGS} here, or start the other side with them "
        f"({_words(reason)})"
    )


def seen_by_listener(error: OSError) -> str:
    """Why the handshake of somebody who came has failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted here: {error.verify_message}"
    if not isinstance(error, ssl.SSLError):
        return "it broke off the TLS handshake; most likely it does not accept the certificate of this process"
    reason = error.reason or str(error)
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return "it shows no certificate (--tls-cert, --tls-key)"
    if _ALERT in reason:
        return f"it does not accept the certificate of this process: {_words(reason)}"
    return f"the TLS handshake has failed: {_words(reason)}"


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")
