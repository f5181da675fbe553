"""Algorithm 1 of the paper without its loop over the vocabulary: the same iterates, one exponential per step.

J mirror steps from q_0 = r on  <q, s> − λ·[c·KL(q ‖ r) − Σ w(1 − (1−q)^K)]  unroll to

    log q_j = log r + C_j·s + λwK·S_j − L_j,    C_{j+1} = ρC_j + step,   S_{j+1} = ρS_j + step·(1−q_j)^{K−1},

ρ = 1 − step·λc and L_j the normaliser. Where q_j is too small to be felt in (1−q_j)^{K−1}, S_j = C_j is known
beforehand and no recursion is needed. The few tokens left over are the head.
"""

from typing import Any

import torch
from torch import Tensor

from simplexity.narrow import narrow_to
from simplexity.problem import Problem
from simplexity.rows import argmax, exp_, normalise_, plus, power, total


def coverage_ascent(problem: Problem, parts: Any, steps: int, step: float | Tensor) -> Tensor:
    """q_J `[..., V]` for scores with maximum 0 whose forbidden tokens are −inf, J >= 1 and 0 <= ρ <= 1.

    `parts` as `entropic_coverage` gives them. Reads values.
    """
    c, log_r, factor, cover = parts
    log_r = log_r.expand_as(problem.scores)
    x, k, w, rho = problem.scores, cover.k, cover.weights, 1.0 - step * problem.lam * c
    climb: float | Tensor = 0.0
    climbs = [climb] + [climb := rho * climb + step for _ in range(steps)]  # C_0 … C_J
    reward = problem.lam * factor * k
    drive = plus(w, reward, x) if isinstance(w, Tensor) else x + w * reward  # what a token outside the head climbs by
    best = argmax(x)
    anchor = log_r - log_r.gather(-1, best)
    if not bool((x.amin(-1) > -torch.inf).all()):
        anchor.masked_fill_(x == -torch.inf, -torch.inf)
    # The best token keeps log q_j + L_j >= 0 in these units, so that q_j <= exp(anchor + C_j·drive), at most
    # that of the first or the last step; S_j then differs from C_j by at most C_J·(K−1)·q.
    exponent = drive.clamp_min(0.0).mul_(climb).add_(anchor)
    kept = (exponent + 1e-3).relu_()  # all that may exceed the best token belong to the head
    ceiling = exp_(exponent.clamp_max_(0.0))
    bend = reward * climb * (k - 1.0)
    felt = kept.add_((ceiling * w).mul_(bend)).sub_(torch.finfo(x.dtype).eps).relu_().scatter_(-1, best, 1.0)
    columns = narrow_to(felt, anchor)
    head, x_head = columns.scores.double(), columns.take(x).double()
    reward_head = reward * (columns.take(w.expand_as(x)).double() if isinstance(w, Tensor) else w)
    columns.drop_(anchor, -torch.inf)
    covered, q = torch.zeros_like(head), torch.ones_like(head)
    rest, outside = exp_(ceiling.copy_(anchor)), torch.ones_like(head[..., :1])
    for j, climb in enumerate(climbs):
        y = head
        if j > 0:
            covered = rho * covered + step * power((1.0 - q).clamp_min_(0.0), k - 1)
            y = head + climb * x_head + reward_head * covered
            exp_(torch.addcmul(anchor, drive, _filled(climb, x), out=rest))
        # outside the head every log q_j + L_j is below 0, and inside it some are not
        peak = y.amax(-1, keepdim=True)
        q, scale = torch.exp(y - peak), torch.exp(-peak)
        mass = total(q) + total(rest) * scale
        q, outside = q / mass, scale / mass
    return normalise_(columns.add_(rest.mul_(outside.to(x.dtype)), q.to(x.dtype)))


def _filled(number: float | Tensor, like: Tensor) -> Tensor:
    return number if isinstance(number, Tensor) else like.new_tensor(number)
