"""The two ways in which trajectories lie in a micro-batch; see `micro_batch`. Apart, so that a plan needs no torch."""

from typing import Literal

Layout = Literal["padded", "packed"]
