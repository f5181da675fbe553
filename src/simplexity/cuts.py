"""Cuts by probability: the supports of the samplers that people know by name.

Each looks at p = softmax(s / temperature), or at the scores themselves. Where a token's fate hangs on its own score and
one number of its row, that number is all that is computed; only `Typical` and `TopH` need an order.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from simplexity.narrow import Narrowed, crowded, narrow_above
from simplexity.parameters import Rule
from simplexity.rows import FLOORS, argmax, block_maxima, exp_, per_row, total
from simplexity.supports import Support, TopK


class Cut(Support):
    """A rule with numbers in it, each a number or one per row."""

    rules: ClassVar[dict[str, Rule]] = {}

    def __post_init__(self) -> None:
        self._obey(tensors=False)

    def check(self, scores: Tensor) -> None:
        self._obey(tensors=True)

    def _obey(self, tensors: bool) -> None:
        for name, rule in self.rules.items():
            value = getattr(self, name)
            if isinstance(value, Tensor) == tensors and not rule.accepts(value):
                got = " in every row" if tensors else f", got {value!r}"
                raise ValueError(f"{type(self).__name__}: {name} must be {rule.expected(value)}{got}")


TEMPERATURE = Rule(above=0)
CUT = 1e-3  # relative to the best token: most of what is kept lies above


class Floor(Cut):
    """Keeps the tokens whose score reaches a floor, and the best ones whatever the floor."""

    keeps_best = True

    @abstractmethod
    def floor(self, scores: Tensor, best: Tensor) -> Tensor:
        """The least score kept, `[..., 1]`; `best` `[..., 1]` is the largest one."""

    def mask(self, scores: Tensor) -> Tensor:
        best = scores.amax(-1, keepdim=True)
        return (scores >= torch.minimum(self.floor(scores, best), best)) & (scores > -torch.inf)

    def narrow(self, scores: Tensor, peaks: Tensor | None = None) -> Narrowed:
        peaks = block_maxima(scores) if peaks is None else peaks
        best = peaks.amax(-1, keepdim=True)
        floor = torch.minimum(self.floor(scores, best), best)
        if crowded(scores, floor):
            return Narrowed(scores.masked_fill(scores < floor, -torch.inf))
        return narrow_above(scores, torch.nextafter(floor, torch.full_like(floor, -torch.inf)), peaks)


@dataclass(frozen=True, eq=False)
class MinP(Floor):
    """The tokens at least p times as probable as the best one.

    >>> MinP(0.1).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([ True,  True, False])
    """

    rules: ClassVar = {"p": Rule(at_least=0, at_most=1), "temperature": TEMPERATURE}
    p: float | Tensor
    temperature: float | Tensor = 1.0

    def floor(self, scores: Tensor, best: Tensor) -> Tensor:
        return best + per_row(self.temperature, scores, "temperature") * _log(self.p, scores, "p")


@dataclass(frozen=True, eq=False)
class Epsilon(Floor):
    """The tokens with probability at least ε.

    >>> Epsilon(0.1).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([ True,  True, False])
    """

    rules: ClassVar = {"epsilon": Rule(above=0, at_most=1), "temperature": TEMPERATURE}
    epsilon: float | Tensor
    temperature: float | Tensor = 1.0

    def floor(self, scores: Tensor, best: Tensor) -> Tensor:
        return _score_at(_log(self.epsilon, scores, "epsilon"), *_weigh(scores, best, self.temperature)[:2], best)


@dataclass(frozen=True, eq=False)
class Eta(Floor):
    """The tokens with probability at least η = min(ε, √ε·exp(−H(p))): the flatter p is, the less is asked for.

    >>> Eta(0.1).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([ True,  True, False])
    """

    rules: ClassVar = {"epsilon": Rule(above=0, at_most=1), "temperature": TEMPERATURE}
    epsilon: float | Tensor
    temperature: float | Tensor = 1.0

    def floor(self, scores: Tensor, best: Tensor) -> Tensor:
        tau, log_mass, entropy = _weigh(scores, best, self.temperature)
        log_epsilon = _log(self.epsilon, scores, "epsilon")
        return _score_at(torch.minimum(log_epsilon, log_epsilon / 2 - entropy), tau, log_mass, best)


@dataclass(frozen=True, eq=False)
class TopNSigma(Floor):
    """The tokens at most n standard deviations of all finite scores below the best; no temperature changes that.

    >>> TopNSigma(1.0).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([ True,  True, False])
    """

    rules: ClassVar = {"n": Rule(above=0)}
    n: float | Tensor

    def floor(self, scores: Tensor, best: Tensor) -> Tensor:
        finite = scores > -torch.inf
        below = torch.where(finite, best - scores, 0.0)
        count = finite.sum(-1, keepdim=True).clamp_min(1)
        mean = (total(below) / count).to(scores.dtype)
        variance = total(torch.where(finite, (below - mean).square(), 0.0)) / count
        return best - per_row(self.n, scores, "n") * variance.sqrt().to(scores.dtype)


@dataclass(frozen=True, eq=False)
class Typical(Cut):
    """The tokens whose surprise −log p is nearest to its mean, the entropy H(p): the fewest that reach mass p.

    Ties at the cut are all kept, as they are as typical as each other. p = 1 keeps everything.

    >>> Typical(0.2).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([ True, False, False])
    """

    keeps_best = False
    rules: ClassVar = {"p": Rule(above=0, at_most=1), "temperature": TEMPERATURE}
    p: float | Tensor
    temperature: float | Tensor = 1.0

    def mask(self, scores: Tensor) -> Tensor:
        best = scores.amax(-1, keepdim=True)
        return self._kept(scores, best, *_weigh(scores, best, self.temperature))[0] & (scores > -torch.inf)

    def narrow(self, scores: Tensor, peaks: Tensor | None = None) -> Narrowed:
        peaks = block_maxima(scores) if peaks is None else peaks
        best = peaks.amax(-1, keepdim=True)
        tau, log_mass, entropy = _weigh(scores, best, self.temperature)
        floor = best + tau * math.log(CUT)
        if not crowded(scores, floor):
            few = narrow_above(scores, floor, peaks)
            kept, edge = self._kept(few.scores, best, tau, log_mass, entropy)
            # a token left out is at least this far from typical: where the cut lies nearer, none was missed
            if bool((edge < log_mass - math.log(CUT) - entropy - 1e-3).all()):
                return few.keep(kept)
        return Narrowed(scores.masked_fill(~self._kept(scores, best, tau, log_mass, entropy)[0], -torch.inf))

    def _kept(
        self, scores: Tensor, best: Tensor, tau: float | Tensor, log_mass: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which of these columns are kept, and how far the last one is from typical, `[..., 1]`; inf: mass is short."""
        x = (scores - best) / tau
        distance = (log_mass - entropy - x).abs()
        far, order = distance.sort(dim=-1)
        ends = exp_(x - log_mass).gather(-1, order).cumsum(-1, dtype=torch.float64)
        p = per_row(self.p, scores, "p")
        needed = torch.where(p >= 1, torch.inf, p.double()) if isinstance(p, Tensor) else p if p < 1 else torch.inf
        last = (ends < needed).sum(-1, keepdim=True)
        edge = far.gather(-1, last.clamp_max(scores.shape[-1] - 1))
        edge = torch.where(last < scores.shape[-1], edge, torch.inf)
        return distance <= edge, edge


@dataclass(frozen=True, eq=False)
class TopH(Cut):
    """The best tokens whose terms −p log p add up to at most h times the entropy H(p), and always the best one.

    p is the distribution of the `cap` best tokens. Ties at the cut: lowest ids first.

    >>> TopH(0.4).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([ True, False, False])
    """

    keeps_best = True
    rules: ClassVar = {"h": Rule(above=0, at_most=1), "temperature": TEMPERATURE, "cap": Rule(at_least=1, whole=True)}
    h: float | Tensor
    temperature: float | Tensor = 1.0
    cap: int = 100

    def mask(self, scores: Tensor) -> Tensor:
        ids = self._candidates(scores)
        kept = self._kept(scores.gather(-1, ids))
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ids, kept)

    def narrow(self, scores: Tensor, peaks: Tensor | None = None) -> Narrowed:
        few = TopK(self.cap).narrow(scores, peaks)
        if few.ids is None:
            ids = self._candidates(scores)
            few = Narrowed(scores.gather(-1, ids), ids)
        return few.keep(self._kept(few.scores))

    def _candidates(self, scores: Tensor) -> Tensor:
        """The ids of the `cap` best scores, ascending; of ties at the last place those with the lowest ids."""
        inside = scores.masked_fill(~TopK(self.cap).mask(scores), -torch.inf)
        return inside.topk(min(self.cap, scores.shape[-1])).indices.sort(-1).values

    def _kept(self, scores: Tensor) -> Tensor:
        order = scores.argsort(dim=-1, descending=True, stable=True)
        ranked = scores.gather(-1, order).double()
        p = torch.softmax((ranked - ranked[..., :1]) / per_row(self.temperature, ranked, "temperature"), -1)
        sums = -torch.xlogy(p, p).cumsum(-1)
        kept = (sums <= per_row(self.h, ranked, "h") * sums[..., -1:]) & (ranked > -torch.inf)
        kept[..., 0] = True
        return torch.zeros_like(kept).scatter(-1, order, kept)


@dataclass(frozen=True, eq=False)
class XTC(Cut):
    """Where `fires`, all but the least probable of the tokens with probability at least `threshold` are left out.

    Fewer than two such tokens leave everything as it is. Of tied least ones the lowest id stays.

    >>> XTC(0.2).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([False,  True,  True])
    """

    rules: ClassVar = {"threshold": Rule(above=0, at_most=1), "temperature": TEMPERATURE}
    threshold: float | Tensor
    temperature: float | Tensor = 1.0
    fires: bool | Tensor = True  # or one per row; the chance is the caller's

    def mask(self, scores: Tensor) -> Tensor:
        best = scores.amax(-1, keepdim=True)
        log_t = _log(self.threshold, scores, "threshold")
        likely = scores >= _score_at(log_t, *_weigh(scores, best, self.temperature)[:2], best)
        least = argmax(torch.where(likely, -scores, -torch.inf))
        return ~(likely.scatter(-1, least, False) & self.fires) & (scores > -torch.inf)


def _log(number: float | Tensor, scores: Tensor, name: str) -> Tensor:
    """The logarithm of a number, `[1]`, or of one per row, `[..., 1]`, in the dtype of the scores."""
    value = per_row(number, scores, name)
    return value.log() if isinstance(value, Tensor) else scores.new_full((1,), math.log(value) if value else -torch.inf)


def _weigh(scores: Tensor, best: Tensor, temperature: float | Tensor) -> tuple[float | Tensor, Tensor, Tensor]:
    """(τ, log Σ exp((s − max s)/τ), the entropy of softmax(s/τ)), each `[..., 1]` or a number."""
    tau = per_row(temperature, scores, "temperature")
    x = torch.sub(scores, best).div_(tau).clamp_min_(FLOORS[scores.dtype][0])  # where e is 0 and x would be −inf
    e = exp_(x.clone())
    mass = total(e)
    log_mass = mass.log()
    entropy = log_mass - total(e.mul_(x)) / mass
    return tau, log_mass.to(scores.dtype), entropy.to(scores.dtype)


def _score_at(log_p: Tensor, tau: float | Tensor, log_mass: Tensor, best: Tensor) -> Tensor:
    """The score of a token with this log-probability, `[..., 1]`."""
    return best + tau * (log_p + log_mass)
