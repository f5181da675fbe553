"""Algorithm 1 of the paper without its loop over the vocabulary: the same iterates, computed where they differ.

J mirror steps from q_0 = r on  <q, s> − λ·[c·KL(q ‖ r) − Σ w(1 − (1−q)^K)]  unroll to

    log q_j = log r + C_j·s + λwK·S_j − L_j,    C_{j+1} = ρC_j + step,   S_{j+1} = ρS_j + step·(1−q_j)^{K−1},

ρ = 1 − step·λc and L_j the normaliser. Tokens that all together weigh less than rounding after the first step need no
recursion: (1−q_j)^{K−1} is 1 there, S_j = C_j is known beforehand, and they only wait for the last L_J.
"""

import math
from typing import Any

import torch
from torch import Tensor

from simplexity.narrow import Inside, Narrowed, narrow_to
from simplexity.problem import Problem
from simplexity.rows import argmax, exp_, normalise_, plus, power, total

FEW = 4096  # columns on which float64 costs nothing


def coverage_ascent(problem: Problem, parts: Any, steps: int, step: float | Tensor) -> Tensor | Inside:
    """q_J for scores with maximum 0 whose forbidden tokens are −inf, J >= 1 and 0 <= ρ <= 1.

    `parts` as `entropic_coverage` gives them. Reads values.
    """
    c, log_r, factor, cover = parts
    x, k, w, rho = problem.scores, cover.k, cover.weights, 1.0 - step * problem.lam * c
    climb: float | Tensor = 0.0
    climbs = [climb] + [climb := rho * climb + step for _ in range(steps)]  # C_0 … C_J
    reward = problem.lam * factor * k
    anchor = log_r.expand_as(x)
    if not bool((x.amin(-1) > -torch.inf).all()):
        anchor = anchor.masked_fill(x == -torch.inf, -torch.inf)
    # In these units the token with the best reference has log q_j + L_j >= 0, so q_j is at most
    # exp(anchor − its anchor + C_j·(x − its x + λwK)).
    best = argmax(anchor)
    base, level = anchor.gather(-1, best), x.gather(-1, best)
    first_mass = total(exp_(anchor - base))
    most = w.amax(-1, keepdim=True) if isinstance(w, Tensor) else w
    columns = _weighing(anchor, x, climbs, base, level, reward * most, k)
    w_inside = columns.take(w.expand_as(x)) if isinstance(w, Tensor) else w
    q_inside, scale = _climb(
        columns.scores - base, columns.take(x) - level, reward * w_inside, climbs, rho, step, k, first_mass
    )
    if columns.ids is None:
        return normalise_(q_inside)

    def rest() -> Tensor:
        drive = plus(w, reward, x) if isinstance(w, Tensor) else x + w * reward
        return plus(drive.sub_(level), climb, anchor).add_(scale.log().to(x.dtype) - base)

    return Inside(q_inside, columns, x.shape[-1], rest)


def _weighing(
    anchor: Tensor, x: Tensor, climbs: list[Any], base: Tensor, level: Tensor, reward: float | Tensor, k: int | Tensor
) -> Narrowed:
    """The columns of `anchor` that weigh more than rounding after the first step, or may be felt before it."""
    rounding = math.log(torch.finfo(anchor.dtype).eps)
    # S_j differs from C_j by at most C_J·(K−1)·q, and log q by bend·q
    bend = torch.as_tensor(reward * climbs[-1] * (k - 1.0), dtype=anchor.dtype)
    felt = bend.clamp_min(1.0).log()
    # what C_J can add to C_1: nothing unless some score, with its reward, lies above that of the best reference
    ahead = (climbs[-1] - climbs[1]) * torch.relu(reward - level) + climbs[1] * reward
    cut = rounding - math.log(anchor.shape[-1]) - felt + base + climbs[1] * level - ahead
    kept = torch.maximum(plus(x, climbs[1], anchor).sub_(cut), anchor - (rounding - felt + base)).relu_()
    return narrow_to(kept, anchor) if 4 * int(kept.count_nonzero()) < kept.numel() else Narrowed(anchor)


def _climb(
    anchor: Tensor, x: Tensor, reward: Any, climbs: list[Any], rho: Any, step: Any, k: Any, mass: Tensor
) -> tuple[Tensor, Tensor]:
    """(q_J on these columns, e^−L_J): the recursion itself; `mass` is e^L_0, exp(anchor) summed over all columns."""
    dtype = x.dtype
    if x.shape[-1] <= FEW:
        anchor, x = anchor.double(), x.double()
    covered, q = torch.zeros_like(x), torch.exp(anchor).mul_(mass.reciprocal())
    scale = mass
    for climb in climbs[1:]:
        covered = covered * rho + power((1.0 - q).clamp_min_(0.0), k - 1) * step
        y = plus(x, climb, anchor) + reward * covered
        peak = y.amax(-1, keepdim=True)
        q = exp_(y.sub_(peak))
        mass = total(q)
        q, scale = q.mul_(mass.reciprocal().to(q.dtype)), torch.exp(-peak) / mass
    return q.to(dtype), scale
