"""How an episode ended: why it stopped, and what its score is worth.

`StopReason` is why the agent loop ended; `Outcome` is whether the episode may be learned from. The two are
independent: an agent that ran out of turns (`MAX_TURNS`) may still have solved its task (`SCORED`).
"""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """Why the agent loop of an episode ended. Exactly one per episode."""

    COMPLETED = "completed"
    """The agent said that the task is done."""
    NO_COMMAND = "no_command"
    """A reply held no fenced command and no completion mark."""
    MAX_TURNS = "max_turns"
    """The agent used every turn it had."""
    TURN_TRUNCATED = "turn_truncated"
    """A reply was cut at its token limit; nothing after the cut was run."""
    SESSION_BUDGET = "session_budget"
    """The next turn would not fit into the session's token budget."""
    WALL_CLOCK = "wall_clock"
    """The agent's time was up; the clock starts when the sandbox is ready."""
    ABORTED = "aborted"
    """Cut short from outside: infrastructure failed or the run ended."""


class Outcome(StrEnum):
    """What an episode is worth. Only `SCORED` carries a reward and is ever trained on."""

    SCORED = "scored"
    """The verifier ran and gave a finite reward."""
    SANDBOX_FAILED = "sandbox_failed"
    """The sandbox could not be made, or broke while the episode ran."""
    ENGINE_FAILED = "engine_failed"
    """The inference engine or the router did not answer properly."""
    VERIFIER_FAILED = "verifier_failed"
    """The verifier did not really run: no reward, or a 0 without proof that tests ran."""
    CANCELLED = "cancelled"
    """The run ended before the episode did."""

    @property
    def is_infra_failure(self) -> bool:
        """True for failures of the system, which are refilled and never scored."""
        return self in (Outcome.SANDBOX_FAILED, Outcome.ENGINE_FAILED, Outcome.VERIFIER_FAILED)
