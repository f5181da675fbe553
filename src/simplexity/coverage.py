"""The scalar function behind K-sample coverage, q -> 1 − (1−q)^K: its curvature, and its inverse beside an entropy."""

import math
from typing import Literal

import torch
from torch import Tensor

from simplexity.rows import power

NEWTON_STEPS = 32  # about log(gain·K) and five more: enough for gains up to 1e9

Geometry = Literal["entropic", "euclidean"]


def curvature(k: int | Tensor, geometry: Geometry = "entropic") -> float | Tensor:
    """The largest curvature of −(1 − (1−q)^K) relative to the geometry's potential.

    φ'' = K(K−1)(1−q)^{K−2}. Against 1/q, q·φ'' peaks at q = 1/(K−1): κ = K·((K−2)/(K−1))^{K−2}.

    >>> curvature(2), round(curvature(8), 2)
    (2.0, 3.17)
    """
    if geometry == "euclidean":
        return k * (k - 1.0)
    if isinstance(k, Tensor):
        n = k.double()
        return torch.where(n > 2, n * ((n - 2) / (n - 1).clamp_min(1)).pow(n - 2), torch.where(n > 1, 2.0, 0.0))
    return float(k * ((k - 2) / (k - 1)) ** (k - 2)) if k > 2 else (2.0 if k == 2 else 0.0)


def log_inverse(t: Tensor, gain: float | Tensor, k: int | Tensor, reads: bool = False) -> Tensor:
    """y = log q with  y − gain·(1 − e^y)^{K−1} = t,  for t below 0 (q reaches 1 at t = 0).

    Newton's method from the point of inflection, q = 1/(K−1), moved into the bracket
    [t, min(0, t + gain)] that must hold y. Left of the inflection the function is convex and the
    start lies above the root; right of it, concave and below: either way each step stops short of
    the root and none can overshoot, so no safeguard is needed. Far from the root a step
    gains a factor e, near it it doubles the digits; `reads` allows to stop when all tokens have arrived.
    """
    t = t.clamp(-1e9, 0.0)  # e^−1e9 is zero, and unlike −inf it can be subtracted from itself
    above = (t + gain).clamp_max(0.0)
    if isinstance(k, Tensor):
        y = torch.maximum(-torch.log(k - 1.0).to(t.dtype).expand_as(t), t)
    else:
        y = t.clamp_min(-math.log(k - 1.0)) if k > 1 else above
    y = torch.minimum(y, above)
    for _ in range(NEWTON_STEPS):
        q = torch.exp(y)
        short = (1.0 - q).clamp_min(0.0)
        lower = (k - 2).clamp_min(0) if isinstance(k, Tensor) else max(k - 2, 0)  # at K = 1 its factor is 0
        slope = power(short, lower)
        residual = y - gain * power(short, k - 1) - t
        better = y - residual / (1.0 + gain * (k - 1.0) * slope * q)
        better = torch.minimum(torch.maximum(better, t), above)
        arrived = reads and bool(((better - y).abs() <= 1e-11 * (1.0 - y)).all())  # Newton doubles the digits
        y = better
        if arrived:
            break
    return y
