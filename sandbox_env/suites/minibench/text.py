"""Families about the text in a file: replace, drop lines, capitals, reverse, join."""

from __future__ import annotations

from sandbox_env.suites.minibench.draw import Draw, text_of
from sandbox_env.suites.minibench.exercise import Action, holds, kept, ok


def replace_word(draw: Draw) -> Action:
    """One word by another, in place."""
    path, old, new = draw.file(), draw.word(), draw.word()
    others = [word for word in draw.lines() if word not in (old, new)]
    lines = draw.shuffled([*others, old, old])
    changed = text_of([new if line == old else line for line in lines])
    return Action(
        family="replace-word",
        subject=old,
        phrase=draw.pick(f"replace {old} by {new} in {path}", f"change every {old} in {path} to {new}"),
        files={path: text_of(lines).encode()},
        turn=ok(f"sed -i 's/{old}/{new}/' {path}"),
        checks=(holds(path, changed),),
        mistakes=(
            ok(f"sed 's/{old}/{new}/' {path}", changed),
            ok(f"sed -i 's/{new}/{old}/' {path}"),
            ok(f"echo {new} > {path}"),
        ),
    )


def drop_lines(draw: Draw) -> Action:
    """Some lines less, in place."""
    path, word = draw.file(), draw.word()
    others = [line for line in draw.lines() if line != word]
    lines = draw.shuffled([*others, word, word])
    left = text_of(others_in_order(lines, word))
    return Action(
        family="drop-lines",
        subject=word,
        phrase=draw.pick(f"remove the lines with {word} from {path}", f"delete every line with {word} in {path}"),
        files={path: text_of(lines).encode()},
        turn=ok(f"sed -i '/{word}/d' {path}"),
        checks=(holds(path, left),),
        mistakes=(
            ok(f"sed '/{word}/d' {path}", left),
            ok(f"grep {word} {path}", text_of([word, word])),
            ok(f"rm {path}"),
        ),
    )


def upper_case(draw: Draw) -> Action:
    """A copy in capitals."""
    source, target, text = draw.file(), draw.file(), text_of(draw.lines())
    return Action(
        family="upper-case",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"write {source} in capitals to {target}",
            f"put a copy of {source} in capitals into {target}",
        ),
        files={source: text.encode()},
        turn=ok(f"tr a-z A-Z < {source} > {target}"),
        checks=(holds(target, text.upper()), kept(source, text)),
        mistakes=(
            ok(f"tr a-z A-Z < {source}", text.upper()),
            ok(f"tr A-Z a-z < {source} > {target}"),
            ok(f"cp {source} {target}"),
        ),
    )


def reverse_lines(draw: Draw) -> Action:
    """The last line first."""
    source, target, lines = draw.file(), draw.file(), draw.lines()
    return Action(
        family="reverse-lines",
        subject=source.split(".")[0],
        phrase=draw.pick(
            f"write the lines of {source} in reverse order to {target}",
            f"put {source} into {target} with the last line first",
        ),
        files={source: text_of(lines).encode()},
        turn=ok(f"tac {source} > {target}"),
        checks=(holds(target, text_of(lines[::-1])), kept(source, text_of(lines))),
        mistakes=(
            ok(f"tac {source}", text_of(lines[::-1])),
            ok(f"cat {source} > {target}"),
            ok(f"sort -r {source} > {target}"),
        ),
    )


def join_files(draw: Draw) -> Action:
    """Two files one after the other in a third."""
    first, second, target = draw.file(), draw.file(), draw.file()
    head, tail = text_of(draw.lines(3, 5)), text_of(draw.lines(3, 5))
    return Action(
        family="join-files",
        subject=target.split(".")[0],
        phrase=draw.pick(f"join {first} and {second} into {target}", f"write {first} and then {second} to {target}"),
        files={first: head.encode(), second: tail.encode()},
        turn=ok(f"cat {first} {second} > {target}"),
        checks=(holds(target, head + tail), kept(first, head), kept(second, tail)),
        mistakes=(
            ok(f"cat {first} {second}", head + tail),
            ok(f"cat {second} {first} > {target}"),
            ok(f"cat {first} > {target}"),
            ok(f"cat {first} {second} {second} {second} > {target}"),
        ),
    )


def others_in_order(lines: list[str], word: str) -> list[str]:
    """The lines that are not `word`."""
    return [line for line in lines if line != word]


ACTIONS = (replace_word, drop_lines, upper_case, reverse_lines, join_files)
