"""Bounds on the mass of groups of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from simplexity.constraints import GroupBounds
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.groups import Groups
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class Bounded(Decoder, name="bounded"):
    """softmax(s / temperature) inside each group of tokens, with a factor that keeps the group's mass in its bounds.

    Groups are lists of token ids that do not overlap, given from Python or JSON.
    """

    objective = "max <q,s> − temperature·Σ q log q with lower <= mass of each group <= upper"

    groups: Sequence[Sequence[int]] = parameter((), "lists of token ids", listed=True)
    lower: float | Sequence[float] | Tensor = parameter(
        0.0, "the least mass of a group, or of each", listed=True, at_least=0, at_most=1
    )
    upper: float | Sequence[float] | Tensor = parameter(
        1.0, "the most mass of a group, or of each", listed=True, at_least=0, at_most=1
    )
    temperature: float | Tensor = temperature()

    def check(self) -> None:
        object.__setattr__(self, "_groups", Groups(self.groups, self.name))
        self._bounds()

    def _bounds(self) -> GroupBounds:
        return GroupBounds(getattr(self, "_groups"), self.lower, self.upper)  # noqa: B009

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        return Problem(scores, NegEntropy(), lam=self.temperature, constraints=(self._bounds(),) if self.groups else ())
