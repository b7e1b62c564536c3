"""Plays many worlds, or one again: see scripts/sim."""

import argparse
import contextlib
import itertools
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence

from tests.sim.runner import Outcome, play

LOG_LINES_SHOWN = 60
PROGRESS_INTERVAL_S = 1.0
CHUNK_WORLDS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a world was broken, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="scripts/sim", description="Simulated clusters under seeded faults.")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--worlds", type=_positive(int), help="play so many (200 unless told)")
    amount.add_argument("--minutes", type=_positive(float), help="play as many as fit")
    amount.add_argument("--seed", type=int, help="play one again, and print its log")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0 unless told)")
    parser.add_argument("--jobs", type=_positive(int), default=1, help="processes at a time (1 unless told)")
    options = parser.parse_args(argv)
    logger = logging.getLogger("tensorcast_connector")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what the processes of a world say is part of its log
    try:
        return _play(options)
    finally:
        logger.setLevel(level)


def _play(options: argparse.Namespace) -> int:
    if options.seed is not None:
        outcome = play(options.seed, keep_log=True)
        print("\n".join(outcome.log))
        return _conclude([outcome], 1, 0.0)
    if options.minutes is None:
        seeds: Iterable[int] = range(options.first, options.first + (options.worlds or 200))
        return play_all(seeds, None, options.jobs)
    return play_all(itertools.count(options.first), options.minutes * 60, options.jobs)


def _positive(kind: type) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value: float = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError("must be above 0")
        return value

    return parse


def play_all(seeds: Iterable[int], seconds: float | None, jobs: int) -> int:
    """Plays the worlds of `seeds`, at most for `seconds`, until one is broken; prints how it went."""
    began = shown = time.monotonic()
    count = events = 0
    with contextlib.closing(_outcomes(seeds, jobs)) as outcomes:
        for outcome in outcomes:
            count += 1
            events += outcome.events
            now = time.monotonic()
            if outcome.problem:
                return _conclude([outcome], count, now - began)
            if now - shown >= PROGRESS_INTERVAL_S:
                shown = now
                print(f"\r{count} worlds, {events} events, {now - began:.0f} s ", end="", file=sys.stderr, flush=True)
            if seconds is not None and now - began >= seconds:
                break
    print("\r", end="", file=sys.stderr)
    return _conclude([], count, time.monotonic() - began)


def _outcomes(seeds: Iterable[int], jobs: int) -> Generator[Outcome, None, None]:
    if jobs == 1:
        yield from map(play, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_quiet) as pool:
        source = iter(seeds)
        while some := list(itertools.islice(source, jobs * CHUNK_WORLDS)):
            yield from pool.imap(play, some)


def _quiet() -> None:
    logging.getLogger("tensorcast_connector").setLevel(logging.ERROR)


def _conclude(broken: Sequence[Outcome], count: int, seconds: float) -> int:
    for outcome in broken:
        if outcome.problem:
            print("\n".join(["", "...", *outcome.log[-LOG_LINES_SHOWN:]]))
            print(f"\nseed {outcome.seed} is broken after {outcome.duration_s:.3f} s: {outcome.problem}")
            print(f"again, with its whole log: scripts/sim --seed {outcome.seed}")
            print(f"{count} worlds in {seconds:.1f} s, the last one broken")
            return 1
    rate = f", {count / seconds:.1f} a second" if seconds else ""
    print(f"{count} worlds, all clean{rate} ({seconds:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
