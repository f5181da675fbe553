"""Intervals for means over questions, by a bootstrap over the questions.

    mean* = Σ_q w_q·v_q / Q        w ~ Multinomial(Q; 1/Q, …, 1/Q)

The interval is cut from the distribution of mean* at the tails Φ(∓√(Q/(Q−1))·t) with t Student's quantile for Q − 1
degrees of freedom: the percentile interval, widened for what it misses on few questions (Hesterberg, 2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

RESAMPLES = 10_000
CHUNK = 2**20  # numbers drawn at a time, so that memory does not grow with the resamples


@dataclass(frozen=True, eq=False)
class PerQuestion:
    """One value for each question `[questions]`, float64, and the ids of the questions."""

    questions: tuple[str, ...]
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.shape != (len(self.questions),):
            raise ValueError(f"{len(self.questions)} questions but values of shape {tuple(self.values.shape)}")

    @property
    def mean(self) -> float:
        """The score: the mean over the questions."""
        return self.values.double().mean().item()


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval that covers the truth in a share `level` of all experiments."""

    estimate: float
    low: float
    high: float
    level: float = 0.95

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


def same_questions(*parts: PerQuestion) -> tuple[str, ...]:
    """The ids of the questions that all parts share, in the same order; a ValueError where they differ."""
    first = parts[0].questions
    for part in parts[1:]:
        if len(part.questions) != len(first):
            raise ValueError(f"the questions differ: {len(first)} and {len(part.questions)} of them")
        for number, (one, other) in enumerate(zip(first, part.questions, strict=True)):
            if one != other:
                raise ValueError(f"the questions differ: number {number} is {one!r} and {other!r}")
    return first


def interval(
    values: PerQuestion | Tensor, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The mean of one value per question, `[questions]`, with its interval; NaN ends where there is one question.

    >>> found = interval(torch.arange(100) / 99)
    >>> round(found.estimate, 2), round(found.low, 2), round(found.high, 2)
    (0.5, 0.44, 0.56)
    """
    v = (values.values if isinstance(values, PerQuestion) else values).double()
    if v.ndim != 1 or len(v) == 0:
        raise ValueError(f"an interval needs one value for each question, not the shape {tuple(v.shape)}")
    drawn = resampled_means(v.unsqueeze(0), resamples, seed).squeeze(1)
    return cut(v.mean().item(), drawn, len(v), level)


def paired_difference(
    a: PerQuestion, b: PerQuestion, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The mean of a − b over the same questions, with its interval; a ValueError where the questions differ.

    Pairing removes what is due to easy and hard questions, so this is narrower than two separate intervals suggest.

    >>> ids = tuple(str(i) for i in range(100))
    >>> ease = torch.arange(100) / 99
    >>> found = paired_difference(PerQuestion(ids, ease), PerQuestion(ids, ease**2))
    >>> round(found.estimate, 2), round(found.low, 2), round(found.high, 2)
    (0.16, 0.15, 0.18)
    """
    same_questions(a, b)
    return interval(a.values.double() - b.values.double(), level=level, resamples=resamples, seed=seed)


def resampled_means(values: Tensor, resamples: int, seed: int) -> Tensor:
    """Means over questions drawn with replacement, `[rows, questions] -> [resamples, rows]`, float64.

    All rows share each draw of the questions, which is what pairs them.
    """
    if not values.isfinite().all():
        wrong = (~values.isfinite()).nonzero()[0, -1].item()
        raise ValueError(f"the value of question number {wrong} is not finite")
    if resamples < 1:
        raise ValueError(f"resamples = {resamples}: at least one is needed")
    count = values.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    weights = values.double().T / count
    parts = []
    for size in _chunks(resamples, max(1, CHUNK // count)):
        drawn = torch.randint(count, (size, count), generator=generator)
        times = torch.zeros(size, count, dtype=torch.float64)
        parts.append(times.scatter_add_(1, drawn, times.new_ones(()).expand(size, count)) @ weights)
    return torch.cat(parts)


def cut(estimate: float, drawn: Tensor, questions: int, level: float) -> Interval:
    """The interval from resampled estimates `[resamples]`."""
    if not 0 < level < 1:
        raise ValueError(f"level = {level}: it must lie between 0 and 1")
    if questions < 2:
        return Interval(estimate, math.nan, math.nan, level)
    tail = _tail(level, questions)
    low = torch.quantile(drawn, tail, interpolation="lower")  # outwards to the next resample
    high = torch.quantile(drawn, 1 - tail, interpolation="higher")
    return Interval(estimate, low.item(), high.item(), level)


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def _tail(level: float, questions: int) -> float:
    """The share to cut at each end; Student's quantile by its expansion in 1/(Q − 1), good to 1% from Q = 6 on."""
    z, f = -NormalDist().inv_cdf((1 - level) / 2), questions - 1
    t = z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
    return NormalDist().cdf(-math.sqrt(questions / f) * t)
