"""The exact optimum of Best-of-K: KL to a reference plus coverage by K draws.

    max <q, s> − λ·[c·KL(q ‖ r) − Σ w(1 − (1−q)^K)]

Stationarity reads  log q = a − η + g·(1−q)^{K−1}  with a = s/λc + log r and g = wK/c. Only tokens that the
coverage term can move by more than rounding need the implicit equation (the head); for all others
q = exp(a + g − η), so that they enter the search for η as a single number.
"""

import torch
from torch import Tensor

from simplexity.narrow import Narrowed, narrow_to
from simplexity.problem import Problem
from simplexity.regularisers import Coverage, log_inverse
from simplexity.roots import find_root
from simplexity.rows import log_total, total


def coverage_root(problem: Problem, c: float | Tensor, log_r: float | Tensor, cover: Coverage, reads: bool) -> Tensor:
    """q `[..., V]` for scores whose forbidden tokens are −inf."""
    k = cover.k
    a = problem.scores / (problem.lam * c) + log_r
    gain = cover.weights * (k / c)
    risen = a + gain
    # Coverage only adds, so η >= low and q <= ceiling. The implicit term differs from g by at most
    # g(K−1)q: where that is below eps, log q does not feel it, and q = ceiling·e^(low − η).
    low, high = log_total(a), log_total(risen)
    ceiling = torch.exp((risen - low).clamp_max_(0.0))
    if reads:
        felt = gain * (k - 1.0) * ceiling - torch.finfo(a.dtype).eps
        best = ceiling - 0.999 * ceiling.amax(-1, keepdim=True)  # a head is never empty
        head = narrow_to(torch.maximum(felt, best).relu_(), a)
    else:
        head = Narrowed(a)
    rest = head.drop(ceiling)
    rest_mass = total(rest)
    gain = head.take(gain.expand_as(a)).double() if isinstance(gain, Tensor) else gain
    columns, low, high = head.scores.double(), low.double(), high.double()  # few enough for float64

    def head_at(eta: Tensor) -> Tensor:
        return torch.exp(log_inverse(columns - eta, gain, k, reads))

    def excess(eta: Tensor) -> Tensor:
        return torch.log(total(head_at(eta)) + rest_mass * torch.exp(low - eta))

    eta = find_root(excess, low, torch.maximum(low, high), reads)
    q = rest * torch.exp(low - eta).to(a.dtype) + head.widen(head_at(eta).to(a.dtype), a.shape[-1])
    return q * total(q).reciprocal().to(q.dtype)
