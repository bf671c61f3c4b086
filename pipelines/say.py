"""Lines for the person at the terminal. A reader who went away (`| head`) ends the lines, never the run."""

from __future__ import annotations

import os
import sys
from typing import TextIO, cast


def say(text: str, out: TextIO | None = None) -> None:
    """Write `text` and a line end to `out` (standard output if None) at once."""
    out = cast(TextIO, sys.stdout) if out is None else out
    try:
        out.write(f"{text}\n")
        out.flush()
    except BrokenPipeError:
        # Also what others print later, and what is flushed at exit, must find an open file.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)
