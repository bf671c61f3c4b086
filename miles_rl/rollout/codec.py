"""A trajectory as bytes, for the ledger: a checksum, a JSON header, then the arrays as they lie in memory.

Not compressed: it is written once, on the path of every episode, and read only by a resume.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import fields
from typing import Any

import numpy as np

from miles_rl.types import Outcome, StopReason, Trajectory, Turn

_TURN = tuple(field.name for field in fields(Turn))  # `asdict` copies deeply, which is most of the time
_ARRAYS = {"token_ids": "<i4", "loss_mask": "|b1", "logprobs": "<f4", "versions": "<i4"}
_NUMBER = struct.Struct("<I")
_START = 2 * _NUMBER.size
"""The checksum of all that follows it, and the length of the JSON header, come first."""


def encode(trajectory: Trajectory) -> bytes:
    """`trajectory` as bytes; `decode` gives an equal one back."""
    header: dict[str, Any] = {
        "length": len(trajectory.token_ids),
        "sample_id": trajectory.sample_id,
        "group_id": trajectory.group_id,
        "task": trajectory.task,
        "reward": trajectory.reward,
        "outcome": str(trajectory.outcome),
        "stop_reason": str(trajectory.stop_reason),
        "turns": [{name: getattr(turn, name) for name in _TURN} for turn in trajectory.turns],
        "timings": dict(trajectory.timings),
    }
    text = json.dumps(header).encode()
    arrays = [np.asarray(getattr(trajectory, name), kind).tobytes() for name, kind in _ARRAYS.items()]
    checked = b"".join([_NUMBER.pack(len(text)), text, *arrays])
    return _NUMBER.pack(zlib.crc32(checked)) + checked


def decode(data: bytes) -> Trajectory:
    """What `encode` was given. `ValueError` if the bytes are not whole."""
    try:
        (checksum,), (size,) = _NUMBER.unpack_from(data), _NUMBER.unpack_from(data, _NUMBER.size)
        if zlib.crc32(memoryview(data)[_NUMBER.size :]) != checksum:
            raise ValueError("the checksum does not match")
        header: dict[str, Any] = json.loads(data[_START : _START + size])
        offset, length = _START + size, header.pop("length")
        arrays: dict[str, Any] = {}
        for name, kind in _ARRAYS.items():
            arrays[name] = np.frombuffer(data, kind, length, offset).copy()
            offset += arrays[name].nbytes
        if offset != len(data):
            raise ValueError(f"{len(data)} bytes, not {offset}")
        header["outcome"], header["stop_reason"] = Outcome(header["outcome"]), StopReason(header["stop_reason"])
        header["turns"] = tuple(Turn(**turn) for turn in header["turns"])
        return Trajectory(**header, **arrays)
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a trajectory: {error}") from error
