"""Draws from q ∝ exp(a·s) on a support: softmax, top-k, top-p, and a KL anchor to the model itself.

Nothing is normalised: an inverse CDF works with exp(a·(s − max s)) as it is.
"""

import math
from typing import Any

import torch
from torch import Tensor

from simplexity.anchor import AnchorKL
from simplexity.cuts import CUT
from simplexity.draw import ByNumber, Pick
from simplexity.problem import Problem
from simplexity.regularisers import Sum
from simplexity.rows import FLOORS, block_length, exp_, in_blocks, total
from simplexity.supports import TopP

FEW = 512  # tokens that a loop in Python handles faster than torch


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
        one = problem.scores.numel() == problem.scores.shape[-1]
        if one and isinstance(pick, ByNumber) and not isinstance(support.p, Tensor):
            token = draw_one_nucleus(problem.scores.view(-1), peaks.view(-1), support.p, lam, pick.u)
            if token is not None:
                return token
        # the exponentials that tell the cut are those to draw from
        columns, masses = support.nucleus(problem.scores, peaks)
        return columns.tokens(pick(masses))
    support.check(problem.scores)
    columns = support.narrow(problem.scores, peaks)
    e = exp_(torch.sub(columns.scores, peaks.amax(-1, keepdim=True)).mul_(1.0 / lam))
    return columns.tokens(pick(e))


def draw_one_nucleus(scores: Tensor, peaks: Tensor, p: float, tau: float, u: Tensor) -> Tensor | None:
    """The token `[...]` of one row; None where too many are left for plain Python.

    The few numbers above the cut leave torch: what takes a tensor operation microseconds takes a list nanoseconds.
    """
    best = float(peaks.amax())
    floor = min(best + tau * math.log(CUT), math.nextafter(best, -math.inf))
    hot = (peaks > floor).nonzero().view(-1)
    length = block_length(len(scores))
    if len(hot) > FEW // 4:
        return None
    inside = in_blocks(scores, fill=-math.inf).index_select(0, hot).view(-1)
    places = (inside > floor).nonzero().view(-1)
    if len(places) > FEW:
        return None
    e = torch.sub(scores, best).mul_(1.0 / tau).clamp_min_(FLOORS[scores.dtype][0]).exp_()
    needed = p * float(total(e))
    values = inside.index_select(0, places).tolist()
    weights = [math.exp((value - best) / tau) for value in values]
    mass, kept = 0.0, []
    for i in sorted(range(len(values)), key=values.__getitem__, reverse=True):  # stable: of equals the lowest id first
        if mass >= needed:
            break
        kept.append(i)
        mass += weights[i]
    if mass < needed:
        return None
    left, chosen = float(u) * mass, max(kept)  # the last one, should rounding leave anything
    for i in sorted(kept):
        left -= weights[i]
        if left < 0:
            chosen = i
            break
    block, offset = divmod(places.tolist()[chosen], length)
    return torch.full(u.shape, hot.tolist()[block] * length + offset, device=u.device)


def _is(value: float | Tensor, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number
