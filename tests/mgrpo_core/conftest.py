"""Small real tokenizers: byte-level BPE behind `transformers`, with templates that treat history differently."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The shape of Qwen's: tools in the system turn, tool replies wrapped in a mark inside a user turn.
QWEN_LIKE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Forgets what an assistant thought in every turn but the last message (case C2).
FORGETS_REASONING = QWEN_LIKE.replace(
    "{{ message.content }}<|im_end|>",
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>",
)

WITH_BOS = "<|bos|>" + QWEN_LIKE

OPENS_THINKING = QWEN_LIKE.replace(
    "{%- if add_generation_prompt %}<|im_start|>assistant\n",
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
).replace(
    "{{ message.content }}<|im_end|>",
    "{% if message.role == 'assistant' %}<think>\n{% endif %}{{ message.content | trim }}<|im_end|>",
)

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|bos|>", "<|pad|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def byte_tokenizer(
    template: str | None = QWEN_LIKE, merges: tuple[tuple[str, str], ...] = ()
) -> "PreTrainedTokenizerFast":
    """Byte-level BPE over 256 bytes and the given merges."""
    # Imported here: two seconds that tests without a tokenizer need not wait for.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|bos|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> "Callable[..., PreTrainedTokenizerFast]":
    """Builds one, with a template and merges of choice."""
    return byte_tokenizer


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return {
        "qwen": QWEN_LIKE,
        "forgets": FORGETS_REASONING,
        "bos": WITH_BOS,
        "opens": OPENS_THINKING,
    }
