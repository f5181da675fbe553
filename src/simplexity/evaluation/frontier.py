"""Families of settings compared: the frontier of pass@1 and pass@k, and a softmax at a matched temperature.

A family is one decoder at several settings of its own knob, each a point (x, y) = (pass@1, pass@k). Its frontier is

    f(x)  =  the most pass@k that the family reaches with a pass@1 of at least x

the piecewise linear curve through the points that no other point of the family equals or beats in both, level to the
left of them: choosing one of two neighbouring settings at random for each question reaches every point between them.
With l the larger of two families' lowest x and h the smaller of their highest,

    area(a, b)  =  1/(h − l) · ∫_l^h (f_a(x) − f_b(x)) dx,        f_a(h) − f_b(h) where l >= h

is the mean height of a above b: how much more pass@k the one family has at equal pass@1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from simplexity.evaluation.intervals import RESAMPLES, Interval, PerQuestion, cut, resampled_means, same_questions

Setting = tuple[PerQuestion, PerQuestion]  # pass@1 and pass@k of one setting


def frontier(points: Tensor) -> Tensor:
    """The points on the frontier, `[points, 2] -> [kept, 2]`, by rising pass@1 and falling pass@k.

    >>> frontier(torch.tensor([[0.5, 0.75], [0.25, 0.5], [0.25, 1.0], [0.375, 0.75]])).tolist()
    [[0.25, 1.0], [0.5, 0.75]]
    """
    curve = _curve(_checked(points))
    new = torch.ones(len(curve), dtype=torch.bool)
    new[1:] = (curve[1:] != curve[:-1]).any(-1)
    return curve[new]


def area_between(a: Tensor, b: Tensor) -> float:
    """The mean height of the frontier of a above that of b, both `[points, 2]`.

    >>> area_between(torch.tensor([[0.25, 1.0], [0.75, 0.5]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    0.25
    """
    return _area(_checked(a), _checked(b)).item()


def area_interval(
    a: Sequence[Setting],
    b: Sequence[Setting],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """`area_between` two families on the same questions with its paired bootstrap interval.

    Each resample draws the questions once for all settings of both families, then recomputes every point, both
    frontiers, the range they share and the area. The frontier of noisy points lies a little too high, the more so the
    more settings there are: give both families about as many.

    >>> ids, one = tuple("abcd"), torch.ones(4)
    >>> def setting(x, y):
    ...     return PerQuestion(ids, x * one), PerQuestion(ids, y * one)
    >>> print(area_interval([setting(0.25, 1.0), setting(0.75, 0.5)], [setting(0.5, 0.5)]))
    0.250 [0.250, 0.250]
    """
    both = [values for setting in (*a, *b) for values in setting]
    if not a or not b:
        raise ValueError("a family needs at least one setting")
    count = len(same_questions(*both))
    values = torch.stack([part.values.double() for part in both])

    def areas(means: Tensor) -> Tensor:
        points = means.unflatten(-1, (-1, 2))
        return _area(points[..., : len(a), :], points[..., len(a) :, :])

    return cut(areas(values.mean(-1)).item(), areas(resampled_means(values, resamples, seed)), count, level)


def matched(points: Mapping[float, PerQuestion], effective_temperature: float) -> PerQuestion:
    """The values that a softmax at `effective_temperature` would have, read off a sweep of its temperature.

    Linear in log temperature between the two neighbours; a ValueError outside the sweep.

    >>> ids = ("a", "b")
    >>> sweep = {0.25: PerQuestion(ids, torch.tensor([0.0, 1.0])), 1.0: PerQuestion(ids, torch.tensor([1.0, 0.5]))}
    >>> matched(sweep, 0.5).values.tolist()
    [0.5, 0.75]
    """
    if not points:
        raise ValueError("the sweep has no temperatures")
    temperatures = sorted(points)
    if not 0 < temperatures[0] <= temperatures[-1] < math.inf:
        raise ValueError(f"the temperatures of the sweep must be positive and finite: {temperatures}")
    questions = same_questions(*points.values())
    if not temperatures[0] <= effective_temperature <= temperatures[-1]:
        raise ValueError(
            f"temperature {effective_temperature} lies outside the sweep, {temperatures[0]} to {temperatures[-1]}"
        )
    low = max(t for t in temperatures if t <= effective_temperature)
    high = min(t for t in temperatures if t >= effective_temperature)
    share = 0.0 if low == high else math.log(effective_temperature / low) / math.log(high / low)
    return PerQuestion(questions, points[low].values.double().lerp(points[high].values.double(), share))


def _checked(points: Tensor) -> Tensor:
    if points.ndim != 2 or points.shape[0] == 0 or points.shape[1] != 2 or not points.isfinite().all():
        raise ValueError(f"points must be finite and of shape [points, 2], not {tuple(points.shape)}")
    return points.double()


def _curve(points: Tensor) -> Tensor:
    """The frontier with as many points as the family has, `[..., points, 2]`, by rising x.

    A point that is beaten becomes the next one on the frontier, so that a batch keeps one shape.
    """
    x, y = points[..., 0], points[..., 1]
    order = y.argsort(dim=-1, stable=True)
    order = order.gather(-1, x.gather(-1, order).argsort(dim=-1, stable=True))
    x, y = x.gather(-1, order), y.gather(-1, order)
    best = y.flip(-1).cummax(-1).values.flip(-1)  # of this point and all to its right
    count = x.shape[-1]
    kept = torch.ones_like(x, dtype=torch.bool)
    kept[..., :-1] = y[..., :-1] > best[..., 1:]
    index = torch.where(kept, torch.arange(count), count)
    following = index.flip(-1).cummin(-1).values.flip(-1)
    return torch.stack([x.gather(-1, following), y.gather(-1, following)], -1)


def _area(a: Tensor, b: Tensor) -> Tensor:
    """The mean height of the frontier of a above that of b, `[..., points, 2] -> [...]`."""
    high = torch.minimum(a[..., 0].amax(-1), b[..., 0].amax(-1)).unsqueeze(-1)
    low = torch.maximum(a[..., 0].amin(-1), b[..., 0].amin(-1)).unsqueeze(-1).clamp_max(high)
    a, b = _curve(a), _curve(b)
    # both are straight between these, so the trapezoids are exact
    x = torch.cat([low, a[..., 0], b[..., 0], high], -1).clamp(low, high).sort(-1).values
    height = _height(a, x) - _height(b, x)
    area = (x.diff(dim=-1) * (height[..., 1:] + height[..., :-1]) / 2).sum(-1)
    width = (high - low).squeeze(-1)
    return torch.where(width > 0, area / width.clamp_min(1e-300), height[..., 0])


def _height(curve: Tensor, x: Tensor) -> Tensor:
    """The curve at x, `[..., points, 2], [..., m] -> [..., m]`: linear between its points, level to their left."""
    xs, ys = curve[..., 0].contiguous(), curve[..., 1]
    right = torch.searchsorted(xs, x.contiguous()).clamp_max(xs.shape[-1] - 1)
    left = (right - 1).clamp_min(0)
    x0, x1, y0, y1 = xs.gather(-1, left), xs.gather(-1, right), ys.gather(-1, left), ys.gather(-1, right)
    share = torch.where(x1 > x0, (x - x0) / (x1 - x0).clamp_min(1e-300), 1.0)
    return torch.lerp(y0, y1, share.clamp(0, 1))
