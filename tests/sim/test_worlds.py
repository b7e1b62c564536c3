"""The fast tier's worlds, and that they are worth something: what should happen in them does, and a seed is all there is."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sim import cli
from tests.sim.cluster import draw_shape
from tests.sim.mutants import MUTANTS
from tests.sim.runner import play

WORLDS = 200
WITH_PLANS = 7  # a seed
ROOT = Path(__file__).resolve().parents[2]
# In so many worlds each of these is seen, or the worlds have become tame.
HAPPENS = (
    "artifacts", "congestion", "connection given up while copying", "database lost", "database made anew",
    "database restored", "delay", "duplication", "engine crash", "engine gives up", "engine pause", "inventory accepted",
    "lease expired", "listing in pages", "log torn", "loss", "one-way partition", "page evicted",
    "page fetched", "page read", "page with wrong bytes", "partition", "reply too late, or the second one",
    "report accepted", "report refused", "store clock", "store crash", "store pause",
    "store says conflict", "store says not-found", "torn write", "watch from before the history", "worker clock",
    "told of a former life", "worker crash", "worker leaves", "worker pause",
    "plan Conflict", "plan NotFound", "plan cancelled", "plan done", "plan failed", "plan record finished", "plan taken over",
    "step joined", "step known", "step refused", "step stopped",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_invariant_holds_in_two_hundred_worlds() -> None:
    counts: Counter[str] = Counter()
    for seed in range(WORLDS):
        outcome = play(seed)
        last = "\n".join(outcome.log[-20:])
        assert not outcome.problem, f"{last}\n{outcome.problem}\nits whole log: scripts/sim --seed {seed}"
        counts += outcome.counts
    missing = [each for each in HAPPENS if not counts[each]]
    assert not missing, f"never seen in {WORLDS} worlds: {missing}"


def test_a_seed_is_played_the_same_again() -> None:
    first, again = play(3, keep_log=True), play(3, keep_log=True)
    assert len(first.log) > 200
    assert first.log == again.log and first == again


def test_some_worlds_have_plans() -> None:
    assert draw_shape(WITH_PLANS).plans and not draw_shape(1).plans
    assert any("plans/t/k0" in line for line in play(WITH_PLANS, keep_log=True).log)


def test_another_seed_is_another_world() -> None:
    assert play(3, keep_log=True).log != play(4, keep_log=True).log


@pytest.mark.parametrize("name", ["home ignores its own expiry", "retry without idempotency"])
def test_a_broken_world_is_broken_the_same_again(name: str) -> None:
    [mutant] = [each for each in MUTANTS if each.name == name]
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        first, again = play(mutant.seed), play(mutant.seed)
    assert first.problem and first.log[-1].endswith(first.problem)
    assert first == again


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, WITH_PLANS])
def test_a_seed_is_played_the_same_in_another_process(seed: int) -> None:
    """Where sets of texts have another order."""
    script = f"from tests.sim.cli import main; main(['--seed', '{seed}'])"

    def log(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert log("1") == log("2")


# --- scripts/sim ---


def test_it_says_how_many_were_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--worlds", "2", "--first", "5"]) == 0
    assert capsys.readouterr().out.startswith("2 worlds, all clean")


def test_it_plays_as_many_as_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--minutes", "0.0001"]) == 0
    assert capsys.readouterr().out.startswith("1 worlds, all clean")


def test_it_plays_one_again_with_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--seed", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == play(5, keep_log=True).log


def test_it_names_the_broken_seed_and_shows_how_it_came(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [mutant] = [each for each in MUTANTS if each.name == "home ignores its own expiry"]
    mutant.apply(monkeypatch)
    assert cli.main(["--worlds", "3", "--first", str(mutant.seed)]) == 1
    out = capsys.readouterr().out
    assert f"seed {mutant.seed} is broken" in out and f"scripts/sim --seed {mutant.seed}" in out
    assert out.count("\n") > 20


@pytest.mark.slow
def test_it_uses_several_processes_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--worlds", "4", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.startswith("4 worlds, all clean")


@pytest.mark.parametrize("wrong", ["--worlds=0", "--minutes=-1", "--jobs=0", "--seed=x"])
def test_it_refuses_nonsense(wrong: str) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main([wrong])
    assert refused.value.code == 2
