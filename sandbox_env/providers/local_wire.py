"""Frames between the host and the first process of a box: a JSON header and raw bytes.

    | header length | payload length | header (JSON object) | payload |      lengths: 4 bytes each, big-endian

Both sides bound what they accept. The host treats every frame as hostile: nothing in it names anything of the host.
Imported by the processes inside too, so it and all it imports stay small: every page here is copied on each fork.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, NamedTuple

PREFIX = struct.Struct("!II")
MAX_HEADER_BYTES = 4 << 20
"""A command, its environment and nothing else."""
MAX_PAYLOAD_BYTES = 256 << 20
"""The largest upload or download."""


class BoxLimits(NamedTuple):
    """What one box may use. Sizes in MiB unless the name says bytes; `memory_by_cgroup`: the kernel holds the bound."""

    max_processes: int
    memory_mb: int
    storage_mb: int
    scoring_storage_mb: int
    cpu_time_s: int
    max_file_mb: int
    output_bytes: int
    max_output_mb: int
    memory_by_cgroup: bool


class FrameError(Exception):
    """A frame that is too large or no JSON object: the other side is broken or hostile."""


def encode(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One frame. Raises `FrameError` if it is larger than the other side accepts."""
    text = json.dumps(header).encode("ascii")
    if len(text) > MAX_HEADER_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(
            f"a frame of {len(text)} + {len(payload)} bytes is over {MAX_HEADER_BYTES} + {MAX_PAYLOAD_BYTES}"
        )
    return PREFIX.pack(len(text), len(payload)) + text + payload


def decode_prefix(prefix: bytes, max_payload_bytes: int) -> tuple[int, int]:
    """Lengths of header and payload. Raises `FrameError` if one is over its bound."""
    header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > max_payload_bytes:
        raise FrameError(f"a frame announces {header_bytes} + {payload_bytes} bytes")
    return header_bytes, payload_bytes


def decode_header(text: bytes) -> dict[str, Any]:
    """The header. Raises `FrameError` if it is no JSON object."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise FrameError("the header is not JSON") from None
    if not isinstance(header, dict):
        raise FrameError("the header is no JSON object")
    return header  # pyright: ignore[reportUnknownVariableType]


def receive(channel: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Wait for one frame on a blocking socket; None when the other side is gone."""
    prefix = _receive_exactly(channel, PREFIX.size)
    if prefix is None:
        return None
    header_bytes, payload_bytes = decode_prefix(prefix, MAX_PAYLOAD_BYTES)
    body = _receive_exactly(channel, header_bytes + payload_bytes)
    if body is None:
        return None
    return decode_header(body[:header_bytes]), body[header_bytes:]


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    while num_bytes > 0:
        part = channel.recv(min(num_bytes, 1 << 20))
        if not part:
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
