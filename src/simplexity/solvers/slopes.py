"""From slopes back to probabilities: the inverse of φ', token by token, that every dual root rests on."""

import math
from typing import Any

import torch
from torch import Tensor

from simplexity.regularisers import Regulariser
from simplexity.roots import find_root
from simplexity.rows import tiny
from simplexity.structure import entropic_power

NEWTON_STEPS = 7  # from a start within log z of the root, to rounding error


def at_slope(omega: Regulariser, slope: Tensor, reads: bool) -> Tensor:
    """q with φ'(q) = slope, token by token: by formula where Ω has one, by search where not.

    0 where the slope is below φ'(0); anything from 1 up where it is above φ'(1).
    """
    if (q := omega.inverse_grad(slope)) is not None:
        return q
    if (parts := entropic_power(omega)) is not None:
        return _by_omega(slope, *parts)
    return invert(omega, slope, reads)


def _by_omega(slope: Tensor, c: Any, log_r: Any, b: Any, alpha: float, d: float) -> Tensor:
    """q with  c·(log q + 1 − log r) + b·(q^{α−1}/(α−1) − d) = slope.

    With w = (b/c)·q^{α−1} that is  w + log w = z:  w is Wright's omega function of z (Corless and Jeffrey, 2002).
    """
    base = (slope + b * d) / c - 1.0 + log_r
    ratio = (b / c).to(slope).log() if isinstance(b / c, Tensor) else math.log(b / c)
    z = (alpha - 1.0) * base + ratio
    # Newton's method for e^y + y = z: convex, and started where the left side is too large, it never overshoots.
    z = z.clamp_min(-1e30)
    y = torch.minimum(z, z.clamp_min(1.0).log())
    for _ in range(NEWTON_STEPS):
        w = y.exp()
        y = y - (w + (y - z)) / (w + 1.0)
    # log q = (log w − log(b/c))/(α−1), written with the smaller of w and log w
    return torch.exp(torch.where(y < 0, base - y.exp() / (alpha - 1.0), (y - ratio) / (alpha - 1.0)))


def invert(omega: Regulariser, slope: Tensor, reads: bool) -> Tensor:
    """q in [0, 1] with φ'(q) = slope, token by token, by bracketing in log q: precise down to the smallest numbers."""
    low, high = torch.full_like(slope, math.log(tiny(slope.dtype))), torch.zeros_like(slope)
    q = torch.exp(find_root(lambda y: slope - omega.grad(torch.exp(y)), low, high, reads))
    return q.masked_fill(slope <= omega.grad(torch.exp(low)), 0.0).masked_fill_(slope == -torch.inf, 0.0)
