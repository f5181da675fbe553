"""Which problems the Triton kernels know: a table keyed by the regulariser and the support, as for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from simplexity.anchor import AnchorKL
from simplexity.problem import Problem
from simplexity.regularisers import HalfSquare, NegEntropy, Regulariser, Tsallis
from simplexity.supports import Everything, TopK, TopP


@dataclass(frozen=True, eq=False)
class Plan:
    """One family of problems for a whole batch: numbers, or tensors with one value a row."""

    kind: str
    lam: float | Tensor = 1.0
    tau: float | Tensor = 1.0  # top-p: the temperature of the cut
    p: float | Tensor = 1.0
    k: int | Tensor = 1

    def expand(self, rows: torch.Size) -> Plan:
        """The same with one value for each row, where it has tensors."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **{name: value.expand(*rows, 1).reshape(-1) for name, value in tensors.items()})


def plan_for(problem: Problem, solver: Any) -> Plan | None:
    """What the kernels need to know of the problem; None where they do not know it."""
    planner = PLANNERS.get((type(problem.regulariser), type(problem.support)))
    greedy = not isinstance(problem.lam, Tensor) and problem.lam == 0
    return None if planner is None or solver is not None or greedy else planner(problem)


def _softmax(problem: Problem) -> Plan:
    return Plan("softmax", lam=problem.lam)


def _top_k(problem: Problem) -> Plan:
    assert isinstance(problem.support, TopK)
    return Plan("top-k", lam=problem.lam, k=problem.support.k)


def _top_p(problem: Problem) -> Plan:
    assert isinstance(problem.support, TopP)
    return Plan("top-p", lam=problem.lam, tau=problem.support.temperature, p=problem.support.p)


def _sparse(problem: Problem) -> Plan | None:
    omega: Any = problem.regulariser
    alpha = 2.0 if isinstance(omega, HalfSquare) else omega.alpha
    # one λ = 0 among the rows would need a rule of its own
    if isinstance(problem.lam, Tensor) or isinstance(alpha, Tensor) or alpha not in (1.5, 2):
        return None
    return Plan("sparsemax" if alpha == 2 else "entmax", lam=problem.lam)


def _anchored(problem: Problem) -> Plan | None:
    omega = problem.regulariser
    assert isinstance(omega, AnchorKL)
    if omega.anchor.scores is not problem.scores or isinstance(problem.lam, Tensor):
        return None
    return Plan("softmax", lam=1.0 / (1.0 / problem.lam + 1.0 / omega.anchor.temperature))


PLANNERS: dict[tuple[type[Regulariser], type], Callable[[Problem], Plan | None]] = {
    (NegEntropy, Everything): _softmax,
    (NegEntropy, TopK): _top_k,
    (NegEntropy, TopP): _top_p,
    (HalfSquare, Everything): _sparse,
    (Tsallis, Everything): _sparse,
    (AnchorKL, Everything): _anchored,
}
