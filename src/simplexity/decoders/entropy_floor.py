"""A floor under the entropy: softmax, heated only where it would be too sure of itself."""

from dataclasses import dataclass

from torch import Tensor

from simplexity.constraints import EntropyFloor, unless_alone
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class EntropyFloored(Decoder, name="entropy-floor"):
    """softmax(s / temperature) where its entropy is h nats or more, else softmax(s / τ) with the τ that gives it h.

    A token that is the only one allowed has all mass. Where n > 1 are allowed and h is above log n, there is no q.
    """

    objective = "max <q,s> − temperature·Σ q log q with entropy >= h"

    h: float | Tensor = parameter(1.0, "the entropy q must have at least, in nats", at_least=0)
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        floor = EntropyFloor(unless_alone(self.h, scores, 0.0))
        return Problem(scores, NegEntropy(), lam=self.temperature, constraints=(floor,))
