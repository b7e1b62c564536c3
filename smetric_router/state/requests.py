"""What a request says of itself: model, turn, expected hit and canonical prompt. Bodies are parsed for routing only.

Canonical prompt bytes: first everything short that decides the prompt (model, tenant, cache salt, template options),
each length-prefixed and folded into the seed of the chain; then the pieces of the prompt in order (tools, messages; of
`/v1/messages` tools, system, messages), as the raw JSON bytes received. A chunk has a fixed size and ends early at the
end of a piece, so the whole history of a follow-up is a whole number of chunks however short its messages are. JSON
values delimit themselves, so pieces need no length; that leaves a prompt that merely grew with the same leading bytes.

The work on one request is bounded: what follows after so many messages or chunks is not looked at.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import msgspec
from msgspec import Raw
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from smetric_router.errors import BadRequest
from smetric_router.state.loose_json import mended, parsed
from smetric_router.types import Chain, RequestInfo
from smetric_router.view import ClusterView

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
MESSAGES_PATH = "/v1/messages"
MESSAGES_PATHS = frozenset((b"/v1/messages", b"/v1/messages/count_tokens"))
"""Whose clients expect Anthropic's shapes."""
_COMPUTING_PATHS = frozenset(
    (
        b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/messages/count_tokens", b"/v1/responses",
        b"/v1/embeddings", b"/pooling", b"/classify", b"/v1/classify", b"/score", b"/v1/score", b"/rerank", b"/v1/rerank",
        b"/v2/rerank", b"/tokenize", b"/v1/tokenize", b"/detokenize", b"/v1/detokenize", b"/generate", b"/encode",
        b"/inference/v1/generate", b"/v1/audio/transcriptions", b"/v1/audio/translations", b"/v1/audio/speech",
        b"/v1/images/generations", b"/v1/moderations", b"/invocations",
    )
)  # fmt: skip
CACHE_CLEARING_PATHS = frozenset((b"/reset_prefix_cache", b"/flush_cache", b"/sleep", b"/update_weights"))
"""After a good answer an engine holds nothing of what it was sent before (vLLM's and SGLang's own)."""
MODEL_CHANGING_PATHS = frozenset(
    (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter", b"/load_lora_adapter", b"/unload_lora_adapter")
)
"""After a good answer an engine lists other models."""
_READING_METHODS = frozenset((b"GET", b"HEAD", b"OPTIONS"))
FOLLOW_UP_SHARE = 0.5
MESSAGES_MAX = 20_000
SEED_NAMES_MAX = 256
"""Characters of model and tenant; the seeds of longer names are not remembered."""


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


class _Messages(_Prompted):
    """Anthropic's form: the system prompt is a field of its own."""

    system: Raw = Raw()
    messages: list[Raw] = []


class _Message(msgspec.Struct):
    role: Raw = Raw()


_decode_common = msgspec.json.Decoder(_Common).decode
_decode_loose = msgspec.json.Decoder(_Loose).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_messages = msgspec.json.Decoder(_Messages).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_role_first = re.compile(rb'\{\s*"role"\s*:\s*"(?:(assistant)|[a-z]+)"').match
# Clients of Anthropic's form move these marks to the end of the conversation, turn by turn. They are no part of the
# prompt, and with them no message would be the same in two turns. In a text the quotation marks would be escaped.
_MARKER = b'"cache_control"'
_drop_markers = re.compile(rb',\s*"cache_control"\s*:\s*\{[^{}]*\}|"cache_control"\s*:\s*\{[^{}]*\}\s*(?:,\s*)?').sub
_ASSISTANT = Raw(b'"assistant"')
_TRUE = Raw(b"true")
# UnicodeDecodeError is a ValueError, as is what Python says of a number with too many digits.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
_OBJECT_BEGINS = frozenset((b"{", b" ", b"\t", b"\r", b"\n", b"\xef"))
_FORM_FIELD = b'name="model"'
_form_value = re.compile(rb'name="model"[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,1024})\r\n').match


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests into `RequestInfo`."""

    chunk_bytes: int = 1024
    chunks_max: int = 32_768

    def read(
        self, path: str, body: bytes, *, tenant: str = "", turn: str | None = None, session: str = ""
    ) -> RequestInfo:
        """The request as a decision sees it. `turn` and `session` are the client's own statements, if it makes them.

        Raises BadRequest when a body that must be JSON is not. A body whose fields have unexpected types is the
        engine's to judge: it is placed as a first turn.
        """
        info = self._info(path, body, tenant)
        if turn is not None:
            info = replace(info, turn=_stated_turn(turn))
        return replace(info, session=session) if session else info

    def _info(self, path: str, body: bytes, tenant: str) -> RequestInfo:
        must_parse = path in (CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH)
        if not must_parse and body[:1] not in _OBJECT_BEGINS:
            return RequestInfo(_form_model(body), tenant)
        try:
            return self._read(path, body, tenant)
        except _UNREADABLE as error:
            cause = str(error)
        again = mended(body)
        if again != body:
            try:
                return self._read(path, again, tenant)
            except _UNREADABLE:
                pass
        if (found := parsed(body)) is not None:
            model = found.get("model")
            return RequestInfo(model if isinstance(model, str) else "", tenant, stream=found.get("stream") is True)
        if must_parse:
            raise BadRequest(f"the body is not valid JSON: {cause}")
        return RequestInfo(tenant=tenant)

    def _read(self, path: str, body: bytes, tenant: str) -> RequestInfo:
        """Raises what is in _UNREADABLE."""
        try:
            return self._typed(path, body, tenant)
        except msgspec.ValidationError:
            return _lenient(body, tenant)

    def _typed(self, path: str, body: bytes, tenant: str) -> RequestInfo:
        if path == CHAT_PATH:
            chat = _decode_chat(body)
            return self._chat(chat, [chat.tools, chat.functions, chat.documents], chat.messages, tenant)
        if path == MESSAGES_PATH:
            asked = _decode_messages(body)
            head, messages = [asked.tools, asked.system], asked.messages
            if _MARKER in body:
                head, messages = list(map(_unmarked, head)), list(map(_unmarked, messages))
            return self._chat(asked, head, messages, tenant)
        if path == COMPLETIONS_PATH:
            return self._completion(_decode_completion(body), tenant)
        common = _decode_common(body)
        return RequestInfo(common.model or "", tenant, stream=bool(common.stream))

    def _chat(self, body: _Prompted, head: list[Raw], messages: list[Raw], tenant: str) -> RequestInfo:
        messages = messages[:MESSAGES_MAX]
        answers = [at for at, message in enumerate(messages) if _is_answer(message)]
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
        size, done, add = self.chunk_bytes, 0, digests.append
        for piece in pieces:
            begins.append(done)
            view = memoryview(piece)
            length = len(view)
            if length <= size:  # most messages
                if length and len(digests) < self.chunks_max:
                    add(seed := xxh3_64_intdigest(view, seed))
                    ends.append(done := done + length)
                continue
            starts = range(0, length, size)[: self.chunks_max - len(digests)]
            for start in starts:
                add(seed := xxh3_64_intdigest(view[start : start + size], seed))
            if starts:
                stop = min(starts[-1] + size, length)
                ends += range(done + size, done + stop, size)
                ends.append(done := done + stop)
        return Chain(tuple(digests), tuple(ends)), begins


def is_repeatable(method: bytes, path: bytes) -> bool:
    """Whether a request only reads or computes, so that no harm is done if two engines get it, or one gets it twice."""
    return path in _COMPUTING_PATHS or method in _READING_METHODS


def with_deduced_turn(request: RequestInfo, view: ClusterView) -> RequestInfo:
    """A prompt without messages is a follow-up if at least half of it is cached somewhere; the hit is then expected."""
    if request.turn is not None:
        return request
    longest = view.longest_hit
    if longest and longest >= FOLLOW_UP_SHARE * request.length:
        return replace(request, turn=1, est_hit=longest)
    return replace(request, turn=0)


def _seed(body: _Prompted, tenant: str) -> int:
    model = body.model or ""
    special = body.cache_salt or body.chat_template or body.chat_template_kwargs or body.reasoning_effort
    if special or len(model) + len(tenant) > SEED_NAMES_MAX:
        return _seed_of(body, tenant)
    return _plain_seed(model, tenant)


@lru_cache(maxsize=1024)
def _plain_seed(model: str, tenant: str) -> int:
    return _seed_of(_Prompted(model=model), tenant)


def _seed_of(body: _Prompted, tenant: str) -> int:
    parts: list[bytes | Raw] = [(body.model or "").encode(), tenant.encode("utf-8", "surrogateescape")]
    parts += [body.cache_salt, body.chat_template, body.chat_template_kwargs, body.reasoning_effort]
    return xxh3_64_intdigest(b"".join(b"%d:%b" % (len(memoryview(part)), part) for part in parts))


def _form_model(body: bytes) -> str:
    """The field `model` of a form with files, as audio is sent."""
    if not body.startswith(b"--"):
        return ""
    found = _form_value(body, at) if (at := body.find(_FORM_FIELD)) >= 0 else None
    return found[1].decode("utf-8", "replace").strip() if found else ""


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


def _unmarked(piece: Raw) -> Raw:
    text = bytes(piece)
    return Raw(_drop_markers(b"", text)) if _MARKER in text else piece


def _is_answer(message: Raw) -> bool:
    if found := _role_first(message):  # as nearly all clients write it; the content need not be read for it
        return found.lastindex is not None
    if bytes(memoryview(message)[:1]) != b"{":
        return False
    try:
        return _decode_message(message).role == _ASSISTANT
    except msgspec.ValidationError:
        return False


def _stated_turn(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadRequest(f"the turn must be a whole number from 0 on, not {text!r}")
    return int(text)
