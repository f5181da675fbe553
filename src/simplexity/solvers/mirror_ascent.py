"""Mirror ascent, for any concave objective: climb, measuring the step in a geometry of the simplex.

q_{j+1} = argmax_q  <∇f(q_j), q> − D_ψ(q, q_j)/step
entropic,  ψ = Σ q log q:   q ← q·exp(step·∇f) / norm
Euclidean, ψ = ½‖q‖²:       q ← projection of q + step·∇f, which is projected gradient ascent

Within constraints the same step is itself a problem with Ω = ψ, solved by its dual roots.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from simplexity.coverage import Geometry
from simplexity.narrow import Inside, Narrowed
from simplexity.problem import Problem
from simplexity.regularisers import KL, HalfSquare, NegEntropy, Regulariser, Sum
from simplexity.rows import exp_, first_rows, fits, is_number, is_whole, log_total, per_row, tiny, total
from simplexity.solvers.closed_form import sparsemax
from simplexity.solvers.constrained import constrained_root, linear_gap
from simplexity.solvers.coverage_ascent import coverage_ascent
from simplexity.structure import entropic_coverage

HALVINGS = 60  # from any sensible first step down to rounding error


@dataclass(frozen=True, eq=False)
class MirrorAscent:
    """Fixed `steps`, or on until the gap of every row is at most `tolerance`.

    step:      the step size. By default 1/(λL) where Ω knows its smoothness L, with which no step can
               lower the objective; otherwise found by backtracking, with the same guarantee.
    longest:   what a default step is capped at.
    start:     where to begin: a distribution `[..., V]`, "uniform" on the support, or "reference", the r
               of an Ω that holds KL(q ‖ r).
    tolerance: 1e-10 in float64 and 1e-5 in float32 by default.
    max_steps: 2000 by default, and 200 where nobody may look at the gap: then all of them are taken.
    """

    steps: int | None = None
    step: float | Tensor | None = None
    longest: float = math.inf
    geometry: Geometry = "entropic"
    start: Tensor | Literal["uniform", "reference"] = "uniform"
    tolerance: float | None = None
    max_steps: int | None = None
    name = "mirror-ascent"

    def __post_init__(self) -> None:
        if self.geometry not in get_args(Geometry):
            raise ValueError(
                f"mirror-ascent: geometry must be one of {', '.join(get_args(Geometry))}, got {self.geometry!r}"
            )
        for name, least in (("steps", 0), ("max_steps", 1)):
            count = getattr(self, name)
            if count is not None and not (is_whole(count) and count >= least):
                raise ValueError(f"mirror-ascent: {name} must be a whole number >= {least}, got {count!r}")
        if self.steps is not None and self.tolerance is not None:
            raise ValueError("mirror-ascent: give steps (a fixed number) or tolerance (stop on the gap), not both")
        if isinstance(self.start, str) and self.start not in ("uniform", "reference"):
            raise ValueError(f"mirror-ascent: start must be uniform, reference or a tensor, got {self.start!r}")
        number = is_number(self.step) and 0 < self.step < math.inf
        if self.step is not None and not isinstance(self.step, Tensor) and not number:
            raise ValueError(f"mirror-ascent: step must be a finite number above 0, got {self.step!r}")
        if not (is_number(self.longest) and self.longest > 0):
            raise ValueError(f"mirror-ascent: longest must be a number above 0, got {self.longest!r}")
        if self.tolerance is not None and not (is_number(self.tolerance) and 0 <= self.tolerance < math.inf):
            raise ValueError(f"mirror-ascent: tolerance must be a finite number >= 0, got {self.tolerance!r}")

    def refuses(self, problem: Problem) -> str | None:
        """Why this solver cannot solve the problem: any convex Ω will do, but not any start."""
        if _is(self.start, "reference") and reference(problem.regulariser) is None:
            return "start='reference' needs a regulariser with a KL term"
        if isinstance(self.start, Tensor) and not fits(self.start, problem.scores):
            return f"start must be {list(problem.scores.shape)} like the scores, but is {list(self.start.shape)}"
        return None

    def on(self, columns: Narrowed) -> "MirrorAscent":
        """The same ascent for a problem cut down to some columns."""
        return replace(self, start=columns.take(self.start)) if isinstance(self.start, Tensor) else self

    def __call__(self, problem: Problem, reads: bool) -> Tensor | Inside:
        """q `[..., V]` for scores whose forbidden tokens are −inf."""
        step = self._step(problem)
        if reads and isinstance(step, Tensor) and bool((bad := ~((step > 0) & (step < math.inf))).any()):
            raise ValueError(
                f"mirror-ascent: step must be finite and above 0, but not in {first_rows(bad.squeeze(-1))}"
            )
        if reads and (q := self._unrolled(problem, step)) is not None:
            return q
        x = problem.scores
        allowed = x > -torch.inf
        default = 1e-10 if x.dtype == torch.float64 else 1e-5
        tolerance = default if self.tolerance is None else self.tolerance
        climb = _Climb(problem, allowed, self.geometry, reads)
        place = climb.place(self._first(problem, allowed, reads))
        if problem.constraints:
            place = climb.move(place, torch.zeros_like(x), 1.0)
        trial = _first_trial(problem)
        most = (2000 if reads else 200) if self.max_steps is None else int(self.max_steps)
        for _ in range(most if self.steps is None else int(self.steps)):
            q = climb.distribution(place)
            g = problem.gradient(q)
            if self.steps is None and (reads or not problem.constraints):
                gap = climb.gap(q, g)
                done = gap <= tolerance
                if reads and not bool((gap > tolerance).any()):
                    return q.masked_fill(gap.isnan(), torch.nan)  # no answer, and it must not pass for one
            else:
                done = None
            if step is not None:
                moved = climb.move(place, g, step)
            else:
                moved, trial = _backtrack(climb, place, q, g, trial, reads)
            # a row that has arrived stays: its q must not depend on how long its neighbours take
            place = moved if done is None else torch.where(done, place, moved)
        q = climb.distribution(place)
        if self.steps is None and reads:
            g = problem.gradient(q)
            left = climb.gap(q, g).squeeze(-1)
            if bool((left > tolerance).any()):
                advice = "raise max_steps or the tolerance"
                if bool((stuck := (left > tolerance) & climb.misses_best(place, g)).any()):
                    advice = f"in {first_rows(stuck)} the start gives no mass to tokens that the optimum needs"
                warnings.warn(
                    f"mirror ascent stopped after {most} steps with a gap of {left.max():.2g} above the "
                    f"tolerance {tolerance:.2g} in {first_rows(left > tolerance)}: {advice}",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return q

    def _unrolled(self, problem: Problem, step: float | Tensor | None) -> Tensor | Inside | None:
        """The same iterates by the shortcut for KL plus coverage, where it applies."""
        parts = entropic_coverage(problem.regulariser)
        if (
            not self.steps
            or problem.constraints
            or parts is None
            or len(getattr(problem.regulariser, "terms", ())) != 2  # one KL, one coverage: they agree on r
            or step is None
            or self.geometry != "entropic"
            or not _is(self.start, "reference")
        ):
            return None
        contraction = step * problem.lam * parts[0]
        if bool((contraction > 1).any() if isinstance(contraction, Tensor) else contraction > 1):
            return None
        return coverage_ascent(problem, parts, int(self.steps), step)

    def _first(self, problem: Problem, allowed: Tensor, reads: bool) -> Tensor:
        x = problem.scores
        if _is(self.start, "uniform"):
            return allowed.to(x.dtype) / allowed.sum(-1, keepdim=True)
        if isinstance(self.start, str):
            log_r = reference(problem.regulariser)
            assert log_r is not None
            return torch.where(allowed, log_r.exp(), 0.0)
        start = torch.where(allowed, self.start.to(x.device, x.dtype), 0.0)
        mass = total(start)
        if reads:
            for lost, complaint in (
                (~((start >= 0) & (start < math.inf)).all(-1), "must be finite and >= 0, but not"),
                (~(mass > 0).squeeze(-1), "has no mass on the support"),
            ):
                if bool(lost.any()):
                    raise ValueError(f"mirror-ascent: start {complaint} in {first_rows(lost)}")
        return start / mass.to(x.dtype)

    def _step(self, problem: Problem) -> float | Tensor | None:
        if self.step is not None:
            return per_row(self.step, problem.scores, "step")
        smoothness = problem.regulariser.smoothness(self.geometry)
        if smoothness is None:
            return None
        steepness = problem.lam * smoothness
        if isinstance(steepness, Tensor):
            return (1.0 / steepness.clamp_min(1e-30)).clamp_max(min(self.longest, 1e30)).to(problem.scores.dtype)
        step = min(1.0 / steepness if steepness > 0 else math.inf, self.longest)
        return step if step < math.inf else None


def reference(regulariser: Regulariser) -> Tensor | None:
    """log r of the KL(q ‖ r) in a regulariser, None without one."""
    terms = regulariser.terms if isinstance(regulariser, Sum) else ((1.0, regulariser),)
    return next((term.log_reference for _, term in terms if isinstance(term, KL)), None)


def _is(start: Tensor | str, name: str) -> bool:
    return isinstance(start, str) and start == name


class _Climb:
    """One geometry's coordinates: log q for the entropic one, q for the Euclidean."""

    def __init__(self, problem: Problem, allowed: Tensor, geometry: Geometry, reads: bool) -> None:
        self.problem, self.allowed, self.entropic, self.reads = problem, allowed, geometry == "entropic", reads

    def place(self, q: Tensor) -> Tensor:
        return q.log() - log_total(q.log()) if self.entropic else q

    def distribution(self, place: Tensor) -> Tensor:
        return exp_(place.clone()) if self.entropic else place

    def move(self, place: Tensor, g: Tensor, step: float | Tensor) -> Tensor:
        raised = place + step * g
        if self.problem.constraints:
            return self._within(raised)
        if not self.entropic:
            return sparsemax(raised.masked_fill_(~self.allowed, -torch.inf))
        # −inf stays −inf: a forbidden token has a score of −inf, and −inf + (−inf) is no NaN. What all tokens share is
        # taken off first: added to the logarithm of their sum it would cost that its digits.
        raised = raised.sub_(raised.amax(-1, keepdim=True))
        return raised.sub_(total(exp_(raised.clone())).log_().to(raised.dtype))

    def _within(self, raised: Tensor) -> Tensor:
        """The place nearest to `raised`, in this geometry, that meets the constraints."""
        raised = torch.where(self.allowed, raised, -torch.inf)
        raised = raised - raised.amax(-1, keepdim=True)
        potential = NegEntropy() if self.entropic else HalfSquare()
        step = Problem(raised, potential, sound=True, constraints=self.problem.constraints)
        q = constrained_root(step, self.reads)
        # a token that underflows is not lost for good
        return q.clamp_min(tiny(q.dtype)).log().masked_fill(~self.allowed, -torch.inf) if self.entropic else q

    def gap(self, q: Tensor, g: Tensor) -> Tensor:
        """max <g, u − q> over all u there are to choose from, `[..., 1]`."""
        if self.problem.constraints:
            return linear_gap(self.problem.constraints, q, g, self.allowed, self.reads)
        best = g.masked_fill(~self.allowed, -torch.inf).amax(-1, keepdim=True)
        return torch.where(self.allowed, q * (best - g), 0.0).sum(-1, keepdim=True)

    def misses_best(self, place: Tensor, g: Tensor) -> Tensor:
        """Rows `[...]` whose best token has no mass and can never get any: a factor on 0 is 0."""
        best = g.masked_fill(~self.allowed, -torch.inf).argmax(-1, keepdim=True)
        return (place.gather(-1, best) == -torch.inf).squeeze(-1)

    def spread(self, new: Tensor, q_new: Tensor, old: Tensor, q: Tensor) -> Tensor:
        """D_ψ(q_new, q) + D_ψ(q, q_new), summed from non-negative terms."""
        mirrored = torch.where(self.allowed & (q_new > 0), new - old, 0.0) if self.entropic else q_new - q
        return ((q_new - q) * mirrored).sum(-1, keepdim=True)


def _backtrack(climb: _Climb, place: Tensor, q: Tensor, g: Tensor, trial: Tensor, reads: bool) -> tuple[Tensor, Tensor]:
    """The step halved, row by row, until it cannot have overshot; then doubled for next time.

    f is concave, so f(q⁺) − f(q) >= <g⁺, q⁺ − q>: the step is safe once <g − g⁺, q⁺ − q> is at most the
    distance gone over the step size. Gradients say this down to rounding error, while differences of f
    are lost in it at the square root of that.
    """
    # where the gradient is NaN no step will ever do, and to stay would pass for an answer
    accepted = g.isnan().logical_and_(climb.allowed).any(-1, keepdim=True)
    moved = place.masked_fill(accepted, torch.nan)
    for _ in range(HALVINGS if reads else 1):
        candidate = climb.move(place, g, trial)
        q_new = climb.distribution(candidate)
        turned = torch.where(climb.allowed, g - climb.problem.gradient(q_new), 0.0)
        bent = ((q_new - q) * turned).sum(-1, keepdim=True)
        good = ~accepted & (bent <= climb.spread(candidate, q_new, place, q) / (2 * trial))
        moved = torch.where(good, candidate, moved)
        accepted = accepted | good
        if reads and bool(accepted.all()):
            break
        trial = torch.where(accepted, trial, trial / 2)
    return moved, torch.where(accepted, 2 * trial, trial).clamp_max(1e12)


def _first_trial(problem: Problem) -> Tensor:
    lam = problem.lam
    first = torch.ones_like(problem.scores[..., :1])
    return first / (lam.clamp_min(1e-6) if isinstance(lam, Tensor) else max(lam, 1e-6))
