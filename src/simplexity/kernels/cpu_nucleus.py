"""Draws from nuclei: q ∝ exp(s/τ) on the smallest set of best tokens that holds p of the mass.

By trial, where numbers may be used freely: a token of the whole row lies in the nucleus if those before it hold less
than p. By the nucleus's edge, where a number has to give the same token everywhere: in plain Python where few tokens
are left, by sorting hundreds, and by `nucleus.py` for wide rows and for many at once.
"""

import math

import torch
from torch import Tensor

from simplexity.cuts import CUT
from simplexity.draw import GRAIN, ByNumber, LongRow, Pick, uniform
from simplexity.narrow import crowded
from simplexity.nucleus import prefix
from simplexity.rows import FLOORS, block_length, in_blocks, places, total
from simplexity.supports import TopP

FEW = 512  # tokens that a loop in Python handles faster than torch
HOT = 128  # blocks that hold them
MANY = 4096  # tokens that are sorted
STRIDE = 61  # of a sample that tells wide rows
LIKELY = 0.5  # p from which on a token of the whole row is tried
TRIES = 16
RARELY = 30.0  # times (1 − p)/V of the mass: tokens with less are seldom needed


def draw_nuclei(scores: Tensor, peaks: Tensor, support: TopP, tau: float, pick: Pick) -> Tensor:
    """Tokens `[...]`: of one row, and of wide ones among many, each by itself; of what is left together."""
    if not isinstance(pick, ByNumber) or isinstance(support.p, Tensor):
        return _together(scores, peaks, support, pick)
    tried = not pick.seeded and support.p >= LIKELY
    if scores.numel() > scores.shape[-1]:
        return _draw_many(scores, peaks, support, tau, pick) if tried else _together(scores, peaks, support, pick)
    row, tops, u, token = scores.reshape(-1), peaks.view(-1), float(pick.u), None
    if tried:
        token, u = _by_trial(row, float(tops.amax()), support.p, tau, u)
    if token is None:
        token = _by_edge(row, tops, support.p, tau, u)
    if token is None:
        return _together(scores, peaks, support, ByNumber(torch.full_like(pick.u, u)))
    return torch.full(pick.u.shape, token, device=pick.u.device)


def _draw_many(scores: Tensor, peaks: Tensor, support: TopP, tau: float, pick: ByNumber) -> Tensor:
    rows, best = scores.reshape(-1, scores.shape[-1]), peaks.amax(-1).flatten()
    # those that seem to have more than a few tokens above the floor, told from a sample
    wide = (rows[:, ::STRIDE] > (best + tau * math.log(CUT)).unsqueeze(-1)).sum(-1) * STRIDE > FEW
    alone = wide.nonzero().view(-1).tolist()
    if not alone:
        return _together(scores, peaks, support, pick)
    tokens, numbers, p = [-1] * len(rows), pick.u.flatten().tolist(), float(support.p)
    for i, top in zip(alone, best[wide].tolist(), strict=True):
        token, numbers[i] = _by_trial(rows[i], top, p, tau, numbers[i])
        tokens[i] = -1 if token is None else token
    drawn, left = torch.tensor(tokens), [i for i, token in enumerate(tokens) if token < 0]
    if left:
        own = ByNumber(torch.tensor([numbers[i] for i in left], dtype=torch.float64))
        drawn[left] = _together(rows[left], peaks.view(len(rows), -1)[left], support, own)
    return drawn.view(pick.u.shape)


def _together(scores: Tensor, peaks: Tensor, support: TopP, pick: Pick) -> Tensor:
    columns, masses = support.nucleus(scores, peaks)  # the exponentials that tell the cut are those to draw from
    return columns.tokens(pick(masses))


def _by_trial(scores: Tensor, best: float, p: float, tau: float, u: float) -> tuple[int | None, float]:
    """(A token of a row `[V]` drawn from all, and again until it lies in the nucleus, or None; the u to go on with).

    A token is in the nucleus if those before it hold less than p of the mass: one sum, and its edge need not be known.
    Every number after the first is made of that one's bits.
    """
    e = _masses(scores, best, tau)
    row, bits = LongRow(e), int(u / GRAIN)
    for n in range(1, TRIES + 1):
        token = row.place(u)
        if _kept(scores, e, token, p * row.mass):
            return token, u
        u = float(uniform(torch.tensor(bits), n))
    return None, u


def _kept(scores: Tensor, e: Tensor, token: int, needed: float) -> bool:
    """Whether the tokens before this one, the best first and of equals the lowest id, hold less than is needed."""
    own = float(e[token])
    held = float(torch.threshold(e, own * (1 - 2.0**-22), 0.0).sum())  # with those that are as good
    if held <= needed:
        return float(scores[token]) > -math.inf  # which weighs as much as the least number here
    better = float(torch.threshold(e, own, 0.0).sum())
    left = needed - better
    if left <= 0:
        return False
    if held - better < 1.5 * own:  # it has no equals
        return True
    equals = (e == own).nonzero().view(-1)
    if bool((scores[equals] == scores[token]).all()):
        return int((equals < token).sum()) * own < left
    kept = prefix(e[equals], e.new_full((1,), left, dtype=torch.float64), scores[equals])
    return bool(kept[equals == token])


def _by_edge(scores: Tensor, peaks: Tensor, p: float, tau: float, u: float) -> int | None:
    """The token of one row by its number u in [0, 1); None where too many are left."""
    best = float(peaks.amax())
    floor = min(best + tau * math.log(CUT), math.nextafter(best, -math.inf))
    hot = (peaks > floor).nonzero().view(-1)
    if len(hot) > HOT and crowded(scores, floor):
        return None
    e = _masses(scores, best, tau)
    mass = float(total(e))
    token = _by_lists(scores, hot, floor, best, tau, p * mass, u) if len(hot) <= HOT else None
    return _by_sorting(scores, e, mass, p, u) if token is None else token


def _masses(scores: Tensor, best: float, tau: float) -> Tensor:
    """exp((s − max s)/τ), those too small for a normal number as the least one."""
    return torch.sub(scores, best).mul_(1.0 / tau).clamp_min_(FLOORS[scores.dtype][0]).exp_()


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
