"""Canaries of benchmarks: lines that a benchmark puts into its files so that a text which was copied can be found.

Their owners ask that such text is never published or trained on. They are taken out where text of a task is read
for a policy or written down: the instruction, what a command printed, and the records of episodes.
"""

from __future__ import annotations

import re

_GUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_MARK = re.compile(
    rf"canary.*\b(guid|uuid|string)\b|canary.*{_GUID}|{_GUID}.*canary|\b(guid|uuid)\b.*canary"
    r"|benchmark data should never appear in training",
    re.IGNORECASE,
)
_COMMENT = re.compile(r"\s*(<!--.*canary.*-->|(#|//|;|%|--).*canary.*)\s*", re.IGNORECASE)


def has_canary(text: str) -> bool:
    """Does any line mark the text as part of a benchmark?"""
    lower = text.lower()
    if "canary" not in lower and "benchmark data" not in lower:
        return False
    return any(_MARK.search(line) for line in text.splitlines())


def without_canary(text: str) -> str:
    """`text` without the lines that hold a canary, and otherwise unchanged."""
    if not has_canary(text):
        return text
    return "".join(line for line in text.splitlines(keepends=True) if not _MARK.search(line))


def instruction_of(text: str) -> str:
    """An instruction as the agent sees it, stripped. As in Harbor, comments at its top that say canary go too."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _COMMENT.fullmatch(lines[0])):
        lines.pop(0)
    return without_canary("\n".join(lines)).strip()
