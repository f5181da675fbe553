"""C_t, the tokens a decoder may use at all: the rules that come before the optimisation.

A support is a rule, not a mask: it is applied to the scores of a step and keeps at least one of the
tokens whose score is above −inf.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from simplexity.narrow import Narrowed, crowded, entries_above, narrow_above
from simplexity.nucleus import nucleus_among, prefix, wide_nucleus
from simplexity.parameters import Rule
from simplexity.rows import (
    block_length,
    block_maxima,
    covers,
    exp_,
    exp_totals,
    in_blocks,
    is_number,
    is_whole,
    per_row,
    total,
)


class Support(ABC):
    """A rule that says which tokens may get probability."""

    keeps_best: bool = False
    """The token with the best score always survives."""

    @abstractmethod
    def mask(self, scores: Tensor) -> Tensor:
        """True for the tokens kept, `[..., V] -> [..., V]`. No host synchronisation."""

    def check(self, scores: Tensor) -> None:
        """Raise a ValueError where the rule does not fit the scores. May read values."""

    def narrow(self, scores: Tensor, peaks: Tensor | None = None) -> Narrowed:
        """The scores with the rule applied, on fewer columns where that is cheaper. May read values.

        `peaks`: the block maxima of the scores, where the caller has them.
        """
        return Narrowed(scores.masked_fill(~self.mask(scores), -torch.inf))

    def then(self, second: "Support") -> "Support":
        """This rule first, the second on what it leaves."""
        return Then(self, second)


@dataclass(frozen=True)
class Everything(Support):
    """Every token whose score is above −inf."""

    keeps_best = True

    def mask(self, scores: Tensor) -> Tensor:
        return scores > -torch.inf

    def narrow(self, scores: Tensor, peaks: Tensor | None = None) -> Narrowed:
        return Narrowed(scores)


@dataclass(frozen=True, eq=False)
class TopK(Support):
    """The k best scores. Ties at the cut: exactly k are kept, lowest ids first.

    >>> TopK(2).mask(torch.tensor([3.0, 2.0, 2.0]))
    tensor([ True,  True, False])
    """

    keeps_best = True
    k: int | Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.k, Tensor) and not (is_whole(self.k) and self.k >= 1):
            raise ValueError(f"TopK: k must be a whole number >= 1, got {self.k!r}")

    def check(self, scores: Tensor) -> None:
        if isinstance(self.k, Tensor) and not Rule(at_least=1, whole=True).accepts(self.k):
            raise ValueError("TopK: k must be a whole number >= 1 in every row")

    def mask(self, scores: Tensor) -> Tensor:
        if isinstance(self.k, Tensor):
            rank = torch.arange(scores.shape[-1], device=scores.device)
            order = scores.argsort(dim=-1, descending=True, stable=True)
            kept = (rank < per_row(self.k, scores, "k")).expand_as(scores)
            return torch.zeros_like(kept).scatter(-1, order, kept) & (scores > -torch.inf)
        k = min(int(self.k), scores.shape[-1])
        last = scores.topk(k).values[..., -1:]
        above, tied = scores > last, scores == last
        room = k - above.sum(-1, keepdim=True)
        return (above | (tied & (tied.cumsum(-1) <= room))) & (scores > -torch.inf)

    def narrow(self, scores: Tensor, peaks: Tensor | None = None) -> Narrowed:
        if isinstance(self.k, Tensor) or self.k >= scores.shape[-1]:
            return super().narrow(scores)
        best, ids = best_scores(scores, int(self.k) + 1, peaks)
        if not bool((best[..., -2] > best[..., -1]).all()):  # a tie at the cut: the rule knows which ids win
            below = torch.nextafter(best[..., -2:-1], best.new_tensor(-torch.inf))
            few = narrow_above(scores, below, block_maxima(scores) if peaks is None else peaks)
            return few.keep(self.mask(few.scores))
        ids = ids[..., :-1].sort(-1).values
        return Narrowed(scores.gather(-1, ids), ids)


def best_scores(scores: Tensor, n: int, peaks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The n best scores and their ids, best first; ties in any order.

    The n best entries lie in the n blocks with the best maxima: most of a vocabulary is not looked at.
    """
    if peaks is None or 4 * n > peaks.shape[-1]:
        return tuple(scores.topk(n))  # pyright: ignore[reportReturnType]
    blocks, length = in_blocks(scores, fill=-torch.inf), block_length(scores.shape[-1])
    chosen = peaks.topk(n).indices
    inside = blocks.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, length)).flatten(-2)
    best, place = inside.topk(n)
    return best, chosen.gather(-1, place // length).mul_(length).add_(place % length)


@dataclass(frozen=True, eq=False)
class TopP(Support):
    """The smallest set of best tokens whose mass under softmax(s / temperature) reaches p.

    Ties at the cut: lowest ids first. p = 1 keeps everything.

    >>> TopP(0.7).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([ True, False, False])
    """

    keeps_best = True
    p: float | Tensor
    temperature: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.p, Tensor) and not (is_number(self.p) and 0 < self.p <= 1):
            raise ValueError(f"TopP: p must be in (0, 1], got {self.p!r}")
        number = is_number(self.temperature) and self.temperature > 0
        if not isinstance(self.temperature, Tensor) and not number:
            raise ValueError(f"TopP: temperature must be above 0, got {self.temperature!r}")

    def check(self, scores: Tensor) -> None:
        if isinstance(self.p, Tensor) and not bool(((self.p > 0) & (self.p <= 1)).all()):
            raise ValueError("TopP: p must be in (0, 1] in every row")
        if isinstance(self.temperature, Tensor) and not bool((self.temperature > 0).all()):
            raise ValueError("TopP: temperature must be above 0 in every row")

    def mask(self, scores: Tensor) -> Tensor:
        best, tau = scores.amax(-1, keepdim=True), per_row(self.temperature, scores, "temperature")
        e = exp_(torch.sub(scores, best).div_(tau))
        return (prefix(e, self._needed(total(e)), scores) > 0) & (scores > -torch.inf)

    def narrow(self, scores: Tensor, peaks: Tensor | None = None) -> Narrowed:
        if not isinstance(self.p, Tensor) and self.p == 1:
            return Narrowed(scores)
        few, masses = self.nucleus(scores, block_maxima(scores) if peaks is None else peaks)
        kept, p = masses.sign_(), per_row(self.p, scores, "p")
        if isinstance(p, Tensor) and few.ids is None:
            kept = torch.maximum(kept, (p >= 1).to(kept.dtype))  # everything, and be its mass too small for a number
        return Narrowed(few.scores - kept.reciprocal_().sub_(1.0), few.ids)  # 1/0 − 1 takes a score to −inf

    def nucleus(self, scores: Tensor, peaks: Tensor) -> tuple[Narrowed, Tensor]:
        """Columns that hold the nucleus, and exp((s − max s)/τ) there, 0.0 for those that are not in it."""
        best, tau = peaks.amax(-1, keepdim=True), per_row(self.temperature, scores, "temperature")
        if not crowded(scores, best + tau * math.log(FLAT)):
            found = self._among_few(scores, peaks, best, tau)
            if found is not None:
                return found
        return Narrowed(scores), wide_nucleus(scores, best, tau, per_row(self.p, scores, "p"))

    def _among_few(
        self, scores: Tensor, peaks: Tensor, best: Tensor, tau: float | Tensor
    ) -> tuple[Narrowed, Tensor] | None:
        """`nucleus` among the tokens above a floor; None where those are many."""
        (mass,) = exp_totals(scores, best, tau)
        needed = self._needed(mass)
        for share in (USUALLY, 1.0):
            # tokens with less than (1 − p)/V of the mass each do not hold 1 − p of it
            least = (mass - needed).clamp_min_(0.0).mul_(share / scores.shape[-1])
            floor = best + (tau * least.log_()).to(best.dtype)
            if crowded(scores, floor):
                return None
            few = entries_above(scores, floor, peaks)
            below = few.each(best) - few.scores
            e = exp_(below / (few.each(-tau) if isinstance(tau, Tensor) else -tau))
            found = nucleus_among(few, below.div_(few.each((best - floor).clamp_min_(1e-30))), e, needed)
            if found is not None:
                few, e = few.pick(found), e.index_select(0, found)
                return few.narrowed(), few.table(e, 0.0)
        return None

    def _needed(self, mass: Tensor) -> Tensor:
        """The part of a mass that the nucleus must hold; +inf where p = 1."""
        p = per_row(self.p, mass, "p")
        if isinstance(p, Tensor):
            return torch.where(p >= 1, torch.inf, p * mass)
        return mass * p if p < 1 else torch.full_like(mass, torch.inf)


FLAT = 1e-3  # relative to the best token: where many lie above, none is ruled out by being small
USUALLY = 10.0  # times (1 − p)/V of the mass: what a nucleus mostly does without


@dataclass(frozen=True, eq=False)
class Listed(Support):
    """Token ids, for all rows or row by row."""

    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor
    _tensor: Tensor = field(init=False, repr=False)  # `[..., n]`, rows padded with −1

    def _table(self, scores: Tensor) -> Tensor:
        """True for the ids listed, `[..., V]`; an id of −1 is padding."""
        ids, size = self._tensor.to(scores.device), scores.shape[-1]
        ids = ids.expand(*scores.shape[:-1], ids.shape[-1])
        slots = torch.where((ids >= 0) & (ids < size), ids, size)
        table = torch.zeros(*scores.shape[:-1], size + 1, dtype=torch.bool, device=scores.device)
        return table.scatter_(-1, slots, True)[..., :-1]

    def __post_init__(self) -> None:
        if not isinstance(self.ids, (Tensor, list, tuple)):
            raise ValueError(f"{type(self).__name__}: ids must be a list or a tensor, got {type(self.ids).__name__}")
        if not isinstance(self.ids, Tensor) and self.ids and not is_number(self.ids[0]):
            rows = [self._whole(row) for row in self.ids]
            made = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        else:
            made = self._whole(self.ids)
        object.__setattr__(self, "_tensor", made)

    def _whole(self, ids: Any) -> Tensor:
        """Ids as a tensor, their dtype told from what they are: to ask for whole numbers would round others."""
        try:
            found = ids if isinstance(ids, Tensor) else torch.tensor(list(ids), dtype=None if ids else torch.int64)
        except (ValueError, TypeError, RuntimeError):
            raise ValueError(f"{type(self).__name__}: ids must be lists of whole numbers, got {ids!r}") from None
        if found.ndim == 0 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
            raise ValueError(
                f"{type(self).__name__}: ids must be lists of whole numbers, got {found.dtype}; "
                "a mask goes in the context"
            )
        return found.to(torch.int64)

    def check(self, scores: Tensor) -> None:
        ids, size = self._tensor, scores.shape[-1]
        bad = (ids < -1) | (ids >= size)
        if bool(bad.any()):
            raise ValueError(f"{type(self).__name__}: token ids must be in [0, {size}), got {ids[bad][0].item()}")
        rows = scores.shape[:-1]
        if not covers(ids.shape[:-1], rows):
            raise ValueError(
                f"{type(self).__name__}: ids must be [n] or one list per row of {list(rows)}, got {list(ids.shape)}"
            )


class Allowed(Listed):
    """Only the tokens with these ids.

    >>> Allowed([2]).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([False, False,  True])
    """

    def mask(self, scores: Tensor) -> Tensor:
        return self._table(scores) & (scores > -torch.inf)


class Banned(Listed):
    """Every token but these.

    >>> Banned([[0], [1, 2]]).mask(torch.zeros(2, 3))
    tensor([[False,  True,  True],
            [ True, False, False]])
    """

    def mask(self, scores: Tensor) -> Tensor:
        return ~self._table(scores) & (scores > -torch.inf)


@dataclass(frozen=True, eq=False)
class Then(Support):
    """One rule, then another on what the first leaves; longer chains nest.

    >>> Then(Banned([0]), TopK(1)).mask(torch.tensor([3.0, 2.0, 0.0]))
    tensor([False,  True, False])
    """

    first: Support
    second: Support

    def __post_init__(self) -> None:
        for rule in (self.first, self.second):
            if not isinstance(rule, Support):
                raise ValueError(f"Then: both rules must be Supports such as TopK(50), got {rule!r}")

    def check(self, scores: Tensor) -> None:
        self.first.check(scores)
        self.second.check(scores)

    def mask(self, scores: Tensor) -> Tensor:
        return self.second.mask(scores.masked_fill(~self.first.mask(scores), -torch.inf))
