"""Separable problems, solved exactly by one scalar root per row.

For Ω(q) = Σ φ_v(q_v) stationarity gives  q_v(η) = (φ_v')⁻¹((s_v − η)/λ), clipped at 0, decreasing in η:
the multiplier is the root of  Σ_v q_v(η) = 1. Constraints bring further multipliers: see `constrained`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.constraints import has_ball
from simplexity.narrow import Inside, narrow_above
from simplexity.problem import Problem
from simplexity.roots import find_root
from simplexity.rows import block_maxima, normalise_, power, total
from simplexity.solvers.closed_form import is_greedy, power_form
from simplexity.solvers.constrained import constrained_root
from simplexity.solvers.coverage_root import coverage_root
from simplexity.solvers.slopes import at_slope
from simplexity.structure import entropic_coverage

GENTLE = 1.05  # below, (z − η)^e with its large e loses digits that the general method keeps
FEW = 4096  # columns on which float64 costs nothing
NEWTON_STEPS = 50  # about eight are taken
TOLERANCES = {torch.float64: 4e-16, torch.float32: 1e-6}  # of a last step, whose square is what is left
ROUGHLY = 1e-2  # the last step of a root that only tells who gets nothing


@dataclass(frozen=True)
class DualRoot:
    """Solves any separable Ω to rounding error."""

    name = "dual-root"

    def refuses(self, problem: Problem) -> str | None:
        """Why this solver cannot solve the problem; None when it can."""
        if is_greedy(problem):
            if has_ball(problem.constraints):
                return None  # the multiplier of the ball makes it strictly convex
            return "with lam = 0 or no regulariser the optimum is a vertex and has no multiplier to search for"
        if not problem.regulariser.separable:
            return "the regulariser is not separable token by token"
        if not problem.regulariser.strict:
            return "the regulariser is not strictly convex in every token"
        return None

    def __call__(self, problem: Problem, reads: bool) -> Tensor | Inside:
        """q for scores whose forbidden tokens are −inf."""
        if problem.constraints:
            return constrained_root(problem, reads)
        if (parts := entropic_coverage(problem.regulariser)) is not None:
            return coverage_root(problem, parts, reads)
        if reads and (form := power_form(problem.regulariser)) is not None and GENTLE < form[1] < 2:
            return entmax(problem.scores * ((form[1] - 1.0) / (problem.lam * form[0])), form[1])
        return dual_root(problem, reads)


def dual_root(problem: Problem, reads: bool) -> Tensor:
    """The general method, for any separable and strictly convex regulariser."""
    x, lam, omega = problem.scores, problem.lam, problem.regulariser
    allowed = x > -torch.inf

    def at(eta: Tensor) -> Tensor:
        return torch.where(allowed, at_slope(omega, (x - eta) / lam, reads), 0.0)

    # At η = max_v (s_v − λφ_v'(1)) some token has q = 1 and none more; at max_v (s_v − λφ_v'(1/n)) none
    # has more than 1/n. So the sum crosses 1 in between, and is positive and finite at both ends.
    count = allowed.sum(-1, keepdim=True).to(x.dtype)
    low = (x - lam * omega.grad(torch.ones_like(x))).amax(-1, keepdim=True)
    high = (x - lam * omega.grad((1.0 / count).expand_as(x))).amax(-1, keepdim=True)
    eta = find_root(lambda eta: total(at(eta)).log().to(x.dtype), low, torch.maximum(low, high), reads)
    # Where φ' is flat, q jumps within the last digits of η, and to scale it would move the tokens that do not. Every q
    # between those on either side of the bracket that is left is optimal up to rounding, and one of them weighs 1.
    width = 8 * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs())
    more, less = at(eta - width).clamp_max_(1.0), at(eta + width)
    above, below = total(more), total(less)
    share = torch.where(above > below, (1.0 - below) / (above - below), 0.0).clamp_(0.0, 1.0)
    return normalise_(torch.lerp(less, more, share.to(less.dtype)))


def entmax(z: Tensor, alpha: float) -> Tensor | Inside:
    """argmax <q, x> − Tsallis_α(q) over the simplex, 1 < α < 2: ((z − η)_+)^e, e = 1/(α−1) > 1, for z = (α−1)x <= 0.

    The root of some of the tokens lies below that of all: the block maxima alone tell most tokens that they get
    nothing.
    """
    e = 1.0 / (alpha - 1.0)
    e = round(e) if abs(e - round(e)) < 1e-12 else e  # whole powers are products
    start = torch.full_like(z[..., :1], -1.0, dtype=torch.float64)
    precise = TOLERANCES[z.dtype]
    if z.shape[-1] <= FEW:
        return _powers(z.double(), climb_to_root(z.double(), e, start, precise), e).to(z.dtype)
    peaks = block_maxima(z)
    low = climb_to_root(peaks.double(), e, start, ROUGHLY)
    columns = narrow_above(z, (low - 1e-6).to(z.dtype), peaks)
    inside = columns.scores if columns.scores.shape[-1] > FEW else columns.scores.double()
    q = _powers(inside, climb_to_root(inside, e, low, max(precise, 2 * torch.finfo(inside.dtype).eps)), e)
    return Inside(q.to(z.dtype), columns, z.shape[-1])


def climb_to_root(z: Tensor, e: float, eta: Tensor, tolerance: float) -> Tensor:
    """η with Σ ((z − η)_+)^e = 1, from one at which the sum is at least 1, to a last step of `tolerance`. Reads values.

    ‖(z − η)_+‖_e, a norm of convex functions, is convex and falls with η, so Newton's method never passes the root.
    """
    for _ in range(NEWTON_STEPS):
        above = (z - eta.to(z.dtype)).clamp_min_(0.0)
        slope = power(above, e - 1)
        mass = total(slope.mul(above))
        move = mass.sub(mass.pow(1.0 - 1.0 / e)).div_(total(slope))
        eta = eta + move
        if bool((move <= tolerance).all()):
            break
    return eta


def _powers(z: Tensor, eta: Tensor, e: float) -> Tensor:
    return normalise_(power((z - eta.to(z.dtype)).clamp_min_(0.0), e))
