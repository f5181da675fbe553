"""C_t, the tokens a decoder may use at all: the rules that come before the optimisation.

A support is a rule, not a mask: it is applied to the scores of a step and keeps at least one of the
tokens whose score is above −inf.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.narrow import Narrowed, narrow_to
from simplexity.rows import covers, exp_, is_number, per_row, total


class Support(ABC):
    """A rule that says which tokens may get probability."""

    keeps_best: bool = False
    """The token with the best score always survives."""

    @abstractmethod
    def mask(self, scores: Tensor) -> Tensor:
        """True for the tokens kept, `[..., V] -> [..., V]`. No host synchronisation."""

    def check(self, scores: Tensor) -> None:
        """Raise a ValueError where the rule does not fit the scores. May read values."""

    def narrow(self, scores: Tensor) -> Narrowed:
        """The scores with the rule applied, on fewer columns where that is cheaper. May read values."""
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

    def narrow(self, scores: Tensor) -> Narrowed:
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
        if not isinstance(self.k, Tensor) and not (is_number(self.k) and self.k >= 1 and self.k == int(self.k)):
            raise ValueError(f"TopK: k must be a whole number >= 1, got {self.k!r}")

    def check(self, scores: Tensor) -> None:
        if isinstance(self.k, Tensor) and bool((self.k < 1).any()):
            raise ValueError(f"TopK: k must be >= 1, got {self.k.min().item()}")

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

    def narrow(self, scores: Tensor) -> Narrowed:
        if isinstance(self.k, Tensor) or self.k >= scores.shape[-1]:
            return super().narrow(scores)
        best = scores.topk(int(self.k) + 1)
        last, next_ = best.values[..., -2], best.values[..., -1]
        if not bool((last > next_).all()):  # a tie at the cut: only the full rule knows which ids win
            return super().narrow(scores)
        ids = best.indices[..., :-1].sort(-1).values
        return Narrowed(scores.gather(-1, ids), ids)


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
        x = self._scaled(scores)
        return _nucleus(x, self._needed(total(exp_(x.clone())), scores), scores) & (scores > -torch.inf)

    def narrow(self, scores: Tensor) -> Narrowed:
        if not isinstance(self.p, Tensor) and self.p == 1:
            return Narrowed(scores)
        x = self._scaled(scores)
        e = exp_(x)
        needed = self._needed(total(e), scores)
        for cut in (0.02, 1e-4):  # relative to the best token; most nuclei end above
            kept = torch.threshold(e, cut, 0.0)
            if bool((total(kept) >= needed).all()):
                if 16 * int(kept.count_nonzero()) > kept.numel() > BINS:
                    break  # too many to sort
                few = narrow_to(kept, scores)
                return few.keep(_nucleus(self._scaled(few.scores), needed, few.scores))
        return _wide_nucleus(e, needed, scores)

    def _scaled(self, scores: Tensor) -> Tensor:
        return (scores - scores.amax(-1, keepdim=True)).div_(per_row(self.temperature, scores, "temperature"))

    def _needed(self, mass: Tensor, scores: Tensor) -> Tensor:
        p = per_row(self.p, scores, "p")
        if isinstance(p, Tensor):
            return torch.where(p >= 1, torch.inf, p.double() * mass)
        return mass * p if p < 1 else torch.full_like(mass, torch.inf)


def _nucleus(x: Tensor, needed: Tensor, order: Tensor) -> Tensor:
    """The tokens, best `order` first, before which less than `needed` of Σ exp(x) lies."""
    ids = order.argsort(dim=-1, descending=True, stable=True)
    mass = torch.exp(x.gather(-1, ids)).double()
    kept = mass.cumsum(-1) - mass < needed
    return torch.zeros_like(kept).scatter(-1, ids, kept)


def _wide_nucleus(e: Tensor, needed: Tensor, scores: Tensor) -> Narrowed:
    """The nucleus of a flat row without sorting it: only the bin of scores in which the mass is reached is sorted."""
    shape, size = scores.shape[:-1], scores.shape[-1]
    flat, e, needed = scores.reshape(-1, size), e.reshape(-1, size), needed.reshape(-1, 1)
    best = flat.amax(-1, keepdim=True)
    worst = torch.where(flat > -torch.inf, flat, best).amin(-1, keepdim=True)
    # any bins will do as long as a better score never lands in a later one
    bins = ((best - flat) * (BINS / (best - worst).clamp_min(1e-30))).clamp_(0, BINS).to(torch.int32)
    offset = torch.arange(len(flat), dtype=torch.int32, device=flat.device).unsqueeze(-1) * (BINS + 1)
    mass = torch.bincount((bins + offset).view(-1), e.view(-1).double(), len(flat) * (BINS + 1)).view(-1, BINS + 1)
    ends = mass.cumsum(-1)
    crossing = torch.searchsorted(ends, torch.minimum(needed, ends[:, -1:]))  # the last bin with mass, at the latest
    left = needed - (ends - mass).gather(-1, crossing)
    split = bins == crossing.to(torch.int32)
    few = narrow_to(split.to(torch.int8), flat)
    # the bins were summed in another order than the row was: one token more or less at the very edge of p
    chosen = _nucleus(torch.log(few.take(e)).masked_fill_(few.scores == -torch.inf, -torch.inf), left, few.scores)
    mask = (bins < crossing.to(torch.int32)).to(torch.int8)
    mask = few.add_(mask, (chosen & (few.scores > -torch.inf)).to(torch.int8)) > 0
    return Narrowed(scores.masked_fill(~mask.view(*shape, size), -torch.inf))


BINS = 1024


@dataclass(frozen=True, eq=False)
class Listed(Support):
    """Token ids, for all rows or row by row."""

    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor

    def _table(self, scores: Tensor) -> Tensor:
        """True for the ids listed, `[..., V]`; an id of −1 is padding."""
        ids, size = self._tensor(scores.device), scores.shape[-1]
        ids = ids.expand(*scores.shape[:-1], ids.shape[-1])
        slots = torch.where((ids >= 0) & (ids < size), ids, size)
        table = torch.zeros(*scores.shape[:-1], size + 1, dtype=torch.bool, device=scores.device)
        return table.scatter_(-1, slots, True)[..., :-1]

    def __post_init__(self) -> None:
        if isinstance(self.ids, Tensor) and (self.ids.is_floating_point() or self.ids.dtype == torch.bool):
            raise ValueError(
                f"{type(self).__name__}: ids must be whole numbers, got {self.ids.dtype}; a mask goes in the context"
            )
        if not isinstance(self.ids, (Tensor, list, tuple)):
            raise ValueError(f"{type(self).__name__}: ids must be a list or a tensor, got {type(self.ids).__name__}")

    def _tensor(self, device: "torch.device | None" = None) -> Tensor:
        if isinstance(self.ids, Tensor):
            ids = self.ids
        elif self.ids and not isinstance(self.ids[0], int):
            rows = [torch.as_tensor(list(row), dtype=torch.int64) for row in self.ids]  # pyright: ignore[reportArgumentType]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        else:
            ids = torch.as_tensor(self.ids, dtype=torch.int64)
        return ids.to(device)

    def check(self, scores: Tensor) -> None:
        ids, size = self._tensor(), scores.shape[-1]
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

    def check(self, scores: Tensor) -> None:
        self.first.check(scores)
        self.second.check(scores)

    def mask(self, scores: Tensor) -> Tensor:
        return self.second.mask(scores.masked_fill(~self.first.mask(scores), -torch.inf))
