"""Families about archives and permissions."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping

from sandbox_env.suites.base import DemoTurn
from sandbox_env.suites.minibench.draw import Draw, text_of
from sandbox_env.suites.minibench.exercise import Action, Check, holds, kept, mode, ok


def packed(archive: str, member: str, text: str) -> Check:
    """The tar file `archive` holds the file `member` with this content."""
    return Check(f"{archive} holds {member}", "packed", (archive, member, text.removesuffix("\n")))


def zipped(path: str, text: str) -> Check:
    """The gzip file `path` holds this content."""
    return Check(f"{path} unpacks to what was asked for", "zipped", (path, text.removesuffix("\n")))


def pack_files(draw: Draw) -> Action:
    """Two files in a new tar archive."""
    archive, first, second = draw.file("tar"), draw.file(), draw.file()
    texts = text_of(draw.lines(3, 5)), text_of(draw.lines(3, 5))
    swapped = (
        f"tar: {archive}: Cannot stat: No such file or directory\n"
        "tar: Exiting with failure status due to previous errors\n"
    )
    return Action(
        family="pack-files",
        subject=archive.split(".")[0],
        phrase=draw.pick(
            f"pack {first} and {second} into {archive}", f"make the archive {archive} of {first} and {second}"
        ),
        files={first: texts[0].encode(), second: texts[1].encode()},
        turn=ok(f"tar -cf {archive} {first} {second}"),
        checks=(
            packed(archive, first, texts[0]),
            packed(archive, second, texts[1]),
            kept(first, texts[0]),
            kept(second, texts[1]),
        ),
        mistakes=(
            DemoTurn(f"tar -cf {first} {archive} {second}", swapped, 2),
            ok(f"tar -cf {archive} {first}"),
            ok(f"cat {first} {second} > {archive}"),
        ),
    )


def unpack_archive(draw: Draw) -> Action:
    """The files of a tar archive."""
    archive, first, second = draw.file("tar"), draw.file(), draw.file()
    texts = {name: text_of(draw.lines(3, 5)) for name in (first, second)}
    return Action(
        family="unpack-archive",
        subject=archive.split(".")[0],
        phrase=draw.pick(f"unpack {archive}", f"extract the files of {archive} here"),
        files={archive: tar_bytes(texts)},
        turn=ok(f"tar -xf {archive}"),
        checks=tuple(holds(name, text) for name, text in texts.items()),
        mistakes=(
            ok(f"tar -tf {archive}", text_of([first, second])),
            DemoTurn(f"gunzip {archive}", f"gzip: {archive}: unknown suffix -- ignored\n", 2),
            ok(f"tar -xf {archive} {first}"),
        ),
    )


def gzip_file(draw: Draw) -> Action:
    """A file compressed."""
    path, text = draw.file(), text_of(draw.lines())
    return Action(
        family="gzip-file",
        subject=path.split(".")[0],
        phrase=draw.pick(f"compress {path} with gzip", f"gzip the file {path}"),
        files={path: text.encode()},
        turn=ok(f"gzip {path}"),
        checks=(zipped(f"{path}.gz", text),),
        mistakes=(
            DemoTurn(f"gzip -d {path}", f"gzip: {path}: unknown suffix -- ignored\n", 2),
            ok(f"tar -cf {path}.gz {path}"),
            ok(f"cp {path} {path}.gz"),
        ),
    )


def gunzip_file(draw: Draw) -> Action:
    """A compressed file as it was."""
    path, text = draw.file(), text_of(draw.lines())
    return Action(
        family="gunzip-file",
        subject=path.split(".")[0],
        phrase=draw.pick(f"uncompress {path}.gz", f"unzip {path}.gz to {path}"),
        files={f"{path}.gz": gzip.compress(text.encode(), mtime=0)},
        turn=ok(f"gunzip {path}.gz"),
        checks=(holds(path, text),),
        mistakes=(
            ok(f"gunzip -t {path}.gz"),
            ok(f"cp {path}.gz {path}"),
            ok(f"mv {path}.gz {path}"),
        ),
    )


def set_mode(draw: Draw) -> Action:
    """Permissions given as a number."""
    path, text = draw.file(), text_of(draw.lines(3, 5))
    wanted = draw.pick("600", "640", "660", "700", "740", "750")
    wrong = draw.pick(*[bits for bits in ("600", "640", "660", "700", "740", "750") if bits != wanted])
    return Action(
        family="set-mode",
        subject=path.split(".")[0],
        phrase=draw.pick(f"set the mode of {path} to {wanted}", f"give {path} the permissions {wanted}"),
        files={path: text.encode()},
        turn=ok(f"chmod {wanted} {path}"),
        checks=(mode(path, wanted, f"has mode {wanted}"), kept(path, text)),
        mistakes=(
            ok(f"chmod {wrong} {path}"),
            ok(f"chmod +x {path}"),
            ok(f"echo {wanted} > {path}"),
        ),
    )


def make_executable(draw: Draw) -> Action:
    """A file that can be run."""
    path, text = draw.file(), text_of(draw.lines(3, 5))
    return Action(
        family="make-executable",
        subject=path.split(".")[0],
        phrase=draw.pick(f"make {path} executable", f"let {path} be run as a program"),
        files={path: text.encode()},
        turn=ok(f"chmod +x {path}"),
        checks=(mode(path, "[1357]??", "is executable"), kept(path, text)),
        mistakes=(
            ok(f"chmod -x {path}"),
            ok(f"chmod 644 {path}"),
            ok(f"chmod +w {path}"),
        ),
    )


def make_read_only(draw: Draw) -> Action:
    """A file that nobody may write."""
    path, text = draw.file(), text_of(draw.lines(3, 5))
    return Action(
        family="make-read-only",
        subject=path.split(".")[0],
        phrase=draw.pick(f"make {path} read-only", f"take the permission to write {path} from everyone"),
        files={path: text.encode()},
        turn=ok(f"chmod a-w {path}"),
        checks=(mode(path, "[4-5][014-5][014-5]", "is read-only"), kept(path, text)),
        mistakes=(
            ok(f"chmod a+w {path}"),
            ok(f"chmod a-x {path}"),
            ok(f"chmod +x {path}"),
        ),
    )


def tar_bytes(texts: Mapping[str, str]) -> bytes:
    """A tar archive of these files, always the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(text), 1_700_000_000
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


ACTIONS = (pack_files, unpack_archive, gzip_file, gunzip_file, set_mode, make_executable, make_read_only)
