"""`report.html` of a run: what happened, in one file that opens offline and can be sent to a colleague."""

from __future__ import annotations

import os
from pathlib import Path

from pipelines.report.page import page
from pipelines.report.run_folder import RunFolder

__all__ = ["write_report"]


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into the run folder from what is there, complete or not; returns its path.

    Raises `FileNotFoundError` if there is no such folder, `OSError` if it cannot be written.
    """
    run_dir = Path(run_dir)
    text = page(RunFolder.read(run_dir))
    target, hidden = run_dir / "report.html", run_dir / ".report.html.tmp"
    hidden.write_text(text, encoding="utf-8")
    os.replace(hidden, target)
    return target
