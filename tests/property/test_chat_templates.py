"""Rendering on ids, over the three ways in which chat templates end a reply."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from miles_rl.rollout.chat import ChatRenderer

# A reply ends with a token of its own, and fixed text follows it; observations are wrapped in added plain tokens.
OWN_END = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
# Nothing ends a reply: the opener of the next message is the stop token.
NEXT_OPENER = (
    "[gMASK]<sop>{%- for m in messages %}"
    "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ '\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
# Openers alone, and one end token after replies.
CONCATENATIVE = (
    "{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{%- if m.role == 'assistant' %}<|end|>{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
STYLES = {
    "own_end": (OWN_END, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<|im_end|>", "<|endoftext|>"]),
    "next_opener": (
        NEXT_OPENER,
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "concatenative": (
        CONCATENATIVE,
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"],
        ["<|end|>"],
    ),
}


def write_model(folder: Path, style: str) -> Path:
    """A folder with config and tokenizer, no weights."""
    template, special, stops = STYLES[style]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["user\nassistant\nlist the files of the folder\n", "ls -la | sort > names.txt", "\n\n  total 12\n"] * 5
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<tool_response>", "</tool_response>", "<think>")]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(text) for text in stops]
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    config = {"model_type": "qwen3", "max_position_embeddings": 512, "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids if len(ids) > 1 else ids[0]}))
    return folder


@pytest.fixture(scope="module", params=list(STYLES))
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer(str(write_model(tmp_path_factory.mktemp("model"), request.param)))


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatRenderer]:
    return {s: ChatRenderer(str(write_model(tmp_path_factory.mktemp("model"), s))) for s in STYLES}


def token(renderer: ChatRenderer, text: str) -> int:
    return renderer._native.convert_tokens_to_ids(text)


def template_text(renderer: ChatRenderer, messages: list[dict[str, str]]) -> str:
    return renderer._native.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


STRUCTURE = sorted(
    {text for _, special, _ in STYLES.values() for text in special} | {"<tool_response>", "</tool_response>"}
)
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=24)
plain = words.filter(lambda text: not any(s in text for s in STRUCTURE))
hostile = st.lists(st.one_of(words, st.sampled_from(STRUCTURE)), max_size=6).map("".join)


def conversation(contents: list[str], replies: list[str]) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": contents[0]}]
    for reply, observation in zip(replies, contents[1:], strict=True):
        messages += [{"role": "assistant", "content": reply}, {"role": "tool", "content": observation}]
    return messages


def turn_by_turn(renderer: ChatRenderer, messages: list[dict[str, str]]) -> list[int]:
    ids = renderer.prompt(messages[:1])
    for reply, observation in zip(messages[1::2], messages[2::2], strict=True):
        output = renderer.reply(reply["content"])
        keep, new_ids = renderer.continuation(output, [observation])
        ids += output[:keep] + new_ids
    return ids


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(plain, min_size=1, max_size=4))
def test_prompts_equal_the_tokenizers_own_rendering(renderer: ChatRenderer, contents: list[str]) -> None:
    messages = [
        {"role": role, "content": c} for role, c in zip(("user", "assistant", "tool", "user"), contents, strict=False)
    ]
    native = renderer._native(template_text(renderer, messages), add_special_tokens=False)["input_ids"]
    assert renderer.prompt(messages) == native


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_turns=st.integers(1, 3))
def test_turn_by_turn_ids_spell_the_whole_conversation(
    renderer: ChatRenderer, data: st.DataObject, num_turns: int
) -> None:
    contents = data.draw(st.lists(hostile, min_size=num_turns + 1, max_size=num_turns + 1))
    replies = data.draw(st.lists(plain, min_size=num_turns, max_size=num_turns))
    messages = conversation(contents, replies)
    ids = turn_by_turn(renderer, messages)
    spelled = renderer._native.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert spelled == template_text(renderer, messages)


@settings(max_examples=100, deadline=None)
@given(observation=hostile)
def test_observations_never_become_structure(renderer: ChatRenderer, observation: str) -> None:
    structure = set(renderer._structure_ids)
    output = renderer.reply("ls")
    empty = renderer.continuation(output, [{"role": "tool", "content": ""}])[1]
    ids = renderer.continuation(output, [{"role": "tool", "content": observation}])[1]
    assert [i for i in ids if i in structure] == [i for i in empty if i in structure]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_the_policy_wrote_is_kept_but_for_one_stop_token(renderer: ChatRenderer, data: st.DataObject) -> None:
    vocabulary = renderer._native.backend_tokenizer.get_vocab_size()
    ordinary = st.integers(0, vocabulary - 1).filter(lambda i: i not in renderer.stop_token_ids)
    output = data.draw(st.lists(ordinary, max_size=12)) + data.draw(
        st.lists(st.sampled_from(renderer.stop_token_ids), max_size=1)
    )
    role = data.draw(st.sampled_from(["user", "tool"]))
    keep, ids = renderer.continuation(output, [{"role": role, "content": "x"}])
    stopped = bool(output) and output[-1] in renderer.stop_token_ids
    assert keep in ((len(output) - 1, len(output)) if stopped else (len(output),))
    joined = output[:keep] + ids
    uncut = renderer.continuation(output[: len(output) - stopped], [{"role": role, "content": "x"}])
    assert joined == output[: len(output) - stopped] + uncut[1]


def test_a_reply_keeps_its_own_end_token_and_gains_the_fixed_text_after_it(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["own_end"]
    output = [*renderer._plain("ls"), token(renderer, "<|im_end|>")]
    keep, ids = renderer.continuation(output, [{"role": "tool", "content": "a.txt"}])
    assert keep == len(output)
    assert ids[0] == renderer._plain("\n")[0]
    assert token(renderer, "<|im_end|>") not in ids[:2]


def test_another_stop_token_than_the_templates_is_dropped(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["own_end"]
    output = [*renderer._plain("ls"), token(renderer, "<|endoftext|>")]
    keep, ids = renderer.continuation(output, [{"role": "tool", "content": "a.txt"}])
    assert keep == len(output) - 1
    assert ids[0] == token(renderer, "<|im_end|>")


def test_a_stop_token_that_opens_the_next_message_is_there_once(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["next_opener"]
    observation = token(renderer, "<|observation|>")
    output = [*renderer._plain("ls"), observation]
    keep, ids = renderer.continuation(output, [{"role": "tool", "content": "a.txt"}])
    assert keep == len(output)
    assert observation not in ids


def test_a_stop_token_that_opens_another_message_is_dropped(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["next_opener"]
    output = [*renderer._plain("ls"), token(renderer, "<|user|>")]
    keep, ids = renderer.continuation(output, [{"role": "tool", "content": "a.txt"}])
    assert keep == len(output) - 1
    assert ids[0] == token(renderer, "<|observation|>")


def test_at_most_one_boundary_token_is_trimmed(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["next_opener"]
    observation = token(renderer, "<|observation|>")
    output = [*renderer._plain("ls"), observation, observation]
    keep, ids = renderer.continuation(output, [{"role": "tool", "content": "a.txt"}])
    assert (
        output[:keep] + ids == output + renderer.continuation([observation], [{"role": "tool", "content": "a.txt"}])[1]
    )


def test_a_cut_reply_is_closed_by_the_template(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["concatenative"]
    output = renderer._plain("ls -la |")
    keep, ids = renderer.continuation(output, [{"role": "tool", "content": "a.txt"}])
    assert keep == len(output)
    assert ids[:2] == [token(renderer, "<|end|>"), token(renderer, "<|tool|>")]
    assert ids[-1] == token(renderer, "<|assistant|>")


def test_stop_tokens_come_from_the_configs_and_from_the_template(renderers: dict[str, ChatRenderer]) -> None:
    def names(style: str) -> set[str]:
        return set(renderers[style]._native.convert_ids_to_tokens(renderers[style].stop_token_ids))

    assert names("own_end") == {"<|im_end|>", "<|endoftext|>"}
    assert names("next_opener") == {"<|user|>", "<|observation|>", "<|endoftext|>"}
    assert names("concatenative") == {"<|end|>", "<|endoftext|>"}


def test_a_closing_token_of_the_template_stops_even_if_no_config_names_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "own_end")
    (folder / "generation_config.json").unlink()
    renderer = ChatRenderer(str(folder))
    assert token(renderer, "<|im_end|>") in renderer.stop_token_ids


def test_decoding_leaves_out_special_tokens_and_keeps_plain_added_ones(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["own_end"]
    ids = [token(renderer, "<think>"), *renderer._plain("ls"), token(renderer, "<|im_end|>")]
    assert renderer.decode(ids) == "<think>ls"
