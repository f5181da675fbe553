"""Problems whose solution can be written down.

    Ω = 0 or λ = 0             all mass on the best score
    Ω = c·KL(q ‖ r)            q ∝ r·exp(s / λc)           (softmax where r is uniform)
    Ω = c·½‖q‖²                q = (s − η)_+ / λc          (sparsemax)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.problem import Problem
from simplexity.regularisers import HalfSquare, Regulariser, Sum, Tsallis, Zero, entropic
from simplexity.rows import divide, is_number, one_hot_argmax, softmax


@dataclass(frozen=True)
class ClosedForm:
    """Solves by formula."""

    name = "closed-form"

    def refuses(self, problem: Problem) -> str | None:
        """Why this solver cannot solve the problem; None when it can."""
        if is_greedy(problem) or entropic(problem.regulariser) or half_square(problem.regulariser) is not None:
            return None
        return "the regulariser has no closed form: only zero, negative entropy, KL and the half square have one"

    def __call__(self, problem: Problem, reads: bool) -> Tensor:
        """q `[..., V]` for scores whose forbidden tokens are −inf."""
        x, lam = problem.scores, problem.lam
        if is_greedy(problem):
            return one_hot_argmax(x)
        if (parts := entropic(problem.regulariser)) is not None:
            weight, log_r = parts
            x = divide(x, lam * weight)
            return softmax(x + log_r if isinstance(log_r, Tensor) else x)
        scale = half_square(problem.regulariser)
        assert scale is not None
        return sparsemax(divide(x, lam * scale))


def is_greedy(problem: Problem) -> bool:
    """Nothing but the score counts."""
    return isinstance(problem.regulariser, Zero) or (isinstance(problem.lam, float) and problem.lam == 0)


def half_square(regulariser: Regulariser) -> float | Tensor | None:
    """c when Ω = c·½‖q‖² up to a constant."""
    if isinstance(regulariser, HalfSquare):
        return 1.0
    if isinstance(regulariser, Tsallis) and is_number(regulariser.alpha) and regulariser.alpha == 2:
        return 1.0
    if isinstance(regulariser, Sum) and len(regulariser.terms) == 1:
        ((c, term),) = regulariser.terms
        inner = half_square(term)
        return None if inner is None or (is_number(c) and c == 0) else c * inner
    return None


def sparsemax(x: Tensor) -> Tensor:
    """argmin ½‖q − x‖² over the simplex: (x − η)_+ with η = (A_k − 1)/k, A_k the sum of the k best.

    k is the largest number with x_(k) > (A_k − 1)/k (Martins and Astudillo, 2016).
    """
    x = x - x.amax(-1, keepdim=True)
    best = x.sort(-1, descending=True).values.double()
    sums = best.cumsum(-1)
    count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=torch.float64)
    k = (1 + count * best > sums).sum(-1, keepdim=True)
    eta = (sums.gather(-1, k - 1) - 1) / k
    return (x.double() - eta).clamp_min_(0.0).to(x.dtype)


def project_to_simplex(point: Tensor, mask: Tensor | None = None) -> Tensor:
    """The distribution nearest to `point` `[..., V]` in Euclidean distance, zero outside `mask`.

    >>> project_to_simplex(torch.tensor([0.8, 0.6, -1.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """
    return sparsemax(point if mask is None else point.masked_fill(~mask, -torch.inf))
