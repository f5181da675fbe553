"""What a run compares: a decoder, and whether its samples are drawn one by one or in coupled groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """A decoder whose samples come in groups of `coupled` with evenly spread codes; 1: each one is independent.

    >>> str(Arm("softmax")), str(Arm("softmax", 4))
    ('softmax', 'softmax, coupled 4')
    """

    decoder: str
    coupled: int = 1

    def __str__(self) -> str:
        return self.decoder + self.suffix

    @property
    def suffix(self) -> str:
        """What tables add to the decoder's name."""
        return "" if self.coupled == 1 else f", coupled {self.coupled}"

    def group(self, sample: int) -> int | None:
        """The number of a sample's group among those of its question; None where it is independent."""
        return None if self.coupled == 1 else sample // self.coupled
