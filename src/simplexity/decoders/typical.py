"""Locally typical sampling: negative entropy on the tokens about as surprising as the model expects."""

from dataclasses import dataclass

from torch import Tensor

from simplexity import cuts
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature, temperature_last
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class Typical(Decoder, name="typical"):
    """softmax on the fewest tokens of mass p whose surprise is nearest to the entropy (Meister et al., 2022).

    It may leave out the best token. Ties at the cut are all kept, as in transformers.
    """

    objective = "max <q,s> − temperature·Σ q log q on the tokens with least |log p + H(p)|, of mass p"

    p: float | Tensor = parameter(0.9, "mass that must be reached", above=0, at_most=1, aliases=("typical_p", "typ_p"))
    temperature: float | Tensor = temperature()
    temperature_last: bool = temperature_last()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        kept = cuts.Typical(self.p, 1.0 if self.temperature_last else self.temperature)
        return Problem(scores, NegEntropy(), lam=self.temperature, support=kept)
