"""A row of scores cut down to the few columns that can matter.

A vocabulary has 150,000 tokens and a nucleus has 50. Once it is known that the rest gets nothing, the
problem is solved on those columns alone, and its answer put back in place.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.rows import exp_, in_blocks, normalise_


@dataclass(frozen=True, eq=False)
class Narrowed:
    """Scores `[..., n]` of the tokens `ids` `[..., n]`, ascending. ids None: all tokens.

    Rows that keep fewer than n are padded: the score is −inf, the id that of their first token.
    """

    scores: Tensor
    ids: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """The narrowed columns of another `[..., V]`."""
        return x if self.ids is None else x.expand(*self.ids.shape[:-1], x.shape[-1]).gather(-1, self.ids)

    def drop_(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Another `[..., V]` with the narrowed columns filled, in place."""
        return x.fill_(fill) if self.ids is None else x.scatter_(-1, self.ids, fill)

    def add_(self, x: Tensor, values: Tensor) -> Tensor:
        """Another `[..., V]` plus values `[..., n]` on the narrowed columns, in place."""
        return x.add_(values) if self.ids is None else x.scatter_add_(-1, self.ids, values)

    def keep(self, mask: Tensor) -> "Narrowed":
        """The same columns, those outside `mask` forbidden."""
        return Narrowed(self.scores.masked_fill(~mask, -torch.inf), self.ids)

    def within(self, outer: "Narrowed") -> "Narrowed":
        """These columns, picked from `outer`, with the vocabulary's own ids."""
        if self.ids is None or outer.ids is None:
            return Narrowed(self.scores, self.ids if outer.ids is None else outer.ids)
        return Narrowed(self.scores, outer.ids.gather(-1, self.ids))

    def widen(self, q: Tensor, size: int) -> Tensor:
        """q on the narrowed columns as q on the whole vocabulary, zero elsewhere."""
        if self.ids is None:
            return q
        # add, not set: padding repeats an id, with nothing to add
        return q.new_zeros(*q.shape[:-1], size).scatter_add_(-1, self.ids, q)

    def widen_log(self, log_q: Tensor, size: int) -> Tensor:
        """log q on the narrowed columns as log q on the whole vocabulary, −inf elsewhere."""
        if self.ids is None:
            return log_q
        return self.raise_(log_q.new_full((*log_q.shape[:-1], size), -torch.inf), log_q)

    def raise_(self, x: Tensor, values: Tensor) -> Tensor:
        """Another `[..., V]`, at least `values` `[..., n]` on the narrowed columns, in place."""
        # the larger one: padding repeats an id, with −inf
        return x.copy_(values) if self.ids is None else x.scatter_reduce_(-1, self.ids, values, "amax")

    def tokens(self, columns: Tensor) -> Tensor:
        """Column numbers `[...]` as token ids."""
        return columns if self.ids is None else self.ids.gather(-1, columns.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Inside:
    """A solution on the columns that weigh, q `[..., n]` there; `rest` gives log q `[..., V]`, right on all others.

    Those together weigh less than the rounding error of q's sum, so a draw can do without them. Without `rest` they
    have none.
    """

    q: Tensor
    columns: Narrowed
    size: int
    rest: Callable[[], Tensor] | None = None

    def write(self) -> Tensor:
        """q `[..., V]`."""
        if self.rest is None:
            return self.columns.widen(self.q, self.size)
        return normalise_(self.columns.add_(self.columns.drop_(exp_(self.rest())), self.q))

    def write_log(self) -> Tensor:
        """log q `[..., V]`."""
        if self.rest is None:
            return self.columns.widen_log(self.q.log(), self.size)
        return self.columns.raise_(self.columns.drop_(self.rest(), -torch.inf), self.q.log())


def narrow_to(kept: Tensor, scores: Tensor) -> Narrowed:
    """The columns of `scores` where `kept` `[..., V]` is above zero, at least one in every row."""
    rows = kept.reshape(-1, kept.shape[-1])
    row, column = _above(rows, in_blocks(rows).amax(-1), rows.new_zeros(len(rows), 1))
    return _columns(row, column, scores)


def narrow_above(scores: Tensor, floor: Tensor, peaks: Tensor) -> Narrowed:
    """The columns of `scores` above `floor` `[..., 1]`, at least one in every row; `peaks` are their block maxima."""
    best = peaks.amax(-1, keepdim=True)
    # a floor a little below the best may round to it: the best entry stays, whatever the floor
    floor = torch.minimum(floor, torch.nextafter(best, torch.full_like(best, -torch.inf)))
    rows, peaks = scores.reshape(-1, scores.shape[-1]), peaks.reshape(-1, peaks.shape[-1])
    row, column = _above(rows, peaks, floor.expand(*scores.shape[:-1], 1).reshape(-1, 1))
    return _columns(row, column, scores)


def crowded(scores: Tensor, floor: float | Tensor, widest: bool = False) -> bool:
    """Whether more than one token in eight seems to lie above the floor, told from a sample.

    Of all rows together, or of the `widest`, to which the columns of the others are padded.
    """
    above = scores[..., ::61] > floor
    return 8 * int(above.sum(-1).max() if widest else above.sum()) > (above.shape[-1] if widest else above.numel())


def _above(x: Tensor, peaks: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of the entries of x `[n, V]` above `floor` `[n, 1]`, in order.

    Two levels: first the blocks that hold any, then their entries; `nonzero` over a whole vocabulary
    costs more than all the arithmetic.
    """
    blocks = in_blocks(x, fill=-torch.inf)
    row, block = (peaks > floor).nonzero().unbind(1)
    length = blocks.shape[-1]
    inside = blocks.reshape(-1, length).index_select(0, block if len(x) == 1 else row * blocks.shape[-2] + block)
    bound = floor if len(x) == 1 else floor.index_select(0, row)
    entry, offset = (inside > bound).nonzero().unbind(1)
    column = torch.add(offset, block.index_select(0, entry), alpha=length)
    return row.index_select(0, entry), column


def _columns(row: Tensor, column: Tensor, scores: Tensor) -> Narrowed:
    """Entries as a table with one line for each row, as wide as the row that keeps most."""
    flat = scores.reshape(-1, scores.shape[-1])
    shape = scores.shape[:-1]
    if len(flat) == 1:
        return Narrowed(flat[0].index_select(0, column).expand(*shape, -1), column.expand(*shape, -1))
    counts = torch.bincount(row, minlength=len(flat))
    ends = counts.cumsum(0)
    starts = ends - counts
    width = int(counts.max()) if len(counts) else 1
    place = torch.arange(len(row), device=row.device) - starts.index_select(0, row)
    ids = column.index_select(0, starts).unsqueeze(-1).repeat(1, width)
    place.add_(row, alpha=width)
    ids.view(-1)[place] = column
    values = scores.new_full(ids.shape, -torch.inf)
    values.view(-1)[place] = flat[row, column]
    return Narrowed(values.view(*shape, width), ids.view(*shape, width))
