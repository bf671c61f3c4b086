"""Families about sorting and filtering lines."""

from __future__ import annotations

from sandbox_env.suites.minibench.draw import Draw, text_of
from sandbox_env.suites.minibench.exercise import Action, holds, kept, not_found, ok


def sort_lines(draw: Draw) -> Action:
    """Lines in alphabetical order."""
    source, target, lines = draw.file(), draw.file(), draw.lines()
    return Action(
        family="sort-lines",
        subject=source.split(".")[0],
        phrase=draw.pick(f"sort {source} into {target}", f"write the sorted lines of {source} to {target}"),
        files={source: text_of(lines).encode()},
        turn=ok(f"sort {source} > {target}"),
        checks=(holds(target, text_of(sorted(lines))), kept(source, text_of(lines))),
        mistakes=(
            ok(f"sort {source}", text_of(sorted(lines))),
            ok(f"sort -r {source} > {target}"),
            not_found(f"sort {target} > {source}", "sort: cannot read: ", target, 2),
            ok(f"sort {source} {source} {source} {source} > {target}"),
        ),
    )


def sort_numbers(draw: Draw) -> Action:
    """Numbers from small to large; sorting as text gives another order."""
    source, target = draw.file(), draw.file()
    numbers = draw.shuffled([*draw.rng.sample(range(2, 10), 3), *draw.rng.sample(range(10, 20), 3)])
    ordered = text_of(sorted(numbers))
    return Action(
        family="sort-numbers",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"sort the numbers of {source} into {target}", f"write the numbers of {source} in order to {target}"
        ),
        files={source: text_of(numbers).encode()},
        turn=ok(f"sort -n {source} > {target}"),
        checks=(holds(target, ordered), kept(source, text_of(numbers))),
        mistakes=(
            ok(f"sort -n {source}", ordered),
            ok(f"sort {source} > {target}"),
            not_found(f"sort -n {target} > {source}", "sort: cannot read: ", target, 2),
        ),
    )


def sort_unique(draw: Draw) -> Action:
    """Sorted, and each line once."""
    source, target = draw.file(), draw.file()
    words = draw.lines(4, 5)
    lines = [*words, words[1], words[0]]
    return Action(
        family="sort-unique",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"sort {source} into {target} without duplicates", f"write each line of {source} once, sorted, to {target}"
        ),
        files={source: text_of(lines).encode()},
        turn=ok(f"sort -u {source} > {target}"),
        checks=(holds(target, text_of(sorted(words))), kept(source, text_of(lines))),
        mistakes=(
            ok(f"sort -u {source}", text_of(sorted(words))),
            ok(f"sort {source} > {target}"),
            ok(f"uniq {source} > {target}"),
        ),
    )


def matching(draw: Draw, word: str) -> tuple[list[str], list[str], list[str]]:
    """Lines of two words, those of them with `word`, and those without."""
    others = [line for line in draw.lines(6, 8) if line != word]
    hits = [f"{word} {others[0]}", f"{others[1]} {word}"]
    misses = [f"{left} {right}" for left, right in zip(others[2:], others[1:], strict=False)][:3]
    lines = draw.shuffled([*hits, *misses])
    return lines, [line for line in lines if line in hits], [line for line in lines if line in misses]


def keep_lines(draw: Draw) -> Action:
    """The lines with a word."""
    source, target, word = draw.file(), draw.file(), draw.word()
    lines, hits, _ = matching(draw, word)
    return Action(
        family="keep-lines",
        subject=word,
        phrase=draw.pick(
            f"put the lines of {source} with {word} into {target}",
            f"write every line of {source} that contains {word} to {target}",
        ),
        files={source: text_of(lines).encode()},
        turn=ok(f"grep {word} {source} > {target}"),
        checks=(holds(target, text_of(hits)), kept(source, text_of(lines))),
        mistakes=(
            ok(f"grep {word} {source}", text_of(hits)),
            ok(f"grep -v {word} {source} > {target}"),
            not_found(f"grep {source} {word} > {target}", "grep: ", word, 2),
            ok(f"grep {word} {source} {source} {source} {source} > {target}"),
        ),
    )


def omit_lines(draw: Draw) -> Action:
    """The lines without a word."""
    source, target, word = draw.file(), draw.file(), draw.word()
    lines, hits, misses = matching(draw, word)
    return Action(
        family="omit-lines",
        subject=word,
        phrase=draw.pick(
            f"put the lines of {source} without {word} into {target}",
            f"write every line of {source} that lacks {word} to {target}",
        ),
        files={source: text_of(lines).encode()},
        turn=ok(f"grep -v {word} {source} > {target}"),
        checks=(holds(target, text_of(misses)), kept(source, text_of(lines))),
        mistakes=(
            ok(f"grep -v {word} {source}", text_of(misses)),
            ok(f"grep {word} {source} > {target}"),
            ok(f"grep {word} {source}", text_of(hits)),
        ),
    )


def first_lines(draw: Draw) -> Action:
    """The start of a file."""
    source, target, lines, count = draw.file(), draw.file(), draw.lines(6, 9), draw.number(2, 4)
    return Action(
        family="first-lines",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"put the first {count} lines of {source} into {target}",
            f"write the top {count} lines of {source} to {target}",
        ),
        files={source: text_of(lines).encode()},
        turn=ok(f"head -n {count} {source} > {target}"),
        checks=(holds(target, text_of(lines[:count])), kept(source, text_of(lines))),
        mistakes=(
            ok(f"head -n {count} {source}", text_of(lines[:count])),
            ok(f"tail -n {count} {source} > {target}"),
            ok(f"head -n {count + 1} {source} > {target}"),
            ok(f"head -n {count} {source} {source} {source} {source} > {target}"),
        ),
    )


def last_lines(draw: Draw) -> Action:
    """The end of a file."""
    source, target, lines, count = draw.file(), draw.file(), draw.lines(6, 9), draw.number(2, 4)
    return Action(
        family="last-lines",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"put the last {count} lines of {source} into {target}",
            f"write the bottom {count} lines of {source} to {target}",
        ),
        files={source: text_of(lines).encode()},
        turn=ok(f"tail -n {count} {source} > {target}"),
        checks=(holds(target, text_of(lines[-count:])), kept(source, text_of(lines))),
        mistakes=(
            ok(f"tail -n {count} {source}", text_of(lines[-count:])),
            ok(f"head -n {count} {source} > {target}"),
            ok(f"tail -n {count + 1} {source} > {target}"),
        ),
    )


def pick_column(draw: Draw) -> Action:
    """One column of comma-separated rows."""
    source, target, column = draw.file("csv"), draw.file(), draw.number(1, 3)
    count = draw.number(3, 5)
    columns = [draw.lines(count, count) for _ in range(3)]
    text = text_of([",".join(row) for row in zip(*columns, strict=True)])
    wrong = 1 + column % 3
    return Action(
        family="pick-column",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"write column {column} of {source} to {target}", f"put only column {column} of {source} into {target}"
        ),
        files={source: text.encode()},
        turn=ok(f"cut -d, -f{column} {source} > {target}"),
        checks=(holds(target, text_of(columns[column - 1])), kept(source, text)),
        mistakes=(
            ok(f"cut -d, -f{column} {source}", text_of(columns[column - 1])),
            ok(f"cut -d, -f{wrong} {source} > {target}"),
            ok(f"cut -f{column} {source} > {target}"),
        ),
    )


ACTIONS = (
    sort_lines,
    sort_numbers,
    sort_unique,
    keep_lines,
    omit_lines,
    first_lines,
    last_lines,
    pick_column,
)
