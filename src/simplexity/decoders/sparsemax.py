"""Sparsemax: half the squared norm, which lets probabilities reach zero."""

from dataclasses import dataclass

from torch import Tensor

from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter
from simplexity.problem import Problem
from simplexity.regularisers import HalfSquare


@dataclass(frozen=True)
class Sparsemax(Decoder, name="sparsemax"):
    """(s − η)_+ / lam: exact zeros for all tokens more than lam below the best (Martins and Astudillo, 2016)."""

    objective = "max <q,s> − lam·½‖q‖²"
    knob = "lam"

    lam: float | Tensor = parameter(1.0, "strength: larger spreads wider", at_least=0)

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        return Problem(scores, HalfSquare(), lam=self.lam)
