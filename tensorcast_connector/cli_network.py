"""How commands reach the network: the flags for a token and for TLS, and `tensorcast token`. See docs/security.md."""

import argparse
import secrets
import sys
from collections import Counter

from tensorcast_connector.config import TENANT
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.access import read_token
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.tls import load_tls
from tensorcast_connector.settings import StoreConfig, WorkerConfig
from tensorcast_connector.wire.tokens import tenant_token

ACCESS_FLAGS = ("token_file", "tls_cert", "tls_key", "tls_ca")
NEW_TOKEN_BYTES = 32


def access_flags(sub: argparse.ArgumentParser) -> None:
    """What opens TCP connections, in a cluster that asks for it."""
    sub.add_argument(
        "--token-file", metavar="FILE", help="the cluster's token, or a tenant's; only its owner may read it"
    )
    sub.add_argument(
        "--tls-cert", metavar="FILE", help="mutual TLS on all TCP connections: the certificate of this process,"
    )
    sub.add_argument("--tls-key", metavar="FILE", help="its key,")
    sub.add_argument("--tls-ca", metavar="FILE", help="and the certificate of the cluster's own authority")


def network_of_flags(args: argparse.Namespace, tenant: str = "") -> SocketNetwork:
    """The network as the flags say, for a caller of that tenant; raises ConfigError."""
    token, *files = (getattr(args, flag) or "" for flag in ACCESS_FLAGS)
    access = read_token(token)
    if access is not None and access.of_tenant and tenant:
        access.acts_for(tenant)
    return SocketNetwork(access, load_tls(*files), access.tenant if access is not None else "")


def tenant_of_flags(args: argparse.Namespace) -> str:
    """The tenant that is named, else that of a tenant's token, else the default; raises ConfigError."""
    access = read_token(getattr(args, "token_file", None) or "")
    return args.tenant if args.tenant is not None else (access.tenant if access is not None else "") or TENANT


def network_of(config: StoreConfig | WorkerConfig, refused: Counter[str]) -> SocketNetwork:
    """The network of a store or a worker, which counts in `refused` whom it refuses; raises ConfigError."""
    access = read_token(config.token_file)
    if access is not None and access.of_tenant:
        raise ConfigError(f"token_file={config.token_file!r} is a tenant's; a store or a worker needs the cluster's")
    return SocketNetwork(access, load_tls(config.tls_cert, config.tls_key, config.tls_ca), refused=refused)


def token_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of `tensorcast token`."""
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("--new", action="store_true", help="a token for a new cluster")
    what.add_argument("--tenant", metavar="NAME", help="the token of a tenant, made of the cluster's")
    sub.add_argument("--token-file", metavar="FILE", help="the cluster's token, for --tenant")


def run_token(args: argparse.Namespace) -> None:
    """`tensorcast token`: prints one; raises ConfigError."""
    if args.new:
        token = secrets.token_urlsafe(NEW_TOKEN_BYTES)
    else:
        access = read_token(args.token_file or "")
        if access is None:
            raise ConfigError("--tenant needs the cluster's token: --token-file FILE")
        if access.of_tenant:
            raise ConfigError(f"{args.token_file} is a tenant's token; those of others are made of the cluster's")
        token = tenant_token(access.token, args.tenant)
    sys.stdout.write(token + "\n")
