"""Top-p (nucleus) sampling: negative entropy on the smallest set of tokens with mass p."""

from dataclasses import dataclass

from torch import Tensor

from simplexity import supports
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature, temperature_last
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class TopP(Decoder, name="top-p"):
    """softmax on the nucleus, the fewest best tokens whose mass reaches p (Holtzman et al., 2020)."""

    objective = "max <q,s> − temperature·Σ q log q on the nucleus of mass p"

    p: float | Tensor = parameter(0.9, "mass the nucleus must reach", above=0, at_most=1, aliases=("top_p",))
    temperature: float | Tensor = temperature()
    temperature_last: bool = temperature_last()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        nucleus = supports.TopP(self.p, 1.0 if self.temperature_last else self.temperature)
        return Problem(scores, NegEntropy(), lam=self.temperature, support=nucleus)
