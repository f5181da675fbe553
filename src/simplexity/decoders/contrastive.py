"""Contrastive decoding: what an expert says and an amateur does not, among the tokens the expert finds plausible."""

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.context import Context, required
from simplexity.cuts import MinP
from simplexity.decoders.guidance import mixed
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class Contrastive(Decoder, name="contrastive"):
    """softmax((expert·s − amateur·t) / temperature) on the tokens with p >= alpha·max p, p = softmax(s).

    t is the amateur's logits, `context.other`. Weights 1 and 1 are Li et al. (2023), whose amateur at temperature τ
    is amateur = 1/τ; expert = 1 + β and amateur = β are O'Brien and Lewis (2023).
    """

    objective = "max <q, expert·s − amateur·t> − temperature·Σ q log q where p >= alpha·max p, t another model's logits"
    needs = ("other",)

    alpha: float | Tensor = parameter(0.1, "how likely a token must be, beside the expert's best", above=0, at_most=1)
    expert: float | Tensor = parameter(1.0, "weight of this model's scores", at_least=0)
    amateur: float | Tensor = parameter(1.0, "weight of the other model's logits", at_least=0)
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        other = required(context, "other", scores, self.name)
        contrast = mixed(scores, self.expert, other, -self.amateur)
        # the cut is the expert's alone, so it is made here and not by a rule on the contrast
        plausible = MinP(self.alpha).mask(scores)
        return Problem(contrast.masked_fill(~plausible, -torch.inf), NegEntropy(), lam=self.temperature)
