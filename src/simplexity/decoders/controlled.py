"""Controlled decoding: climb a reward for each token, tied to the model."""

from dataclasses import dataclass

from torch import Tensor

from simplexity.anchor import Anchor, AnchorKL
from simplexity.context import Context, required
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem


@dataclass(frozen=True)
class Controlled(Decoder, name="controlled"):
    """p·exp(r / lam), normalised; p = softmax(s / temperature), r the rewards (Mudgal et al., 2024).

    r is `context.rewards`: what each next token is worth, such as a value function's estimate after it.
    """

    objective = "max <q,r> − lam·KL(q‖p), r a reward for each token"
    needs = ("rewards",)

    lam: float | Tensor = parameter(1.0, "strength of the anchor; 0 takes the best reward", at_least=0)
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        rewards = required(context, "rewards", scores, self.name).expand(scores.shape)
        return Problem(rewards, AnchorKL(Anchor(scores, self.temperature)), lam=self.lam)
