"""The warm-started policy's tokenizer."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from miles_rl.model.tokenizer import END, FORM, PAD, SPECIAL, train_tokenizer

TEXTS = [f"Copy {name}.txt to {other}.md." for name in ("kastel", "lorin", "mimak") for other in ("nedor", "puvin")] * 3


def test_it_has_the_size_asked_for_and_starts_with_padding() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=280, context_length=512)
    assert len(tokenizer) == 280
    assert tokenizer.convert_tokens_to_ids(PAD) == tokenizer.pad_token_id == 0


def test_more_tokens_than_the_texts_give_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^model\.vocab_size: 5000; .* ask for at most"):
        train_tokenizer(TEXTS, vocab_size=5000, context_length=512)


def test_the_form_of_a_reply_costs_one_token_a_part() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=280, context_length=512)
    for part in FORM:
        ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == part


def test_any_text_survives_a_round_trip() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=280, context_length=512)
    text = "awk '{s+=$1} END {print s}' \t\n\n  gr\u00fc\u00df \U0001f600 ```bash\nls\n```\nTASK_COMPLETE"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_same_texts_give_the_same_tokenizer(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_tokenizer(TEXTS, vocab_size=280, context_length=512).save_pretrained(tmp_path / name)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_a_saved_tokenizer_loads_with_its_template_and_special_tokens(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, vocab_size=280, context_length=512).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.eos_token == END
    assert set(SPECIAL) <= set(loaded.all_special_tokens)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "c"},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>a<|assistant|>b<|end|><|tool|>c<|assistant|>"
