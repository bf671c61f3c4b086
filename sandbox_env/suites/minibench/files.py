"""Families about whole files and folders: write, append, copy, rename, delete, make, move, repeat."""

from __future__ import annotations

from sandbox_env.suites.minibench.draw import Draw, text_of
from sandbox_env.suites.minibench.exercise import (
    Action,
    absent,
    bad_option,
    folder,
    holds,
    kept,
    no_source,
    ok,
)


def write_word(draw: Draw) -> Action:
    """A new file with one word."""
    word, path = draw.word(), draw.file()
    return Action(
        family="write-word",
        subject=word,
        phrase=draw.pick(f"write the word {word} to {path}", f"put the word {word} into {path}"),
        files={},
        turn=ok(f"echo {word} > {path}"),
        checks=(holds(path, word),),
        mistakes=(
            ok(f"echo {word} {path}", f"{word} {path}\n"),
            ok(f"echo {path} > {word}"),
            ok(f"echo {rambling(draw, word)} > {path}"),
        ),
    )


def append_word(draw: Draw) -> Action:
    """A word after the last line of a file."""
    word, path, lines = draw.word(), draw.file(), draw.lines()
    return Action(
        family="append-word",
        subject=word,
        phrase=draw.pick(f"add the word {word} at the end of {path}", f"append the word {word} to {path}"),
        files={path: text_of(lines).encode()},
        turn=ok(f"echo {word} >> {path}"),
        checks=(holds(path, text_of([*lines, word])),),
        mistakes=(
            ok(f"echo {word} > {path}"),
            ok(f"echo {word} {path}", f"{word} {path}\n"),
            ok(f"echo {rambling(draw, word)} >> {path}"),
        ),
    )


def copy_file(draw: Draw) -> Action:
    """A second file with the same content."""
    source, target, text = draw.file(), draw.file(), text_of(draw.lines())
    return Action(
        family="copy-file",
        subject=source.split(".")[0],
        phrase=draw.pick(f"copy {source} to {target}", f"make a copy of {source} called {target}"),
        files={source: text.encode()},
        turn=ok(f"cp {source} {target}"),
        checks=(holds(target, text), kept(source, text)),
        mistakes=(
            no_source("cp", target, source),
            ok(f"mv {source} {target}"),
            bad_option(f"cp -q {source} {target}"),
        ),
    )


def rename_file(draw: Draw) -> Action:
    """The same file under another name."""
    source, target, text = draw.file(), draw.file(), text_of(draw.lines())
    return Action(
        family="rename-file",
        subject=source.split(".")[0],
        phrase=draw.pick(f"rename {source} to {target}", f"give {source} the new name {target}"),
        files={source: text.encode()},
        turn=ok(f"mv {source} {target}"),
        checks=(holds(target, text), absent(source)),
        mistakes=(
            no_source("mv", target, source),
            ok(f"cp {source} {target}"),
            bad_option(f"mv -q {source} {target}"),
        ),
    )


def delete_file(draw: Draw) -> Action:
    """One file less, and another kept."""
    path, other = draw.file(), draw.file()
    text, kept_text = text_of(draw.lines()), text_of(draw.lines())
    return Action(
        family="delete-file",
        subject=path.split(".")[0],
        phrase=draw.pick(f"delete {path} but keep {other}", f"remove the file {path} and leave {other} alone"),
        files={path: text.encode(), other: kept_text.encode()},
        turn=ok(f"rm {path}"),
        checks=(absent(path), kept(other, kept_text)),
        mistakes=(
            ok(f"rm {other}"),
            ok(f"rm {path} {other}"),
            ok(f"mv {path} {other}"),
        ),
    )


def make_folder(draw: Draw) -> Action:
    """A new, empty folder."""
    path = draw.word()
    return Action(
        family="make-folder",
        subject=path,
        phrase=draw.pick(f"make the folder {path}", f"create a folder called {path}"),
        files={},
        turn=ok(f"mkdir {path}"),
        checks=(folder(path),),
        mistakes=(
            ok(f"touch {path}"),
            ok(f"echo {path}", f"{path}\n"),
            bad_option(f"mkdir -q {path}"),
        ),
    )


def move_into(draw: Draw) -> Action:
    """A file into a folder that is there."""
    path, target, inside = draw.file(), draw.word(), draw.file()
    text, inside_text = text_of(draw.lines()), text_of(draw.lines())
    return Action(
        family="move-into",
        subject=target,
        phrase=draw.pick(f"move {path} into the folder {target}", f"put {path} into the folder {target}, no copy"),
        files={path: text.encode(), f"{target}/{inside}": inside_text.encode()},
        turn=ok(f"mv {path} {target}"),
        checks=(
            folder(target),
            holds(f"{target}/{path}", text),
            absent(path),
            kept(f"{target}/{inside}", inside_text),
        ),
        mistakes=(
            ok(f"cp {path} {target}"),
            ok(f"mv {target} {path.split('.')[0]}"),
            bad_option(f"mv -q {path} {target}"),
        ),
    )


def repeat_word(draw: Draw) -> Action:
    """A long, repetitive line of a given count: the policy has to count, and succeeds now and then."""
    word, path, times = draw.word(), draw.file(), draw.number(8, 16)
    wrong = draw.pick(times - 2, times - 1, times + 1, times + 3)
    return Action(
        family="repeat-word",
        subject=word,
        phrase=draw.pick(
            f"write {word} {times} times on one line of {path}",
            f"fill one line of {path} with {times} times the word {word}",
        ),
        files={},
        turn=ok(f"echo {repeated(word, times)} > {path}"),
        checks=(holds(path, repeated(word, times)),),
        mistakes=(
            ok(f"echo {repeated(word, wrong)} > {path}"),
            ok(f"echo {repeated(word, draw.number(20, 30))} > {path}"),
            ok(f"echo {word} > {path}"),
        ),
    )


def repeated(word: str, times: int) -> str:
    """`word`, `times` times, on one line."""
    return " ".join([word] * times)


def rambling(draw: Draw, word: str) -> str:
    """A policy that cannot stop: `word` again and again."""
    return repeated(word, draw.number(6, 12))


ACTIONS = (write_word, append_word, copy_file, rename_file, delete_file, make_folder, move_into, repeat_word)
