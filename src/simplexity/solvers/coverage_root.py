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
from simplexity.roots import find_root
from simplexity.rows import argmax, exp_, log_total, normalise_, plus, power, total

NEWTON_STEPS = 12


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
    ceiling = exp_((plus(w, strength, a) if isinstance(w, Tensor) else a + w * strength).sub_(low).clamp_max_(0.0))
    if reads:
        felt = (ceiling * w).mul_(strength * (k - 1.0)).sub_(torch.finfo(a.dtype).eps).relu_()
        columns = narrow_to(felt.scatter_(-1, argmax(ceiling), 1.0), a)  # a head is never empty
    else:
        columns = Narrowed(a)
    rest = columns.drop_(ceiling)
    gain = (
        columns.take(w.expand_as(a)).double() if isinstance(w, Tensor) else torch.full_like(columns.scores, w).double()
    )
    head = Head(columns.scores.double(), gain * strength, k, total(rest), low.double())
    eta, q_head = newton(head) if reads else bracketed(head, reads)
    q = rest.mul_(torch.exp(head.low - eta).to(a.dtype))
    return normalise_(columns.add_(q, q_head.to(a.dtype)))


def newton(head: Head) -> tuple[Tensor, Tensor]:
    """(η, q of the head) by Newton's method on η and log q together; bracketed in the rows where that fails.

    Linearised, log q moves by (r − δ)/D, r the residual of its equation and D its slope, and the mass by
    Σ qr/D − δ·Σ q/D: one division gives the step δ of η. Quadratic, and right from the start when
    coverage is weak; the residuals at the end tell whether it arrived.
    """
    a, gain, k, rest, low = head
    eta = head.high
    y = (a + gain - eta).clamp_(-1e9, 0.0)
    off = torch.zeros_like(eta)
    for _ in range(NEWTON_STEPS):
        q = torch.exp(y)
        outside = rest * torch.exp(low - eta)
        short = (1.0 - q).clamp_min_(0.0)
        pull = gain * power(short, k - 1)
        residual = (a - eta).clamp_min_(-1e9) + pull - y
        slope = 1.0 + (k - 1.0) * q * torch.where(short > 0, pull / short, 0.0)
        share = q / slope
        mass = q.sum(-1, keepdim=True) + outside
        off = torch.maximum((q * residual.abs()).amax(-1, keepdim=True), (mass - 1.0).abs())
        if bool((off <= 1e-14).all()):
            break
        delta = (mass - 1.0 + (share * residual).sum(-1, keepdim=True)) / (share.sum(-1, keepdim=True) + outside)
        eta = eta + delta
        y = (y + (residual - delta) / slope).clamp_(-1e9, 0.0)
    lost = ~(off <= 1e-13)
    if bool(lost.any()):
        safe_eta, safe_q = bracketed(head, True)
        return torch.where(lost, safe_eta, eta), torch.where(lost, safe_q, torch.exp(y))
    return eta, torch.exp(y)


def bracketed(head: Head, reads: bool) -> tuple[Tensor, Tensor]:
    """(η, q of the head) by the root of the mass between its bounds, each token solved anew at every η."""

    def at(eta: Tensor) -> Tensor:
        return torch.exp(log_inverse(head.a - eta, head.gain, head.k, reads))

    def excess(eta: Tensor) -> Tensor:
        return torch.log(total(at(eta)) + head.rest * torch.exp(head.low - eta))

    eta = find_root(excess, head.low, torch.maximum(head.low, head.high), reads)
    return eta, at(eta)
