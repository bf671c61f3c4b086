"""Keeps what is typed off the terminal while something is drawn there."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Generator


@contextlib.contextmanager
def without_echo() -> Generator[None]:
    """Typed keys are not shown, and shown again on leaving. Signals of keys like Ctrl-C work all the same.

    Does nothing without a terminal, or in the background: the terminal is another program's then, and to change it
    would stop this one.
    """
    terminal = _own_terminal()
    if terminal is None:
        yield
        return
    before = termios.tcgetattr(terminal)
    termios.tcsetattr(terminal, termios.TCSADRAIN, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        if _own_terminal() is not None:  # it may be gone
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _own_terminal() -> int | None:
    """Descriptor of the terminal on standard input, if this program is in its foreground."""
    try:
        terminal = sys.stdin.fileno()
        return terminal if os.tcgetpgrp(terminal) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):
        return None
