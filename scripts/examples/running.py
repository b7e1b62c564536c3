"""A vLLM server that takes published versions of its weights, by vLLM's own endpoints (docs/weights.md)."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import tensorcast_connector as tensorcast

POLICY = "policy"


class Refused(Exception):
    """The engine's own words on why it keeps its weights."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A vLLM server with `--weight-transfer-config '{"backend": "tensorcast"}'`, and the worker of its host."""

    url: str
    worker: str

    def attach(self, model: str = POLICY) -> None:
        """Says where versions come from; once."""
        self._post("/init_weight_transfer_engine", {"init_info": {"worker": self.worker, "model": model}})

    async def bring(self, version: int | str, model: str = POLICY) -> None:
        """Has its host's worker fetch what it has not of a version, while the engine serves on."""
        async with await tensorcast.connect(self.worker) as session:
            await (await session.weights(model, version=version)).prefetch()

    def update(self, version: int | str | None = None, pause: bool = True) -> None:
        """Gives it a version, the newest unless told.

        Raises:
            Refused: it keeps the weights that it has, and serves on.
        """
        if pause:
            self._post("/pause?mode=wait")  # waits for requests under way; empties the engine's own cache
        try:
            self._post("/start_weight_update")
            self._post("/update_weights", {"update_info": {"version": version}})
            self._post("/finish_weight_update", {"weight_version": str(version)})
        finally:
            if pause:
                self._post("/resume")

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(error.read().decode(errors="replace")) from error
