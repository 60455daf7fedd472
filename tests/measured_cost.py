"""A cost of collectives as if it had been measured."""

from dataclasses import dataclass


@dataclass
class Measured:
    """What a cost model answers."""

    time_s: float
    low_s: float = 0.0
    high_s: float = 0.0
    confidence: str = "measured"


@dataclass
class Cost:
    """A measured cost, so that flows have caps and sizes that are not round numbers."""

    factor: float

    def time_s(self, collective: str, ranks: int, message_bytes: int) -> Measured:
        """Return a time that grows with ranks and bytes."""
        return Measured(self.factor * (0.001 * ranks + 0.0007 * message_bytes))
