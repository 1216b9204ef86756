"""A small tokenizer for each agent: byte-level, so any text can be encoded, and names are mostly one token."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
_SPECIAL = (PADDING, "<|im_start|>", END_OF_TURN)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(texts: Iterable[str], markup: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `texts`.

    Args:
        texts: what the agent reads and writes.
        markup: strings that are one token each: the fixed parts of a call or an answer. They are no control tokens:
            decoding shows them, and they may come out of any text.
        vocabulary: at most so many entries.
    """
    tokenizer = Tokenizer(models.BPE())
    # A word is the same token at the start of a text and inside it.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in markup])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=PADDING, clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast
