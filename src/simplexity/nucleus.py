"""The smallest set of best tokens whose mass reaches what is needed, without sorting more than its edge.

Masses e `[..., n]` are those of the tokens up to a factor. Ties at the edge: lowest ids first.
"""

from math import copysign, inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from simplexity.narrow import Entries, narrow_to
from simplexity.rows import FLOORS, exp_, in_blocks, total

BINS = 256  # by which scores are told apart before any are sorted
SHORT = 4096  # entries of rows that are sorted
LONG = 2**15  # entries of a row worth its own operations
SAMPLE = 512  # entries of such a row that tell where the edge of its nucleus lies
BAND_SAMPLE = 2048  # more where a band is sorted at once
FEW = 256  # tokens at the edge that need no further look
SECANTS = 2  # pairs of looks once the edge lies between two cuts


def prefix(e: Tensor, needed: Tensor, order: Tensor) -> Tensor:
    """1.0 for the tokens, best `order` first, before which less than `needed` `[..., 1]` of Σ e lies, else 0.0."""
    ids = order.argsort(dim=-1, descending=True, stable=True)
    mass = e.gather(-1, ids)
    kept = (mass.cumsum(-1, dtype=torch.float64) - mass < needed).to(e.dtype)
    return torch.empty_like(kept).scatter_(-1, ids, kept)


def nucleus_among(entries: Entries, depth: Tensor, e: Tensor, needed: Tensor) -> Tensor | None:
    """The numbers of the entries in the nucleus, ascending; None where all of some row's together hold too little.

    depth: from 0 to 1, the deeper the lower the score, `[n]`. Entries are put into bins by it; of each row only the bin
    in which the mass is reached is sorted.
    """
    count = entries.lead.numel()
    needed = needed.expand(*entries.lead, 1).reshape(-1, 1)
    bins = (depth * BINS).clamp_max_(BINS - 1).long().add_(entries.rows, alpha=BINS)
    masses = torch.bincount(bins, weights=e, minlength=count * BINS).view(count, BINS)
    ends = masses.cumsum(-1)
    if not bool((ends[:, -1:] >= needed).all()):
        return None
    last = (ends < needed).sum(-1, keepdim=True)
    before = (ends - masses).gather(-1, last)
    reached = last.squeeze(-1).add(torch.arange(count, device=bins.device), alpha=BINS)
    beyond = bins - entries.each(reached.view(*entries.lead, 1))
    at_edge = (beyond == 0).nonzero().view(-1)
    edge = entries.pick(at_edge)
    kept = prefix(
        edge.table(e.index_select(0, at_edge), 0.0),
        (needed - before).view(*entries.lead, 1),
        edge.table(edge.scores, -torch.inf),
    )
    return (beyond < 0).index_copy_(0, at_edge, edge.listed(kept) > 0).nonzero().view(-1)


def wide_nucleus(scores: Tensor, best: Tensor, tau: float | Tensor, p: float | Tensor) -> Tensor:
    """exp((s − max s)/τ) in the nuclei of flat rows `[..., V]`, else 0.0; `best` `[..., 1]` is max s. Reads values.

    Short rows are sorted. Long ones, or one alone, row by row: one stays in the cache where many do not, and needs no
    more looks than it needs.
    """
    size, count = scores.shape[-1], scores.numel() // scores.shape[-1]
    if scores.device.type != "cpu" or size < SHORT or (size < LONG and count > 1):
        e, everything = exp_(torch.sub(scores, best).div_(tau)), torch.as_tensor(p, device=scores.device) >= 1
        needed = (total(e) * p).masked_fill_(everything, inf)
        return e.mul_((prefix if size < SHORT else sort_bands)(e, needed, scores))
    rows = scores.reshape(-1, scores.shape[-1])
    masses = torch.empty_like(rows)
    peaks, taus, parts = (_one_each(x, scores.shape[:-1]) for x in (best, tau, p))
    for out, row, peak, own, part in zip(masses, rows, peaks, taus, parts, strict=True):
        x = torch.sub(row, peak, out=out).mul_(1.0 / own)
        if part < 1:
            keep_nucleus_(x.clamp_min_(FLOORS[x.dtype][0]).exp_(), part, row)
        else:
            exp_(x)
    return masses.view_as(scores)


def sort_bands(e: Tensor, needed: Tensor, scores: Tensor) -> Tensor:
    """`prefix` for many rows in few operations: a sample tells in which band the edge of each lies, and that is sorted.

    Indicators are numbers, not booleans: over a whole vocabulary those are several times faster.
    """
    size = scores.shape[-1]
    flat, e, needed = scores.reshape(-1, size), e.reshape(-1, size), needed.reshape(-1, 1)
    stride = size // BAND_SAMPLE
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
        return prefix(e, needed, flat).view_as(scores)
    chosen = prefix(mass, left, few.scores).mul_(mass.sign_())
    return few.add_(kept, chosen).view_as(scores)


def _one_each(x: float | Tensor, rows: torch.Size) -> list[float]:
    """A number, or one for each row, as a list."""
    return x.expand(*rows, 1).flatten().tolist() if isinstance(x, Tensor) else [x] * rows.numel()


def keep_nucleus_(e: Tensor, p: float, scores: Tensor) -> None:
    """0.0 for what is not in the nucleus, p of the masses e `[V]`, in place."""
    mass = float(e.sum())
    high, low = cuts_around(e, p * mass, mass)
    ids = between(e, low.level, high.level)
    at_edge = e.index_select(0, ids)
    left = e.new_full((1,), p * mass - high.held, dtype=torch.float64)
    at_edge.mul_(prefix(at_edge, left, scores.index_select(0, ids)))
    torch.threshold_(e, high.level, 0.0).index_copy_(0, ids, at_edge)


class Cut(NamedTuple):
    """A level, and the sum of the masses above it."""

    level: float
    held: float


def cuts_around(e: Tensor, needed: float, mass: float) -> tuple[Cut, Cut]:
    """(a cut that holds less than is needed, one that holds enough) through masses e `[V]`, with few tokens between.

    A sample tells where the edge lies, a sum over the row how far off that is; once it lies between two cuts, straight
    lines are good guesses. What the cuts hold is exact up to rounding, however good the guesses.
    """
    high, low = Cut(inf, 0.0), Cut(-1.0, mass)

    def look(level: float) -> float:
        """How much more than needed lies above this level; one of the cuts may move there."""
        nonlocal high, low
        held = float(torch.threshold(e, level, 0.0).sum())
        if held < needed:
            high = Cut(level, held) if level < high.level else high
        else:
            low = Cut(level, held) if level > low.level else low
        return held - needed

    stride = len(e) // SAMPLE
    part = e[::stride].sort().values
    # from the worst token up: small numbers, whose sums a sample tells well
    below = part.cumsum(-1, dtype=torch.float64).mul_(stride)
    place = int(torch.searchsorted(below, mass - needed))
    while 0 <= place < len(part) and not (low.level >= 0 and high.level < inf):
        level = float(part[place])
        over = look(level)
        doubt = 2 * sqrt(abs(over) * stride * level)  # of the sample, about what lies between
        aim = int(torch.searchsorted(below, float(below[place]) + over + copysign(doubt, over)))
        place = max(aim, place + 1) if over >= 0 else min(aim, place - 1)
    for _ in range(SECANTS):
        span = low.held - high.held
        if not (low.level > 0 and high.level < inf) or span < FEW * low.level:
            break
        doubt = 1.5 * sqrt(span * high.level)
        (start, width), over = (low.level, (high.level - low.level) / span), low.held - needed
        for aim in (over + doubt, over - doubt):
            if 0 < aim < span:
                look(start + aim * width)
    return high, low


def between(e: Tensor, low: float, high: float) -> Tensor:
    """The ids of masses e `[V]` in (low, high], ascending."""
    blocks = in_blocks(torch.le(e, high, out=torch.empty_like(e)).mul_(e).gt_(max(low, 0.0)))  # numbers, not booleans
    hot = blocks.amax(-1).nonzero().view(-1)
    block, place = blocks.index_select(0, hot).nonzero().unbind(-1)
    return hot.index_select(0, block).mul_(blocks.shape[-1]).add_(place)
