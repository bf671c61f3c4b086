"""A trajectory as bytes, for the ledger: a JSON header, then the arrays as they lie in memory.

Not compressed: it is written once, on the path of every episode, and read only by a resume.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict
from typing import Any

import numpy as np

from miles_rl.types import Outcome, StopReason, Trajectory, Turn

_ARRAYS = {"token_ids": "<i4", "loss_mask": "|b1", "logprobs": "<f4", "versions": "<i4"}
_LENGTH = struct.Struct("<I")


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
        "turns": [asdict(turn) for turn in trajectory.turns],
        "timings": dict(trajectory.timings),
    }
    text = json.dumps(header).encode()
    arrays = [np.asarray(getattr(trajectory, name), kind).tobytes() for name, kind in _ARRAYS.items()]
    return b"".join([_LENGTH.pack(len(text)), text, *arrays])


def decode(data: bytes) -> Trajectory:
    """What `encode` was given. `ValueError` if the bytes are not whole."""
    try:
        (size,) = _LENGTH.unpack_from(data)
        header: dict[str, Any] = json.loads(data[_LENGTH.size : _LENGTH.size + size])
        offset, length = _LENGTH.size + size, header.pop("length")
        arrays: dict[str, Any] = {}
        for name, kind in _ARRAYS.items():
            arrays[name] = np.frombuffer(data, kind, length, offset).copy()
            offset += arrays[name].nbytes
        if offset != len(data):
            raise ValueError(f"{len(data)} bytes, not {offset}")
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a trajectory: {error}") from error
    header["outcome"], header["stop_reason"] = Outcome(header["outcome"]), StopReason(header["stop_reason"])
    header["turns"] = tuple(Turn(**turn) for turn in header["turns"])
    return Trajectory(**header, **arrays)
