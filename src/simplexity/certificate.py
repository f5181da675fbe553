"""How far is a given q from the optimum? The answer needs the problem and q alone.

With g = ∇f(q) and f concave,  gap(q) = Σ_v q_v·(max_{u∈C} g_u − g_v) >= f(q*) − f(q) >= 0. Within constraints the
maximum runs over the distributions u that meet them:  gap(q) = max_u <g, u − q>. That Ω is convex, and that a gradient
it brings itself is right, is taken on trust.

The gap is that of q as it was rounded: in float32 the slopes λ·log(q/r) are off by some λ·6e-8·|log r|, so that with λ
above 10 or so even the best q of an entropy or a KL may show a gap above 1e-4.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from simplexity.constraints import violation
from simplexity.problem import Problem
from simplexity.rows import tiny
from simplexity.solvers.constrained import linear_gap


@dataclass(frozen=True, eq=False)
class Certificate:
    """The optimality conditions of a problem at some q, one value per row, in float64.

    gap:                at least f(q*) − f(q), in units of the scores
    multiplier:         η, the common value of s − λ∇Ω(q) on the active tokens
    active_residual:    max |s − λ∇Ω(q) − η| over tokens with q > 0
    inactive_violation: max (s − λ∇Ω(q) − η)_+ over allowed tokens with q = 0
    mass_error:         |Σq − 1|
    leak:               the mass outside the support, and any below zero
    violation:          by how much q breaks a constraint: of a cap or a bound in mass, of a ball in nats

    The gap bounds f(q*) − f(q) for a q that meets the constraints. The multipliers of constraints are not part of the
    second to fourth: where a constraint is felt they do not vanish, and the gap alone tells.
    """

    gap: Tensor
    multiplier: Tensor
    active_residual: Tensor
    inactive_violation: Tensor
    mass_error: Tensor
    leak: Tensor
    violation: Tensor

    def holds(self, tolerance: float) -> Tensor:
        """True for the rows whose gap, mass error, leak and violation are all at most `tolerance`."""
        broken = torch.maximum(torch.maximum(self.mass_error, self.leak), self.violation)
        return (self.gap <= tolerance) & (broken <= tolerance)

    def __str__(self) -> str:
        worst = ", ".join(f"{f.name} {getattr(self, f.name).max():.3g}" for f in fields(self) if self.gap.numel())
        return f"Certificate(worst of {self.gap.numel()}: {worst})"


def certify(problem: Problem, q: Tensor) -> Certificate:
    """The certificate of q `[..., V]`, whoever computed it.

    >>> from simplexity import NegEntropy, solve
    >>> problem = Problem(torch.tensor([3.0, 2.0, 0.0]), NegEntropy())
    >>> bool(certify(problem, solve(problem)).gap < 1e-6)
    True
    >>> certify(problem, torch.tensor([1.0, 0.0, 0.0])).gap > 1
    tensor(True)
    """
    if not isinstance(q, Tensor) or q.shape != problem.scores.shape:
        raise ValueError(
            f"q must have the shape of the scores, {list(problem.scores.shape)}, got {list(getattr(q, 'shape', ()))}"
        )
    problem.check()
    smallest = tiny(q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32)
    allowed, q = problem.mask(), q.double()
    # Centred, so that an offset of 1000 on the scores does not drown the gap.
    peak = problem.scores.double().masked_fill(~allowed, -torch.inf).amax(-1, keepdim=True)
    centred = (problem.scores.double() - peak).masked_fill(~allowed, 0.0)
    # Gradients of log type are taken at max(q, tiny) in q's own precision: a token whose true optimum
    # underflows adds nothing, a token wrongly cut to zero shows.
    lam = problem.lam.double() if isinstance(problem.lam, Tensor) else problem.lam
    slope = problem.regulariser.grad(q.clamp_min(smallest))
    g = centred if isinstance(lam, float) and lam == 0 else centred - lam * slope
    inside = torch.where(allowed, q, 0.0)
    best = g.masked_fill(~allowed, -torch.inf).amax(-1, keepdim=True)
    mass = inside.sum(-1, keepdim=True)
    eta = torch.where(allowed, inside * g, 0.0).sum(-1, keepdim=True) / mass
    excess = g - eta
    active = allowed & (q >= smallest)
    if problem.constraints:
        gap = linear_gap(problem.constraints, inside, g, allowed, reads=True)
    else:
        gap = torch.where(allowed, inside * (best - g), 0.0).sum(-1, keepdim=True)
    return Certificate(
        gap=torch.where(mass > 0, gap, torch.inf).squeeze(-1),
        multiplier=(eta + peak).squeeze(-1),
        active_residual=excess.abs().masked_fill(~active, 0.0).amax(-1),
        inactive_violation=excess.masked_fill(~allowed | active, 0.0).clamp_min(0.0).amax(-1),
        mass_error=(q.sum(-1) - 1).abs(),
        leak=(q * ~allowed).abs().sum(-1) + (-q).clamp_min(0.0).sum(-1),
        violation=violation(problem.constraints, inside, allowed),
    )
