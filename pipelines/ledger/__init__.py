"""The ledger of a run as a person reads it: while the run goes on, and after whatever ended it."""

from pipelines.ledger.consistency import check
from pipelines.ledger.reading import LedgerUnreadable

__all__ = ["LedgerUnreadable", "check"]
