"""Top-H sampling: negative entropy on the best tokens, as many as a share of the entropy allows."""

from dataclasses import dataclass

from torch import Tensor

from simplexity import cuts
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature, temperature_last
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class TopH(Decoder, name="top-h"):
    """softmax on the best tokens whose −p log p add up to at most h·H(p) (Potraghloo et al., 2025).

    p is the distribution of the 100 best tokens, as in transformers, and the best of them always stays.
    """

    objective = "max <q,s> − temperature·Σ q log q on the best tokens with Σ −p log p ≤ h·H(p)"

    h: float | Tensor = parameter(0.4, "share of the entropy to keep", above=0, at_most=1, aliases=("top_h",))
    temperature: float | Tensor = temperature()
    temperature_last: bool = temperature_last()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        kept = cuts.TopH(self.h, 1.0 if self.temperature_last else self.temperature)
        return Problem(scores, NegEntropy(), lam=self.temperature, support=kept)
