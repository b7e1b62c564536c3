"""What the demo shows: progress and the table, letter by letter whatever a name looks like."""

import io
from typing import Any

import pytest
from demo.play import Display, Played, Record
from demo.quickstart import Case, Options, PromptTokens, Quickstart, Row
from demo.sessions import Shape
from rich.console import Console

AWKWARD = ["[red]x", "a\\", "[/]"]


def shown(terminal: bool) -> tuple[Console, io.StringIO]:
    """A console and what it has printed."""
    printed = io.StringIO()
    return Console(file=printed, force_terminal=terminal, color_system=None, width=150), printed


@pytest.mark.parametrize("name", AWKWARD)
def test_progress_on_a_terminal(name: str) -> None:
    console, printed = shown(terminal=True)
    with Display(name, 3, console) as display:
        display.finished(Record("s", 0, status=200))
        display.finished(Record("s", 1, status=500))
    last = printed.getvalue().splitlines()[-2]  # the cursor comes back after it
    assert f" {name} " in last and " 1 failed " in last and " 2/3 " in last


@pytest.mark.parametrize("name", AWKWARD)
def test_the_table_and_a_step(name: str) -> None:
    for terminal in (False, True):
        console, printed = shown(terminal)
        nothing: Any = None
        quickstart = Quickstart(Options(Shape(), model=name), nothing, console)
        quickstart.show_table([Row(Case(name, "smetric"), Played(), PromptTokens(), {name: 1})])
        with quickstart.step(f"making {name}"):
            pass
        assert f"│ {name} " in printed.getvalue() and f"making {name}" in printed.getvalue()
