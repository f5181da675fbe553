"""Problems within constraints, solved exactly by one root for each multiplier.

Caps and bounds on groups: with Ω(q) = Σ φ_v(q_v) and one level η_g for each group,

    q_v = min(c_v, (φ_v')⁻¹((s_v − η_g)/λ)),     η_g = η unless a bound of the group holds.

First the η at which the groups' masses, each clipped to its bounds, sum to 1; then the level of each group whose bound
holds. For Ω = c·KL(q ‖ r) without caps a level is a factor on its group, and only the groups' masses are searched.

A ball R(q) <= b, R(q) = Σ q log(q/r): its multiplier ν turns λΩ into λΩ + νR, and R(q) falls with ν.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from simplexity.constraints import Ball, Bounds, Constraint, ball_of, bounds_of
from simplexity.groups import group_peaks
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy, Regulariser, Zero
from simplexity.roots import find_root, find_root_below
from simplexity.rows import exp_, one_hot_argmax, softmax_, tiny
from simplexity.solvers.closed_form import is_greedy
from simplexity.solvers.slopes import at_slope
from simplexity.structure import entropic

EPS = {torch.float64: 1e-13, torch.float32: 1e-9}  # how well a multiplier is found, below the noise of the sums
JUMP = 1e-3  # what a group's mass may change by within that, and still be the common η's

# The smallest ν, in units of the scores, and the largest. Below, q could gain at most ν times the range of R; above, q
# is the point nearest to the centre.
COLDEST, HOTTEST = {torch.float64: 1e-9, torch.float32: 1e-5}, 1e8


def constrained_root(problem: Problem, reads: bool) -> Tensor:
    """q for scores with maximum 0 whose forbidden tokens are −inf; Ω separable and strict, or none."""
    x = problem.scores
    bounds, ball = bounds_of(problem.constraints, x > -torch.inf, x), ball_of(problem.constraints, x)
    if ball is None:
        return _optimum(problem, bounds, reads)
    return _in_ball(problem, bounds, ball, reads)[0]


def linear_gap(constraints: tuple[Constraint, ...], q: Tensor, g: Tensor, allowed: Tensor, reads: bool) -> Tensor:
    """max <g, u − q> over the u that meet the constraints, `[..., 1]`.

    Over caps and bounds the best u is known. Over a ball weak duality bounds the maximum whatever the multiplier ν:
    <g, u> <= <g, u_ν> + ν·(b − R(u_ν)).
    """
    eta = torch.where(allowed, q * g, 0.0).sum(-1, keepdim=True) / q.sum(-1, keepdim=True)
    climb = torch.where(allowed, g - eta, -torch.inf)
    bounds, ball = bounds_of(constraints, allowed, g), ball_of(constraints, g)
    slack: float | Tensor = 0.0
    if ball is None:
        assert bounds is not None
        u = bounds.fill(climb)
    else:
        u, slack = _in_ball(Problem(climb, Zero(), lam=0.0, sound=True), bounds, ball, reads)
    return (torch.where(u > 0, u * climb, 0.0).sum(-1, keepdim=True) + slack).clamp_min(0.0).to(q.dtype)


def _optimum(problem: Problem, bounds: Bounds | None, reads: bool) -> Tensor:
    """The optimum within the bounds, if there are any."""
    x, lam = problem.scores, problem.lam
    if is_greedy(problem):
        return one_hot_argmax(x) if bounds is None else bounds.fill(x)
    if isinstance(lam, Tensor):  # rows with λ = 0 are solved with another one, then replaced
        greedy = _optimum(replace(problem, lam=0.0), bounds, reads)
        q = _spread(x, torch.where(lam == 0, 1.0, lam), problem.regulariser, bounds, reads)
        return torch.where(lam == 0, greedy, q)
    return _spread(x, lam, problem.regulariser, bounds, reads)


def _spread(x: Tensor, lam: float | Tensor, omega: Regulariser, bounds: Bounds | None, reads: bool) -> Tensor:
    """The same for λ > 0."""
    if (parts := entropic(omega)) is not None:
        weight, log_r = parts
        return _entropic(torch.where(x > -torch.inf, x / (lam * weight) + log_r, x), bounds, reads)
    if bounds is None:
        bounds = _unbounded(x)
    return _bounded(x, lam, omega, bounds, reads)


def _entropic(y: Tensor, bounds: Bounds | None, reads: bool) -> Tensor:
    """argmax <q, y> − Σ q log q within the bounds."""
    if bounds is None:
        return softmax_(y)
    if bounds.cap is None:
        return _by_groups(y, bounds, reads)
    return _bounded(y - y.amax(-1, keepdim=True), 1.0, NegEntropy(), bounds, reads)


def _unbounded(x: Tensor) -> Bounds:
    one = torch.ones_like(x[..., :1], dtype=torch.float64)
    return Bounds(x > -torch.inf, None, None, 0 * one, 2 * one)


def _by_groups(y: Tensor, bounds: Bounds, reads: bool) -> Tensor:
    """Negative entropy under bounds on groups: a softmax inside each, and a factor for each."""
    assert bounds.index is not None
    y = y.masked_fill(~bounds.allowed, -torch.inf)
    peak = group_peaks(y, bounds.index, bounds.lower.shape[-1]).double()
    filled = peak > -torch.inf
    e = exp_(y - bounds.to_tokens(torch.where(filled, peak, 0.0)).to(y.dtype))
    inside = bounds.sums(e)
    log_mass = torch.where(filled, peak + inside.log(), -torch.inf)
    low = torch.where(filled, log_mass - bounds.upper.clamp_max(1.0).log(), torch.inf).amin(-1, keepdim=True)
    high = torch.logsumexp(log_mass, -1, keepdim=True) - _left(bounds).log()
    unit = torch.ones_like(low)
    share, _, _ = _shares(lambda eta: torch.exp(log_mass - eta), bounds, low, high, unit, reads, EPS[torch.float64])
    return e * bounds.to_tokens(torch.where(filled, share / inside, 0.0)).to(y.dtype)


def _bounded(x: Tensor, lam: float | Tensor, omega: Regulariser, bounds: Bounds, reads: bool) -> Tensor:
    """Any separable and strictly convex Ω under caps and bounds on groups."""
    allowed, cap = bounds.allowed, bounds.cap

    def at(level: Tensor) -> Tensor:
        q = at_slope(omega, (x - level.to(x.dtype)) / lam, reads)
        return torch.where(allowed, q.clamp_max(1.0) if cap is None else torch.minimum(q, cap), 0.0)

    def reached(q: Tensor, other: float) -> Tensor:
        """The level at which a token has this much."""
        return torch.where(allowed, x - lam * omega.grad(q.expand_as(x)), other).double()

    # At `low` every token is at its cap and every group at its upper bound. At `high` no token has more than its
    # part of what the lower bounds leave.
    full, smallest = torch.ones_like(x[..., :1]) if cap is None else cap.clamp(tiny(x.dtype), 1.0), tiny(x.dtype)
    unit = torch.zeros_like(x[..., :1], dtype=torch.float64) + lam
    count = allowed.sum(-1, keepdim=True).clamp_min(1)
    bottom = reached(full, torch.inf)
    part = (_left(bounds) / count).to(x.dtype).clamp_min(smallest)
    low, high = bottom.amin(-1, keepdim=True), reached(part, -torch.inf).amax(-1, keepdim=True)
    share, held, level = _shares(lambda eta: bounds.sums(at(eta)), bounds, low, high, unit, reads, EPS[x.dtype])
    if bounds.index is not None and not (reads and not bool((held & (share > 0)).any())):
        groups = share.shape[-1]
        members = bounds.sums(allowed.to(x.dtype)).clamp_min(1)
        part = bounds.to_tokens(share / members).to(x.dtype).clamp_min(smallest)
        low = -group_peaks(-bottom, bounds.index, groups)
        high = group_peaks(reached(part, -torch.inf), bounds.index, groups)
        empty = ~(low < torch.inf)
        low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
        wanted = share.clamp_min(smallest).log()
        own = find_root_below(
            lambda eta: bounds.sums(at(bounds.to_tokens(eta))).log() - wanted, low, high, unit, reads, EPS[x.dtype]
        )
        level = torch.where(held, own, level)
    q = at(bounds.to_tokens(level.expand_as(share)))
    # What rounding of the levels left wrong is put right by the tokens below their caps: group by group where a bound
    # holds, by one factor in all other groups, where it moves η.
    loose = q if cap is None else torch.where(q < cap, q, 0.0)
    mass, whole = bounds.sums(loose), bounds.sums(q)
    free = torch.where(held, 0.0, 1.0)
    left = 1.0 - (share * held).sum(-1, keepdim=True)
    mass = torch.where(held, mass, (mass * free).sum(-1, keepdim=True))
    whole = torch.where(held, whole, (whole * free).sum(-1, keepdim=True))
    error = torch.where(held, share, left) - whole
    # an error within rounding is none: it may be all that the loose tokens have
    factor = torch.where((error.abs() > torch.finfo(x.dtype).eps * whole) & (mass > 0), 1.0 + error / mass, 1.0)
    loose = loose * bounds.to_tokens(factor.clamp_min(0.0)).to(x.dtype)
    return loose if cap is None else torch.where(q < cap, torch.minimum(loose, cap), q)


def _left(bounds: Bounds) -> Tensor:
    """What the lower bounds leave of the mass, `[..., 1]`."""
    return (1.0 - bounds.lower.sum(-1, keepdim=True)).clamp_min(tiny(torch.float64))


def _shares(
    masses: Callable[[Tensor], Tensor], bounds: Bounds, low: Tensor, high: Tensor, unit: Tensor, reads: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(the mass of each group `[..., G]`, whether it needs a level of its own, η `[..., 1]`); masses fall with η."""

    def clipped(eta: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(masses(eta), bounds.lower), bounds.upper)

    eta = find_root_below(lambda eta: clipped(eta).sum(-1, keepdim=True).log(), low, high, unit, reads, eps)
    # With λ near 0 masses jump within the precision of η. Between what lies on both sides of it the sum is exactly 1.
    doubt = 200 * eps * (high - eta) + 4 * torch.finfo(torch.float64).eps * (high.abs() + unit)
    more, less = clipped(eta - doubt), clipped(eta + doubt)
    above, below = more.sum(-1, keepdim=True) - 1.0, 1.0 - less.sum(-1, keepdim=True)
    part = torch.where(above + below > 0, above / (above + below), 0.5).clamp(0.0, 1.0)
    share = more + part * (less - more)
    held = (share <= bounds.lower) | (share >= bounds.upper) | (more - less > JUMP)
    free = torch.where(held, 0.0, share).sum(-1, keepdim=True)
    left = (1.0 - torch.where(held, share, 0.0).sum(-1, keepdim=True)).clamp_min(0.0)
    return torch.where(held, share, share * (left / free)), held, eta


def _in_ball(problem: Problem, bounds: Bounds | None, ball: Ball, reads: bool) -> tuple[Tensor, Tensor]:
    """(q, ν·(b − R(q)) `[..., 1]`): zero but for rounding, and exactly zero where the ball is not felt."""
    x, lam, omega = problem.scores, problem.lam, problem.regulariser
    allowed = x > -torch.inf
    free = _optimum(problem, bounds, reads)
    inside = ball.value(free) <= ball.bound
    if reads and bool(inside.all()):
        return free, torch.zeros_like(ball.bound)
    nearest = _entropic(torch.where(allowed, torch.zeros_like(x) + ball.log_r, x), bounds, reads)
    greedy = is_greedy(problem)
    parts = (0.0, 0.0) if greedy else entropic(omega)

    def at(log_nu: Tensor) -> Tensor:
        nu = log_nu.exp().to(x.dtype)
        if parts is None:
            return _spread(x, 1.0, lam * omega + nu * ball.regulariser, bounds, reads)
        weight = 0.0 if greedy else lam * parts[0]
        drive = x if greedy else x + weight * parts[1]
        y = (drive + nu * ball.log_r) / (weight + nu)
        return _entropic(torch.where(allowed, y, -torch.inf), bounds, reads)

    slope = x if greedy else x - lam * omega.grad(nearest)
    top = slope.masked_fill(~allowed, -torch.inf).amax(-1, keepdim=True)
    scale = (top - slope.masked_fill(~allowed, torch.inf).amin(-1, keepdim=True)).double()
    scale = torch.where(scale > 0, scale, 1.0)
    cold, hot = (COLDEST[x.dtype] * scale.clamp_max(1.0)).log(), (HOTTEST * scale.clamp_max(1e28)).log()
    cold = torch.where(inside, hot, cold)  # nothing to look for
    log_nu = find_root(lambda t: ball.value(at(t)) - ball.bound, cold, hot, reads, eps=EPS[x.dtype])
    q = at(log_nu)
    slack = log_nu.exp() * (ball.bound - ball.value(q))
    out = ball.value(at(hot)) > ball.bound
    q = torch.where(inside, free, torch.where(out, nearest, q))
    return q, torch.where(inside | out, 0.0, slack)
