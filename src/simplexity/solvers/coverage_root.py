"""The exact optimum of Best-of-K: KL to a reference plus coverage by K draws.

    max <q, s> − λ·[c·KL(q ‖ r) − Σ w(1 − (1−q)^K)]

Stationarity reads  log q = a − η + g·(1−q)^{K−1}  with a = s/λc + log r and g = wK/c. Only tokens that the
coverage term can move by more than rounding need the implicit equation (the head); for all others
q = exp(a + g − η), and they enter the search for η as a single number.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplexity.coverage import log_inverse
from simplexity.narrow import Inside, Narrowed, narrow_to
from simplexity.problem import Problem
from simplexity.rows import argmax, exp_, normalise_, plus, power, total

FEW = 4096  # columns on which the implicit equation costs less than telling who needs it
NEWTON_STEPS = 10
LEAST = -690.0  # e^-690 is still a normal number
TOLERANCES = {torch.float64: 2e-14, torch.float32: 1e-10}  # of log q and of the mass, by the dtype of the scores
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


def coverage_root(problem: Problem, parts: Any, reads: bool) -> Tensor | Inside:
    """q for scores whose forbidden tokens are −inf; `parts` as `entropic_coverage` gives them."""
    c, log_r, factor, cover = parts
    k, w, strength = cover.k, cover.weights, factor * cover.k / c  # g = strength·w
    a = plus(problem.scores, 1.0 / (problem.lam * c), log_r)
    # Coverage only adds, so η >= log Σ exp(a) >= max a, and q <= exp(a + g − max a). What lies so far below that
    # it weighs less than rounding all together only waits for η; the rest is solved on its own columns.
    risen = plus(w, strength, a) if isinstance(w, Tensor) else a + w * strength
    top = a.amax(-1, keepdim=True)
    if reads:
        felt = torch.as_tensor(
            strength * (k - 1.0) * (w.amax(-1, keepdim=True) if isinstance(w, Tensor) else w), dtype=a.dtype
        )
        cut = math.log(torch.finfo(a.dtype).eps / a.shape[-1]) - felt.clamp_min(1.0).log()
        columns = narrow_to((risen - (top + cut)).relu_().scatter_(-1, argmax(a), 1.0), a)
    else:
        columns = Narrowed(a)
    gain = (
        columns.take(w.expand_as(a)).double() if isinstance(w, Tensor) else torch.full_like(columns.scores, w).double()
    )
    eta, q_inside = _inside(columns.scores, gain * strength, k, reads)
    if columns.ids is None:
        return normalise_(q_inside.to(a.dtype))

    return Inside(q_inside.to(a.dtype), columns, a.shape[-1], lambda: risen - eta.to(a.dtype))


def _inside(a: Tensor, gain: Tensor, k: int | Tensor, reads: bool) -> tuple[Tensor, Tensor]:
    """(η, q `[..., n]`): the head by its implicit equation, the others as one number."""
    low = a.double().logsumexp(-1, keepdim=True)
    if not reads or a.shape[-1] <= FEW:
        head = Head(a.double(), gain, k, torch.zeros_like(low), low)
        return newton(head, TOLERANCES[a.dtype]) if reads else search(head, reads)
    exponent = a + gain - low
    # The implicit term differs from g by at most g(K−1)q: where that is below eps, log q does not feel it.
    ceiling = exp_(exponent.clamp_max(0.0))
    felt = (ceiling * gain).mul_(k - 1.0).sub_(torch.finfo(a.dtype).eps).relu_()
    felt = felt.add_(exponent.add_(1e-3).relu_()).scatter_(-1, argmax(ceiling), 1.0)  # never empty
    columns = narrow_to(felt, a)
    rest = columns.drop_(ceiling)
    head = Head(columns.scores.double(), columns.take(gain), k, total(rest), low)
    eta, q_head = newton(head, TOLERANCES[a.dtype])
    return eta, columns.add_(rest.mul_(torch.exp(low - eta)), q_head)


def newton(head: Head, tolerance: float = 2e-14) -> tuple[Tensor, Tensor]:
    """(η, q of the head) by Newton's method on η and log q together; by `search` in the rows where that fails.

    Linearised, log q moves by (r − δ)/D, r the residual of its equation and D its slope, and the mass by
    Σ qr/D − δ·Σ q/D: one division gives the step δ of η. Right from the start when coverage is weak; the
    residuals at the end, at most ten times the tolerance, tell whether it arrived.
    """
    a, gain, k, rest, low = head
    curve, eta = gain * (k - 1.0), head.high
    y = (a + gain - eta).clamp_(LEAST, 0.0)
    a = torch.maximum(a, eta - gain + LEAST)  # what weighs nothing must not hold up the rest
    off = eta
    for _ in range(NEWTON_STEPS):
        q = torch.exp(y)
        outside = rest * torch.exp(low - eta)
        short = (1.0 - q).clamp_min_(0.0)
        if isinstance(k, Tensor):
            lower, pull = power(short, (k - 2.0).clamp_min(0.0)), gain * power(short, k - 1.0)
        else:
            lower = power(short, max(k - 2, 0))
            pull = gain * lower * short if k > 1 else gain
        residual = a - eta + pull - y
        share = q / (1.0 + curve * lower * q)
        mass = q.sum(-1, keepdim=True) + outside - 1.0
        drift = (share * residual).sum(-1, keepdim=True)
        off = (residual / (1.0 - y)).abs_().amax(-1, keepdim=True) + mass.abs()
        if bool((off <= tolerance).all()):
            break
        delta = (mass + drift) / (share.sum(-1, keepdim=True) + outside)
        eta = eta + delta
        y = (y + (residual - delta) * (share / q)).clamp_(LEAST, 0.0)
    # where coverage adds more to log q than it may span, a token pinned at its least looks as if it had arrived
    lost = ~(off <= 10 * tolerance) | (gain.amax(-1, keepdim=True) > -LEAST / 2)
    if bool(lost.any()):
        safe_eta, safe_q = search(head, True)
        return torch.where(lost, safe_eta, eta), torch.where(lost, safe_q, torch.exp(y))
    return eta, torch.exp(y)


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
        lower = (k - 2).clamp_min(0) if isinstance(k, Tensor) else max(k - 2, 0)
        bend = gain * (k - 1.0) * q * power((1.0 - q).clamp_min_(0.0), lower)
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
