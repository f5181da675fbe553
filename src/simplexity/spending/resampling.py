"""Power sampling: a draw from a sharper law over whole texts than the one the samples came from.

    max  E_Q[α·log p(x) + term(x)] + H(Q)   over distributions Q on texts x

Its solution is Q(x) ∝ p(x)^α·exp(term(x)). This is not a temperature of 1/α at every token: that one looks no further
than the next token, while p^α knows which tokens lead to likely texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.draw import draw
from simplexity.spending.ranking import Scorer, as_number
from simplexity.spending.samples import Cost, Sample, cost_of


@dataclass(frozen=True)
class Resampled:
    """Samples chosen by their weights, and the weights of all."""

    samples: tuple[Sample, ...]  # one for each draw
    weights: tuple[float, ...]  # of the group, they sum to 1
    effective_size: float  # 1/Σw²: how many equally weighted samples the group is worth
    cost: Cost


def power(
    group: Sequence[Sample], alpha: float, term: Scorer | None = None, seed: int | None = None, draws: int = 1
) -> Resampled:
    """Draws from p(x)^alpha·exp(term(x)) by self-normalised importance resampling of the K samples.

    A sample is chosen with a probability in proportion to p^alpha·e^term/q, where q is the decoder's own probability
    of the text; each sample must be an exact draw from q, which coupled ones are. The law of the chosen text is biased
    by O(1/K), with a constant that grows as q is further from the target: look at `effective_size`. Texts that the
    decoder cannot write (cut by top-p, say) have no part in the law. A text cut at the limit counts as it stands, with
    the probabilities of the tokens it has.

    term:  −inf forbids a text
    seed:  draws are repeatable with one, otherwise they come from torch's global generator
    draws: how many, independent given the group: the same sample may come again

    >>> group = [Sample("rare", (1,), log_q=-1.0, log_p=-3.0), Sample("likely", (2,), log_q=-1.0, log_p=-1.0)]
    >>> found = power(group, alpha=2, seed=1)
    >>> [round(w, 3) for w in found.weights], round(found.effective_size, 3), found.samples[0].text
    ([0.018, 0.982], 1.037, 'likely')
    """
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha must be a finite number >= 0, got {alpha}")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    cost = cost_of(group, 0 if term is None else len(group))
    weights = (alpha * _recorded(group, "log_p") - _recorded(group, "log_q") + _terms(group, term)).softmax(-1)
    seeds = None if seed is None else [seed] * draws
    chosen = draw(weights.expand(draws, -1), seeds=seeds, step=torch.arange(draws))
    effective = 1 / weights.square().sum().item()
    return Resampled(tuple(group[i] for i in chosen.tolist()), tuple(weights.tolist()), effective, cost)


def _recorded(group: Sequence[Sample], name: str) -> Tensor:
    found = [getattr(sample, name) for sample in group]
    for i, value in enumerate(found):
        if value is None:
            raise ValueError(f"sample {i} has no {name}, without which it has no weight: generate with trace=True")
        if not math.isfinite(value):
            raise ValueError(f"sample {i} has {name} = {value}: no weight follows from it")
    return torch.tensor(found, dtype=torch.float64)


def _terms(group: Sequence[Sample], term: Scorer | None) -> Tensor:
    found = [0.0 if term is None else as_number(term(sample), "the term", i) for i, sample in enumerate(group)]
    if max(found) in (math.inf, -math.inf):
        raise ValueError("the term must be below infinity for all samples and above −infinity for one at least")
    return torch.tensor(found, dtype=torch.float64)
