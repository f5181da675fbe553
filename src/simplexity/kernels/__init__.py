"""Fused draws: from scores to tokens without writing q.

A table keyed by the problem, the types of its regularisers and of its support, says which kernel knows it.
A problem that is not in the table, or a kernel that declines, takes the general path: solve, then draw.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from simplexity.anchor import AnchorCoverage, AnchorKL
from simplexity.kernels.cpu_coverage import draw_coverage
from simplexity.kernels.cpu_entropic import draw_entropic
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy, Sum
from simplexity.supports import Everything, TopK, TopP

Kernel = Callable[[Problem, Any, Tensor, Tensor], Tensor | None]
"""(problem, solver, block maxima of its scores, uniform numbers `[...]`) -> tokens `[...]`, or None: not this one."""

CPU: dict[tuple[tuple[type, ...], type], Kernel] = {
    ((NegEntropy,), Everything): draw_entropic,
    ((NegEntropy,), TopK): draw_entropic,
    ((NegEntropy,), TopP): draw_entropic,
    ((AnchorKL,), Everything): draw_entropic,
    ((AnchorKL, AnchorCoverage), Everything): draw_coverage,
}

SMALL = 1024  # vocabularies for which the general path is as fast


def draw_fused(problem: Problem, solver: Any, peaks: Tensor, u: Tensor) -> Tensor | None:
    """Tokens `[...]` of a problem on the CPU whose scores are known to be sound; None where no kernel serves."""
    if problem.scores.device.type != "cpu":
        return None
    omega = problem.regulariser
    terms = tuple(type(term) for _, term in omega.terms) if isinstance(omega, Sum) else (type(omega),)
    kernel = CPU.get((terms, type(problem.support)))
    if kernel is None or problem.scores.shape[-1] < SMALL or problem.scores.numel() == 0:
        return None
    return kernel(problem, solver, peaks, u)
