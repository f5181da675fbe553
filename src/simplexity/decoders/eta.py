"""Eta sampling: negative entropy on the tokens that are not too improbable for a distribution this flat."""

from dataclasses import dataclass

from torch import Tensor

from simplexity import cuts
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature, temperature_last
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class Eta(Decoder, name="eta"):
    """softmax on the tokens with probability at least min(epsilon, √epsilon·exp(−H)) (Hewitt, Manning and Liang, 2022).

    H is the entropy of p. The best tokens stay where none reaches it.
    """

    objective = "max <q,s> − temperature·Σ q log q on the tokens with probability ≥ min(epsilon, √epsilon·exp(−H(p)))"

    epsilon: float | Tensor = parameter(
        3e-4, "least probability where p is sharp", above=0, at_most=1, aliases=("eta_cutoff",)
    )
    temperature: float | Tensor = temperature()
    temperature_last: bool = temperature_last()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        kept = cuts.Eta(self.epsilon, 1.0 if self.temperature_last else self.temperature)
        return Problem(scores, NegEntropy(), lam=self.temperature, support=kept)
