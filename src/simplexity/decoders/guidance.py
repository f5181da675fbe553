"""Classifier-free guidance: the model's scores, moved away from those of another prompt or another model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.context import Context, required
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class Guidance(Decoder, name="guidance"):
    """softmax((t + scale·(s − t)) / temperature), t the logits without the prompt (Sanchez et al., 2023).

    t is `context.other`: the same model's logits under an empty or an unwanted prompt, or another model's.
    """

    objective = "max <q, t + scale·(s−t)> − temperature·Σ q log q, t another model's logits"
    needs = ("other",)

    scale: float | Tensor = parameter(1.5, "0 is the other model, 1 this one, above goes beyond it", at_least=0)
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        other = required(context, "other", scores, self.name)
        return Problem(mixed(scores, self.scale, other, 1.0 - self.scale), NegEntropy(), lam=self.temperature)


def mixed(s: Tensor, a: float | Tensor, t: Tensor, b: float | Tensor) -> Tensor:
    """a·s + b·t `[..., V]`, −inf where s is.

    A constant on s or t changes no q: logits do as well as log-probabilities, and centred ones keep their digits.
    """
    both = _times(a, s - s.amax(-1, keepdim=True)) + _times(b, t - t.amax(-1, keepdim=True))
    return both.masked_fill(s == -torch.inf, -torch.inf)


def _times(weight: float | Tensor, x: Tensor) -> Tensor:
    """weight·x, zero where the weight is: 0·(−inf) would be NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, weight * x)
    return x * weight if weight else torch.zeros_like(x)
