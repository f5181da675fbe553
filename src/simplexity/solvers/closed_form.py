"""Problems whose solution can be written down.

Ω = 0 or λ = 0             all mass on the best score; under caps and bounds on groups, filled best first
Ω = c·KL(q ‖ r)            q ∝ r·exp(s / λc)           (softmax where r is uniform)
Ω = c·½‖q‖²                q = (s − η)_+ / λc          (sparsemax)
Ω = c·Tsallis, α = 1.5     q = ((s − η)_+ / 2λc)²      (1.5-entmax)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.constraints import bounds_of, has_ball
from simplexity.problem import Problem
from simplexity.regularisers import HalfSquare, Regulariser, Sum, Tsallis, Zero
from simplexity.rows import divide, exp_, first_rows, fits, is_number, normalise_, one_hot_argmax, softmax_
from simplexity.structure import entropic


@dataclass(frozen=True)
class ClosedForm:
    """Solves by formula."""

    name = "closed-form"

    def refuses(self, problem: Problem) -> str | None:
        """Why this solver cannot solve the problem; None when it can."""
        if problem.constraints:
            if is_greedy(problem) and not has_ball(problem.constraints):
                return None
            return "within constraints only lam = 0 under caps and bounds on groups has a closed form"
        form = power_form(problem.regulariser)
        if is_greedy(problem) or entropic(problem.regulariser) or (form is not None and form[1] in (1.5, 2)):
            return None
        return "only zero, negative entropy, KL, the half square and Tsallis 1.5 have a closed form"

    def __call__(self, problem: Problem, reads: bool) -> Tensor:
        """q `[..., V]` for scores with maximum 0 whose forbidden tokens are −inf."""
        x, lam = problem.scores, problem.lam
        if problem.constraints:
            bounds = bounds_of(problem.constraints, x > -torch.inf, x)
            assert bounds is not None
            return bounds.fill(x)
        if is_greedy(problem):
            return one_hot_argmax(x)
        if (parts := entropic(problem.regulariser)) is not None:
            weight, log_r = parts
            if isinstance(log_r, Tensor):
                return softmax_(torch.div(x, lam * weight).add_(log_r))
            return normalise_(exp_(x / (lam * weight)))  # max x is 0
        form = power_form(problem.regulariser)
        assert form is not None
        scale, alpha = form
        return normalise_((sparsemax if alpha == 2 else entmax15)(divide(x, lam * scale)))


def is_greedy(problem: Problem) -> bool:
    """Nothing but the score counts."""
    return isinstance(problem.regulariser, Zero) or (isinstance(problem.lam, float) and problem.lam == 0)


def power_form(regulariser: Regulariser) -> tuple[float | Tensor, float] | None:
    """(c, α) when Ω is c times the Tsallis regulariser of one α; α = 2 is the half square, up to a constant."""
    if isinstance(regulariser, HalfSquare):
        return 1.0, 2.0
    if isinstance(regulariser, Tsallis) and not isinstance(regulariser.alpha, Tensor):
        return 1.0, float(regulariser.alpha)
    if isinstance(regulariser, Sum) and len(regulariser.terms) == 1:
        ((c, term),) = regulariser.terms
        form = power_form(term)
        return None if form is None or (is_number(c) and c == 0) else (c * form[0], form[1])
    return None


def sparsemax(x: Tensor) -> Tensor:
    """argmin ½‖q − x‖² over the simplex: (x − η)_+ with η = (A_k − 1)/k, A_k the sum of the k best.

    k is the largest number with x_(k) > (A_k − 1)/k (Martins and Astudillo, 2016).
    """
    x, best, count = _ranked(x)
    sums = best.cumsum(-1)
    k = (1 + count * best > sums).sum(-1, keepdim=True)
    eta = (sums.gather(-1, (k - 1).clamp_min_(0)) - 1) / k  # k = 0 where there is a NaN, which stays one
    return (x - eta).clamp_min_(0.0).to(x.dtype)


def entmax15(x: Tensor) -> Tensor:
    """argmax <q, x> − Tsallis_1.5(q) over the simplex: ((x/2 − η)_+)² (Peters, Niculae and Martins, 2019).

    On the k best the equation Σ (x/2 − η)² = 1 is quadratic in η; k is the largest number whose root
    keeps all k active.
    """
    x, best, count = _ranked(x / 2)
    mean, square = best.cumsum(-1) / count, best.square().cumsum(-1) / count
    spread = count * (square - mean.square())
    roots = mean - ((1 - spread) / count).clamp_min_(0.0).sqrt_()
    k = (roots <= best).sum(-1, keepdim=True)
    return (x - roots.gather(-1, (k - 1).clamp_min_(0))).clamp_min_(0.0).square_().to(x.dtype)


def _ranked(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x with maximum 0, its values in float64 best first, and 1, 2, 3, … beside them."""
    x = x - x.amax(-1, keepdim=True)
    best = x.sort(-1, descending=True).values.double()
    return x, best, torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=torch.float64)


def project_to_simplex(point: Tensor, mask: Tensor | None = None) -> Tensor:
    """The distribution nearest to `point` `[..., V]` in Euclidean distance, zero outside `mask`.

    >>> project_to_simplex(torch.tensor([0.8, 0.6, -1.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """
    if not isinstance(point, Tensor) or not point.is_floating_point():
        raise ValueError(f"project_to_simplex: point must be a floating-point tensor, got {_kind(point)}")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not fits(mask, point):
            raise ValueError(f"project_to_simplex: mask must be bool {list(point.shape)}, got {_kind(mask)}")
        point = point.masked_fill(~mask, -torch.inf)
    if bool((bad := ~point.amax(-1).isfinite()).any()):
        raise ValueError(f"project_to_simplex: {first_rows(bad)} holds NaN or +inf, or no entry inside the mask")
    return sparsemax(point)


def _kind(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
