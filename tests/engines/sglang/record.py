"""A program: what a real SGLang server says to a router, written down for tests that have no SGLang.

    .envs/sglang/bin/python -m tests.engines.sglang.record tests/router/recorded/sglang-0.5.23

`answers.json`: the version, and what it answers to GET /v1/models, /v1/loads, /metrics and /server_info (its `kv_events`).
`events.jsonl`: a conversation after the other, one line for each answer: the prompt in tokens, how many of them were cached, on
which medium, and the messages with KV events that came before the next request (msgpack in hexadecimal, as its own encoder wrote
them).
"""

import argparse
import json
import random
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import zmq
from demo import model, sglang_engine
from demo.processes import ROOT, Supervisor, run_id
from demo.sglang_engine import SglangOptions, SglangServer

PAGE = 64
QUIET_S = 0.25  # after so much silence all events of an answer are there
GAUGES = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:cache_hit_rate")


class Events:
    """The messages of a server's publisher."""

    def __init__(self, endpoint: str) -> None:
        self._messages: list[str] = []
        self._last = time.monotonic()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            _, _, payload = self._socket.recv_multipart()
            self._messages.append(payload.hex())
            self._last = time.monotonic()

    def take(self) -> list[str]:
        """Those since the last time, once nothing comes any more."""
        begun = time.monotonic()
        while time.monotonic() - max(begun, self._last) < QUIET_S:
            time.sleep(0.05)
        taken, self._messages = self._messages, []
        return taken


def get(server: SglangServer, path: str) -> str:
    """The text of an answer."""
    status, text = server.ask(path, method="GET")
    if status != 200:
        raise SystemExit(f"{path} answered {status}: {text}")
    return text


def answers(server: SglangServer) -> dict[str, Any]:
    """See the module."""
    info = json.loads(get(server, "/server_info"))
    metrics = [line for line in get(server, "/metrics").splitlines() if line.lstrip("# HELPTY").startswith(GAUGES)]
    return {
        "version": info["version"],
        "/v1/models": json.loads(get(server, "/v1/models")),
        "/v1/loads": json.loads(get(server, "/v1/loads?include=core")),
        "/metrics": "\n".join(metrics) + "\n",
        "/server_info": {"version": info["version"], "kv_events": info["kv_events"]},
    }


def conversations(server: SglangServer, events: Events, file: TextIO) -> None:
    """See the module. More than the device holds and the host holds, so that blocks move and go."""
    draw = random.Random(3)

    def ask(prompt: list[int], *, flush: bool = False, **more: Any) -> list[int]:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
        status, text = server.ask("/generate", {**body, **more})
        if status != 200:
            raise SystemExit(f"/generate answered {status}: {text}")
        answer = json.loads(text)
        meta = answer["meta_info"]
        line = {
            "prompt": prompt, "salt": more.get("cache_salt", ""), "cached": meta["cached_tokens"],
            "where": {k: n for k, n in (meta.get("cached_tokens_details") or {}).items() if n},
            "events": [] if flush else events.take(),
        }  # fmt: skip
        if flush:
            server.flush()
            line["events"] = events.take()
        file.write(json.dumps(line) + "\n")
        file.flush()
        return list(answer["output_ids"])

    system = draw.choices(range(10, 2000), k=150)
    prompts: list[list[int]] = []
    for number in range(8):
        prompt = list(system)
        for _ in range(3):
            prompt += draw.choices(range(10, 2000), k=draw.randrange(60, 260))
            prompt += ask(prompt)
        prompts.append(prompt)
        if number % 2:
            ask(prompts[draw.randrange(len(prompts))])
    ask(prompts[-1], cache_salt="of somebody else")
    ask(prompts[-1], cache_salt="of somebody else", flush=True)
    ask(prompts[-1])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with Supervisor(ROOT / ".out" / f"sglang-record-{run_id()}") as supervisor:
        port, replay = supervisor.port(), supervisor.port()
        config = {"publisher": "zmq", "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}"}
        args = ("--kv-events-config", json.dumps(config), "--enable-metrics", "--served-model-name", "demo")
        server = sglang_engine.start(
            supervisor,
            "recorded",
            SglangOptions(model.make("tiny"), kv_tokens=2048, args=args, env={"OMP_NUM_THREADS": "1"}),
        )
        server.wait()
        events = Events(f"tcp://127.0.0.1:{port}")
        server.generate([5] * 20)  # its events say that the subscription is there
        events.take()
        (folder / "answers.json").write_text(json.dumps(answers(server), indent=1) + "\n")
        with (folder / "events.jsonl").open("w") as file:
            conversations(server, events, file)


if __name__ == "__main__":
    main()
