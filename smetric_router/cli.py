"""The command `smetric-router`."""

import argparse
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from smetric_router.config import RouterConfig, load_config
from smetric_router.errors import ConfigError

EXIT_CONFIG = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    folder: Path | None = None
    options = _parser().parse_args(arguments)
    try:
        config = _config(options)
        # Here, so that --help and a bad configuration answer at once.
        if config.workers > 1:
            from smetric_router.server.workers import prepare

            folder = prepare()
        from smetric_router.server.logs import set_up_logging
        from smetric_router.server.serve import serve

        set_up_logging(config.log_format, config.log_level)
        serve(config, options.ready_file, folder)
    except ConfigError as error:
        print(f"smetric-router: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _config(options: argparse.Namespace) -> RouterConfig:
    given = {
        "engines": options.engine,
        "host": options.host,
        "port": options.port,
        "workers": options.workers,
        "policy": options.policy,
        "log_format": options.log_format,
        "log_level": options.log_level,
    }
    return load_config(options.config, options.set, {key: value for key, value in given.items() if value is not None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smetric-router",
        description="An OpenAI-compatible router that keeps sessions where their prefix is cached.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="route requests to engines", description="Route requests to engines.")
    serve.add_argument("--config", type=Path, metavar="FILE", help="TOML file; see configs/router.toml")
    serve.add_argument("--engine", action="append", metavar="URL", help="an engine, without /v1; repeatable")
    serve.add_argument("--host", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on, 0 for any free one (8000)")
    serve.add_argument("--workers", type=int, help="processes on the port (1)")
    serve.add_argument("--policy", help="policy by name (smetric)")
    serve.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the file; repeatable"
    )
    serve.add_argument("--ready-file", type=Path, metavar="PATH", help='written when listening: {"url": "http://..."}')
    serve.add_argument("--log-format", choices=("logfmt", "json"), help="format of the log lines (logfmt)")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="least level logged (info)")
    return parser


def _version() -> str:
    """Of the package, and of the Python it runs on."""
    try:
        package = version("tensorcast-connector")
    except PackageNotFoundError:
        package = "unknown (not installed)"
    return f"smetric-router {package}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
