"""The command behind `scripts/bench`."""

import argparse
import sys
from collections.abc import Callable, Sequence

from demo.processes import terminated_as_exit
from rich.console import Console

from benchmarks import metadata, router, service, sglang, weights
from benchmarks.face import BenchError, Row, show

Say = Callable[[str], None]
Run = Callable[[bool, bool, Say], list[Row]]
"""(quick, install peers, progress) -> rows"""


def _metadata(quick: bool, install_peers: bool, say: Say) -> list[Row]:
    return metadata.run(metadata.QUICK if quick else metadata.FULL, install_peers, say)


def _service(quick: bool, install_peers: bool, say: Say) -> list[Row]:  # noqa: ARG001 - pip installs its peers
    return service.run(service.QUICK if quick else service.FULL, say)


def _router(quick: bool, install_peers: bool, say: Say) -> list[Row]:  # noqa: ARG001 - pip installs its peers
    return router.run(router.QUICK if quick else router.FULL, say)


def _weights(quick: bool, install_peers: bool, say: Say) -> list[Row]:  # noqa: ARG001 - pip installs its peers
    return weights.run(weights.QUICK if quick else weights.FULL, say)


def _sglang(quick: bool, install_peers: bool, say: Say) -> list[Row]:
    return sglang.run(sglang.QUICK if quick else sglang.FULL, install_peers, say)


BENCHMARKS: dict[str, Run] = {
    "metadata": _metadata,
    "router": _router,
    "service": _service,
    "sglang": _sglang,
    "weights": _weights,
}
"""Every NAME, one module each."""


def _router_parts(quick: bool, say: Say, parts: Sequence[str]) -> list[Row]:
    return router.run(router.QUICK if quick else router.FULL, say, parts)


def _weights_parts(quick: bool, say: Say, parts: Sequence[str]) -> list[Row]:
    return weights.run(weights.QUICK if quick else weights.FULL, say, parts)


PARTS: dict[str, tuple[list[str], Callable[[bool, Say, Sequence[str]], list[Row]]]] = {
    "router": (list(router.PARTS), _router_parts),
    "weights": (list(weights.PARTS), _weights_parts),
}
"""Which NAMEs can be run in parts: their names, and what runs some of them."""


def _parts() -> str:
    return "; ".join(f"{name}: {', '.join(parts)}" for name, (parts, _) in PARTS.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark: 0 when every row holds, 1 when one does not, 2 when it cannot run, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Figures of this project beside those of its peers and what the machine can do, measured in one go.",
        epilog="Exit status: 0 when every row holds, 1 when one does not, 2 when the benchmark cannot run here.",
    )
    parser.add_argument("name", metavar="NAME", choices=sorted(BENCHMARKS), help=", ".join(sorted(BENCHMARKS)))
    parser.add_argument("--json", action="store_true", help="one line of JSON per row instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs, in less than a minute")
    parser.add_argument(
        "--install-peers", action="store_true", help="install a peer's Debian package that is missing (as root)"
    )
    parser.add_argument("--figures", action="store_true", help="with weights: the paper's figures in its shape")
    parser.add_argument("--part", action="append", help=f"these rows alone (may be repeated): {_parts()}")
    args = parser.parse_args(argv)
    parts, run_parts = PARTS.get(args.name, ([], None))
    for each in args.part or ():
        if each not in parts:
            parser.error(f"{args.name} has no part {each!r}; there are: {_parts()}")
    if args.figures and args.name != "weights":
        parser.error("--figures goes with weights")
    console = Console() if sys.stdout.isatty() else Console(width=200)

    def say(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    try:
        with terminated_as_exit():
            if args.figures:
                rows = weights.figures(args.quick, say)
            elif args.part and run_parts is not None:
                rows = run_parts(args.quick, say, args.part)
            else:
                rows = BENCHMARKS[args.name](args.quick, args.install_peers, say)
    except BenchError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json:
        for row in rows:
            print(row.line())
    else:
        show(rows, console)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
