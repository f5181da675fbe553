"""Min-p sampling: negative entropy on the tokens not too far below the best."""

from dataclasses import dataclass

from torch import Tensor

from simplexity import cuts
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature, temperature_last
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class MinP(Decoder, name="min-p"):
    """softmax on the tokens at least p times as probable as the best one (Nguyen et al., 2024)."""

    objective = "max <q,s> − temperature·Σ q log q on the tokens with probability ≥ p·max"

    p: float | Tensor = parameter(
        0.1, "share of the best token's probability", at_least=0, at_most=1, aliases=("min_p",)
    )
    temperature: float | Tensor = temperature()
    temperature_last: bool = temperature_last()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        kept = cuts.MinP(self.p, 1.0 if self.temperature_last else self.temperature)
        return Problem(scores, NegEntropy(), lam=self.temperature, support=kept)
