"""Draws from q ∝ exp(a·s) on a support: softmax, top-k, top-p, and a KL anchor to the model itself.

Nothing is normalised: an inverse CDF works with exp(a·(s − max s)) as it is.
"""

from typing import Any

import torch
from torch import Tensor

from simplexity.anchor import AnchorKL
from simplexity.draw import Pick
from simplexity.kernels.cpu_nucleus import draw_nuclei
from simplexity.problem import Problem
from simplexity.regularisers import Sum
from simplexity.rows import exp_
from simplexity.supports import TopP


def draw_entropic(problem: Problem, solver: Any, peaks: Tensor, pick: Pick) -> Tensor | None:
    """Tokens `[...]`; see `Kernel`."""
    omega, lam = problem.regulariser, problem.lam
    if solver is not None or isinstance(lam, Tensor) or lam == 0 or isinstance(omega, Sum):
        return None
    if isinstance(omega, AnchorKL):
        if omega.anchor.scores is not problem.scores or isinstance(omega.anchor.temperature, Tensor):
            return None
        lam = 1.0 / (1.0 / lam + 1.0 / omega.anchor.temperature)
    support = problem.support
    if isinstance(support, TopP) and _is(support.temperature, lam) and not _is(support.p, 1.0):
        return draw_nuclei(problem.scores, peaks, support, lam, pick)
    support.check(problem.scores)
    columns = support.narrow(problem.scores, peaks)
    e = exp_(torch.sub(columns.scores, peaks.amax(-1, keepdim=True)).mul_(1.0 / lam))
    return columns.tokens(pick(e))


def _is(value: float | Tensor, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number
