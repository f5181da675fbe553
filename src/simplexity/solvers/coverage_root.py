"""The exact optimum of Best-of-K: KL to a reference plus coverage by K draws.

    max <q, s> − λ·[c·KL(q ‖ r) − Σ w(1 − (1−q)^K)]

Stationarity reads  log q = a − η + g·(1−q)^{K−1}  with a = s/λc + log r and g = wK/c. Only tokens that the
coverage term can move by more than rounding need the implicit equation (the head); for all others
q = exp(a + g − η), so that they enter the search for η as a single number.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplexity.coverage import log_inverse
from simplexity.narrow import Narrowed, narrow_to
from simplexity.problem import Problem
from simplexity.rows import argmax, exp_, log_total, normalise_, plus, power, total

SWEEPS = 60  # bisection alone would do with that many; Newton needs about five


class Head(NamedTuple):
    """What the search for η needs, in float64: `[..., n]` and `[..., 1]`."""

    a: Tensor
    gain: Tensor
    k: int | Tensor
    rest: Tensor  # the other tokens' mass at η = low
    low: Tensor  # log Σ exp(a) <= η

    @property
    def high(self) -> Tensor:
        """log Σ exp(a + g) >= η."""
        return torch.logaddexp((self.a + self.gain).logsumexp(-1, keepdim=True), self.rest.log() + self.low)


def coverage_root(problem: Problem, parts: Any, reads: bool) -> Tensor:
    """q `[..., V]` for scores whose forbidden tokens are −inf; `parts` as `entropic_coverage` gives them."""
    c, log_r, factor, cover = parts
    k, w, strength = cover.k, cover.weights, factor * cover.k / c  # g = strength·w
    a = plus(problem.scores, 1.0 / (problem.lam * c), log_r)
    # Coverage only adds, so η >= low and q <= ceiling. The implicit term differs from g by at most
    # g(K−1)q: where that is below eps, log q does not feel it, and q = ceiling·e^(low − η).
    low = log_total(a)
    exponent = (plus(w, strength, a) if isinstance(w, Tensor) else a + w * strength).sub_(low)
    if reads:
        kept = (exponent + 1e-3).relu_()  # what may exceed the ceiling of 1 belongs to the head
        ceiling = exp_(exponent.clamp_max_(0.0))
        felt = (ceiling * w).mul_(strength * (k - 1.0)).sub_(torch.finfo(a.dtype).eps).relu_()
        columns = narrow_to(felt.add_(kept).scatter_(-1, argmax(ceiling), 1.0), a)  # and a head is never empty
    else:
        ceiling = exp_(exponent.clamp_max_(0.0))
        columns = Narrowed(a)
    rest = columns.drop_(ceiling)
    gain = (
        columns.take(w.expand_as(a)).double() if isinstance(w, Tensor) else torch.full_like(columns.scores, w).double()
    )
    head = Head(columns.scores.double(), gain * strength, k, total(rest), low.double())
    eta, q_head = search(head, reads)
    q = rest.mul_(torch.exp(head.low - eta).to(a.dtype))
    return normalise_(columns.add_(q, q_head.to(a.dtype)))


def search(head: Head, reads: bool) -> tuple[Tensor, Tensor]:
    """(η, q of the head): Newton's method on log Σ q(η) = 0, with bisection wherever it leaves the bracket.

    From log q = a − η + g(1−q)^{K−1} follows d log q/dη = −1/D with D = 1 + g(K−1)q(1−q)^{K−2}, so the slope
    of log Σ q is −Σ(q/D)/Σq. A row that has arrived stays, whatever its neighbours still need.
    """
    a, gain, k, rest, low = head
    left, eta = low, torch.maximum(low, head.high)
    right = eta
    for _ in range(SWEEPS):
        q = torch.exp(log_inverse(a - eta, gain, k, reads))
        bend = (
            gain * (k - 1.0) * q * power((1.0 - q).clamp_min_(0.0), (k - 2) if isinstance(k, Tensor) else max(k - 2, 0))
        )
        outside = rest * torch.exp(low - eta)
        mass = q.sum(-1, keepdim=True) + outside
        error = mass.log()
        left, right = torch.where(error >= 0, eta, left), torch.where(error <= 0, eta, right)
        better = eta + error * mass / ((q / (1.0 + bend)).sum(-1, keepdim=True) + outside)
        better = torch.where((better >= left) & (better <= right), better, (left + right) / 2)
        moving = (error.abs() > 4e-15) & ((better - eta).abs() > 4e-16 * eta.abs())
        if reads and not bool(moving.any()):
            break
        eta = torch.where(moving, better, eta)
    return eta, torch.exp(log_inverse(a - eta, gain, k, reads))
