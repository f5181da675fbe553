"""α-entmax: Tsallis entropy, between softmax (α = 1) and sparsemax (α = 2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy, Tsallis


@dataclass(frozen=True)
class Entmax(Decoder, name="entmax"):
    """((α−1)(s − η)/lam)_+^{1/(α−1)}: softmax with a finite tail (Peters, Niculae and Martins, 2019)."""

    objective = "max <q,s> − lam·Σ (q^alpha − q)/(alpha(alpha−1))"
    knob = "lam"

    alpha: float | Tensor = parameter(1.5, "1 is softmax, 2 is sparsemax, above is sparser still", at_least=1)
    lam: float | Tensor = parameter(1.0, "strength: larger spreads wider", at_least=0)

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        if not isinstance(self.alpha, Tensor):
            return Problem(scores, NegEntropy() if self.alpha == 1 else Tsallis(self.alpha), lam=self.lam)
        # a row with alpha = 1 in a mixed batch: closer to softmax than the arithmetic can tell
        return Problem(scores, Tsallis(self.alpha.to(torch.float64).clamp_min(1 + 1e-12)), lam=self.lam)
