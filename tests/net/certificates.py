"""Certificates for the tests of TLS."""

import subprocess
from pathlib import Path

from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.tls import load_tls


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_authorities(folder: Path) -> None:
    """Two authorities, and a certificate of each: a.pem, b.pem with keys a.key, b.key. old.pem, of the first, has expired."""
    for name in ("a", "b"):
        _openssl(folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                "-subj", f"/CN=authority {name}", "-keyout", f"ca-{name}.key", "-out", f"ca-{name}.pem")  # fmt: skip
        _openssl(folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"ca-{name}.pem", "-CAkey", f"ca-{name}.key",
                "-CAcreateserial", "-days", "2", "-out", f"{name}.pem")  # fmt: skip
    _openssl(folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=old",
            "-keyout", "old.key", "-out", "old.csr")  # fmt: skip
    _openssl(folder, "x509", "-req", "-in", "old.csr", "-CA", "ca-a.pem", "-CAkey", "ca-a.key", "-CAcreateserial",
            "-days", "-1", "-out", "old.pem")  # fmt: skip
    _openssl(folder, "ec", "-in", "a.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")


def of(authority: Path, name: str, ca: str | None = None) -> SocketNetwork:
    """The network of who has that certificate."""
    tls = load_tls(
        str(authority / f"{name}.pem"), str(authority / f"{name}.key"), str(authority / f"ca-{ca or name}.pem")
    )
    return SocketNetwork(tls=tls)
