"""Greedy: λ = 0."""

from dataclasses import dataclass

from torch import Tensor

from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.problem import Problem
from simplexity.regularisers import Zero


@dataclass(frozen=True)
class Greedy(Decoder, name="greedy"):
    """All mass on the best score; the lowest id wins a tie."""

    objective = "max <q,s>"

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        return Problem(scores, Zero(), lam=0.0)
