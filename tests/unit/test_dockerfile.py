"""The Dockerfile subset, and what a local sandbox is built from."""

import io
import tarfile
from pathlib import Path

import pytest
from local_boxes import write_task

from sandbox_env.archive import pack
from sandbox_env.dockerfile import Copy, Dockerfile, MakeFolder, Run, parse_dockerfile
from sandbox_env.providers.local_image import build_image


def parse(tmp_path: Path, text: str) -> Dockerfile:
    (tmp_path / "Dockerfile").write_text(text)
    return parse_dockerfile(tmp_path / "Dockerfile")


def files_of(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar if m.isreg()}  # type: ignore[union-attr]


def test_every_known_instruction_is_read_in_order(tmp_path):
    parsed = parse(
        tmp_path,
        "# syntax=docker/dockerfile:1\n"
        "FROM debian:bookworm AS base\n"
        "\n"
        "WORKDIR /app\n"
        "COPY a.txt b.txt ./\n"
        "ENV A=1 B='two words' \\\n"
        "    # a comment inside\n"
        "    C=\n"
        "ENV OLD form with spaces\n"
        "WORKDIR sub\n"
        "RUN echo hello && \\\n"
        "    echo world\n",
    )
    where = f"{tmp_path / 'Dockerfile'}"
    assert parsed.base == "debian:bookworm"
    assert parsed.workdir == "/app/sub"
    assert parsed.env == {"A": "1", "B": "two words", "C": "", "OLD": "form with spaces"}
    assert parsed.steps[0] == MakeFolder("/app")
    assert parsed.steps[1] == Copy(("a.txt", "b.txt"), "/app", True, f"{where}:5")
    assert parsed.steps[2] == MakeFolder("/app/sub")
    run = parsed.steps[3]
    assert isinstance(run, Run)
    assert run.argv == ("/bin/sh", "-c", "echo hello &&     echo world")
    assert (run.workdir, run.where) == ("/app/sub", f"{where}:11")


def test_variables_are_filled_in_from_env_lines_and_from_the_image(tmp_path):
    parsed = parse(tmp_path, "FROM x\nENV DIR=/srv/data\nENV PATH=/opt/bin:$PATH\nWORKDIR ${DIR}/in\n")
    assert parsed.workdir == "/srv/data/in"
    assert parsed.env["PATH"].startswith("/opt/bin:/usr/local/sbin:")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ARG X=1", "ARG; only FROM, WORKDIR, COPY, ENV, RUN are built without Docker"),
        ("USER nobody", "USER;"),
        ("ADD a b", "ADD;"),
        ("FROM other", "FROM other; only one stage"),
        ("COPY --chown=1 a b", "COPY --chown=1; copy without options"),
        ("COPY *.txt /app/", "COPY *.txt; name the files"),
        ("COPY ../x /app/", "COPY ../x; copy from within"),
        ("COPY a", "name a source and a target"),
        ("COPY a ../b", "write the path without '..'"),
        ("RUN --mount=type=cache true", "RUN --mount=type=cache; run without options"),
        ("RUN cat <<EOF > x", "RUN <<; write the lines into a file"),
        ("ENV A=$NOPE", "$NOPE; set it with ENV"),
        ("ENV A=${B:-1}", "use plain ${NAME}"),
        ("ENV A='$B'", "a literal $ is not understood"),
        ("WORKDIR", "WORKDIR; its arguments are missing"),
        ('ENV A="open', "close the quotes"),
    ],
)
def test_anything_else_is_refused_with_file_line_and_remedy(tmp_path, line, says):
    with pytest.raises(ValueError, match="Dockerfile:3: ") as caught:
        parse(tmp_path, f"FROM x\n# comment\n{line}\n")
    assert says in str(caught.value)


def test_a_dockerfile_without_from_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Dockerfile:1: RUN; a Dockerfile starts with FROM"):
        parse(tmp_path, "RUN true\n")
    with pytest.raises(ValueError, match=r"Dockerfile:1: no FROM"):
        parse(tmp_path, "# nothing\n")


def test_arithmetic_and_shifts_in_run_are_no_heredoc(tmp_path):
    assert len(parse(tmp_path, "FROM x\nRUN echo $((1<<2)) $HOME\n").steps) == 1


def test_run_in_json_form_keeps_its_words(tmp_path):
    (step,) = parse(tmp_path, 'FROM x\nRUN ["touch", "a b"]\n').steps
    assert isinstance(step, Run)
    assert step.argv == ("/bin/sh", "-c", "touch 'a b'")


def test_copies_land_where_docker_puts_them(tmp_path):
    task = write_task(
        tmp_path,
        "FROM x\nWORKDIR /app\nCOPY notes.txt .\nCOPY notes.txt /app/renamed.txt\nCOPY data /srv/in\n"
        "COPY notes.txt /opt/new/\nCOPY notes.txt data/a.csv /home/both\nCOPY notes.txt /srv/in\n",
    )
    (archive,) = build_image(task).parts
    assert isinstance(archive, bytes)
    assert set(files_of(archive)) == {
        "app/notes.txt",
        "app/renamed.txt",
        "srv/in/a.csv",
        "opt/new/notes.txt",
        "home/both/notes.txt",
        "home/both/a.csv",
        "srv/in/notes.txt",
    }


def test_programs_run_between_the_copies_around_them(tmp_path):
    task = write_task(tmp_path, "FROM x\nWORKDIR /app\nCOPY notes.txt .\nRUN sort notes.txt\nCOPY data data\n")
    first, run, last = build_image(task).parts
    assert isinstance(first, bytes)
    assert isinstance(run, Run)
    assert isinstance(last, bytes)
    assert set(files_of(first)) == {"app/notes.txt"}
    assert set(files_of(last)) == {"app/data/a.csv"}


@pytest.mark.parametrize(
    ("dockerfile", "says"),
    [
        ("FROM x\nCOPY nothere /app/\n", "COPY nothere; there is no"),
        ("FROM x\nCOPY notes.txt /usr/bin/tool\n", "COPY to /usr/bin/tool; the system is read-only here"),
        ("FROM x\nWORKDIR /etc/app\n", "WORKDIR /etc/app; the system is read-only here"),
    ],
)
def test_an_environment_that_cannot_be_built_is_refused(tmp_path, dockerfile, says):
    with pytest.raises(ValueError, match="Dockerfile") as caught:
        build_image(write_task(tmp_path, dockerfile))
    assert says in str(caught.value)


def test_a_link_in_the_environment_is_refused(tmp_path):
    task = write_task(tmp_path)
    (tmp_path / "environment/data/link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="data/link: neither a regular file nor a folder"):
        build_image(task)


def test_the_same_folder_packs_to_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        for file in ("z.txt", "sub/a.sh") if name == "one" else ("sub/a.sh", "z.txt"):
            (folder / file).write_text(file)
        (folder / "sub/a.sh").chmod(0o755)
    one = pack(tmp_path / "one")
    assert one == pack(tmp_path / "two")
    with tarfile.open(fileobj=io.BytesIO(one)) as tar:
        assert [(m.name, m.mtime, m.uid) for m in tar] == [("sub", 0, 0), ("sub/a.sh", 0, 0), ("z.txt", 0, 0)]
        assert tar.getmember("sub/a.sh").mode == 0o755


def test_packing_refuses_what_is_no_folder_and_what_holds_a_link(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        pack(tmp_path / "missing")
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(ValueError, match="neither a regular file nor a folder"):
        pack(tmp_path)
