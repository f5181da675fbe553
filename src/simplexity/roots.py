"""The root of a decreasing function, one per row, by bracketing that cannot fail."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

KAPPA = 0.2  # how far an estimate is pushed towards the midpoint, relative to the first bracket


def find_root(
    f: Callable[[Tensor], Tensor],
    low: Tensor,
    high: Tensor,
    reads: bool = True,
    before: bool = False,
    eps: float | None = None,
) -> Tensor:
    """x with f(x) = 0 for a decreasing f, f(low) >= 0 >= f(high), for every entry of low and high.

    The ITP method (Oliveira and Takahashi, ACM TOMS 47(1), 2020): interpolation that is superlinear
    on smooth functions and never needs more than one sweep over what bisection needs. An entry
    whose bracket is down to rounding error stays as it is, so its value does not depend on its
    neighbours. `reads=False` runs the worst-case number of sweeps and never looks at a value. `before`
    gives the end of the bracket where f >= 0: at a jump of f, the side before it. `eps`, rounding error by default, is
    what a bracket may measure relative to its ends: a coarser one saves the sweeps that only chase the noise of f.

    >>> find_root(lambda x: 2 - x * x, torch.tensor([0.0]), torch.tensor([2.0]))
    tensor([1.4142])
    """
    eps = torch.finfo(low.dtype).eps if eps is None else eps
    scale = torch.maximum(low.abs(), high.abs()).clamp_min(torch.finfo(low.dtype).tiny)
    tolerance = 2 * eps * scale
    width = (high - low).clamp_min(tolerance)
    # width <= 2·scale, so bisection needs at most −log2(eps) halvings; ITP allows itself one more
    sweeps = 1 - round(math.log2(eps))
    halvings = torch.log2(width / (2 * tolerance)).ceil_().clamp_min_(0)
    f_low, f_high = f(low), f(high)
    for j in range(sweeps):
        middle, half = (low + high) / 2, (high - low) / 2
        open_ = half > tolerance
        if reads and not bool(open_.any()):
            break
        secant = _secant(low, high, f_low, f_high)
        away = torch.sign(middle - secant)
        # at least the tolerance: an estimate right to rounding error must land beyond the root to close the bracket
        truncation = (KAPPA / width * (2 * half).square()).clamp_min(tolerance)
        truncated = torch.where(truncation <= (middle - secant).abs(), secant + away * truncation, middle)
        reach = tolerance * torch.exp2(halvings + 1 - j) - half
        point = torch.where((truncated - middle).abs() <= reach, truncated, middle - away * reach.clamp_min(0))
        value = f(point)
        up, down = open_ & (value >= 0), open_ & (value <= 0)
        low, f_low = torch.where(up, point, low), torch.where(up, value, f_low)
        high, f_high = torch.where(down, point, high), torch.where(down, value, f_high)
    return low if before else _secant(low, high, f_low, f_high)


def _secant(low: Tensor, high: Tensor, f_low: Tensor, f_high: Tensor) -> Tensor:
    """Where the chord crosses zero; the middle where there is none."""
    middle = (low + high) / 2
    secant = low + (high - low) * (f_low / (f_low - f_high))
    return torch.where(secant.isfinite(), secant, middle).clamp(low, high)


def find_root_below(
    f: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, unit: Tensor, reads: bool, eps: float
) -> Tensor:
    """The root of a decreasing f in [low, high], precise relative to its distance from `high`, not to the bracket.

    For brackets whose lower end may lie absurdly far away. `unit`: a length in which x matters, for a root at `high`.
    """
    nearest = (1e-17 * (high.abs() + unit)).clamp_min_(torch.finfo(low.dtype).tiny)
    farthest = torch.maximum(high - low, nearest).clamp_max_(1e300)
    # decreasing in minus the logarithm of the distance too
    root = find_root(lambda y: f(high - torch.exp(-y)), -farthest.log(), -nearest.log(), reads, eps=eps)
    return high - torch.exp(-root)
