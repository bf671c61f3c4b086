"""What the tests of local sandboxes share: a task to make them from, and a look at the host's processes."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from sandbox_env.task import Task, load_task

DOCKERFILE = """\
FROM debian:bookworm-slim
WORKDIR /app
COPY notes.txt ./
COPY data/ /app/data/
ENV GREETING="good day" \\
    TARGET=/app/data
"""


def write_task(folder: Path, dockerfile: str = DOCKERFILE, files: Mapping[str, str] | None = None) -> Task:
    """A task whose environment holds `notes.txt`, `data/a.csv`, and `files`."""
    texts = {
        "task.toml": 'schema_version = "1.4"\n',
        "instruction.md": "Do it.\n",
        "tests/test.sh": "mkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n",
        "environment/Dockerfile": dockerfile,
        "environment/notes.txt": "b\na\n",
        "environment/data/a.csv": "1,2\n",
        **(files or {}),
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_task(folder)


def host_processes(marker: str) -> list[int]:
    """Processes of this machine, whoever sees them, whose command line holds `marker`."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


async def wait_until_gone(marker: str, timeout_s: float = 10.0) -> None:
    """Wait until no process of this machine holds `marker`; an assertion error if one stays."""
    deadline = time.monotonic() + timeout_s
    while host_processes(marker):
        assert time.monotonic() < deadline, f"still running: {host_processes(marker)}"
        await asyncio.sleep(0.02)
