"""Requests in tokens: by pieces as in the whole, and not at all where the engine might see something else."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from smetric_router.blocks import array, prompt_seed
from smetric_router.errors import ConfigError
from smetric_router.server.rendering import CannotRender, Dialect
from smetric_router.server.tokenising import CHECKS_ALWAYS, ModelTokenizer
from smetric_router.state.requests import CHAT_PATH, COMPLETIONS_PATH

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.arguments.what }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
TEXT = ["the quick brown fox jumps over the lazy dog " * 20, "def f(x): return x + 1\n" * 20, "système 名前 \u00fc"]


def folder(tmp_path: Path, *, sentencepiece: bool = False) -> Path:
    """A model's tokenizer: byte level, or one that treats the beginning of a text in its own way."""
    made = Tokenizer(models.BPE())
    if sentencepiece:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    special = [AddedToken(each, special=True, normalized=False) for each in ("<|im_start|>", "<|im_end|>")]
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def body(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def said(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def whole(where: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(where / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def test_by_pieces_as_in_the_whole(tmp_path: Path) -> None:
    made = ModelTokenizer(folder(tmp_path), 100_000)
    draw = random.Random(1)
    alphabet = ["the ", "fox", "\n", "名", "<|im_end|>", "<|im_", " x + 1", "|>", "\u00fc", "  "]
    for _ in range(50):
        contents = ["".join(draw.choices(alphabet, k=draw.randrange(12))) for _ in range(draw.randrange(1, 6))]
        text = "".join(
            f"<|im_start|>{('user', 'assistant')[at % 2]}\n{content}<|im_end|>\n" for at, content in enumerate(contents)
        )
        prompt = made.prompt(CHAT_PATH, body(said(*contents)))
        assert list(prompt.tokens) == whole(tmp_path, text + "<|im_start|>assistant\n")
    assert made.piecewise
    assert CHECKS_ALWAYS <= made.counts["checks"] < 50


def test_of_a_follow_up_only_what_is_new_is_tokenised(tmp_path: Path) -> None:
    made = ModelTokenizer(folder(tmp_path), 100_000)
    history = [f"message {at} " * 50 for at in range(40)]
    made.prompt(CHAT_PATH, body(said(*history)))
    before = dict(made.counts)
    rendered = made.begin(CHAT_PATH, body(said(*history, "the answer", "and now")))
    assert rendered.missing_chars <= len("assistant\nthe answer" + "user\nand now")
    assert made.counts["pieces"] - before["pieces"] - (made.counts["pieces_known"] - before["pieces_known"]) == 2


def test_the_history_ends_behind_the_last_answer(tmp_path: Path) -> None:
    where = folder(tmp_path)
    made = ModelTokenizer(where, 100_000)
    assert made.prompt(CHAT_PATH, body(said("hello"))).history == 0
    prompt = made.prompt(CHAT_PATH, body(said("hello", "the answer", "and now")))
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe answer<|im_end|>\n"
    assert prompt.history == len(whole(where, text + "<|im_start|>"))


def test_a_tokenizer_that_cannot_be_cut_is_used_whole(tmp_path: Path) -> None:
    where = folder(tmp_path, sentencepiece=True)
    made = ModelTokenizer(where, 100_000)
    text = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    for _ in range(3):
        assert list(made.prompt(CHAT_PATH, body(said("hello there"))).tokens) == whole(where, text)
    assert not made.piecewise


def test_tools_arguments_and_the_templates_own_options(tmp_path: Path) -> None:
    where = folder(tmp_path)
    made = ModelTokenizer(where, 100_000)
    # The order of a tool's fields is the engines', not the client's.
    tool = {"function": {"parameters": {"b": 1}, "name": "f", "description": "d"}, "type": "function"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"what": "it"}'}}
    asked = body(
        [{"role": "assistant", "tool_calls": [call]}], tools=[tool], chat_template_kwargs={"enable_thinking": True}
    )
    shown = '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"b": 1}}}'
    text = f"<|im_start|>system\n{shown}\n<|im_end|>\n<|im_start|>assistant\n<call>it<|im_end|>\n<|im_start|>assistant\n<think>"
    assert list(made.prompt(CHAT_PATH, asked).tokens) == whole(where, text)


def test_completions_in_text_and_in_tokens(tmp_path: Path) -> None:
    where = folder(tmp_path)
    made = ModelTokenizer(where, 100_000)
    assert list(made.prompt(COMPLETIONS_PATH, b'{"prompt": "the fox"}').tokens) == whole(where, "the fox")
    assert made.prompt(COMPLETIONS_PATH, b'{"prompt": [1, 2, 3]}').tokens == array("I", [1, 2, 3])


def test_who_may_share_a_prompt_is_in_its_seed(tmp_path: Path) -> None:
    made = ModelTokenizer(folder(tmp_path), 100_000)
    plain, salted = (made.prompt(CHAT_PATH, body(said("x"), **more)) for more in ({}, {"cache_salt": "s"}))
    assert (plain.seed, salted.seed) == (0, prompt_seed("", "s"))
    assert made.prompt(CHAT_PATH, body(said("x")), "adapter").seed == prompt_seed("adapter")
    assert plain.digests(1)[0] != salted.digests(1)[0]


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": said("x"), "chat_template": "{{ 1 }}"},
        {"messages": said("x"), "continue_final_message": True},
        {"messages": said("x"), "documents": [{"text": "x"}]},
        {"messages": said("x"), "reasoning_effort": "high"},
        {"messages": said("x"), "cache_salt": 3},
        {"messages": said("x"), "chat_template_kwargs": [1]},
        {"messages": []},
        {"messages": ["x"]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "x", "audio": {}}]},
        {"messages": [{"role": "developer", "content": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        {"messages": [{"role": "user", "content": "half a character \ud83d"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]"}}]}]},
        {"messages": said("x"), "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        {"messages": said("x"), "tools": [{"type": "custom"}]},
        {"messages": said("x"), "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    ],
)
def test_what_the_engine_might_render_otherwise_is_left_alone(asked: dict[str, Any], tmp_path: Path) -> None:
    made = ModelTokenizer(folder(tmp_path), 1000)
    with pytest.raises(CannotRender):
        made.prompt(CHAT_PATH, json.dumps(asked).encode())


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    made = ModelTokenizer(folder(tmp_path), 500)
    for at in range(50):
        made.prompt(CHAT_PATH, body(said(f"{at} the quick brown fox " * 20)))
        assert made._cached <= 500
        assert made._cached == sum(map(len, made._pieces.values()))


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ModelTokenizer(tmp_path, 10)
    folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="chat template"):
        ModelTokenizer(tmp_path, 10)


def test_sglang_reads_a_request_in_its_own_way(tmp_path: Path) -> None:
    where = folder(tmp_path)
    tokenizer = ModelTokenizer(where, 10_000)
    function = {"parameters": {"type": "object"}, "name": "look"}
    asked = body(
        [
            {"role": "user", "content": "hello", "name": "someone"},
            {"role": "assistant", "content": "so", "reasoning_content": "hm", "reasoning": "unknown to it"},
        ],
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=False,
    )
    written = {"type": "function", "function": {**function, "description": None}, "defer_loading": None}
    text = (
        f"<|im_start|>system\n{json.dumps(written)}\n<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nso<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(tokenizer.prompt(CHAT_PATH, asked, dialect=Dialect.SGLANG).tokens) == whole(where, text)
    with pytest.raises(CannotRender, match="reasoning_content"):
        tokenizer.prompt(CHAT_PATH, body([{"role": "assistant", "content": "so", "reasoning_content": "hm"}]))
    for field in ("input_ids", "reasoning", "thinking"):
        odd = body(said("hello"), **{field: [1]})
        with pytest.raises(CannotRender, match=field):
            tokenizer.prompt(CHAT_PATH, odd, dialect=Dialect.SGLANG)
        assert tokenizer.prompt(CHAT_PATH, odd).tokens
    one_tool = body(said("hello"), tools=[{"type": "function", "function": function}], tool_choice={"type": "function"})
    with pytest.raises(CannotRender, match="tool_choice"):
        tokenizer.prompt(CHAT_PATH, one_tool, dialect=Dialect.SGLANG)


def test_the_dialect_follows_from_who_owns_the_model() -> None:
    assert Dialect.of("sglang") is Dialect.SGLANG
    assert {Dialect.of("vllm"), Dialect.of(None), Dialect.of("me")} == {Dialect.VLLM}
