"""The smallest set of best tokens whose mass reaches what is needed, without sorting more than its edge.

Masses e `[..., n]` are those of the tokens up to a factor. Ties at the edge: lowest ids first.
"""

import torch
from torch import Tensor

from simplexity.narrow import Entries, narrow_to
from simplexity.rows import total

BINS = 256  # by which scores are told apart before any are sorted
SAMPLE = 2048  # entries of a row that tell where the edge of a wider nucleus lies


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


def wide_nucleus(e: Tensor, needed: Tensor, scores: Tensor) -> Tensor:
    """1.0 in the nucleus of a flat row, else 0.0: a sample tells where the edge lies, only that band is sorted.

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
        return prefix(e, needed, flat).view_as(scores)
    chosen = prefix(mass, left, few.scores).mul_(mass.sign_())
    return few.add_(kept, chosen).view_as(scores)
