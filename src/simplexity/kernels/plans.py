"""Which problems the Triton kernels know: a table keyed by the regulariser and the support, as for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from simplexity.anchor import AnchorCoverage, AnchorKL
from simplexity.cuts import MinP
from simplexity.problem import Problem
from simplexity.regularisers import HalfSquare, NegEntropy, Regulariser, Sum, Tsallis
from simplexity.solvers import MirrorAscent
from simplexity.supports import Everything, TopK, TopP

RULES = ("probs", "top-m", "uniform")  # weights of Best-of-K that a kernel works out by itself
LARGEST_K = 2**20
UNFELT = 1e12  # a λ for which s/λ does not count beside s/τ


@dataclass(frozen=True, eq=False)
class Coverage:
    """What Best-of-K adds to a plan: the reward, and the ascent, or none for the optimum."""

    draws: int | Tensor  # K
    beta: float | Tensor
    rule: str
    steps: int | None = None
    pace: float | Tensor = 0.0  # the step; 0: 1, or the longest safe one if shorter


@dataclass(frozen=True, eq=False)
class Plan:
    """One family of problems for a whole batch: numbers, or tensors with one value a row."""

    kind: str
    lam: float | Tensor = 1.0
    tau: float | Tensor = 1.0  # top-p: the temperature of the cut; bok: of the anchor
    p: float | Tensor = 1.0
    k: int | Tensor = 1  # top-k: tokens kept; bok: tokens with weight 1
    coverage: Coverage | None = None
    other: Tensor | None = None  # kl: the other model's logits, `[..., V]`
    greedy: bool = False  # rows with λ = 0 are possible, whose best token is all there is

    def expand(self, rows: torch.Size) -> Plan:
        """The same with one value for each row, where it has tensors."""
        coverage = None if self.coverage is None else _expand(self.coverage, rows)
        other = None if self.other is None else self.other.expand(*rows, -1).reshape(-1, self.other.shape[-1])
        return replace(_expand(replace(self, other=None), rows), coverage=coverage, other=other)


def _expand(numbers: Any, rows: torch.Size) -> Any:
    tensors = {f.name: value for f in fields(numbers) if isinstance(value := getattr(numbers, f.name), Tensor)}
    return replace(numbers, **{name: value.expand(*rows, 1).reshape(-1) for name, value in tensors.items()})


def plan_for(problem: Problem, solver: Any) -> Plan | None:
    """What the kernels need to know of the problem; None where they do not know it."""
    planner = PLANNERS.get((type(problem.regulariser), type(problem.support)))
    greedy = not isinstance(problem.lam, Tensor) and problem.lam == 0
    return None if planner is None or greedy or problem.constraints else planner(problem, solver)


def _softmax(problem: Problem, solver: Any) -> Plan | None:
    return Plan("softmax", lam=problem.lam) if solver is None else None


def _top_k(problem: Problem, solver: Any) -> Plan | None:
    assert isinstance(problem.support, TopK)
    return Plan("top-k", lam=problem.lam, k=problem.support.k) if solver is None else None


def _top_p(problem: Problem, solver: Any) -> Plan | None:
    support = problem.support
    assert isinstance(support, TopP)
    return Plan("top-p", lam=problem.lam, tau=support.temperature, p=support.p) if solver is None else None


def _min_p(problem: Problem, solver: Any) -> Plan | None:
    support = problem.support
    assert isinstance(support, MinP)
    if solver is None and not isinstance(support.p, Tensor) and support.p == 0:
        return Plan("softmax", lam=problem.lam)
    return Plan("min-p", lam=problem.lam, tau=support.temperature, p=support.p) if solver is None else None


def _sparse(problem: Problem, solver: Any) -> Plan | None:
    omega: Any = problem.regulariser
    alpha = 2.0 if isinstance(omega, HalfSquare) else omega.alpha
    if solver is not None or isinstance(alpha, Tensor) or alpha not in (1.5, 2):
        return None
    return Plan("sparsemax" if alpha == 2 else "entmax", lam=problem.lam, greedy=isinstance(problem.lam, Tensor))


def _anchored(problem: Problem, solver: Any) -> Plan | None:
    """q ∝ exp(s·c + t/τ): c = 1/λ at the optimum, less after a few steps towards it."""
    omega, lam = problem.regulariser, problem.lam
    assert isinstance(omega, AnchorKL)
    tau, greedy = omega.anchor.temperature, isinstance(lam, Tensor) and solver is None
    climb = 1.0 / lam
    if solver is not None:
        if not _climbs(solver) or isinstance(solver.step, Tensor):
            return None
        climb = _climbed(lam, solver)
    if omega.anchor.scores is problem.scores:
        return Plan("softmax", lam=1.0 / (climb + 1.0 / tau), greedy=greedy)
    if not isinstance(climb, Tensor) and climb <= 0:
        return None
    return Plan("two models", lam=1.0 / climb, tau=tau, other=omega.anchor.scores, greedy=greedy)


def _climbed(lam: float | Tensor, solver: Any) -> float | Tensor:
    """(1 − (1 − step·λ)^J)/λ, step by step: as one formula it loses the digits of a small λ, and 0 has none."""
    step = solver.step
    if step is None:
        step = (1.0 / lam).clamp_max(solver.longest) if isinstance(lam, Tensor) else min(1.0 / lam, solver.longest)
    climb = 0.0 * lam
    for _ in range(solver.steps):
        climb = (1.0 - step * lam) * climb + step
    return climb


def _covering(problem: Problem, solver: Any) -> Plan | None:
    omega: Any = problem.regulariser
    if tuple(type(term) for _, term in omega.terms) == (NegEntropy, AnchorCoverage):
        return _covering_alone(problem, solver)
    if tuple(type(term) for _, term in omega.terms) != (AnchorKL, AnchorCoverage):
        return None
    (c, kl), (beta, cover) = omega.terms
    if c != 1 or cover.anchor is not kl.anchor or kl.anchor.scores is not problem.scores or cover.rule not in RULES:
        return None
    coverage = Coverage(cover.k, beta, cover.rule)
    if solver is not None:
        if not _climbs(solver) or solver.longest != 1:
            return None
        coverage = replace(coverage, steps=solver.steps, pace=0.0 if solver.step is None else solver.step)
    if not isinstance(cover.k, Tensor) and cover.k > LARGEST_K:
        return None
    greedy = isinstance(problem.lam, Tensor) and solver is None
    return Plan("bok", lam=problem.lam, tau=kl.anchor.temperature, k=cover.m, coverage=coverage, greedy=greedy)


def _covering_alone(problem: Problem, solver: Any) -> Plan | None:
    """τ·Σ q log q in place of an anchor: Best-of-K anchored at the same τ, whose <q, s>/λ is below rounding."""
    omega: Any = problem.regulariser
    (c, _), (beta, cover) = omega.terms
    tau, lam = cover.anchor.temperature, problem.lam
    same = tau is lam or (not isinstance(tau, Tensor) and not isinstance(lam, Tensor) and tau == lam)
    if c != 1 or solver is not None or not same or cover.anchor.scores is not problem.scores or cover.rule not in RULES:
        return None
    return Plan("bok", lam=UNFELT, tau=tau, k=cover.m, coverage=Coverage(cover.k, beta, cover.rule))


def _climbs(solver: Any) -> bool:
    """Whether this is a fixed number of entropic steps from the anchor."""
    usual = isinstance(solver, MirrorAscent) and solver.geometry == "entropic" and bool(solver.steps)
    return usual and isinstance(solver.start, str) and solver.start == "reference"


PLANNERS: dict[tuple[type[Regulariser], type], Callable[[Problem, Any], Plan | None]] = {
    (NegEntropy, Everything): _softmax,
    (NegEntropy, TopK): _top_k,
    (NegEntropy, TopP): _top_p,
    (NegEntropy, MinP): _min_p,
    (HalfSquare, Everything): _sparse,
    (Tsallis, Everything): _sparse,
    (AnchorKL, Everything): _anchored,
    (Sum, Everything): _covering,
}
