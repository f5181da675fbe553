"""Softmax sampling: negative entropy."""

from dataclasses import dataclass

from torch import Tensor

from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import temperature
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class Softmax(Decoder, name="softmax"):
    """softmax(s / temperature): the model's own distribution at temperature 1."""

    objective = "max <q,s> − temperature·Σ q log q"

    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        return Problem(scores, NegEntropy(), lam=self.temperature)
