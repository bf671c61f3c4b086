"""The system calls that no command in a box needs, taken away by a filter that every later process inherits.

Namespaces and the lack of privileges already refuse most of what could harm. Left are calls that reach into the
kernel's less walked parts, key rings that the namespaces do not divide, and memory that belongs to no process, which
nobody could count where there is no cgroup. Refused calls fail with EPERM, so that programs take their other way.
Source: seccomp(2); the default profile of Docker.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "x86_64": {"add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298, "bpf": 321}
    | {"userfaultfd": 323, "shmget": 29, "memfd_create": 319},
    "aarch64": {"add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "bpf": 280}
    | {"userfaultfd": 282, "shmget": 194, "memfd_create": 279},
}
EVERYWHERE = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "memfd_secret": 447}
"""Calls whose number is the same on every machine."""
UNCOUNTED_MEMORY = ("shmget", "memfd_create", "memfd_secret")
FIRST_X32_NUMBER = 0x40000000
"""From here on x86_64 has a second set of numbers for the same calls."""

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
OFFSET_NUMBER, OFFSET_ARCHITECTURE = 0, 4


def filter_program(machine: str, memory_by_cgroup: bool) -> bytes:
    """The filter as instructions of the kernel's packet filter, 8 bytes each."""
    calls = NUMBERS[machine] | EVERYWHERE
    refused = sorted(n for name, n in calls.items() if not (memory_by_cgroup and name in UNCOUNTED_MEMORY))
    steps = [(LOAD, 0, 0, OFFSET_ARCHITECTURE)]
    # A call through another architecture's entry has other numbers: none of those is allowed.
    steps += [(JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, REFUSE)]
    steps += [(LOAD, 0, 0, OFFSET_NUMBER), (JUMP_AT_LEAST, len(refused) + 1, 0, FIRST_X32_NUMBER)]
    steps += [(JUMP_EQUAL, len(refused) - index, 0, number) for index, number in enumerate(refused)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def install(libc: Any, memory_by_cgroup: bool) -> int:
    """Set the filter for this process and all that it starts. Negative if the kernel refuses it."""
    program = filter_program(os.uname().machine, memory_by_cgroup)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    return int(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0))
