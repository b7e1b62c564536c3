"""The whole system on one machine in a few minutes, on CPUs: what the pool and the router do to the same sessions.

Two engines of one model, each attached to a tensor worker of its own as on two hosts, a store that joins the workers, and
a router in front. The same agent sessions are played once per policy, each time with a fresh router and a fresh
`cache_salt`, so that no policy profits from what an earlier one left behind. Before that, a plain engine without the
connector says which tokens are right, and an engine that loads its prompts from the other one's pages has to give the same.
"""

import argparse
import asyncio
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from demo import compare, engine, model, pool
from demo.compare import Api, Comparison
from demo.engine import Engine, EngineOptions, PromptTokens
from demo.play import Display, Played, Target, play
from demo.processes import DemoError, Supervisor, terminated_as_exit
from demo.sessions import Session, Shape, generate

T = TypeVar("T")
SERVED_NAME = "demo"
NO_POOL = {"kv_transfer_params": {"tensorcast.skip_load": True, "tensorcast.skip_save": True}}
# Engine B never computed the compared prompts, so nearly all of their tokens must come to it from the pool: most of them as
# loads, and what the prompts have in common from B's own cache, where an earlier load has put it.
REUSED_SHARE_MIN = 0.8
LOADED_SHARE_MIN = 0.4
WATCH_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    label: str
    policy: str
    body: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    Case("round-robin, no pool", "round-robin", NO_POOL),
    Case("round-robin", "round-robin"),
    Case("least-loaded", "least-loaded"),
    Case("smetric", "smetric"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy did."""

    case: Case
    played: Played
    tokens: PromptTokens
    instances: Mapping[str, int]

    def cells(self) -> list[str]:
        """The row as the table shows it."""
        times = [self.played.ttft_ms(first=first) for first in (True, False)]
        shown = ["-" if ms is None else f"{ms:,.0f} ms" for ms in times]
        shares = [f"{n:,} ({n / max(1, self.tokens.total):.0%})" for n in dataclasses.astuple(self.tokens)]
        return [self.case.label, *shown, *shares, " / ".join(str(n) for n in self.instances.values())]

    def as_dict(self) -> dict[str, Any]:
        """The row for `--json`."""
        return {
            "row": self.case.label,
            "policy": self.case.policy,
            "ttft_first_p50_ms": self.played.ttft_ms(first=True),
            "ttft_follow_up_p50_ms": self.played.ttft_ms(first=False),
            "prompt_tokens": dataclasses.asdict(self.tokens),
            "requests_per_instance": dict(self.instances),
            "requests": len(self.played.records),
            "failed": len(self.played.failures()),
        }


@dataclass(frozen=True, slots=True)
class Guarantees:
    """What must hold, whatever the figures are."""

    same_tokens: Comparison
    loaded: PromptTokens
    failed: int
    requests: int

    @property
    def loaded_share(self) -> float:
        """The share of the compared prompts' tokens that was loaded from the pool."""
        return self.loaded.pool / max(1, self.same_tokens.prompt_tokens)

    @property
    def same(self) -> bool:
        """Whether the tokens are the same, and the pool had a part in them."""
        reused = self.same_tokens.cached_share >= REUSED_SHARE_MIN and self.loaded_share >= LOADED_SHARE_MIN
        return self.same_tokens.same and reused

    @property
    def hold(self) -> bool:
        """Whether all of them hold."""
        return self.same and not self.failed

    def lines(self) -> Iterator[str]:
        """One line each, and one for each thing that is wrong."""
        yield (
            f"same tokens as without the pool: {'yes' if self.same else 'no'} ({self.same_tokens.compared_share:.0%} of"
            f" {self.same_tokens.positions} positions compared; {self.same_tokens.cached_share:.0%} of the prompts reused,"
            f" {self.loaded_share:.0%} loaded from the pool)"
        )
        yield from (f"  {difference}" for difference in self.same_tokens.differences[:5])
        yield f"failed requests: {self.failed} of {self.requests}"

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "same_tokens": self.same,
            "positions": self.same_tokens.positions,
            "compared_share": self.same_tokens.compared_share,
            "worst_logprob_difference": self.same_tokens.worst,
            "differences": list(self.same_tokens.differences),
            "reused_share": self.same_tokens.cached_share,
            "loaded_share": self.loaded_share,
            "failed": self.failed,
            "hold": self.hold,
        }


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    shape: Shape
    seed: int = 0
    model: str = "small"
    prompts: int = 6
    json: Path | None = None
    serve: bool = False


@dataclass(slots=True)
class Quickstart:
    """One run: what is started, and what is done with it."""

    options: Options
    supervisor: Supervisor
    console: Console
    run: str = field(default_factory=lambda: f"{time.time_ns():x}")

    def main(self) -> bool:
        """Start everything, check the tokens, play the rows, print; whether all guarantees hold."""
        started = time.monotonic()
        sessions = generate(self.options.shape, self.options.seed)
        engines, plain = self.start()
        with self.step("comparing tokens with a plain engine's"):
            tokens, loaded = self.compare_tokens(engines, plain, sessions)
        self.supervisor.stop(plain.running)
        rows = [self.play_row(case, engines, sessions) for case in CASES]
        self.show_table(rows)
        failed, requests = sum(len(r.played.failures()) for r in rows), sum(len(r.played.records) for r in rows)
        guarantees = Guarantees(tokens, loaded, failed, requests)
        for line in guarantees.lines():
            self.say(line)
        for record in [record for row in rows for record in row.played.failures()][:5]:
            self.say(f"  {record.session}, turn {record.turn}: status {record.status} {record.error}")
        self.say(f"took {time.monotonic() - started:.0f} s; logs in {self.supervisor.folder}")
        if self.options.json:
            report = {"rows": [row.as_dict() for row in rows], "guarantees": guarantees.as_dict()}
            self.options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        if self.options.serve:
            self.serve(engines)
        return guarantees.hold

    def start(self) -> tuple[list[Engine], Engine]:
        """Start the pool and the engines: two attached to it, and a plain one."""
        with self.step(f"making the model {self.options.model!r}, if it is not there"):
            folder = model.make(self.options.model)
        with self.step("starting a store and two workers"):
            store = pool.store(self.supervisor)
            workers = [pool.worker(self.supervisor, store["store"], f"worker-{name}") for name in "ab"]
        with self.step("starting three vLLM engines (a minute or two, most of it imports)"):
            transfers = [*(pool.connector(worker["worker"]) for worker in workers), None]
            engines = [
                engine.start(
                    self.supervisor,
                    name,
                    EngineOptions(folder, SERVED_NAME, kv_transfer=transfer, cpus=engine.cpus_of(index, 2)),
                )
                for index, (name, transfer) in enumerate(zip(("engine-a", "engine-b", "plain"), transfers, strict=True))
            ]
            for each in engines:
                each.wait()
        return engines[:2], engines[2]

    def compare_tokens(
        self, engines: Sequence[Engine], plain: Engine, sessions: Sequence[Session]
    ) -> tuple[Comparison, PromptTokens]:
        """Let engine A save prompts while the plain engine continues them, then let engine B load and continue them."""
        salt = f"{self.run}-tokens"
        a, b, right = (Api(each.url, SERVED_NAME, salt) for each in (*engines, plain))

        async def prepare() -> list[compare.Reference]:
            async with compare.client() as client:
                histories = [(s.history(len(s.turns) - 1, "Understood."), s.tools) for s in sessions]
                prompts = [await right.tokenize(client, *history) for history in histories[: self.options.prompts]]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(compare.save(a, prompts))
                return await compare.refer(right, prompts)

        references = self.watched(prepare())
        before = engines[1].sources()
        found = self.watched(compare.check(b, references))
        return found, engines[1].sources() - before

    def play_row(self, case: Case, engines: Sequence[Engine], sessions: Sequence[Session]) -> Row:
        """Play the sessions through a fresh router."""
        name = f"router-{case.label.replace(', ', '-').replace(' ', '-')}"
        router = pool.router(self.supervisor, [each.url for each in engines], case.policy, name)
        before = [each.sources() for each in engines]
        target = Target(router["url"], SERVED_NAME, f"{self.run}-{name}", case.body)
        requests = sum(len(session.turns) for session in sessions)
        with Display(case.label, requests, self.console) as display:
            played = self.watched(play(sessions, target, display))
        after = [each.sources() for each in engines]
        self.supervisor.stop(router.running)
        tokens = sum((new - old for new, old in zip(after, before, strict=True)), PromptTokens())
        answered = Counter(record.instance for record in played.records)
        known = {each.name: answered.pop(each.url, 0) for each in engines}
        return Row(case, played, tokens, {**known, **answered})

    def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, or until one of the started programs dies."""

        async def watch() -> T:
            task = asyncio.create_task(work)
            try:
                while not task.done():
                    await asyncio.wait([task], timeout=WATCH_EVERY_S)
                    self.supervisor.check()
                return task.result()
            finally:
                task.cancel()

        try:
            return asyncio.run(watch())
        except* DemoError as errors:
            raise _first(errors) from None

    def serve(self, engines: Sequence[Engine]) -> None:
        """Leave everything running behind a router until Ctrl-C."""
        router = pool.router(self.supervisor, [each.url for each in engines], "smetric", "router-serving")
        body = msgspec.json.encode({"model": SERVED_NAME, "messages": [{"role": "user", "content": "Hello"}]}).decode()
        self.say(f"\nserving at {router['url']}/v1 until Ctrl-C; try")
        self.say(f"  curl {router['url']}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
        while True:
            self.supervisor.check()
            time.sleep(WATCH_EVERY_S)

    def show_table(self, rows: Sequence[Row]) -> None:
        """Print the rows."""
        table = Table(title="The same sessions under each policy", title_justify="left")
        table.add_column("policy")
        for name in (
            "TTFT p50\nfirst turns",
            "TTFT p50\nfollow-ups",
            "prompt tokens\ncomputed",
            "own cache",
            "tensor pool",
        ):
            table.add_column(name, justify="right")
        table.add_column("requests\nA / B", justify="right")
        for row in rows:
            table.add_row(*map(Text, row.cells()))
        self.console.print()
        self.console.print(table)

    def say(self, text: str) -> None:
        """Print a line as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Say what is being done, and how long it took."""
        started = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(Text(what)):
                yield
        else:
            self.say(f"{what} ...")
            yield
        self.say(f"{what}: {time.monotonic() - started:.0f} s")


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=summary)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer, shorter sessions")
    parser.add_argument("--sessions", type=int, help="sessions played at the same time (6; quick: 4)")
    parser.add_argument("--turns", type=int, help="requests of each session (6; quick: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sessions (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as JSON")
    parser.add_argument("--serve", action="store_true", help="leave everything running until Ctrl-C")
    given = parser.parse_args(arguments)
    shape = Shape(sessions=4, turns=3, think_s=0.3, begin_s=1.0) if given.quick else Shape()
    wanted = {name: value for name in ("sessions", "turns") if (value := getattr(given, name)) is not None}
    if any(value < 1 for value in wanted.values()):
        parser.error("--sessions and --turns must be at least 1")
    return Options(
        shape=dataclasses.replace(shape, **wanted),
        seed=given.seed,
        model="tiny" if given.quick else "small",
        json=given.json,
        serve=given.serve,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 when every guarantee holds, 1 when one does not or something could not start."""
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    folder: Path | None = None
    try:
        with terminated_as_exit(), Supervisor() as supervisor:
            folder = supervisor.folder
            return 0 if Quickstart(options, supervisor, console).main() else 1
    except DemoError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        print(f"quickstart: the logs of all programs are in {folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted; everything it started is stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
