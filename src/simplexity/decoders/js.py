"""JS-anchored decoding: climb the scores, tied to the model by a divergence that never exceeds log 2."""

from dataclasses import dataclass

from torch import Tensor

from simplexity.anchor import Anchor
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import JS


@dataclass(frozen=True)
class JSAnchored(Decoder, name="js"):
    """p / (2·exp(2(η − s)/lam) − 1), η such that it sums to one; p = softmax(s / temperature).

    Leaving the model altogether costs lam·log 2 and no more (Jensen-Shannon divergence: Lin, 1991), so a small lam
    gives the best token nearly all; the anchor holds the order of the rest.
    """

    objective = "max <q,s> − lam·JS(q‖p)"

    lam: float | Tensor = parameter(1.0, "strength of the anchor", at_least=0)
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        return Problem(scores, JS(Anchor(scores, self.temperature).both[0]), lam=self.lam, sound=True)
