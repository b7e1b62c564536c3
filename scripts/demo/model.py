"""A small language model made on the spot, so that nothing has to be downloaded.

The tokenizer is a byte-level BPE trained on the standard library's sources; the model is a Qwen3 with random weights from
a fixed seed. A random model is as good as a trained one for what is tested here (which bytes are reused, and whether the
tokens stay the same), as long as its output depends on the whole prompt and not only on the last token. Three choices see
to that: an output layer of its own (not tied to the embeddings), attention sharp enough to pick out single tokens
(`attention_gain`), and weights scaled so that attention and MLP count as much as the embedding of the last token.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models"
CORPUS_BYTES_MAX = 4_000_000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

CHAT_TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Call a tool with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
{{- (function.arguments if function.arguments is string else function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the model's bytes, apart from the versions of the libraries."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int = 0
    vocab_size: int = 2048
    positions_max: int = 32768
    # With 1.0, one wrong block of 128 tokens among 3,000 changes no token of `small`; with 1.6 it changes a fifth of them,
    # while other chunk boundaries move the log probabilities by 0.03 at most.
    attention_gain: float = 1.6
    logit_std: float = 1.0
    # The corpus is the standard library of the interpreter that makes the model.
    python: str = f"{sys.version_info[0]}.{sys.version_info[1]}"

    def digest(self) -> str:
        """The recipe in twelve hex digits: a changed recipe makes a new folder."""
        text = json.dumps([asdict(self), CHAT_TEMPLATE, SPECIAL_TOKENS, CORPUS_BYTES_MAX], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


RECIPES = {
    "tiny": Recipe("tiny", hidden_size=256, layers=4, heads=8, kv_heads=4, head_dim=32),
    "small": Recipe("small", hidden_size=512, layers=8, heads=8, kv_heads=4, head_dim=64),
    "medium": Recipe("medium", hidden_size=1024, layers=12, heads=16, kv_heads=8, head_dim=64),
    "large": Recipe("large", hidden_size=1536, layers=16, heads=24, kv_heads=8, head_dim=64),
}


def make(name: str = "small", *, seed: int = 0, cache: Path = CACHE) -> Path:
    """Return the folder of the model, making it first if it is not there. Safe when several processes ask at once."""
    if name not in RECIPES:
        raise SystemExit(f"no model named {name!r}; there are {', '.join(RECIPES)}")
    recipe = replace(RECIPES[name], seed=seed)
    target = cache / f"{name}-{recipe.digest()}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        _save_tokenizer(recipe, unfinished)
        _save_model(recipe, unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except OSError:
        if not target.is_dir():  # Otherwise another process was first, and its model is the same.
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def corpus() -> list[str]:
    """Sources of the standard library, in a fixed order, as far as the limit goes."""
    texts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        size += len(text)
        if size > CORPUS_BYTES_MAX:
            break
        texts.append(text)
    return texts


def _save_tokenizer(recipe: Recipe, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=recipe.positions_max,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def _save_model(recipe: Recipe, folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    end, pad = SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|endoftext|>")
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.hidden_size * 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.positions_max,
        tie_word_embeddings=False,
        eos_token_id=end,
        bos_token_id=None,
        pad_token_id=pad,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(recipe.seed)
    try:
        model = Qwen3ForCausalLM(config)
        _scale_weights(model, recipe)
    finally:
        torch.random.set_rng_state(state)
    model.to(torch.bfloat16).save_pretrained(folder)


def _scale_weights(model: Any, recipe: Recipe) -> None:
    """Draw the weights again: unit gain in every layer, see the module's first lines for why."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(recipe.attention_gain)
            elif weight.dim() == 1:
                weight.fill_(1.0)
            elif name.endswith("embed_tokens.weight"):
                weight.normal_(0.0, 1.0)
            elif name.endswith("lm_head.weight"):
                weight.normal_(0.0, recipe.logit_std * recipe.hidden_size**-0.5)
            else:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
        # A conversation is ended by its script, never by chance.
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0.0


def main() -> None:
    """`python -m demo.model NAME`: print the model's folder."""
    parser = argparse.ArgumentParser(prog="demo.model", description=main.__doc__)
    parser.add_argument("name", nargs="?", default="small", choices=sorted(RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(make(options.name, seed=options.seed))


if __name__ == "__main__":
    main()
