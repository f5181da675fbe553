"""As greedy as a distance to the model allows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.anchor import Anchor
from simplexity.constraints import KLBall
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import Zero


@dataclass(frozen=True)
class KLBounded(Decoder, name="kl-ball"):
    """r·exp(s / ν), normalised, with the smallest ν that keeps KL(q ‖ r) within epsilon; greedy if any does.

    r = softmax(t / temperature) over the allowed tokens, t another model's logits (context.other), or t = s.
    """

    objective = "max <q,s> with KL(q‖r) <= epsilon"
    uses = ("other",)

    epsilon: float | Tensor = parameter(0.1, "how far from r, in nats", at_least=0)
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        other = None if context is None else context.other_like(scores)
        # what a mask forbids is not part of the reference either, or it could be too far from all that is left
        other = None if other is None else other.masked_fill(scores == -torch.inf, -torch.inf)
        anchor = Anchor(scores if other is None else other, self.temperature)
        return Problem(scores, Zero(), lam=0.0, constraints=(KLBall(self.epsilon, anchor.both[0]),))
