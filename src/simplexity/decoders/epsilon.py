"""Epsilon sampling: negative entropy on the tokens that are not too improbable."""

from dataclasses import dataclass

from torch import Tensor

from simplexity import cuts
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature, temperature_last
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class Epsilon(Decoder, name="epsilon"):
    """softmax on the tokens with probability at least epsilon (Hewitt, Manning and Liang, 2022).

    The best tokens stay where none reaches it. A target needs temperature_last: otherwise a hotter row loses tokens.
    """

    objective = "max <q,s> − temperature·Σ q log q on the tokens with probability ≥ epsilon"

    epsilon: float | Tensor = parameter(3e-4, "least probability", above=0, at_most=1, aliases=("epsilon_cutoff",))
    temperature: float | Tensor = temperature()
    temperature_last: bool = temperature_last()

    def check(self) -> None:
        if not self.temperature_last and (self.entropy is not None or self.effective_temperature is not None):
            # as the row flattens, one token after another falls below epsilon: the entropy does not grow with τ
            raise ValueError("epsilon: entropy and effective_temperature need temperature_last=true")

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        kept = cuts.Epsilon(self.epsilon, 1.0 if self.temperature_last else self.temperature)
        return Problem(scores, NegEntropy(), lam=self.temperature, support=kept)
