"""Chat messages as token ids, for any chat template. What the policy wrote is never rendered or tokenised again.

A template is asked once per sequence of roles, with marks in place of the contents; what stands between the marks is
the template's own text. From then on rendering is joining that text with the contents:

    template      <|user|> {0} <|assistant|> {1} <|end|> <|tool|> {2} <|assistant|>
    prompt        <|user|> {0} <|assistant|>
    continuation                                 <|end|> <|tool|> {2} <|assistant|>

Only the template's own text may become structure (role openers, stop tokens and the like). Contents are untrusted: a
file that holds the characters `<|end|>` is read as plain text, so that nothing a terminal prints can end a turn or
open another one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

MARK = "zqContent{}Zq"
MARKS = re.compile(r"zqContent(\d+)Zq")
Message = Mapping[str, str]
_MAX_SHAPES = 1024


class ChatRenderer:
    """Renders messages (`{"role": ..., "content": ...}`) to ids with the chat template of a Hugging Face folder.

    Works for templates that close a turn with a token of its own and for those in which the opener of the next
    message is the stop token.
    Construction checks the tokenizer on a short conversation: ids must equal those of `apply_chat_template`, and no
    text may turn into structure. Raises `ValueError` naming the folder and the remedy.
    """

    def __init__(self, model_dir: str) -> None:
        self._dir = model_dir
        config = _read_json(Path(model_dir) / "config.json")
        if not config:
            raise ValueError(f"model.path: {model_dir}; it has no config.json, give a Hugging Face model folder")
        self._native = self._load_tokenizer()
        self.context_length = self._context_length(config)
        stop_ids = self._declared_stop_ids(config)
        self._plain_tokenizer, structure = self._split_structure(stop_ids)
        self._structure_ids = [token["id"] for token in structure]
        self._special_ids = {token["id"] for token in structure if token["special"]}
        self._structure = re.compile("|".join(_pattern(token) for token in structure) or r"(?!)")
        self._shapes: dict[tuple[tuple[str, ...], str], list[str | int]] = {}
        self.stop_token_ids: list[int] = sorted(stop_ids | self._closing_ids())
        if not self.stop_token_ids:
            raise ValueError(f"model.path: {model_dir}; it names no stop token, set eos_token_id in its config.json")
        self._check()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a conversation that the policy is to answer, up to and with the opener of its reply.

        `tools`, in OpenAI's form, are shown to the policy as the template does it. `ValueError` if it does not.
        """
        pieces = self._shape(tuple(m["role"] for m in messages), tools)
        return self._tokenise(pieces, [m["content"] for m in messages])

    def continuation(self, output_ids: Sequence[int], new_messages: Sequence[Message]) -> tuple[int, list[int]]:
        """What follows a reply: `(keep, ids)`, how many of the reply's ids stay and what is appended after them.

        `ids` are the rest of the reply's closing, the new messages, and the opener of the next reply. A stop token
        that the policy wrote stays its own, once, where the template has the same token. One stop token is dropped
        (`keep` is one less) where the template has another there, as when the policy opened a user's message and the
        tool's comes. A reply that was cut keeps all its ids and is closed by the template.
        """
        ids, closing = self._tail([m["role"] for m in new_messages], [m["content"] for m in new_messages])
        last = output_ids[-1] if output_ids else None
        if last is None or last not in self.stop_token_ids:
            return len(output_ids), ids
        if closing is not None and ids[closing] == last:
            return len(output_ids), ids[closing + 1 :]
        return len(output_ids) - 1, ids

    def reply(self, text: str, next_role: str = "tool") -> list[int]:
        """The ids of a reply as a policy would write it before a message of `next_role`, with its stop token.

        Text that the template puts between the opener and the content (a line break, an empty thought) is the
        policy's to write, so it is included.
        """
        return self.written([0], [text], next_role)

    def written(self, pieces: Sequence[str | int], contents: Sequence[str], next_role: str) -> list[int]:
        """The same for a reply that has structure of its own: its text, and the indices of what is only content."""
        ids, closing = self._tail([next_role], [""])
        opener = str(self._shape(("user",))[-1])
        shape = self._shape(("user", "assistant", next_role))
        before = str(shape[shape.index(1) - 1])
        lead = before[len(opener) :] if before.startswith(opener) else ""
        return self._tokenise([lead, *pieces], contents) + ([] if closing is None else [ids[closing]])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        return self._native.backend_tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """One token as text, also a special one."""
        return self._native.backend_tokenizer.decode([token], skip_special_tokens=False)

    def _tail(self, roles: list[str], contents: list[str]) -> tuple[list[int], int | None]:
        """Ids after a reply, and the index in them of the stop token that closes it, if the template has one."""
        shape = self._shape(("user", "assistant", *roles))
        pieces = shape[shape.index(1) + 1 :]
        ids = self._tokenise(pieces, ["", "", *contents])
        if not self._structures(pieces[0]) & set(self.stop_token_ids):
            return ids, None
        return ids, next(i for i, token in enumerate(ids) if token in self.stop_token_ids)

    def _shape(self, roles: tuple[str, ...], tools: Sequence[Mapping[str, Any]] = ()) -> list[str | int]:
        """The rendered conversation of `roles` as the template's own text and the indices of contents, in turn."""
        key = (roles, json.dumps(list(tools), ensure_ascii=False) if tools else "")
        if key in self._shapes:
            return self._shapes[key]
        if match := self._structure.search(key[1]):
            raise ValueError(
                f"tools: they hold {match.group()!r}, which is structure in the chat template; reword them"
            )
        messages = [{"role": role, "content": MARK.format(i)} for i, role in enumerate(roles)]
        text = self._render(messages, tools)
        parts = MARKS.split(text)
        pieces: list[str | int] = [int(part) if i % 2 else part for i, part in enumerate(parts)]
        if pieces[1::2] != list(range(len(roles))):
            raise ValueError(
                f"model.path: {self._dir}; its chat template does not print {', '.join(roles)} once each and in order, "
                "use one that does"
            )
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        self._shapes[key] = pieces
        return pieces

    def _render(self, messages: list[dict[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        shown = {"tools": list(tools)} if tools else {}
        try:
            text = self._native.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **shown)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            roles = ", ".join(m["role"] for m in messages)
            raise ValueError(
                f"model.path: {self._dir}; its chat template cannot render {roles} ({error}), use one that can"
            ) from error
        for tool in tools:
            if tool["function"]["name"] not in text:
                raise ValueError(
                    f"tools: {tool['function']['name']}; the chat template of {self._dir} does not print tools, "
                    "use one that does"
                )
        return str(text)

    def _tokenise(self, pieces: Sequence[str | int], contents: Sequence[str]) -> list[int]:
        ids: list[int] = []
        text = ""
        for piece in pieces:
            if isinstance(piece, int):
                text += contents[piece]
                continue
            start = 0
            for match in self._structure.finditer(piece):
                ids += self._plain(text + piece[start : match.start()])
                ids.append(self._structure_ids[(match.lastindex or 0) - 1])
                text, start = "", match.end()
            text += piece[start:]
        return ids + self._plain(text)

    def _plain(self, text: str) -> list[int]:
        return self._plain_tokenizer.encode(text, add_special_tokens=False).ids if text else []

    def _structures(self, piece: str | int) -> set[int]:
        """The ids of structure in a piece of the template's own text."""
        if isinstance(piece, int):
            return set()
        return {self._structure_ids[(m.lastindex or 0) - 1] for m in self._structure.finditer(piece)}

    def _load_tokenizer(self) -> Any:
        if not (Path(self._dir) / "tokenizer.json").is_file():
            raise ValueError(f"model.path: {self._dir}; it has no tokenizer.json, put one into the folder")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(self._dir, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"model.path: {self._dir}; it has no usable tokenizer ({reason})") from error
        if not tokenizer.chat_template:
            raise ValueError(f"model.path: {self._dir}; it has no chat template, put a chat_template.jinja into it")
        return tokenizer

    def _context_length(self, config: Mapping[str, Any]) -> int:
        length = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"model.path: {self._dir}; its config.json lacks max_position_embeddings, add it")
        return length

    def _declared_stop_ids(self, config: Mapping[str, Any]) -> set[int]:
        generation = _read_json(Path(self._dir) / "generation_config.json")
        declared: list[Any] = [self._native.eos_token_id]
        for source in (generation, config, config.get("text_config", {})):
            value = source.get("eos_token_id")
            declared += value if isinstance(value, list) else [value]
        return {int(token) for token in declared if token is not None}

    def _closing_ids(self) -> set[int]:
        """The special tokens that the template itself puts right after a reply: they end a turn, declared or not."""
        ids: set[int] = set()
        for role in ("user", "tool"):
            try:
                shape = self._shape(("user", "assistant", role))
            except ValueError:
                continue
            after = shape[shape.index(1) + 1]
            match = self._structure.search(after) if isinstance(after, str) else None
            if match is not None:
                ids.add(self._structure_ids[(match.lastindex or 0) - 1])
        return ids & self._special_ids

    def _split_structure(self, stop_ids: set[int]) -> tuple[Tokenizer, list[dict[str, Any]]]:
        """A copy of the tokenizer that never makes structure of text, and the added tokens that are structure."""
        state = json.loads(self._native.backend_tokenizer.to_str())
        template = self._native.chat_template
        source = template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)
        structure: list[dict[str, Any]] = []
        for token in state["added_tokens"]:
            if token["special"] or token["id"] in stop_ids or token["content"] in source:
                structure.append(dict(token))
                token["special"] = True
        tokenizer = Tokenizer.from_str(json.dumps(state))
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer, sorted(structure, key=lambda token: -len(token["content"]))

    def _check(self) -> None:
        structure = set(self._structure_ids)
        text = self._native.convert_ids_to_tokens(self._structure_ids)
        escaped = [content for content in text if structure & set(self._plain(f"a {content} b"))]
        if escaped:
            raise ValueError(
                f"model.path: {self._dir}; its tokenizer takes the plain text {escaped[0]!r} for structure, use another"
            )
        messages = [
            {"role": r, "content": c} for r, c in (("user", "Look."), ("assistant", "done"), ("user", "Again."))
        ]
        native = self._native(self._render(messages), add_special_tokens=False)["input_ids"]
        ids = self.prompt(messages)
        if "Look." not in self.decode(ids):
            raise ValueError(
                f"model.path: {self._dir}; its tokenizer loses text, put its tokenizer.json into the folder"
            )
        if ids != native:
            raise ValueError(
                f"model.path: {self._dir}; its tokenizer reads text in another way after a special token, use another"
            )


def _pattern(token: Mapping[str, Any]) -> str:
    """Expression of one added token, in a group of its own, with the blanks that the token swallows."""
    before, after = r"\s*" if token["lstrip"] else "", r"\s*" if token["rstrip"] else ""
    return f"{before}({re.escape(token['content'])}){after}"


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
