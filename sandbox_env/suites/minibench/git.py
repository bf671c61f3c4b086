"""Families about a git repository.

The repository is written as files, objects and index included, by the generator: it needs no git to be made, its
hashes are known to the checks, and a sandbox starts without running anything.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox_env.suites.base import DemoTurn
from sandbox_env.suites.minibench.draw import Draw, text_of
from sandbox_env.suites.minibench.exercise import SCM_IMAGE, Action, Check, holds, kept, ok

_CONFIG = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
[user]
\tname = mini
\temail = mini@example.com
"""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository with one commit on the branch main: its files under `.git` and the hash of the commit."""

    files: Mapping[str, bytes]
    commit: str


def repository(texts: Mapping[str, str]) -> Repository:
    """A repository whose only commit, and index, hold these files."""
    objects: dict[str, bytes] = {}

    def store(kind: str, body: bytes) -> bytes:
        whole = f"{kind} {len(body)}\0".encode() + body
        digest = hashlib.sha1(whole).hexdigest()
        objects[f".git/objects/{digest[:2]}/{digest[2:]}"] = zlib.compress(whole, 1)
        return bytes.fromhex(digest)

    blobs = {name: store("blob", text.encode()) for name, text in sorted(texts.items())}
    tree = store("tree", b"".join(f"100644 {name}\0".encode() + digest for name, digest in blobs.items()))
    who = "mini <mini@example.com> 1700000000 +0000"
    message = f"tree {tree.hex()}\nauthor {who}\ncommitter {who}\n\nstart\n"
    commit = store("commit", message.encode()).hex()
    files = {
        ".git/HEAD": b"ref: refs/heads/main\n",
        ".git/config": _CONFIG.encode(),
        ".git/refs/heads/main": f"{commit}\n".encode(),
        ".git/index": _index(blobs),
    }
    return Repository({**files, **objects}, commit)


def _index(blobs: Mapping[str, bytes]) -> bytes:
    """An index of version 2. Its file times and sizes are zero, so git looks at the content the first time."""
    body = struct.pack(">4sII", b"DIRC", 2, len(blobs))
    for name, digest in blobs.items():
        entry = struct.pack(">10I20sH", *[0] * 6, 0o100644, *[0] * 3, digest, len(name)) + name.encode()
        body += entry + b"\0" * (8 - len(entry) % 8)
    return body + hashlib.sha1(body).digest()


def points_to(ref: str, commit: str) -> Check:
    """The branch or tag is at this commit."""
    return Check(f"{ref} is at the right commit", "points_to", (ref, commit))


def committed(message: str, parent: str) -> Check:
    """HEAD is one commit after `parent`, with this message."""
    return Check(f"the commit {message} follows the first one", "committed", (message, parent))


def in_commit(path: str, text: str) -> Check:
    """HEAD holds `path` with this content."""
    return Check(f"{path} is committed", "in_commit", (path, text.removesuffix("\n")))


def git_branch(draw: Draw) -> Action:
    """A new branch."""
    branch, path, text = draw.word(), draw.file(), text_of(draw.lines(3, 5))
    repo = repository({path: text})
    return Action(
        family="git-branch",
        subject=branch,
        phrase=draw.pick(f"make the git branch {branch}", f"create a branch called {branch} in the git repository"),
        files={path: text.encode(), **repo.files},
        turn=ok(f"git branch {branch}"),
        checks=(points_to(f"refs/heads/{branch}", repo.commit), kept(path, text)),
        mistakes=(ok(f"git tag {branch}"), ok(f"mkdir {branch}"), ok("git branch", "* main\n")),
        image=SCM_IMAGE,
    )


def git_tag(draw: Draw) -> Action:
    """A name for the commit."""
    tag, path, text = draw.word(), draw.file(), text_of(draw.lines(3, 5))
    repo = repository({path: text})
    return Action(
        family="git-tag",
        subject=tag,
        phrase=draw.pick(f"make the git tag {tag}", f"tag the last git commit as {tag}"),
        files={path: text.encode(), **repo.files},
        turn=ok(f"git tag {tag}"),
        checks=(points_to(f"refs/tags/{tag}", repo.commit), kept(path, text)),
        mistakes=(ok(f"git branch {tag}"), ok(f"echo {tag}", f"{tag}\n"), ok("git tag")),
        image=SCM_IMAGE,
    )


def git_commit(draw: Draw) -> Action:
    """A new file committed."""
    message, old, new = draw.word(), draw.file(), draw.file()
    old_text, new_text = text_of(draw.lines(3, 5)), text_of(draw.lines(3, 5))
    repo = repository({old: old_text})
    missing = f"fatal: pathspec '{message}' did not match any files\n"
    return Action(
        family="git-commit",
        subject=message,
        phrase=draw.pick(
            f"commit {new} to git with the message {message}", f"make a git commit {message} that adds {new}"
        ),
        files={old: old_text.encode(), new: new_text.encode(), **repo.files},
        turn=ok(f"git add {new} && git commit -qm {message}"),
        checks=(committed(message, repo.commit), in_commit(new, new_text), in_commit(old, old_text)),
        mistakes=(
            ok(f"git add {new}"),
            ok(f"git add {new} && git commit -qm {new}"),
            DemoTurn(f"git add {message} && git commit -qm {new}", missing, 128),
        ),
        image=SCM_IMAGE,
    )


def git_restore(draw: Draw) -> Action:
    """A changed file as it was committed."""
    path, other = draw.file(), draw.file()
    lines, other_text = draw.lines(3, 5), text_of(draw.lines(3, 5))
    repo = repository({path: text_of(lines), other: other_text})
    return Action(
        family="git-restore",
        subject=path.split(".")[0],
        phrase=draw.pick(f"undo the changes to {path} with git", f"bring back {path} from the last git commit"),
        files={path: text_of([*lines, draw.word()]).encode(), other: other_text.encode(), **repo.files},
        turn=ok(f"git restore {path}"),
        checks=(holds(path, text_of(lines)), kept(other, other_text)),
        mistakes=(ok(f"rm {path}"), ok(f"git add {path}"), ok(f"git restore {other}")),
        image=SCM_IMAGE,
    )


ACTIONS = (git_branch, git_tag, git_commit, git_restore)
