"""Best-of-K: stay near the model, and make good alternatives show up at least once among K draws.

    max <q, s> − λ·KL(q ‖ p) + λβ·Σ_v w_v (1 − (1 − q_v)^K),      p = softmax(s/τ)

The paper (Ji, Tutunov, Zimmer and Bou-Ammar, 2026) takes J = 5 steps of mirror ascent from p. With s the raw
logits these steps mostly lower the temperature: at β = 0 they give exactly softmax(s/τ'),
1/τ' = 1/τ + (1 − (1 − step·λ)^J)/λ. `describe` reports τ' for any setting; `solver=exact` finds the optimum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simplexity.anchor import Anchor, AnchorCoverage, AnchorKL
from simplexity.context import Context
from simplexity.coverage import curvature
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import Regulariser
from simplexity.rows import is_number
from simplexity.solvers import MirrorAscent, Solver
from simplexity.supports import TopK

Weights = Callable[[Tensor], Tensor]

RANK_DEPTH = 32  # half-lives after which a rank weight, 2^-32, is taken as zero


def weights_parameter() -> Any:
    """The parameter `weights` of the decoders that cover."""
    rules = ("probs", "top-m", "rank", "uniform", "frontier")
    return parameter("probs", "what covering a token is worth", choices=rules, function=True)


def m_parameter() -> Any:
    """The parameter `m` of the decoders that cover."""
    return parameter(8, "top-m: tokens with weight 1; rank: ranks in which it halves", at_least=1, whole=True)


@dataclass(frozen=True)
class BestOfK(Decoder, name="bok"):
    """Anchored to the model, with a reward for tokens that k draws would cover at least once."""

    objective = "max <q,s> − lam·KL(q‖p) + lam·beta·Σ w(1−(1−q)^k)"

    k: int | Tensor = parameter(8, "how many samples will be drawn", at_least=1, whole=True)
    beta: float | Tensor = parameter(0.01, "reward for coverage", at_least=0)
    lam: float | Tensor = parameter(0.1, "strength of the anchor and of the reward", at_least=0)
    temperature: float | Tensor = temperature()
    steps: int = parameter(5, "steps of mirror ascent", at_least=0, whole=True, shared=True)
    step: float | Tensor | None = parameter(None, "step size; 1, or the largest safe one if smaller", above=0)
    weights: str | Weights = weights_parameter()
    m: int | Tensor = m_parameter()
    scores: str = parameter("logits", "s: the logits, log p, or nothing", choices=("logits", "logprobs", "none"))
    solver: str = parameter("mirror", "mirror: J steps; exact: the optimum", choices=("mirror", "exact"))

    def check(self) -> None:
        if self.step is None:
            return
        step, lam = (torch.as_tensor(each, dtype=torch.float64).cpu() for each in (self.step, self.lam))
        if abs(step.ndim - lam.ndim) == 1:  # [...] beside [..., 1]: one value per row either way
            step, lam = (each if each.ndim < max(step.ndim, lam.ndim) else each.squeeze(-1) for each in (step, lam))
        try:
            product = step * lam
        except RuntimeError:
            raise ValueError(
                f"bok: step and lam are for different rows, shapes {list(step.shape)} and {list(lam.shape)}"
            ) from None
        if bool((product >= 2).any()):
            raise ValueError(f"bok: step·lam must be below 2, got {product.max():g}: mirror ascent diverges there")

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        anchor = Anchor(scores, self.temperature)
        s = anchor.both[0] if self.scores == "logprobs" else scores
        if self.scores == "none":
            s = torch.where(scores > -torch.inf, 0.0, scores)
        omega: Regulariser = AnchorKL(anchor)
        if not (is_number(self.beta) and self.beta == 0):
            omega = omega + self.beta * coverage(self.k, self.weights, self.m, anchor)
        return Problem(s, omega, lam=self.lam, sound=not callable(self.weights))

    def method(self, problem: Problem) -> Solver | None:
        if self.solver == "exact":
            return None
        # 1, or 1/(λ + λβ·max(w)·κ), beyond which a step may overshoot, if that is smaller
        step = 1.0 if self.step is None and self._surely_safe() else self.step
        return MirrorAscent(steps=self.steps, step=step, longest=1.0, start="reference")

    def _surely_safe(self) -> bool:
        """Whether a step of 1 is safe whatever the scores: max(w) is at most 1, or τ/e at the frontier."""
        plain = is_number(self.lam) and is_number(self.beta) and isinstance(self.k, int) and not callable(self.weights)
        if not plain or (self.weights == "frontier" and not is_number(self.temperature)):
            return False
        most = self.temperature / math.e if self.weights == "frontier" else 1.0
        return bool(self.lam * (1 + self.beta * most * curvature(self.k)) <= 1)


def coverage(k: int | Tensor, weights: str | Weights, m: int | Tensor, anchor: Anchor) -> AnchorCoverage:
    """−Σ_v w_v (1 − (1 − q_v)^k) with weights made from the anchor."""
    rule = "own" if callable(weights) else weights
    return AnchorCoverage(k, anchor, lambda anchor: token_weights(weights, m, anchor), rule, m)


def token_weights(weights: str | Weights, m: int | Tensor, anchor: Anchor) -> float | Tensor:
    """w `[..., V]`. A rank weight is 2^(−rank/m), rank 0 the best token, and zero from 32·m ranks on.

    At the frontier w = gap·exp(−gap/τ), gap = max s − s: nothing for the best token, most for those τ below it.
    """
    scores = anchor.scores
    if callable(weights):
        own = torch.as_tensor(weights(scores)).to(scores)
        return own if own.ndim else own.expand_as(scores)
    if weights == "uniform":
        return 1.0
    if weights == "probs":
        return anchor.both[1]
    if weights == "top-m":
        return TopK(m).mask(scores).to(scores.dtype)
    if weights == "frontier":
        gap = scores.amax(-1, keepdim=True) - scores
        return torch.where(gap < torch.inf, gap * torch.exp(-gap / anchor.temperature), 0.0)
    # an m for each row is not looked at, and all tokens are ranked
    depth = scores.shape[-1] if isinstance(m, Tensor) else min(RANK_DEPTH * m, scores.shape[-1])
    best = scores.topk(depth).indices.sort(-1).values
    order = scores.gather(-1, best).argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(best.shape[-1], device=scores.device, dtype=scores.dtype) / m
    fading = torch.exp2(-ranks).masked_fill(ranks >= RANK_DEPTH, 0.0)
    return torch.zeros_like(scores).scatter(-1, best.gather(-1, order), fading.expand(best.shape))
