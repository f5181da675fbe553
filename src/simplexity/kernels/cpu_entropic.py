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
from simplexity.narrow import crowded
from simplexity.problem import Problem
from simplexity.regularisers import Sum
from simplexity.rows import FLOORS, block_length, exp_, in_blocks, places, total
from simplexity.supports import TopP

FEW = 512  # tokens that a loop in Python handles faster than torch
HOT = 128  # blocks that hold them
MANY = 4096  # tokens that are sorted
RARELY = 30.0  # times (1 − p)/V of the mass: tokens with less are seldom needed


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
    """The token `[...]` of one row; None where too many are left."""
    best = float(peaks.amax())
    floor = min(best + tau * math.log(CUT), math.nextafter(best, -math.inf))
    hot = (peaks > floor).nonzero().view(-1)
    if len(hot) > HOT and crowded(scores, floor):
        return None
    e = torch.sub(scores, best).mul_(1.0 / tau).clamp_min_(FLOORS[scores.dtype][0]).exp_()
    mass, number = float(total(e)), float(u)
    token = _by_lists(scores, hot, floor, best, tau, p * mass, number) if len(hot) <= HOT else None
    token = _by_sorting(scores, e, mass, p, number) if token is None else token
    return None if token is None else torch.full(u.shape, token, device=u.device)


def _by_lists(
    scores: Tensor, hot: Tensor, floor: float, best: float, tau: float, needed: float, u: float
) -> int | None:
    """The token drawn from those above `floor`, in the `hot` blocks; None where they are many or hold too little.

    The few numbers above a cut leave torch: what takes a tensor operation microseconds takes a list nanoseconds.
    """
    inside = in_blocks(scores, fill=-math.inf).index_select(0, hot).view(-1)
    found = (inside > floor).nonzero().view(-1)
    if len(found) > FEW:
        return None
    values = inside.index_select(0, found).tolist()
    weights = [math.exp((value - best) / tau) for value in values]
    mass, kept = 0.0, []
    for i in sorted(range(len(values)), key=values.__getitem__, reverse=True):  # stable: of equals the lowest id first
        if mass >= needed:
            break
        kept.append(i)
        mass += weights[i]
    if mass < needed:
        return None
    left, chosen = u * mass, max(kept)  # the last one, should rounding leave anything
    for i in sorted(kept):
        left -= weights[i]
        if left < 0:
            chosen = i
            break
    block, offset = divmod(found.tolist()[chosen], block_length(len(scores)))
    return hot.tolist()[block] * block_length(len(scores)) + offset


def _by_sorting(scores: Tensor, e: Tensor, mass: float, p: float, u: float) -> int | None:
    """The token drawn from a nucleus of some hundreds, whose masses are e `[V]`; None where it has more."""
    floor = (mass - p * mass) * RARELY / len(e)
    if floor <= 0:
        return None
    above = torch.gt(e, floor, out=torch.empty_like(e))  # as numbers first: faster than a mask at once
    ids = places(in_blocks(above).view(-1).bool())
    if len(ids) > MANY:
        return None
    masses = e.index_select(0, ids)
    order = scores.index_select(0, ids).sort(descending=True, stable=True).indices
    ends = masses.index_select(0, order).cumsum(0, dtype=torch.float64)
    count = int(torch.searchsorted(ends, p * mass)) + 1
    if count > len(ids):
        return None
    kept = order[:count].sort().values
    ends = masses.index_select(0, kept).cumsum(0, dtype=torch.float64)
    place = min(int(torch.searchsorted(ends, u * float(ends[-1]), right=True)), count - 1)
    return int(ids[kept[place]])


def _is(value: float | Tensor, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number
