"""A row of scores cut down to the few columns that can matter.

A vocabulary has 150,000 tokens and a nucleus has 50. Once it is known that the rest gets nothing, the
problem is solved on those columns alone, and its answer put back in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from simplexity.rows import ONE_BY_ONE, exp_, in_blocks, normalise_, places


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

    def each(self, x: Tensor) -> Tensor:
        """A number for each row, `[..., 1]`, beside the columns."""
        return x

    def sums(self, values: Tensor) -> Tensor:
        """The sum of each row, beside the columns."""
        return values.sum(-1, keepdim=True)

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

    def widen_log(self, log_q: Tensor, size: int, out: Tensor | None = None) -> Tensor:
        """log q on the narrowed columns as log q on the whole vocabulary, −inf elsewhere; in `out`, where given."""
        if self.ids is None:
            return log_q if out is None else out.copy_(log_q)
        out = log_q.new_empty(*log_q.shape[:-1], size) if out is None else out
        return self.raise_(out.fill_(-torch.inf), log_q)

    def raise_(self, x: Tensor, values: Tensor) -> Tensor:
        """Another `[..., V]`, at least `values` `[..., n]` on the narrowed columns, in place."""
        # the larger one: padding repeats an id, with −inf
        return x.copy_(values) if self.ids is None else x.scatter_reduce_(-1, self.ids, values, "amax")

    def tokens(self, columns: Tensor) -> Tensor:
        """Column numbers `[...]` as token ids."""
        return columns if self.ids is None else self.ids.gather(-1, columns.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of scores `[..., V]`: `scores`, `rows` and `ids` `[n]`, row after row, ids ascending.

    As `Narrowed`, but not padded: in a batch one row may keep two thousand tokens and another two.
    """

    scores: Tensor
    rows: Tensor
    ids: Tensor
    lead: torch.Size  # [...]

    def each(self, x: Tensor) -> Tensor:
        """A number for each row, `[..., 1]`, beside the entries."""
        if self.lead.numel() == 1:
            return x.reshape(1)
        return x.expand(*self.lead, 1).reshape(-1).index_select(0, self.rows)

    def sums(self, values: Tensor) -> Tensor:
        """The sum of each row, beside the entries."""
        return self.each(self.totals(values))

    def totals(self, values: Tensor) -> Tensor:
        """The sum of each row, `[..., 1]`."""
        count = self.lead.numel()
        summed = values.sum(0) if count == 1 else values.new_zeros(count).index_add_(0, self.rows, values)
        return summed.view(*self.lead, 1)

    def pick(self, some: Tensor) -> "Entries":
        """Those with these numbers, ascending."""
        scores, rows, ids = (x.index_select(0, some) for x in (self.scores, self.rows, self.ids))
        return Entries(scores, rows, ids, self.lead)

    def put_(self, x: Tensor, values: Tensor) -> Tensor:
        """Another `[..., V]` with `values` `[n]` at the entries, in place."""
        x.view(-1, x.shape[-1])[self.rows, self.ids] = values
        return x

    @cached_property
    def _places(self) -> tuple[int, Tensor, Tensor]:
        """The width of a table with a line for each row, where its lines begin here, and the entries there."""
        counts = torch.bincount(self.rows, minlength=self.lead.numel())
        starts = counts.cumsum(0) - counts
        width = int(counts.max()) if len(counts) else 1
        place = torch.arange(len(self.rows), device=self.rows.device) - starts.index_select(0, self.rows)
        return width, starts, place.add_(self.rows, alpha=width)

    def table(self, values: Tensor, fill: float) -> Tensor:
        """Values `[n]` as `[..., width]`, as wide as the row with most entries."""
        if self.lead.numel() == 1:
            return values.view(*self.lead, -1)
        width, _, place = self._places
        return values.new_full((self.lead.numel() * width,), fill).index_copy_(0, place, values).view(*self.lead, width)

    def listed(self, table: Tensor) -> Tensor:
        """A table's values at the entries, `[n]`."""
        return table.reshape(-1) if self.lead.numel() == 1 else table.reshape(-1).index_select(0, self._places[2])

    def narrowed(self) -> Narrowed:
        """The same as a table; every row has an entry."""
        if self.lead.numel() == 1:
            return Narrowed(self.table(self.scores, 0.0), self.table(self.ids, 0.0))
        width, starts, place = self._places
        ids = self.ids.index_select(0, starts).unsqueeze(-1).repeat(1, width)
        ids.view(-1)[place] = self.ids
        return Narrowed(self.table(self.scores, -torch.inf), ids.view(*self.lead, width))


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
    return _entries(rows, in_blocks(rows).amax(-1), rows.new_zeros(len(rows), 1), scores).narrowed()


def narrow_above(scores: Tensor, floor: Tensor, peaks: Tensor) -> Narrowed:
    """The columns of `scores` above `floor` `[..., 1]`, at least one in every row; `peaks` are their block maxima."""
    return entries_above(scores, floor, peaks).narrowed()


def entries_above(scores: Tensor, floor: Tensor, peaks: Tensor) -> Entries:
    """The same without a table's padding."""
    best = peaks.amax(-1, keepdim=True)
    # a floor a little below the best may round to it: the best entry stays, whatever the floor
    floor = torch.minimum(floor, torch.nextafter(best, torch.full_like(best, -torch.inf)))
    rows, peaks = scores.reshape(-1, scores.shape[-1]), peaks.reshape(-1, peaks.shape[-1])
    return _entries(rows, peaks, floor.expand(*scores.shape[:-1], 1).reshape(-1, 1), scores)


def crowded(scores: Tensor, floor: float | Tensor, widest: bool = False) -> bool:
    """Whether more than one token in eight seems to lie above the floor, told from a sample.

    Of all rows together, or of the `widest`, to which the columns of the others are padded.
    """
    above = scores[..., ::61] > floor
    return 8 * int(above.sum(-1).max() if widest else above.sum()) > (above.shape[-1] if widest else above.numel())


def _entries(x: Tensor, peaks: Tensor, floor: Tensor, scores: Tensor) -> Entries:
    """The entries of `scores` where x `[n, V]` is above `floor` `[n, 1]`.

    Two levels: first the blocks that hold any, then their entries; looking for those in a whole vocabulary
    costs more than all the arithmetic.
    """
    blocks = in_blocks(x, fill=-torch.inf)
    count, length = blocks.shape[-2:]
    hot = (peaks > floor).view(-1).nonzero().view(-1)
    bound = floor if len(x) == 1 else floor.index_select(0, hot.div(count, rounding_mode="floor"))
    inside = blocks.reshape(-1, length).index_select(0, hot)
    if inside.numel() < ONE_BY_ONE:
        block, place = (inside > bound).nonzero().unbind(-1)
        ids = hot.index_select(0, block).mul_(length).add_(place)
    else:
        place = places(inside.gt_(bound).view(-1).bool())  # as numbers first: twice as fast as a mask at once
        block = place.div(length, rounding_mode="floor")
        ids = place.add_(hot.index_select(0, block).sub_(block), alpha=length)
    flat = scores.reshape(-1, scores.shape[-1])
    if len(x) == 1:
        return Entries(flat[0].index_select(0, ids), torch.zeros_like(ids), ids, scores.shape[:-1])
    rows = ids.div(count * length, rounding_mode="floor")
    ids.sub_(rows, alpha=count * length)
    return Entries(flat[rows, ids], rows, ids, scores.shape[:-1])
