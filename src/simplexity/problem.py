"""The master problem: everything else in this library states it, solves it, checks it or draws from it.

    maximise   <q, s> − λ·Ω(q)     over distributions q on the tokens of a support C(s), within further constraints

Greedy is λ = 0; softmax is Ω = Σ q log q; top-k and top-p are supports; sparsemax is Ω = ½‖q‖²;
Best-of-K is Ω = KL(q ‖ p) − β·(expected coverage by K draws). Constraints are convex sets: caps on tokens, bounds on
the mass of groups, at least so much entropy, at most so far from a reference.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from simplexity.constraints import Constraint, as_constraints, unmet
from simplexity.regularisers import Regulariser, as_regulariser
from simplexity.rows import as_working, first_rows, in_range, is_number, per_row
from simplexity.supports import Everything, Support


class Status(IntEnum):
    """What is wrong with a row, where nothing may be raised."""

    OK = 0
    NAN = 1  # a score is NaN
    INFINITE = 2  # a score is +inf
    FORBIDDEN = 3  # no token is allowed
    UNREACHABLE = 4  # no temperature gives the entropy asked for
    PARAMETER = 5  # λ is not a number >= 0
    INFEASIBLE = 6  # no distribution meets the constraints
    UNSOLVED = 7  # the solver found no distribution


COMPLAINTS = {
    Status.NAN: "a NaN among the scores or the reference; they must be numbers or -inf (forbidden)",
    Status.INFINITE: "a +inf among the scores; they must be numbers or -inf (forbidden)",
    Status.FORBIDDEN: "no token is allowed; at least one score inside the support must be above -inf",
    Status.UNREACHABLE: "the target cannot be reached at any temperature",
    Status.PARAMETER: "lam must be a number >= 0",
    Status.INFEASIBLE: "no distribution on the allowed tokens meets the constraints",
    Status.UNSOLVED: "no distribution was found: is the regulariser convex, and finite on the support?",
}


@dataclass(frozen=True, eq=False)
class Problem:
    """max <q, s> − λ·Ω(q) over the simplex on `support(s)`, within the constraints; one problem for each row of scores.

    scores:      s, `[..., V]`; −inf forbids a token
    regulariser: Ω, convex: a `Regulariser` or any object with `value(q)`
    lam:         λ >= 0, a number or one per row
    support:     C, the rule that says which tokens may be used at all
    constraints: convex sets q must lie in: `Caps`, `GroupBounds`, and an `EntropyFloor` or a `KLBall`
    sound:       the caller vouches for Ω: its tensors fit, and it is finite wherever a score is

    >>> from simplexity import NegEntropy, TopK, solve
    >>> solve(Problem(torch.tensor([3.0, 2.0, 0.0]), NegEntropy(), support=TopK(2)))
    tensor([0.7311, 0.2689, 0.0000])
    """

    scores: Tensor
    regulariser: Regulariser
    lam: float | Tensor = 1.0
    support: Support = Everything()
    sound: bool = False
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        scores = as_working(self.scores)
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "regulariser", as_regulariser(self.regulariser))
        if not isinstance(self.lam, Tensor) and not (is_number(self.lam) and self.lam >= 0 and in_range(self.lam)):
            raise ValueError(f"lam must be 0 or a number from 1e-30 to 1e30, got {self.lam!r}")
        object.__setattr__(self, "lam", per_row(self.lam, scores, "lam"))
        if not isinstance(self.support, Support):
            raise ValueError(f"support must be a Support such as TopK(50), got {self.support!r}")
        if self.constraints != ():
            object.__setattr__(self, "constraints", as_constraints(self.constraints))

    def objective(self, q: Tensor) -> Tensor:
        """<q, s> − λ·Ω(q), `[...]`."""
        reward = torch.where(q > 0, q * self.scores, 0.0).sum(-1)
        lam = self.lam.squeeze(-1) if isinstance(self.lam, Tensor) else self.lam
        return reward - lam * self.regulariser.value(q)

    def gradient(self, q: Tensor) -> Tensor:
        """s − λ·∇Ω(q), `[..., V]`."""
        if isinstance(self.lam, float) and self.lam == 0:
            return self.scores.clone()
        return self.scores - self.lam * self.regulariser.grad(q)

    def mask(self) -> Tensor:
        """True where a token may get probability, `[..., V]`."""
        scores = self.open_scores()
        return self.support.mask(scores) & (scores > -torch.inf)

    def open_scores(self) -> Tensor:
        """The scores, with the tokens on which Ω is infinite, or to which a constraint leaves nothing, forbidden."""
        scores = self.scores if self.sound else self.regulariser.restrict(self.scores)
        for constraint in self.constraints:
            scores = constraint.restrict(scores)
        return scores

    def status(self, best: Tensor | None = None) -> Tensor:
        """A `Status` for each row, int8 `[...]`, without host synchronisation.

        `best`: the largest score inside the support `[..., 1]`, where the caller has it already.
        """
        if best is None:
            scores = self.open_scores()
            best = scores.masked_fill(~self.support.mask(scores), -torch.inf).amax(-1, keepdim=True)
        status = status_of(self.scores, best)
        if isinstance(self.lam, Tensor):
            sound = ((self.lam >= 0) & (self.lam < torch.inf)).squeeze(-1)
            status = torch.where(sound, status, Status.PARAMETER).to(torch.int8)
        for bad, _ in self.unmet():
            status = torch.where(bad & (status == 0), Status.INFEASIBLE, status).to(torch.int8)
        return status

    def unmet(self) -> list[tuple[Tensor, str]]:
        """(rows in which no q meets the constraints `[...]`, why) for each reason there can be."""
        return unmet(self.constraints, self.mask(), self.scores) if self.constraints else []

    def check(self) -> None:
        """Raise a ValueError that names the first rows that cannot be solved."""
        self.check_parameters()
        status = self.status()
        raise_for(status.masked_fill(status == Status.INFEASIBLE, Status.OK))
        self.check_feasible()

    def check_feasible(self) -> None:
        """Raise a ValueError that names the first rows in which no q meets the constraints, and says why."""
        for bad, why in self.unmet():
            if bool(bad.any()):
                raise ValueError(f"{first_rows(bad)}: {COMPLAINTS[Status.INFEASIBLE]}: {why}")

    def check_parameters(self) -> None:
        """Raise a ValueError where λ, the regulariser or the support do not fit the scores."""
        if isinstance(self.lam, Tensor) and bool((bad := ~(in_range(self.lam) & (self.lam >= 0))).any()):
            raise ValueError(f"lam must be 0 or a number from 1e-30 to 1e30, but not in {first_rows(bad.squeeze(-1))}")
        self.support.check(self.scores)
        for constraint in self.constraints:
            constraint.check(self.scores)
        if not self.sound:
            self.regulariser.check()


def status_of(scores: Tensor, best: Tensor | None = None) -> Tensor:
    """A `Status` for each row of scores, int8 `[...]`; `best` `[..., 1]` is the largest one inside a support.

    The largest score tells all: it is NaN if any is, +inf if any is, −inf if all are.
    """
    top = scores.amax(-1)
    inside = top if best is None else best.squeeze(-1)
    status = (inside == -torch.inf).to(torch.int8) * Status.FORBIDDEN
    status = torch.where((top == torch.inf) | (inside == torch.inf), Status.INFINITE, status)
    return torch.where(top.isnan() | inside.isnan(), Status.NAN, status).to(torch.int8)


def raise_for(status: Tensor) -> None:
    """Raise a ValueError for the first kind of complaint in `status`. Reads the host once if all is well."""
    if not bool(status.any()):
        return
    for kind, complaint in COMPLAINTS.items():
        bad = status == kind
        if bool(bad.any()):
            raise ValueError(f"{first_rows(bad)}: {complaint}")
