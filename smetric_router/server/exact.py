"""The prompts of requests in tokens, for the exact index: which model's tokenizer, and whether on the loop or in a thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from smetric_router.blocks import TokenPrompt
from smetric_router.config import RouterConfig
from smetric_router.server.logs import log
from smetric_router.server.rendering import CannotRender, Dialect
from smetric_router.server.tokenising import INLINE_BODY_BYTES, INLINE_TEXT_CHARS, ModelTokenizer
from smetric_router.types import RequestInfo

WAITING_MAX = 256
"""More requests do not wait for a thread: they are placed by the observed index."""
CAUSES_MAX = 100
"""Of prompts that cannot be tokenised here; no more are told."""


class _Entry(msgspec.Struct):
    parent: str | None = None
    owned_by: str | None = None


_decode_entry = msgspec.json.Decoder(_Entry).decode


class ExactPrompts:
    """Tokenises requests.

    Args:
        entry: the entry of a model in an engine's list, None for an unknown one: it says whether the model is an adapter.
        count: is told of each request `tokenised` or why it was not.

    Raises ConfigError when a tokenizer cannot be read.
    """

    def __init__(
        self, config: RouterConfig, entry: Callable[[str], bytes | None], count: Callable[[str], None]
    ) -> None:
        self._tokenizers = {
            model: ModelTokenizer(Path(path), config.tokens_cached_max // len(config.tokenizers))
            for model, path in config.tokenizers.items()
        }
        self._entry = entry
        self._count = count
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, "tokenizer")
        self._waiting = 0
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"<ExactPrompts {self._tokenizers}, {self._waiting} waiting>"

    def stop(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def read(
        self, path: str, body: bytes, info: RequestInfo, done: Callable[[RequestInfo], None]
    ) -> RequestInfo | None:
        """The request with its tokens, or as it was where they cannot be had; None: `done` will be called with it."""
        lora, name = "", info.model
        entry = self._listed(name)
        if entry.parent is not None and name not in self._tokenizers:
            lora, name = name, entry.parent
        dialect = Dialect.of(entry.owned_by)
        tokenizer = self._tokenizers.get(name)
        if tokenizer is None:
            return self._unread(info, "no tokenizer for the model")
        if len(body) > INLINE_BODY_BYTES:
            return self._in_thread(partial(tokenizer.prompt, path, body, lora, dialect), info, done)
        try:
            rendered = tokenizer.begin(path, body, lora, dialect)
            if rendered.missing_chars > INLINE_TEXT_CHARS:
                return self._in_thread(partial(tokenizer.finish, rendered), info, done)
            return self._read(info, tokenizer.finish(rendered))
        except CannotRender as error:
            return self._unread(info, str(error))
        except Exception as error:
            return self._failed(info, error)

    def _listed(self, model: str) -> _Entry:
        entry = self._entry(model)
        try:
            return _decode_entry(entry) if entry else _Entry()
        except msgspec.DecodeError:
            return _Entry()

    def _in_thread(
        self, work: Callable[[], TokenPrompt], info: RequestInfo, done: Callable[[RequestInfo], None]
    ) -> RequestInfo | None:
        if self._waiting >= WAITING_MAX:
            return self._unread(info, "too many wait")
        self._waiting += 1

        def finished(future: "asyncio.Future[TokenPrompt]") -> None:
            self._waiting -= 1
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                done(self._read(info, future.result()))
                return
            done(self._unread(info, str(error)) if isinstance(error, CannotRender) else self._failed(info, error))

        asyncio.get_running_loop().run_in_executor(self._threads, work).add_done_callback(finished)
        return None

    def _read(self, info: RequestInfo, prompt: TokenPrompt) -> RequestInfo:
        self._count("tokenised")
        return replace(info, tokens=prompt, est_hit=prompt.history)

    def _failed(self, info: RequestInfo, error: BaseException) -> RequestInfo:
        """By a fault of the router's own, which is told once of each kind: whoever found it may send it for ever."""
        why = f"failed: {type(error).__name__}"
        if why not in self._told:
            log.error("a prompt could not be tokenised", exc_info=error)
        return self._unread(info, why)

    def _unread(self, info: RequestInfo, why: str) -> RequestInfo:
        self._count("observed")
        if why not in self._told and len(self._told) < CAUSES_MAX:  # clients name the fields in it
            self._told.add(why)
            fields = {"model": info.model, "cause": why}
            log.info("not tokenised here: the observed index is used for such requests", extra={"fields": fields})
        return info
