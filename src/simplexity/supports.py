"""C_t, the tokens a decoder may use at all: the rules that come before the optimisation.

A support is a rule, not a mask: it is applied to the scores of a step and keeps at least one of the
tokens whose score is above −inf.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.narrow import Narrowed, crowded, narrow_above, narrow_to
from simplexity.rows import block_length, block_maxima, covers, exp_, in_blocks, is_number, per_row, total


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

    def narrow(self, scores: Tensor, peaks: Tensor | None = None) -> Narrowed:
        if isinstance(self.k, Tensor) or self.k >= scores.shape[-1]:
            return super().narrow(scores)
        best, ids = best_scores(scores, int(self.k) + 1, peaks)
        if not bool((best[..., -2] > best[..., -1]).all()):  # a tie at the cut: only the full rule knows which ids win
            return super().narrow(scores)
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
        e, needed = self._weighed(scores, scores.amax(-1, keepdim=True))
        return (_prefix(e, needed, scores)[0] > 0) & (scores > -torch.inf)

    def narrow(self, scores: Tensor, peaks: Tensor | None = None) -> Narrowed:
        if not isinstance(self.p, Tensor) and self.p == 1:
            return Narrowed(scores)
        few, kept, _ = self.nucleus(scores, block_maxima(scores) if peaks is None else peaks)
        return Narrowed(few.scores - kept.reciprocal_().sub_(1.0), few.ids)  # 1/0 − 1 takes a score to −inf

    def nucleus(self, scores: Tensor, peaks: Tensor) -> tuple[Narrowed, Tensor, Tensor]:
        """Columns that hold the nucleus, 1.0 for those in it and 0.0 for others, and their exp((s − max s)/τ)."""
        best, tau = peaks.amax(-1, keepdim=True), per_row(self.temperature, scores, "temperature")
        e, needed = self._weighed(scores, best)
        for cut in (CUT, DEEPER):  # one flat row among peaked ones is no reason to look at everything
            floor = best + tau * math.log(cut)
            if crowded(scores, floor):
                break
            few = narrow_above(scores, floor, peaks)
            inside = exp_((few.scores - best).div_(tau))
            kept, mass = _prefix(inside, needed, few.scores)
            if bool((mass >= needed).all()):
                return few, kept, inside
        return Narrowed(scores), _wide_nucleus(e, needed, scores), e

    def _weighed(self, scores: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """(exp((s − max s)/τ), the part of its sum that the nucleus must hold); +inf where p = 1."""
        e = exp_(torch.sub(scores, best).div_(per_row(self.temperature, scores, "temperature")))
        mass, p = total(e), per_row(self.p, scores, "p")
        if isinstance(p, Tensor):
            return e, torch.where(p >= 1, torch.inf, p.double() * mass)
        return e, mass * p if p < 1 else torch.full_like(mass, torch.inf)


CUT = 1e-3  # relative to the best token: most nuclei end above
DEEPER = 1e-5  # and nearly all above this
SAMPLE = 2048  # entries of a row that tell where the edge of a wider nucleus lies


def _prefix(e: Tensor, needed: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """1.0 for the tokens, best `order` first, before which less than `needed` of Σ e lies, else 0.0; and Σ e."""
    ids = order.argsort(dim=-1, descending=True, stable=True)
    mass = e.gather(-1, ids)
    ends = mass.cumsum(-1, dtype=torch.float64)
    kept = (ends - mass < needed).to(e.dtype)
    return torch.empty_like(kept).scatter_(-1, ids, kept), ends[..., -1:]


def _wide_nucleus(e: Tensor, needed: Tensor, scores: Tensor) -> Tensor:
    """The nucleus of a flat row without sorting it: a sample tells where its edge lies, only that band is sorted.

    Indicators are numbers, not booleans: over a whole vocabulary those are several times faster.
    """
    size = scores.shape[-1]
    flat, e, needed = scores.reshape(-1, size), e.reshape(-1, size), needed.reshape(-1, 1)
    stride = max(size // SAMPLE, 1)
    part, place = e[:, ::stride].sort(-1)
    # count from the worst token up: small numbers, whose sums a sample tells well
    sums, left_out = part.double(), total(e) - needed
    doubt = 4 * stride * sums.square().cumsum(-1).sqrt_()
    below = sums.cumsum(-1).mul_(stride)
    lower = part.gather(-1, ((below + doubt < left_out).sum(-1, keepdim=True) - 1).clamp_min_(0))
    upper = part.gather(-1, (below - doubt < left_out).sum(-1, keepdim=True).clamp_max_(part.shape[-1] - 1))
    # best tokens first: those from `upper` on, then the band [lower, upper), in which the mass is reached
    kept = (e - torch.nextafter(upper, torch.zeros_like(upper))).relu_().sign_()
    left = needed - total(e * kept)
    band = torch.minimum(e - torch.nextafter(lower, torch.full_like(lower, -1.0)), upper - e)
    few = narrow_to(band.scatter_(-1, place[:, -1:] * stride, 1.0), flat)  # never empty
    mass = few.take(e)
    mass.masked_fill_((few.scores == -torch.inf) | (mass >= upper), 0.0)
    if bool(((left <= 0) | (mass.sum(-1, keepdim=True, dtype=torch.float64) < left)).any()):  # the sample misled
        return _prefix(e, needed, flat)[0].view_as(scores)
    chosen = _prefix(mass, left, few.scores)[0].mul_(mass.sign_())
    return few.add_(kept, chosen).view_as(scores)


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
