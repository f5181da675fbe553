"""Top-nσ sampling: negative entropy on the tokens whose scores stand out from the noise."""

from dataclasses import dataclass

from torch import Tensor

from simplexity import cuts
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class TopNSigma(Decoder, name="top-n-sigma"):
    """softmax on the tokens at most n standard deviations of the scores below the best (Tang et al., 2024).

    σ is over all tokens that are not forbidden, divided by their number, as in llama.cpp. The cut does not depend on
    the temperature: dividing all scores divides σ too.
    """

    objective = "max <q,s> − temperature·Σ q log q on the tokens with s ≥ max s − n·σ(s)"

    n: float | Tensor = parameter(1.0, "standard deviations below the best score", above=0, aliases=("top_n_sigma",))
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        return Problem(scores, NegEntropy(), lam=self.temperature, support=cuts.TopNSigma(self.n))
