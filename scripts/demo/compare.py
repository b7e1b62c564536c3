"""Are the tokens the same as a plain engine's, when the keys and values were not computed but loaded?

The same prompt gives slightly different last bits in another batch or with other chunk boundaries, so two correct engines
may choose different tokens where two candidates are almost equal, and from there on their outputs have nothing in common.
Therefore:

1. The reference engine continues each prompt greedily and reports the two best candidates of every position.
2. The tested engine is given the prompt and the reference's own tokens before a position, and is asked for that one token
   (teacher forcing). So every position is compared on equal terms, whatever happened at the ones before it.
3. Where the reference's best candidate leads by more than `MARGIN` (in log probability), the tokens must be the same;
   elsewhere the log probabilities of the reference's two candidates must agree within `LOGPROB_TOLERANCE`.
4. If fewer than half of the positions have such a lead, the comparison says nothing and fails.

Asking for one token at a time is what makes this a test of the loaded pages: with `prompt_logprobs`, which would give all
positions at once, vLLM neither reads its own cache nor asks a connector, and computes the whole prompt. Here the first
request of each prompt takes its full blocks from where they are (from the pool, when another engine saved them under the
same `cache_salt`), and the others find those loaded blocks in the engine's own cache. `Comparison.cached_share` says how
many tokens of the first requests were not computed, so that a comparison in which nothing was reused is not mistaken for a
proof.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from demo.processes import DemoError

MARGIN = 0.05
LOGPROB_TOLERANCE = 0.05
COMPARED_SHARE_MIN = 0.5
# The reference's two candidates are looked for among this many of the tested engine's.
CANDIDATES = 8
REQUEST_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Position:
    """One generated position: the token, and the log probabilities of the best candidates by token id."""

    token: int
    candidates: Mapping[int, float]

    def ranked(self) -> list[tuple[int, float]]:
        """The candidates, the best first; of equal ones the token that was chosen."""
        return sorted(self.candidates.items(), key=lambda item: (-item[1], item[0] != self.token))

    @property
    def margin(self) -> float:
        """By how much the best candidate leads."""
        best, second = self.ranked()[:2]
        return best[1] - second[1]


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt and the plain engine's greedy continuation."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    positions: tuple[Position, ...]

    def forced(self, index: int) -> list[int]:
        """The prompt of the request that asks for the token at this position."""
        return [*self.prompt, *self.tokens[:index]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found."""

    positions: int = 0
    compared: int = 0
    differences: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # The largest difference of the log probabilities, over all positions.
    worst: float = 0.0

    @property
    def compared_share(self) -> float:
        """The share of positions whose tokens had to be the same."""
        return self.compared / self.positions if self.positions else 0.0

    @property
    def cached_share(self) -> float:
        """The share of the prompts' tokens that the tested engine did not compute."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def same(self) -> bool:
        """Whether the tokens are the same, and enough of them were compared to say so."""
        return not self.differences and self.compared_share >= COMPARED_SHARE_MIN

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(
            self.positions + other.positions,
            self.compared + other.compared,
            self.differences + other.differences,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            max(self.worst, other.worst),
        )

    def __str__(self) -> str:
        verdict = "yes" if self.same else "no"
        return f"{verdict} ({self.compared_share:.0%} of {self.positions} positions compared)"


def compare_position(reference: Position, tested: Position) -> tuple[str | None, float]:
    """What is wrong at one position (None: nothing), and how far the log probabilities are apart."""
    best, second = reference.ranked()[:2]
    apart = max(
        (abs(tested.candidates[token] - p) for token, p in (best, second) if token in tested.candidates), default=0.0
    )
    if reference.margin > MARGIN:
        if tested.token != best[0]:
            return f"token {tested.token} instead of {best[0]}, which led by {reference.margin:.3f}", apart
        return None, apart
    if missing := [token for token, _ in (best, second) if token not in tested.candidates]:
        return f"token {missing[0]} is not among the best {CANDIDATES}", apart
    if apart > LOGPROB_TOLERANCE:
        return f"log probabilities {apart:.3f} apart at a near tie", apart
    return None, apart


def compare(name: str, reference: Reference, tested: Sequence[Position]) -> Comparison:
    """Compare one prompt's positions."""
    assert len(tested) == len(reference.positions)
    pairs = list(zip(reference.positions, tested, strict=True))
    found = [compare_position(*pair) for pair in pairs]
    differences = tuple(f"{name}, position {index}: {wrong}" for index, (wrong, _) in enumerate(found) if wrong)
    compared = sum(position.margin > MARGIN for position in reference.positions)
    return Comparison(len(pairs), compared, differences, worst=max((apart for _, apart in found), default=0.0))


@dataclass(slots=True)
class Api:
    """The few requests a comparison needs, against one engine or router."""

    url: str
    model: str
    cache_salt: str
    body: Mapping[str, Any] = field(default_factory=dict)

    async def tokenize(self, client: aiohttp.ClientSession, messages: Iterable[Any], tools: Iterable[Any]) -> list[int]:
        """The prompt tokens of a conversation, by the engine's own chat template."""
        body = {"model": self.model, "messages": list(messages), "tools": list(tools), "add_generation_prompt": True}
        answer = await self._post(client, "/tokenize", body)
        return list(answer["tokens"])

    async def complete(
        self, client: aiohttp.ClientSession, prompts: Sequence[Sequence[int]], max_tokens: int, logprobs: int
    ) -> tuple[list[list[Position]], int]:
        """Continue the prompts greedily: the positions of each, and how many prompt tokens came from a cache."""
        body = {
            "model": self.model,
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": logprobs,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": self.cache_salt,
            **self.body,
        }
        answer = await self._post(client, "/v1/completions", body)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return [_positions(choice["logprobs"]) for choice in choices], int(cached)

    async def _post(self, client: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with client.post(f"{self.url}{path}", json=body) as response:
                if response.status != 200:
                    raise DemoError(f"{self.url}{path}: status {response.status}: {(await response.text())[:500]}")
                return dict(await response.json())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DemoError(f"{self.url}{path}: {type(error).__name__}: {error}") from error


def _positions(logprobs: Mapping[str, Any]) -> list[Position]:
    """The answer's tokens and candidates; it names tokens `token_id:NUMBER`."""

    def number(name: str) -> int:
        return int(name.rpartition(":")[2])

    pairs = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    return [Position(number(token), {number(name): p for name, p in top.items()}) for token, top in pairs]


def client() -> aiohttp.ClientSession:
    """An HTTP client with the time-out of a long prompt on a slow machine.

    Each request has a connection of its own: after a pause an engine closes idle ones, also while they are being used again.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))


async def refer(plain: Api, prompts: Sequence[Sequence[int]], tokens: int = 16) -> list[Reference]:
    """Let the plain engine continue the prompts."""
    found: list[Reference] = []
    async with client() as http:
        for prompt in prompts:
            (positions,), _ = await plain.complete(http, [prompt], tokens, 2)
            found.append(Reference(tuple(prompt), tuple(p.token for p in positions), tuple(positions)))
    return found


async def save(source: Api, prompts: Sequence[Sequence[int]]) -> None:
    """Let an engine compute the prompts, so that what it saves can be loaded by another one."""
    async with client() as http:
        for prompt in prompts:
            await source.complete(http, [prompt], 1, 1)


async def check(tested: Api, references: Sequence[Reference]) -> Comparison:
    """Compare an engine with the references, teacher-forced."""
    total = Comparison()
    async with client() as http:
        for number, reference in enumerate(references):
            (first,), cached = await tested.complete(http, [reference.prompt], 1, CANDIDATES)
            others = [reference.forced(index) for index in range(1, len(reference.positions))]
            rest, _ = await tested.complete(http, others, 1, CANDIDATES) if others else ([], 0)
            positions = [first[0], *(answer[0] for answer in rest)]
            total += compare(f"prompt {number}", reference, positions)
            total += Comparison(prompt_tokens=len(reference.prompt), cached_tokens=cached)
    return total


def margins(references: Iterable[Reference]) -> list[float]:
    """The margins of all positions, to judge a model by."""
    return sorted(position.margin for reference in references for position in reference.positions)
