"""What a distribution is like: entropy, support size, distance to the model, effective temperature."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from simplexity.rows import softmax_

LEAST = -700.0  # e^-700 is still a normal number; below, processors crawl
SHARPEST = 1e-9  # nats: below, q is one token to the digits it has, and every low temperature would do
NEWTON_STEPS = 200  # about eight are taken; bisection alone would do with eighty


@dataclass(frozen=True, eq=False)
class Description:
    """What a decoder made of the model's scores, one value per row.

    entropy:               of q, in nats
    support_size:          tokens with q > 0
    kl:                    KL(q ‖ p) to the model's own p = softmax(s), temperature 1
    effective_temperature: τ' with the entropy of softmax(s/τ') equal to q's; see `effective_temperature`
    gap:                   how far q is from the optimum of the decoder's own problem, in score units
    """

    entropy: Tensor
    support_size: Tensor
    kl: Tensor
    effective_temperature: Tensor
    gap: Tensor


def entropy(q: Tensor) -> Tensor:
    """−Σ q log q in nats, `[..., V] -> [...]`, float64.

    >>> entropy(torch.tensor([0.5, 0.5, 0.0]))
    tensor(0.6931, dtype=torch.float64)
    """
    q = q.double()
    return -torch.xlogy(q, q).sum(-1)


def kl_to_model(q: Tensor, scores: Tensor) -> Tensor:
    """KL(q ‖ softmax(s)), `[...]`, float64."""
    q, s = q.double(), scores.double()
    log_p = s - s.logsumexp(-1, keepdim=True)
    return torch.where(q > 0, torch.xlogy(q, q) - q * log_p, 0.0).sum(-1)


def entropy_at(scores: Tensor, temperature: float | Tensor) -> Tensor:
    """The entropy of softmax(s / temperature), `[..., 1] -> [...]`, float64."""
    return entropy(softmax_(scores.double() / temperature))


class Moments(Protocol):
    """Sums over the tokens below the best, x = s − max s, e = exp(βx), by row."""

    close: float  # how well log β can be told from them

    def keep(self, rows: Tensor) -> None:
        """Only these rows are asked for from now on."""
        ...

    def at(self, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(Σ e, Σ βx·e, Σ (βx)²·e) in float64, each `[rows]`, at β `[rows]`."""
        ...


class Dense:
    """The sums in plain torch, in float64; x `[rows, V]`, at most 0."""

    close = 1e-12

    def __init__(self, x: Tensor) -> None:
        self.x = x.double().masked_fill(x == 0, -torch.inf)

    def keep(self, rows: Tensor) -> None:
        """As above."""
        self.x = self.x[rows]

    def at(self, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As above."""
        y = (self.x * beta.unsqueeze(-1)).clamp_min_(LEAST)
        e = torch.exp(y)
        rest = e.sum(-1)
        drift = e.mul_(y)
        return rest, drift.sum(-1), drift.mul_(y).sum(-1)


def effective_temperature(scores: Tensor, target: Tensor, moments: Moments | None = None) -> Tensor:
    """τ' such that softmax(s/τ') has the entropy `target` `[...]`, float64 `[...]`.

    0 for entropy zero on a unique maximum, inf for the entropy of the uniform distribution, NaN where
    no τ' reaches the target: one allowed token, a constant row, less entropy than the tied maxima have.
    `moments` of scores `[B, V]` may come from a kernel.

    >>> s = torch.tensor([3.0, 2.0, 0.0]).double()
    >>> round(effective_temperature(s, entropy(torch.softmax(s / 0.7, -1))).item(), 6)
    0.7
    """
    rows = torch.broadcast_shapes(scores.shape[:-1], target.shape)
    scores, target = scores.expand(*rows, scores.shape[-1]), target.expand(rows)
    s = scores if moments is not None else scores.double()
    top = s.amax(-1, keepdim=True)
    allowed, best = s > -torch.inf, s == top
    tied, count = best.sum(-1), allowed.sum(-1)
    highest, lowest = count.double().log(), tied.double().log()
    rounding = 16 * torch.finfo(scores.dtype if scores.dtype == torch.float64 else torch.float32).eps
    slack = rounding * (1 + highest)
    target = target.double()
    # x·β with β = 1/τ': at β·spread = 1e-9 the row is uniform to rounding, at β·step = 700 it is one-hot
    spread = top.squeeze(-1).double() - torch.where(allowed, s, torch.inf).amin(-1).double()
    step = top.squeeze(-1).double() - torch.where(best, -torch.inf, s).amax(-1).double()
    # beside maxima that tie, what the others add to the entropy must be more than its rounding
    least = lowest + torch.where(tied > 1, slack, slack.clamp_max(1e-12))
    usable = (tied < count) & (target > least) & (target < highest - slack)
    low, high, aim = torch.log(1e-9 / spread), torch.log(700.0 / step), target.clamp_min(1e-300).log()
    result = torch.full_like(target, torch.nan)
    if moments is None:
        moments = Dense((s - top)[usable])
    else:
        moments.keep(usable.nonzero().squeeze(-1))
    result[usable] = torch.exp(-_matching(moments, *(table[usable] for table in (tied.double(), aim, low, high))))
    result = torch.where((tied < count) & (target >= highest - slack), torch.inf, result)
    return torch.where((tied == 1) & (count > 1) & (target <= slack.clamp_max(1e-12)), 0.0, result)


def tells_temperature(temperature: Tensor, entropy: Tensor) -> Tensor:
    """Where an effective temperature belongs into a mean, `[...]`.

    Most tokens of a text are certain. Their q is one-hot after rounding at any low temperature, and the 0 that
    `effective_temperature` gives says nothing about the decoder: a mean with them in it is far too low.
    """
    return temperature.isfinite() & (entropy > SHARPEST)


def _matching(moments: Moments, best: Tensor, aim: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """log β in [low, high] `[rows]` at which the log-entropy of softmax(βx) is `aim`; `best` tokens share the maximum.

    Newton's method from β = 1, with a bisection wherever it leaves the bracket: d log H / d log β = −β²·Var(x)/H.
    The logarithm is smooth where the entropy is tiny, and the maxima are left out of the sums: beside a 1 a tiny mass
    would lose its digits, and the search would only end when its bracket is empty. Rows that have arrived leave.
    """
    found = torch.zeros_like(low).clamp(low, high)
    rows, t = torch.arange(len(found), device=found.device), found
    for _ in range(NEWTON_STEPS):
        rest, drift, square = moments.at(t.exp())
        mass = best + rest
        mean = drift / mass
        variance = (square / mass - mean.square()).clamp_min_(1e-300)
        entropy = (best.log() + torch.log1p(rest / best) - mean).clamp_min_(1e-300)
        miss = entropy.log() - aim
        low, high = torch.where(miss > 0, t, low), torch.where(miss < 0, t, high)
        better = t + miss * entropy / variance
        close = moments.close * (1 + t.abs())
        # a step that is all rounding may end outside the bracket, and is no reason to bisect
        inside = (better > low) & (better < high) | ((better - t).abs() <= close)
        better = torch.where(inside, better, (low + high) / 2)
        far = (better - t).abs() > close
        found[rows], t = better, better
        on = far.nonzero().squeeze(-1)
        if not len(on):
            break
        if len(on) <= 0.7 * len(rows):
            best, aim, low, high, rows, t = (table[on] for table in (best, aim, low, high, rows, t))
            moments.keep(on)
    return found
