"""Turns requests into the tokens that their engine will see: the model's own chat template, then its own tokenizer.

The text of a prompt is cut at the tokenizer's special tokens, which no other token crosses, and what lies between is
tokenised piece by piece. A piece is a message or less, so of a follow-up only the new messages have to be tokenised; the rest
is remembered by digest. Whether that gives the tokens of the whole is tried out on a model's first prompts, and on fewer and
fewer later on; where it does not, prompts are tokenised whole.

What cannot be rendered as the engine would is not rendered at all (`CannotRender`): a template in the request, images, fields
whose effect is not known. Nothing but `tokenizers` and `jinja2` is needed, both in every engine's environment.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from smetric_router.blocks import TokenPrompt, prompt_seed
from smetric_router.errors import ConfigError
from smetric_router.server.logs import log
from smetric_router.server.rendering import CannotRender, Dialect, odd_field, template_variables
from smetric_router.state.requests import CHAT_PATH, COMPLETIONS_PATH

CHECKS_ALWAYS = 16
"""So many of a model's first prompts are tokenised whole as well."""
INLINE_BODY_BYTES = 32_768
INLINE_TEXT_CHARS = 2_048
"""What takes longer than about a millisecond is done in a thread."""

_decode = msgspec.json.Decoder().decode


class ModelTokenizer:
    """The tokenizer and the chat template of one model.

    Args:
        folder: with tokenizer.json, and tokenizer_config.json or chat_template.jinja.
        tokens_cached_max: tokens of pieces that are remembered, 4 bytes each.

    Raises ConfigError.
    """

    def __init__(self, folder: Path, tokens_cached_max: int) -> None:
        self._tokenizer, settings = _load(folder)
        self._template = _template(folder, settings)
        self._special_names = _special_names(settings)
        self._cut, self._special = _special_tokens(self._tokenizer)
        self._pieces: OrderedDict[bytes, array[int]] = OrderedDict()
        self._cached = 0
        self._cached_max = tokens_cached_max
        self._lock = threading.Lock()
        self.piecewise = self._cut is not None
        """Whether pieces give the tokens of the whole."""
        self.counts = {"prompts": 0, "checks": 0, "pieces": 0, "pieces_known": 0}

    def __repr__(self) -> str:
        return f"<ModelTokenizer {'by pieces' if self.piecewise else 'whole'} {self.counts}>"

    def prompt(self, path: str, body: bytes, lora: str = "", dialect: Dialect = Dialect.VLLM) -> TokenPrompt:
        """All at once. Raises CannotRender."""
        return self.finish(self.begin(path, body, lora, dialect))

    def begin(self, path: str, body: bytes, lora: str = "", dialect: Dialect = Dialect.VLLM) -> "Rendered":
        """The text of the prompt in pieces, and what of it is not known. Raises CannotRender."""
        try:
            asked = _decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise CannotRender("JSON that only engines read") from None
        if not isinstance(asked, dict):
            raise CannotRender("no object")
        if field := odd_field(asked, dialect):
            raise CannotRender(field)
        salt = asked.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise CannotRender("cache_salt")
        seed = prompt_seed(lora, salt)
        if path == CHAT_PATH:
            text, history = self._render(asked, dialect)
            return self._cut_up(text, history, seed)
        if path != COMPLETIONS_PATH:
            raise CannotRender(path)
        prompt = asked.get("prompt")
        if isinstance(prompt, str):
            # Whatever the tokenizer puts around a text belongs to it, so it is tokenised whole.
            return Rendered([prompt], [None], 0, seed, whole=True)
        if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
            return Rendered([], [array("I", prompt)], 0, seed)
        raise CannotRender("prompt")

    def finish(self, rendered: "Rendered") -> TokenPrompt:
        """Tokenises what is not known. Safe in a thread."""
        self.counts["prompts"] += 1
        if rendered.whole or not self.piecewise:
            text = "".join(rendered.texts)
            tokens = self._encode(text, special=rendered.whole) if text else rendered.joined()
            share = rendered.history / len(text) if text else 0
            return TokenPrompt(tokens, rendered.seed, int(share * len(tokens)))
        missing = [at for at, known in enumerate(rendered.tokens) if known is None]
        if missing:
            made = self._encode_all([rendered.texts[at] for at in missing])
            for at, tokens in zip(missing, made, strict=True):
                rendered.tokens[at] = tokens
                self._remember(_key(rendered.texts[at]), tokens)
        tokens = rendered.joined()
        if missing and self._is_due() and tokens != self._encode("".join(rendered.texts)):
            self.piecewise = False
            log.warning("this model's prompts cannot be tokenised by pieces; they are tokenised whole")
            return self.finish(rendered)
        return TokenPrompt(tokens, rendered.seed, rendered.history_tokens())

    # --- text ---

    def _render(self, asked: Mapping[str, Any], dialect: Dialect) -> tuple[str, int]:
        """The text, and how many characters of it the history has."""
        if self._template is None:
            raise CannotRender("the model has no chat template")
        variables = template_variables(asked, self._special_names, dialect)
        plain = variables["messages"]
        try:
            text = self._template(variables)
        except Exception as error:  # a template is a program
            raise CannotRender(f"the template: {error}") from None
        answers = [at for at, each in enumerate(plain) if each["role"] == "assistant"]
        if not answers:
            return text, 0
        behind = next((each["content"] for each in plain[answers[-1] + 1 :] if each["content"]), "")
        at = text.rfind(behind) if behind else -1
        return text, at if at >= 0 else len(text)

    def _cut_up(self, text: str, history: int, seed: int) -> "Rendered":
        if self._cut is None or not self.piecewise:
            return Rendered([text], [None], history, seed)
        texts = [piece for piece in self._cut.split(text) if piece]
        special, known = self._special, self._pieces
        tokens: list[array[int] | None] = []
        with self._lock:
            for piece in texts:
                found = special.get(piece)
                if found is None:
                    key = _key(piece)
                    found = known.get(key)
                    self.counts["pieces"] += 1
                    if found is not None:
                        known.move_to_end(key)
                        self.counts["pieces_known"] += 1
                tokens.append(found)
        return Rendered(texts, tokens, history, seed)

    # --- tokens ---

    def _encode(self, text: str, *, special: bool = False) -> "array[int]":
        return array("I", self._tokenizer.encode(text, add_special_tokens=special).ids)

    def _encode_all(self, texts: list[str]) -> "list[array[int]]":
        return [array("I", each.ids) for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _remember(self, key: bytes, tokens: "array[int]") -> None:
        with self._lock:
            if key not in self._pieces:
                self._cached += len(tokens)
                self._pieces[key] = tokens
            while self._cached > self._cached_max and len(self._pieces) > 1:
                _, old = self._pieces.popitem(last=False)
                self._cached -= len(old)

    def _is_due(self) -> bool:
        count = self.counts["prompts"]
        due = count <= CHECKS_ALWAYS or count & (count - 1) == 0
        self.counts["checks"] += due
        return due


class Rendered:
    """A prompt as text in pieces, each with its tokens where they are known."""

    __slots__ = ("history", "seed", "texts", "tokens", "whole")

    def __init__(
        self, texts: list[str], tokens: "list[array[int] | None]", history: int, seed: int, *, whole: bool = False
    ) -> None:
        self.texts = texts
        self.tokens = tokens
        self.history = history
        self.seed = seed
        self.whole = whole

    @property
    def missing_chars(self) -> int:
        """How much text has to be tokenised."""
        return sum(len(text) for text, known in zip(self.texts, self.tokens, strict=False) if known is None)

    def joined(self) -> "array[int]":
        """All tokens."""
        made = array("I")
        for each in self.tokens:
            assert each is not None
            made += each
        return made

    def history_tokens(self) -> int:
        """Tokens of the pieces that lie in the history."""
        chars = count = 0
        for text, tokens in zip(self.texts, self.tokens, strict=False):  # token ids come without a text
            chars += len(text)
            if chars > self.history:
                break
            count += len(tokens or ())
        return count


def _key(piece: str) -> bytes:
    return xxh3_128_digest(piece.encode("utf-8", "surrogatepass"))


# --- loading ---


def _load(folder: Path) -> tuple[Any, dict[str, Any]]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError('index = "exact" needs the package tokenizers (and jinja2) beside the router') from None
    file = folder / "tokenizer.json"
    try:
        settings_file = folder / "tokenizer_config.json"
        settings = json.loads(settings_file.read_text()) if settings_file.exists() else {}
        return Tokenizer.from_file(str(file)), settings
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"tokenizers: cannot read {file}: {error}; give the model's folder") from None


def _template(folder: Path, settings: Mapping[str, Any]) -> Callable[[dict[str, Any]], str] | None:
    file = folder / "chat_template.jinja"
    text = file.read_text() if file.exists() else settings.get("chat_template")
    if isinstance(text, list):
        text = next((each.get("template") for each in text if each.get("name") == "default"), None)
    if not isinstance(text, str):
        return None
    try:
        from jinja2 import TemplateError, ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError('index = "exact" needs the package jinja2 beside the router') from None

    def fail(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    # Marks of what was generated, for training; they write nothing.
    text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
    try:
        made = environment.from_string(text)
    except TemplateError as error:
        raise ConfigError(f"tokenizers: the chat template in {folder} is not one: {error}") from None
    return lambda variables: str(made.render(**variables))


def _special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """What templates know the special tokens by."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _special_tokens(tokenizer: Any) -> "tuple[re.Pattern[str] | None, dict[str, array[int]]]":
    """A pattern that cuts a text at them, and the tokens of each."""
    added: Iterable[tuple[int, Any]] = tokenizer.get_added_tokens_decoder().items()
    plain = {
        token.content: array("I", (number,))
        for number, token in added
        if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    }
    if not plain:
        return None, {}
    longest_first = sorted(plain, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")"), plain
