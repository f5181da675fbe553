"""From a problem to its q: `solve` chooses a solver by the problem, or takes the one it is given."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from simplexity.constraints import ball_of, has_ball
from simplexity.narrow import Inside, Narrowed, crowded, narrow_to
from simplexity.problem import COMPLAINTS, Problem, Status, raise_for
from simplexity.rows import BLOCK, all_finite, argmax, first_rows, one_hot_argmax, total
from simplexity.solvers.closed_form import ClosedForm, is_greedy, project_to_simplex
from simplexity.solvers.dual_root import DualRoot
from simplexity.solvers.mirror_ascent import MirrorAscent
from simplexity.supports import Everything

__all__ = ["SOLVERS", "ClosedForm", "DualRoot", "MirrorAscent", "Solution", "Solver", "project_to_simplex", "solve"]


class Solver(Protocol):
    """Solves problems whose support has been applied: the best score is 0, forbidden tokens score −inf."""

    @property
    def name(self) -> str:
        """What `solve(problem, name)` calls it."""
        ...

    def refuses(self, problem: Problem) -> str | None:
        """Why this solver cannot solve the problem; None when it can."""
        ...

    def __call__(self, problem: Problem, reads: bool) -> Tensor | Inside:
        """q `[..., V]`, or its columns that weigh; without `reads` no value may be looked at on the host."""
        ...


TOGETHER = 1e-4  # how far the nearest point may lie outside a ball before the constraints count as apart

SOLVERS: dict[str, Any] = {kind.name: kind for kind in (ClosedForm, DualRoot, MirrorAscent)}


@dataclass(frozen=True, eq=False)
class Solution:
    """q on the columns that matter, and the way back to the vocabulary."""

    q: Tensor  # [..., n]
    columns: Narrowed
    size: int
    status: Tensor | None  # int8 [...], a `Status`: rows that are not OK have q = 0. None: all are OK

    outer: Narrowed | None = None  # the columns in which `inside` was solved,
    inside: Inside | None = None  # where `columns` hold q only up to rounding

    def dense(self) -> Tensor:
        """q `[..., V]`, exact zeros off the support."""
        if self.inside is None or self.outer is None:
            return self.columns.widen(self.q, self.size)
        return self.outer.widen(self.inside.write(), self.size)

    def log_dense(self, out: Tensor | None = None) -> Tensor:
        """log q `[..., V]`, −inf off the support; in `out`, where given."""
        if self.inside is None or self.outer is None:
            return self.columns.widen_log(self.q.log(), self.size, out)
        return self.outer.widen_log(self.inside.write_log(), self.size, out)


def solve(problem: Problem, solver: "str | Solver | None" = None, validate: bool = True) -> Any:
    """q `[..., V]`: on the simplex, exact zeros off the support.

    solver:   "closed-form", "dual-root", "mirror-ascent" or an instance such as
              `MirrorAscent(steps=5)`; chosen by the problem when absent.
    validate: False never reads a value on the host and returns `(q, status)` instead of raising:
              rows whose `Status` is not OK have q = 0.

    >>> from simplexity import HalfSquare
    >>> solve(Problem(torch.tensor([3.0, 2.5, 0.0]), HalfSquare()))
    tensor([0.7500, 0.2500, 0.0000])
    """
    solution = find_solution(problem, solver, validate)
    return solution.dense() if validate else (solution.dense(), solution.status)


def choose(problem: Problem, solver: "str | Solver | None") -> Solver:
    """The solver asked for, or the most exact one that can; a ValueError says why one cannot and which can."""
    if solver is None:
        return next(s for s in (kind() for kind in SOLVERS.values()) if s.refuses(problem) is None)
    if isinstance(solver, str):
        if solver not in SOLVERS:
            raise ValueError(f"unknown solver {solver!r}: choose from {', '.join(SOLVERS)}")
        solver = SOLVERS[solver]
    chosen: Any = solver() if isinstance(solver, type) else solver  # pyright: ignore[reportCallIssue]
    if not hasattr(chosen, "refuses"):
        raise ValueError(f"a solver is one of {', '.join(SOLVERS)} or one made, such as MirrorAscent(), got {solver!r}")
    if (reason := chosen.refuses(problem)) is not None:
        able = [name for name, kind in SOLVERS.items() if kind().refuses(problem) is None]
        raise ValueError(f"{chosen.name} cannot solve this problem: {reason}. These can: {', '.join(able)}")
    return chosen


def find_solution(
    problem: Problem, solver: "str | Solver | None" = None, validate: bool = True, peaks: Tensor | None = None
) -> Solution:
    """`solve`, with q still on the columns that matter.

    `peaks`: the block maxima of the scores, where the caller has them and knows the scores to be sound.
    """
    chosen = choose(problem, solver)
    reads = validate and problem.scores.device.type == "cpu"  # on a GPU every read stalls the stream
    if validate:
        problem.check_parameters()
    scores = problem.open_scores()
    narrows = reads and problem.regulariser.columnwise and not problem.constraints
    peaks = peaks if scores is problem.scores else None
    if narrows and peaks is None and not all_finite(scores.amax(-1)):  # a row without a best score cannot be cut
        raise_for(problem.status())
    columns = problem.support.narrow(scores, peaks) if narrows else _masked(problem, scores)
    known = validate and peaks is not None and problem.support.keeps_best
    best = (peaks if known and peaks is not None else columns.scores).amax(-1, keepdim=True)
    status = None
    if validate:
        # a NaN or a +inf is the largest score of its row, and no support but a list of ids drops that
        if not known and not (all_finite(best) and (problem.support.keeps_best or all_finite(scores.amax(-1)))):
            raise_for(problem.status(best))
        problem.check_feasible()
    else:
        status = problem.status(best)
        # a row that cannot be solved becomes one that can, and is erased below
        best = torch.where(best.isfinite(), best, 0.0)
        bad = (status != 0).unsqueeze(-1)
        columns = Narrowed(columns.scores.masked_fill(bad, 0.0), columns.ids)
    columns = Narrowed(columns.scores - best, columns.ids)
    if narrows and not isinstance(chosen, MirrorAscent):
        columns = _within_reach(problem, columns)
    # an ascent until some gap must look at the gap, wherever it runs
    looks = validate if isinstance(chosen, MirrorAscent) and chosen.steps is None else reads
    found = _solve_open(problem, columns, chosen, looks)
    if isinstance(found, Inside):
        size = problem.scores.shape[-1]
        return Solution(found.q, found.columns.within(columns), size, status, columns, found)
    q = found.to(problem.scores.dtype)
    # a pass over q, saved where a formula or a root solves an Ω that can be cut to columns, as the library's own can
    if validate and (isinstance(chosen, MirrorAscent) or not problem.regulariser.columnwise):
        mass = total(q)
        if not all_finite(mass):
            lost = first_rows(~mass.isfinite().squeeze(-1))
            why = "is the regulariser convex, and finite on the support?"
            raise ValueError(f"{lost}: {chosen.name} found no distribution: {why}")
    if problem.constraints and len(problem.constraints) > 1 and has_ball(problem.constraints):
        status = _meets_all(problem, q, status)
    if status is not None:
        found = q.amax(-1) > 0  # a NaN is not
        status = torch.where((status == 0) & ~found, Status.UNSOLVED, status).to(torch.int8)
        q = q.masked_fill((status != 0).unsqueeze(-1), 0.0)
    return Solution(q, columns, problem.scores.shape[-1], status)


def _meets_all(problem: Problem, q: Tensor, status: Tensor | None) -> Tensor | None:
    """The status, INFEASIBLE where each constraint can be met but not all: the solver stopped at the nearest point."""
    ball = ball_of(problem.constraints, problem.scores)
    assert ball is not None
    apart = (ball.value(q) > ball.bound + TOGETHER).squeeze(-1)
    if status is not None:
        return torch.where((status == 0) & apart, Status.INFEASIBLE, status).to(torch.int8)
    if bool(apart.any()):
        why = "each of them can be met, but not all together"
        raise ValueError(f"{first_rows(apart)}: {COMPLAINTS[Status.INFEASIBLE]}: {why}")
    return None


def _masked(problem: Problem, scores: Tensor) -> Narrowed:
    if isinstance(problem.support, Everything):
        return Narrowed(scores)
    return Narrowed(scores.masked_fill(~problem.support.mask(scores), -inf))


def _within_reach(problem: Problem, columns: Narrowed) -> Narrowed:
    """The columns a sparse Ω can reach: further than λ·reach below the best, q is zero."""
    reach, x = problem.regulariser.reach, columns.scores
    if is_greedy(problem):
        ids = argmax(x)
        return Narrowed(x.gather(-1, ids), ids).within(columns)
    if x.shape[-1] <= 4 * BLOCK or (isinstance(reach, float) and reach == inf):
        return columns
    span = problem.lam * reach
    if isinstance(span, Tensor):  # rows with λ = 0 keep their best; 0·inf is theirs too
        span = span.nan_to_num(0.0, posinf=inf).clamp_min(1e-30)
    return columns if crowded(x, -span) else narrow_to(torch.relu(x + span), x).within(columns)


def _solve_open(problem: Problem, columns: Narrowed, solver: Solver, reads: bool) -> Tensor | Inside:
    omega = problem.regulariser.cast(columns.scores.dtype)
    omega = omega if columns.ids is None else omega.take(columns.ids)
    solver = solver.on(columns) if isinstance(solver, MirrorAscent) else solver
    opened = replace(problem, scores=columns.scores, regulariser=omega, support=Everything())
    if (
        not isinstance(problem.lam, Tensor)
        or is_greedy(problem)
        or isinstance(solver, MirrorAscent)
        or problem.constraints  # their solvers know rows with λ = 0
    ):
        return solver(opened, reads)
    # rows with λ = 0 are solved with some other λ, to keep their arithmetic finite, then replaced
    greedy = problem.lam == 0
    q = solver(replace(opened, lam=torch.where(greedy, 1.0, problem.lam)), reads)
    q = q.write() if isinstance(q, Inside) else q
    return torch.where(greedy, one_hot_argmax(columns.scores), q)
