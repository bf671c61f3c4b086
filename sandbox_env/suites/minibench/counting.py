"""Families about counting and arithmetic over columns."""

from __future__ import annotations

from sandbox_env.suites.minibench.draw import Draw, text_of
from sandbox_env.suites.minibench.exercise import Action, bad_option, holds, kept, ok


def count_lines(draw: Draw) -> Action:
    """The number of lines."""
    source, target = draw.file(), draw.file()
    lines = [f"{left} {right}" for left, right in zip(draw.lines(5, 5), draw.lines(5, 5), strict=True)]
    lines = lines[: draw.number(3, 5)]
    return Action(
        family="count-lines",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"count the lines of {source} into {target}", f"write the number of lines in {source} to {target}"
        ),
        files={source: text_of(lines).encode()},
        turn=ok(f"wc -l < {source} > {target}"),
        checks=(holds(target, str(len(lines))), kept(source, text_of(lines))),
        mistakes=(
            ok(f"wc -l < {source}", f"{len(lines)}\n"),
            ok(f"wc -w < {source} > {target}"),
            ok(f"wc -l {source} > {target}"),
            bad_option(f"wc -q < {source} > {target}"),
        ),
    )


def count_words(draw: Draw) -> Action:
    """The number of words."""
    source, target = draw.file(), draw.file()
    words = draw.lines(7, 10)
    lines = [" ".join(words[:2]), " ".join(words[2:5]), *words[5:]]
    return Action(
        family="count-words",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"count the words of {source} into {target}", f"write the number of words in {source} to {target}"
        ),
        files={source: text_of(lines).encode()},
        turn=ok(f"wc -w < {source} > {target}"),
        checks=(holds(target, str(len(words))), kept(source, text_of(lines))),
        mistakes=(
            ok(f"wc -w < {source}", f"{len(words)}\n"),
            ok(f"wc -l < {source} > {target}"),
            ok(f"wc -w {source} > {target}"),
        ),
    )


def count_matches(draw: Draw) -> Action:
    """The number of lines with a word."""
    source, target, word = draw.file(), draw.file(), draw.word()
    hits = draw.number(2, 4)
    others = [line for line in draw.lines(5, 6) if line != word]
    lines = draw.shuffled([*others, *[word] * hits])
    return Action(
        family="count-matches",
        subject=word,
        phrase=draw.pick(
            f"count the lines of {source} with {word} into {target}",
            f"write how many lines of {source} contain {word} to {target}",
        ),
        files={source: text_of(lines).encode()},
        turn=ok(f"grep -c {word} {source} > {target}"),
        checks=(holds(target, str(hits)), kept(source, text_of(lines))),
        mistakes=(
            ok(f"grep -c {word} {source}", f"{hits}\n"),
            ok(f"grep {word} {source} > {target}"),
            ok(f"wc -l < {source} > {target}"),
        ),
    )


def sum_column(draw: Draw) -> Action:
    """The sum of one column of a table."""
    source, target, column = draw.file(), draw.file(), draw.number(2, 3)
    count = draw.number(3, 5)
    rows = list(zip(draw.words(count), draw.numbers(count), draw.numbers(count), strict=True))
    sums = {2: sum(row[1] for row in rows), 3: sum(row[2] for row in rows)}
    if sums[2] == sums[3]:
        rows[0] = (rows[0][0], rows[0][1], rows[0][2] + 1)
        sums[3] += 1
    text = text_of([f"{name} {left} {right}" for name, left, right in rows])
    wrong = 5 - column
    return Action(
        family="sum-column",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"sum column {column} of {source} into {target}",
            f"write the sum of column {column} in {source} to {target}",
        ),
        files={source: text.encode()},
        turn=ok(f"awk '{{s+=${column}}} END {{print s}}' {source} > {target}"),
        checks=(holds(target, str(sums[column])), kept(source, text)),
        mistakes=(
            ok(f"awk '{{s+=${column}}} END {{print s}}' {source}", f"{sums[column]}\n"),
            ok(f"awk '{{s+=${wrong}}} END {{print s}}' {source} > {target}"),
            ok(f"awk '{{print ${column}}}' {source} > {target}"),
        ),
    )


def largest_number(draw: Draw) -> Action:
    """The largest of some numbers; one digit and two digits, so that sorting as text gives another one."""
    source, target = draw.file(), draw.file()
    numbers = draw.shuffled([9, *draw.rng.sample(range(2, 9), 2), *draw.rng.sample(range(10, 80), 3)])
    best = max(numbers)
    return Action(
        family="largest-number",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"write the largest number of {source} to {target}", f"find the largest number in {source} for {target}"
        ),
        files={source: text_of(numbers).encode()},
        turn=ok(f"sort -n {source} | tail -n 1 > {target}"),
        checks=(holds(target, str(best)), kept(source, text_of(numbers))),
        mistakes=(
            ok(f"sort -n {source} | tail -n 1", f"{best}\n"),
            ok(f"sort -n {source} | head -n 1 > {target}"),
            ok(f"sort {source} | tail -n 1 > {target}"),
            ok(f"sort -n {source} > {target}"),
        ),
    )


ACTIONS = (count_lines, count_words, count_matches, sum_column, largest_number)
