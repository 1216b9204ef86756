"""A policy of another family than the rest of the small team: Llama, with tokenizer and template as Llama 3 has them.

Other ids for the same text, control tokens of other names at the end of the vocabulary and not at its beginning, a BOS
that the template writes, and an EOS that is not what ends a turn.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.flows.small_team import SIZE, say_nothing_else

_BOS, _EOS, _PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad|>"
_HEAD, _HEAD_END, _TURN_END = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
_TEMPLATE = (
    f"{_BOS}"
    f"{{% for message in messages %}}{_HEAD}{{{{ message['role'] }}}}{_HEAD_END}\n\n"
    f"{{{{ message['content'] }}}}{_TURN_END}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{_HEAD}assistant{_HEAD_END}\n\n{{% endif %}}"
)


def save_llama(folder: Path, says: Mapping[str, float], *, seed: int) -> Path:
    """A policy whose every turn is one of `says`, with these probabilities."""
    tokenizer = _tokenizer(list(says))
    torch.manual_seed(seed)
    end_of_turn = tokenizer.convert_tokens_to_ids(_TURN_END)
    model = LlamaForCausalLM(
        LlamaConfig(
            **SIZE,
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=end_of_turn,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    prompt_end = tokenizer.encode(f"{_HEAD_END}\n\n", add_special_tokens=False)[-1]
    say_nothing_else(model, tokenizer, says, prompt_end, end_of_turn)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(actions: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["which colour\n\n red blue is it colour"] * 3, trainer)
    core.add_tokens([AddedToken(action, normalized=False) for action in reversed(actions)])
    core.add_special_tokens([AddedToken(one, special=True) for one in (_BOS, _EOS, _PAD, _HEAD, _HEAD_END, _TURN_END)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=_BOS, eos_token=_EOS, pad_token=_PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [_HEAD, _HEAD_END, _TURN_END]})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
