"""Runs a module as `__main__` in a process that dies with the process that started it.

`python -m miles_rl.engine.child PARENT_PID MODULE [ARGUMENTS...]`
"""

from __future__ import annotations

import runpy
import sys

from miles_rl.engine.process import die_with_parent

if __name__ == "__main__":
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent_pid)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
