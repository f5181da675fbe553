"""Best-of-K that knows its siblings: K is the number of samples of a group that still share this text.

    max <q, s> − τ·Σ q log q + τ·(β/K)·Σ_v w_v (1 − (1 − q_v)^K)

Samples that have parted choose nothing together any more, so K counts those at the same node of the tree alone. The
reward's slope at q = 0 is β·w whatever K is: K changes its shape. Alone (K = 1) it is linear, and q ∝ p·exp(β·w), p =
softmax(s/τ), commits to what is worth most. Together it fades where q is large already, and q spreads over what is not
yet covered. Divided by τ this is max −KL(q ‖ p) + (β/K)·Σ …: Best-of-K without the <q, s> that lowers its temperature.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.anchor import Anchor
from simplexity.context import Context
from simplexity.decoders.best_of_k import Weights, coverage, m_parameter, weights_parameter
from simplexity.decoding import Decoder
from simplexity.parameters import parameter
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy, Regulariser
from simplexity.rows import is_number


@dataclass(frozen=True)
class TreeBestOfK(Decoder, name="tree-bok"):
    """Commit when alone, spread while together: K is how many samples of the group share the text (context.siblings).

    With beta = 0 it is softmax at two temperatures. A sample without a group is alone.
    """

    objective = "max <q,s> − τ·(Σ q log q − (beta/K)·Σ w(1−(1−q)^K)), τ = alone if K = 1, else together"
    uses = ("siblings",)
    knob = "alone"

    beta: float | Tensor = parameter(1.0, "reward for coverage", at_least=0)
    alone: float | Tensor = parameter(1.0, "temperature where K = 1", above=0)
    together: float | Tensor | None = parameter(None, "temperature where K > 1; absent: as alone", above=0)
    weights: str | Weights = weights_parameter()
    m: int | Tensor = m_parameter()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        k: int | Tensor = 1
        temperature = self.alone
        if context is not None and (siblings := context.siblings_like(scores)) is not None:
            k = siblings
            if self.together is not None:
                alone = torch.zeros_like(scores[..., :1]) + self.alone
                temperature = torch.where(k == 1, alone, torch.zeros_like(alone) + self.together)
        omega: Regulariser = NegEntropy()
        if not (is_number(self.beta) and self.beta == 0):
            share = self.beta / (k.to(scores.dtype) if isinstance(k, Tensor) else k)
            omega = omega + share * coverage(k, self.weights, self.m, Anchor(scores, temperature))
        return Problem(scores, omega, lam=temperature, sound=not callable(self.weights))
