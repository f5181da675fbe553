"""Capped softmax: no token gets more than a given probability."""

from dataclasses import dataclass

from torch import Tensor

from simplexity.constraints import Caps, unless_alone
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class Capped(Decoder, name="capped"):
    """min(cap, softmax(s / temperature) times a factor): what exceeds the cap goes to the other tokens in proportion.

    A token that is the only one allowed has all mass. Where more are allowed, but too few for the cap, there is no q.
    """

    objective = "max <q,s> − temperature·Σ q log q with q <= cap"

    cap: float | Tensor = parameter(0.9, "the most that a token may get", above=0, at_most=1)
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        caps = Caps(unless_alone(self.cap, scores, 1.0))
        return Problem(scores, NegEntropy(), lam=self.temperature, constraints=(caps,))
