"""The tokenizer of the warm-started policy: byte-level BPE over its own demonstrations, and a plain chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sandbox_env.episode import COMPLETION_MARK

PAD, USER, ASSISTANT, TOOL, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"
SPECIAL = (PAD, USER, ASSISTANT, TOOL, END)

FORM = ("```bash\n", "\n```", f"\n{COMPLETION_MARK}")
"""What every reply repeats, one token each. They are plain text, not special."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{%- if message.role == 'assistant' %}<|end|>{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, context_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab_size` tokens: specials first (`<|pad|>` is 0), then bytes, merges, and `FORM`.

    Raises `ValueError` if `texts` do not give that many.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(FORM),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in FORM])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"model.vocab_size: {vocab_size}; the texts give {tokenizer.get_vocab_size()}, ask for at most that"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, TOOL],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
