"""Agent sessions made by a seed, with the shape real ones have.

Every session opens with the same tools and the same long system prompt, gets a task of its own, and then goes on turn by
turn: the assistant answers or calls a tool, the tool's result (of varying length) or the user's next message follows, and
the whole history is sent again. Most prompt tokens are therefore reused: most of those within the session, and about a
fifth from what all sessions share. The text is drawn from the standard library's sources.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from demo.model import corpus

# Of the demo's tokenizer on this kind of text.
CHARS_PER_TOKEN = 2.7

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the sessions look like; sizes in tokens of the demo's model, about."""

    sessions: int = 6
    turns: int = 6
    system_tokens: int = 600
    # A real task brings whole files; what a tool returns is short beside the history.
    task_tokens: int = 1600
    result_tokens: int = 150
    # Spread of the results' lengths and of the think times: the sigma of a log-normal.
    result_sigma: float = 0.6
    reply_tokens: int = 24
    # Median pause before a session's next turn. Real ones are some 20 s; a demonstration has less time.
    think_s: float = 2.0
    think_sigma: float = 0.6
    # The sessions begin at any moment of this time.
    begin_s: float = 8.0
    # The share of turns whose answer is a scripted tool call; the other turns go on with the model's own answer.
    tool_call_share: float = 0.6


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, and what is added to the history after its answer."""

    think_s: float
    # The tool calls written into the history in place of the model's answer; None: its answer is used.
    scripted: tuple[Message, ...] | None
    # What follows the assistant's message: tool results, or the user's next message.
    follow_up: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation to be played: its opening and its turns."""

    name: str
    tools: tuple[Tool, ...]
    opening: tuple[Message, ...]
    turns: tuple[Turn, ...]
    reply_tokens: int

    def history(self, turns: int, reply: str) -> list[Message]:
        """The history before the given turn, if the model had always given this reply."""
        messages = list(self.opening)
        for turn in self.turns[:turns]:
            self.extend(messages, turn, reply)
        return messages

    def extend(self, history: list[Message], turn: Turn, reply: str) -> None:
        """Add the turn's assistant message and what follows it to the history."""
        if turn.scripted is None:
            history.append({"role": "assistant", "content": reply})
        else:
            history.append({"role": "assistant", "content": None, "tool_calls": list(turn.scripted)})
        history.extend(turn.follow_up)


@dataclass(slots=True)
class Text:
    """Pieces of source text of a wanted length, by a seed."""

    chance: random.Random
    sources: Sequence[str] = field(default_factory=lambda: [text for text in corpus() if len(text) > 5_000])

    def piece(self, tokens: int) -> str:
        """About so many tokens of consecutive lines from one or more files."""
        wanted = int(tokens * CHARS_PER_TOKEN)
        parts: list[str] = []
        while wanted > 0:
            source = self.chance.choice(self.sources)
            start = self.chance.randrange(len(source))
            part = source[start : start + wanted]
            parts.append(part)
            wanted -= len(part)
        return "\n".join(parts)

    def around(self, tokens: int, sigma: float) -> str:
        """A piece whose length is log-normal around this median, at most four times it."""
        drawn = tokens * math.exp(self.chance.gauss(0.0, sigma))
        return self.piece(max(8, min(int(drawn), 4 * tokens)))


def generate(shape: Shape, seed: int = 0) -> list[Session]:
    """The sessions of a seed; the same seed and shape give the same bytes."""
    shared = Text(random.Random(f"{seed}/shared"))
    tools = tuple(_tools())
    opening = "You are a careful engineer. Work in small steps and call a tool for every fact you need.\n"
    system = {"role": "system", "content": opening + "House rules, by example:\n" + shared.piece(shape.system_tokens)}
    return [
        _session(f"session-{number}", shape, tools, system, Text(random.Random(f"{seed}/{number}"), shared.sources))
        for number in range(shape.sessions)
    ]


def _session(name: str, shape: Shape, tools: tuple[Tool, ...], system: Message, text: Text) -> Session:
    task = f"{name}: find out why this fails and mend it.\n{text.around(shape.task_tokens, shape.result_sigma / 2)}"
    turns = tuple(_turn(name, number, shape, text) for number in range(shape.turns))
    return Session(name, tools, (system, {"role": "user", "content": task}), turns, shape.reply_tokens)


def _turn(name: str, number: int, shape: Shape, text: Text) -> Turn:
    if number == 0:
        think_s = text.chance.uniform(0.0, shape.begin_s)
    else:
        think_s = min(shape.think_s * math.exp(text.chance.gauss(0.0, shape.think_sigma)), 4 * shape.think_s)
    if text.chance.random() >= shape.tool_call_share:
        content = f"Go on with step {number + 2}. I found this:\n{text.around(shape.result_tokens, shape.result_sigma)}"
        return Turn(think_s, None, ({"role": "user", "content": content},))
    calls = tuple(_calls(name, number, text.chance))
    results = tuple(
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": text.around(shape.result_tokens // len(calls), shape.result_sigma),
        }
        for call in calls
    )
    return Turn(think_s, calls, results)


def _calls(name: str, number: int, chance: random.Random) -> Iterator[Message]:
    for position in range(chance.choice((1, 1, 1, 2))):
        tool = chance.choice(sorted(TOOLS))
        arguments = {parameter: f"{parameter}-{chance.randrange(1000)}" for parameter in TOOLS[tool][1]}
        function = {"name": tool, "arguments": json.dumps(arguments)}
        yield {"id": f"call-{name}-{number}-{position}", "type": "function", "function": function}


TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "read_file": ("Read a part of a file of the repository.", {"path": "the file", "lines": "first and last line"}),
    "search": ("Search the repository for a regular expression.", {"pattern": "the expression", "folder": "where"}),
    "run_tests": ("Run the tests that match a name, and return the end of their output.", {"name": "what to run"}),
    "edit": (
        "Replace one piece of a file by another.",
        {"path": "the file", "old": "the piece", "new": "its successor"},
    ),
}


def _tools() -> Iterator[Tool]:
    for name, (description, parameters) in TOOLS.items():
        properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(parameters)}
        yield {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
