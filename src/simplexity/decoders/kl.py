"""KL-anchored decoding: climb the scores, tied to a reference distribution."""

from dataclasses import dataclass

from torch import Tensor

from simplexity.anchor import Anchor, AnchorKL
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem


@dataclass(frozen=True)
class KLAnchored(Decoder, name="kl"):
    """r·exp(s / lam), normalised; r = softmax(t / temperature), t another model's logits (context.other).

    Without another model the anchor is the model itself, t = s.
    """

    objective = "max <q,s> − lam·KL(q‖r)"
    uses = ("other",)

    lam: float | Tensor = parameter(1.0, "strength of the anchor", at_least=0)
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        other = None if context is None else context.other_like(scores)
        anchor = Anchor(scores if other is None else other, self.temperature)
        return Problem(scores, AnchorKL(anchor), lam=self.lam, sound=other is None)
