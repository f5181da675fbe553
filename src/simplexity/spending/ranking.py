"""The best of K samples under a scorer of one's own.

    max  scorer(x)   over the samples x of the group

A scorer is a plain function of a sample, so that terms are added as numbers are:
`lambda s: quality(s.text) + 0.1 * log_p(s)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simplexity.spending.samples import Cost, Sample, cost_of

Scorer = Callable[[Sample], float]


@dataclass(frozen=True)
class Chosen:
    """The sample with the best score."""

    sample: Sample
    score: float
    cost: Cost


@dataclass(frozen=True)
class Ranking:
    """All samples, the best first; samples with equal scores keep their order."""

    samples: tuple[Sample, ...]
    scores: tuple[float, ...]
    cost: Cost


def rerank(group: Sequence[Sample], scorer: Scorer) -> Ranking:
    """The whole group in the order of its scores; K samples and as many calls of the scorer.

    >>> group = [Sample("long", (1, 2, 3)), Sample("short", (4,))]
    >>> found = rerank(group, lambda s: -length(s))
    >>> [s.text for s in found.samples], found.scores, found.cost.tokens
    (['short', 'long'], (-1.0, -3.0), 4)
    """
    cost = cost_of(group, len(group))
    scores = [as_number(scorer(sample), "the scorer", i) for i, sample in enumerate(group)]
    order = sorted(range(len(group)), key=lambda i: -scores[i])
    return Ranking(tuple(group[i] for i in order), tuple(scores[i] for i in order), cost)


def best_of(group: Sequence[Sample], scorer: Scorer) -> Chosen:
    """The sample with the best score, the first of equal ones; K samples and as many calls of the scorer.

    >>> best_of([Sample("no", (1,), log_p=-3.0), Sample("yes", (2,), log_p=-0.5)], log_p).sample.text
    'yes'
    """
    ranking = rerank(group, scorer)
    return Chosen(ranking.samples[0], ranking.scores[0], ranking.cost)


def log_p(sample: Sample) -> float:
    """The log-probability of the whole text under the model at temperature 1."""
    if sample.log_p is None:
        raise ValueError("the sample has no log p: generate(..., trace=True) records it")
    return sample.log_p


def log_p_per_token(sample: Sample) -> float:
    """Its mean over the tokens: long texts are not punished for their length.

    >>> log_p_per_token(Sample("so it is", (3, 4, 5, 2), log_p=-6.0))
    -1.5
    """
    return log_p(sample) / max(1, len(sample.tokens))


def length(sample: Sample) -> float:
    """How many tokens the text has, the end token included."""
    return float(len(sample.tokens))


def as_number(value: Any, whose: str, index: int) -> float:
    """What a function of a sample gave, as a float; a ValueError for anything that cannot be ordered."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{whose} gave {value!r} for sample {index}: it must give a number")
    return number
