"""What a request says of itself: model, turn, expected hit and canonical prompt. Bodies are parsed for routing only.

Canonical prompt bytes: first everything short that decides the prompt (model, tenant, cache salt, template options),
each length-prefixed and folded into the seed of the chain; then the pieces of the prompt in order (tools, messages),
as the raw JSON bytes received. A chunk has a fixed size and ends early at the end of a piece, so the whole history of
a follow-up is a whole number of chunks however short its messages are. JSON values delimit themselves, so pieces need
no length; that leaves a prompt that merely grew with the same leading bytes.

The work on one request is bounded: what follows after so many messages or chunks is not looked at.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import msgspec
from msgspec import Raw
from xxhash import xxh3_64_intdigest

from smetric_router.errors import BadRequest
from smetric_router.types import Chain, ClusterView, RequestInfo

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
FOLLOW_UP_SHARE = 0.5
MESSAGES_MAX = 20_000


class _Common(msgspec.Struct):
    """The fields that any JSON body may have."""

    model: str | None = None
    stream: bool | None = None


class _Loose(msgspec.Struct):
    """The same where their types are not the expected ones."""

    model: Raw = Raw()
    stream: Raw = Raw()


class _Prompted(_Common):
    """Everything besides messages that changes the prompt or who may share it."""

    cache_salt: Raw = Raw()
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    reasoning_effort: Raw = Raw()
    documents: Raw = Raw()
    tools: Raw = Raw()
    functions: Raw = Raw()


class _Chat(_Prompted):
    messages: list[Raw] = []


class _Completion(_Prompted):
    prompt: Raw = Raw()


class _Message(msgspec.Struct):
    role: Raw = Raw()


_decode_common = msgspec.json.Decoder(_Common).decode
_decode_loose = msgspec.json.Decoder(_Loose).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_ASSISTANT = Raw(b'"assistant"')
_TRUE = Raw(b"true")


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests into `RequestInfo`."""

    chunk_bytes: int = 512
    chunks_max: int = 32_768

    def read(self, path: str, body: bytes, *, tenant: str = "", turn: str | None = None) -> RequestInfo:
        """The request as a decision sees it. `turn` is the client's own statement, if it makes one.

        Raises BadRequest when a body that must be JSON is not. A body whose fields have unexpected types is the
        engine's to judge: it is placed as a first turn.
        """
        info = self._info(path, body, tenant)
        return info if turn is None else replace(info, turn=_stated_turn(turn))

    def _info(self, path: str, body: bytes, tenant: str) -> RequestInfo:
        must_parse = path in (CHAT_PATH, COMPLETIONS_PATH)
        if not body and not must_parse:
            return RequestInfo(tenant=tenant)
        try:
            try:
                return self._typed(path, body, tenant)
            except msgspec.ValidationError:
                return _lenient(body, tenant)
        # UnicodeDecodeError is a ValueError, as is what Python says of a number with too many digits.
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            if must_parse:
                raise BadRequest(f"the body is not valid JSON: {error}") from None
            return RequestInfo(tenant=tenant)

    def _typed(self, path: str, body: bytes, tenant: str) -> RequestInfo:
        if path == CHAT_PATH:
            return self._chat(_decode_chat(body), tenant)
        if path == COMPLETIONS_PATH:
            return self._completion(_decode_completion(body), tenant)
        common = _decode_common(body)
        return RequestInfo(common.model or "", tenant, stream=bool(common.stream))

    def _chat(self, body: _Chat, tenant: str) -> RequestInfo:
        head = [body.tools, body.functions, body.documents]
        messages = body.messages[:MESSAGES_MAX]
        answers = [at for at, message in enumerate(messages) if _role(message) == _ASSISTANT]
        chain, ends = self._chain(_seed(body, tenant), [*head, *messages])
        est_hit = ends[len(head) + answers[-1]] if answers else 0
        return RequestInfo(body.model or "", tenant, len(answers), est_hit, chain, bool(body.stream))

    def _completion(self, body: _Completion, tenant: str) -> RequestInfo:
        # The closing quote or bracket is left out: it would differ from the bytes of a longer prompt.
        chain, _ = self._chain(_seed(body, tenant), [memoryview(body.prompt)[:-1]])
        return RequestInfo(body.model or "", tenant, None, 0, chain, bool(body.stream))

    def _chain(self, seed: int, pieces: Iterable[Raw | memoryview]) -> tuple[Chain, list[int]]:
        """The chain over all pieces, and the offset at which each piece begins."""
        digests: list[int] = []
        ends: list[int] = []
        begins: list[int] = []
        size, done = self.chunk_bytes, 0
        for piece in pieces:
            begins.append(done)
            view = memoryview(piece)
            for start in islice(range(0, len(view), size), self.chunks_max - len(digests)):
                chunk = view[start : start + size]
                seed = xxh3_64_intdigest(chunk, seed)
                done += len(chunk)
                digests.append(seed)
                ends.append(done)
        return Chain(tuple(digests), tuple(ends)), begins


def with_deduced_turn(request: RequestInfo, view: ClusterView) -> RequestInfo:
    """A prompt without messages is a follow-up if at least half of it is cached somewhere; the hit is then expected."""
    if request.turn is not None:
        return request
    longest = max(view.hits.values(), default=0)
    if longest and longest >= FOLLOW_UP_SHARE * request.chain.length:
        return replace(request, turn=1, est_hit=longest)
    return replace(request, turn=0)


def _seed(body: _Prompted, tenant: str) -> int:
    parts: list[bytes | Raw] = [(body.model or "").encode(), tenant.encode("utf-8", "surrogateescape")]
    parts += [body.cache_salt, body.chat_template, body.chat_template_kwargs, body.reasoning_effort]
    return xxh3_64_intdigest(b"".join(b"%d:%b" % (len(memoryview(part)), part) for part in parts))


def _lenient(body: bytes, tenant: str) -> RequestInfo:
    """What can be told of the rare body whose fields have unexpected types."""
    try:
        loose = _decode_loose(body)
    except msgspec.ValidationError:
        return RequestInfo(tenant=tenant)
    try:
        model = _decode_text(loose.model)
    except msgspec.DecodeError:
        model = ""
    return RequestInfo(model, tenant, stream=loose.stream == _TRUE)


def _role(message: Raw) -> Raw:
    if bytes(memoryview(message)[:1]) != b"{":
        return Raw()
    try:
        return _decode_message(message).role
    except msgspec.ValidationError:
        return Raw()


def _stated_turn(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadRequest(f"the turn must be a whole number from 0 on, not {text!r}")
    return int(text)
