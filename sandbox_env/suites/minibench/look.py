"""Families that need two or more turns: look at the world first, then act on what is there.

The name to act on is in no instruction, only in what the first command prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sandbox_env.suites.base import DemoTurn
from sandbox_env.suites.minibench import archives, counting, files, git, process, selection, text
from sandbox_env.suites.minibench.draw import EXTENSIONS, Draw, text_of
from sandbox_env.suites.minibench.exercise import (
    SCM_IMAGE,
    Action,
    ActionBuilder,
    Check,
    Exercise,
    absent,
    holds,
    kept,
    mode,
    ok,
    sentence,
)

NOTE_ACTIONS: tuple[ActionBuilder, ...] = (
    files.write_word,
    files.copy_file,
    files.rename_file,
    files.delete_file,
    files.make_folder,
    text.reverse_lines,
    counting.count_lines,
    selection.sort_lines,
    selection.keep_lines,
    archives.make_executable,
)
"""What a note may ask for."""


@dataclass(frozen=True, slots=True)
class Deed:
    """What is to be done to a file whose name is found first. `phrase` and `command` take what names the file."""

    phrase: Callable[[str], str]
    command: Callable[[str], str]
    checks: tuple[Check, ...]


def deed(draw: Draw, target: str, lines: list[str], *, writes: bool = False) -> Deed:
    """Something to do to `target`; with `writes`, something that makes a new file."""
    out, content = draw.file(), text_of(lines)
    same = kept(target, content)
    writing = (
        Deed(lambda it: f"copy {it} to {out}", lambda path: f"cp {path} {out}", (holds(out, content), same)),
        Deed(
            lambda it: f"count the lines of {it} into {out}",
            lambda path: f"wc -l < {path} > {out}",
            (holds(out, str(len(lines))), same),
        ),
        Deed(
            lambda it: f"sort {it} into {out}",
            lambda path: f"sort {path} > {out}",
            (holds(out, text_of(sorted(lines))), same),
        ),
    )
    changing = (
        Deed(lambda it: f"delete {it}", lambda path: f"rm {path}", (absent(target),)),
        Deed(
            lambda it: f"make {it} executable",
            lambda path: f"chmod +x {path}",
            (mode(target, "[1357]??", "is executable"), same),
        ),
    )
    return draw.pick(*writing) if writes else draw.pick(*writing, *changing)


def note_file(draw: Draw) -> Exercise:
    """A note names the file to act on."""
    note, target, other = draw.file("md"), draw.file(), draw.file()
    lines, other_text = draw.lines(4, 6), text_of(draw.lines(4, 6))
    todo = deed(draw, target, lines)
    look = ok(f"cat {note}", f"{target}\n")
    return Exercise(
        family="note-file",
        subject=note.split(".")[0],
        instruction=draw.pick(
            f"{note} names a file. {sentence(todo.phrase('that file'))}",
            sentence(todo.phrase(f"the file named in {note}")),
        ),
        files={note: f"{target}\n".encode(), target: text_of(lines).encode(), other: other_text.encode()},
        turns=(look, ok(todo.command(target))),
        checks=(*todo.checks, kept(other, other_text), kept(note, target)),
        mistakes=(
            (ok(todo.command(note)),),
            (look,),
            (look, ok(todo.command(note))),
            (look, ok(f"cat {target}", text_of(lines))),
        ),
    )


def note_word(draw: Draw) -> Exercise:
    """A note holds the word to write."""
    note, path, word = draw.file(), draw.file(), draw.word()
    says = f"the word is {word}\n"
    look = ok(f"cat {note}", says)
    return Exercise(
        family="note-word",
        subject=note.split(".")[0],
        instruction=draw.pick(
            f"{note} tells a secret word. Write only that word to {path}.",
            f"Find the secret word in {note} and write just the word to {path}.",
        ),
        files={note: says.encode()},
        turns=(look, ok(f"echo {word} > {path}")),
        checks=(holds(path, word), kept(note, says)),
        mistakes=(
            (ok(f"cp {note} {path}"),),
            (look,),
            (look, ok(f"echo {word} {path}", f"{word} {path}\n")),
            (look, ok(f"echo {files.rambling(draw, word)} > {path}")),
        ),
    )


def note_task(draw: Draw) -> Exercise:
    """A note says what to do."""
    note = draw.file("md")
    action = draw.pick(*NOTE_ACTIONS)(draw)
    says = f"{sentence(action.phrase)}\n"
    look = ok(f"cat {note}", says)
    return Exercise(
        family="note-task",
        subject=note.split(".")[0],
        instruction=draw.pick(f"Do what {note} says.", f"Read {note} and do what it asks for."),
        files={note: says.encode(), **action.files},
        turns=(look, action.turn),
        checks=(*action.checks, kept(note, says)),
        mistakes=((look,), *_wrong_ends((look,), action)),
        actions=(action.family,),
    )


def note_chain(draw: Draw) -> Exercise:
    """A note points to a note that says what to do: three turns."""
    first, second = draw.file("md"), draw.file("md")
    action = draw.pick(*NOTE_ACTIONS)(draw)
    points, says = f"See {second}\n", f"{sentence(action.phrase)}\n"
    looks = (ok(f"cat {first}", points), ok(f"cat {second}", says))
    return Exercise(
        family="note-chain",
        subject=first.split(".")[0],
        instruction=draw.pick(
            f"Follow the notes from {first} on and do what the last one says.",
            f"Start at {first}, go on to the next note, and do what that one says.",
        ),
        files={first: points.encode(), second: says.encode(), **action.files},
        turns=(*looks, action.turn),
        checks=(*action.checks, kept(first, points), kept(second, says)),
        mistakes=(looks[:1], looks, *_wrong_ends(looks, action)),
        actions=(action.family,),
    )


def _wrong_ends(looks: tuple[DemoTurn, ...], action: Action) -> list[tuple[DemoTurn, ...]]:
    return [(*looks, mistake) for mistake in action.mistakes[:2]]


def find_kind(draw: Draw) -> Exercise:
    """The only file of a kind."""
    kind, *rest = draw.shuffled(EXTENSIONS)
    target, others = draw.file(kind), [draw.file(extension) for extension in rest[:3]]
    # Another number of lines, so that counting those of a wrong file is wrong.
    lines, other_texts = draw.lines(4, 6), {name: text_of(draw.lines(3, 3)) for name in others}
    todo = deed(draw, target, lines, writes=True)
    look = ok("ls", text_of(sorted([target, *others])))
    return Exercise(
        family="find-kind",
        subject=target.split(".")[0],
        instruction=draw.pick(
            sentence(todo.phrase(f"the only {kind} file here")),
            f"There is one {kind} file. {sentence(todo.phrase('it'))}",
        ),
        files={target: text_of(lines).encode()} | {name: body.encode() for name, body in other_texts.items()},
        turns=(look, ok(todo.command(target))),
        checks=(*todo.checks, *(kept(name, body) for name, body in other_texts.items())),
        mistakes=(
            (look,),
            (look, ok(todo.command(others[0]))),
            (look, ok(f"cat {target}", text_of(lines))),
        ),
    )


def find_word(draw: Draw) -> Exercise:
    """The only file with a word in it."""
    word, target, others = draw.word(), draw.file(), [draw.file(), draw.file()]
    lines = [line for line in draw.lines(4, 6) if line != word]
    lines.insert(draw.number(0, len(lines)), word)
    other_texts = {name: text_of([line for line in draw.lines(4, 6) if line != word]) for name in others}
    todo = deed(draw, target, lines)
    look = ok(f"grep -l {word} *", f"{target}\n")
    return Exercise(
        family="find-word",
        subject=word,
        instruction=draw.pick(
            sentence(todo.phrase(f"the file that contains {word}")),
            f"One file contains {word}. {sentence(todo.phrase('it'))}",
        ),
        files={target: text_of(lines).encode()} | {name: body.encode() for name, body in other_texts.items()},
        turns=(look, ok(todo.command(target))),
        checks=(*todo.checks, *(kept(name, body) for name, body in other_texts.items())),
        mistakes=(
            (look,),
            (ok("ls", text_of(sorted([target, *others]))),),
            (look, ok(f"grep {word} {target}", f"{word}\n")),
        ),
    )


def stop_process(draw: Draw) -> Exercise:
    """A script starts a process and says where its number is."""
    script, program = draw.file("sh"), draw.word()
    body = process.start_script(program, f"{program} runs, see {program}.pid")
    look = ok(f"bash {script}", f"{program} runs, see {program}.pid\n")
    return Exercise(
        family="stop-process",
        subject=script.split(".")[0],
        instruction=draw.pick(
            f"Run {script}, then stop the process that it started.",
            f"Start {script} and then kill what it leaves running.",
        ),
        files={script: body.encode()},
        turns=(look, ok(f"kill $(cat {program}.pid)")),
        checks=(*process.stopped(program, script), kept(script, body)),
        mistakes=((look,), (look, ok(f"rm {program}.pid")), (ok(f"cat {script}", body),)),
    )


def git_switch(draw: Draw) -> Exercise:
    """The other branch, whose name git tells."""
    branch, path, out, content = draw.word(), draw.file(), draw.file(), text_of(draw.lines(3, 5))
    repo = git.repository({path: content})
    names = sorted([branch, "main"])
    look = ok("git branch", text_of([f"* {name}" if name == "main" else f"  {name}" for name in names]))
    return Exercise(
        family="git-switch",
        subject=out.split(".")[0],
        instruction=draw.pick(
            f"Switch to the other git branch and write its name to {out}.",
            f"Go to the git branch that is not main and put its name into {out}.",
        ),
        files={path: content.encode(), **repo.files, f".git/refs/heads/{branch}": f"{repo.commit}\n".encode()},
        turns=(look, ok(f"git checkout -q {branch} && echo {branch} > {out}")),
        checks=(holds(".git/HEAD", f"ref: refs/heads/{branch}"), holds(out, branch), kept(path, content)),
        mistakes=(
            (look,),
            (look, ok(f"echo {branch} > {out}")),
            (look, ok(f"git checkout -q main && echo main > {out}")),
        ),
        image=SCM_IMAGE,
    )


LOOKS = (note_file, note_word, note_task, note_chain, find_kind, find_word, stop_process, git_switch)
