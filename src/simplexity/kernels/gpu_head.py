"""Rows solved from their head: the few groups of tokens with the best maxima, one tile at most."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

import triton
import triton.language as tl

from simplexity.kernels.gpu_coverage import TOP_M
from simplexity.kernels.gpu_coverage_rows import climb_head, optimum_head
from simplexity.kernels.gpu_weights import (
    BEST,
    BOK,
    ENTMAX,
    LOG2E,
    SPARSEMAX,
    TOP_K,
    TOP_P,
    among,
    draw_head,
    key,
    unkey,
    weigh,
)


@triton.jit
def head_groups(peak, best, reach, GROUPS: tl.constexpr):
    """A cut above which at most GROUPS groups have their maximum: `reach` below the best, or less deep."""
    cut = best - reach
    if tl.sum((peak > cut).to(tl.int32)) > GROUPS:
        low, high = key(cut), key(best)  # too many above low
        count = 0
        while (high - low > 1) & ((count <= GROUPS // 2) | (count > GROUPS)):
            middle = low + (high - low) // 2
            count = tl.sum((peak > unkey(middle)).to(tl.int32))
            low = tl.where(count > GROUPS, middle, low)
            high = tl.where(count > GROUPS, high, middle)
        cut = unkey(high)
    return cut


@triton.jit
def best_k(h, ids, kept, bound, best):
    """(cut, last tied id): the value of the k-th best entry, and the last id kept among those equal to it."""
    low, high = key(bound), key(best)  # at least k entries lie above low, fewer than k above high
    more, fewer = tl.sum((h > bound).to(tl.int32)), 0
    while (high - low > 1) & (more - fewer > 1):
        middle = low + (high - low) // 2
        above = tl.sum((h > unkey(middle)).to(tl.int32))
        enough = above >= kept
        low, more = tl.where(enough, middle, low), tl.where(enough, above, more)
        high, fewer = tl.where(enough, high, middle), tl.where(enough, fewer, above)
    cut = tl.max(tl.where(h <= unkey(high), h, -float("inf")))  # one value is left between the two
    room = kept - tl.sum((h > cut).to(tl.int32))
    tied = h == cut
    order = tl.cumsum(tied.to(tl.int32), 0)
    return cut, tl.max(tl.where(tied & (order <= room), ids, -1))


@triton.jit
def nucleus(h, ids, e, needed, bound, best):
    """(cut, last tied id) of the smallest set of best entries whose e reaches `needed`."""
    low, high = key(bound), key(best)  # the mass above low is enough, above high it is not
    # one sum for two: the mass, at most as large as the head, and the count in units of 2^14 above it
    UNIT: tl.constexpr = 16384.0
    pair = e + UNIT
    more, fewer = tl.floor(tl.sum(tl.where(h > bound, pair, 0.0)) / UNIT), tl.full([], 0.0, tl.float64)
    while (high - low > 1) & (more - fewer > 1):
        middle = low + (high - low) // 2
        both = tl.sum(tl.where(h > unkey(middle), pair, 0.0))
        count = tl.floor(both / UNIT)
        enough = both - count * UNIT >= needed
        low, more = tl.where(enough, middle, low), tl.where(enough, count, more)
        high, fewer = tl.where(enough, high, middle), tl.where(enough, fewer, count)
    cut = tl.max(tl.where(h <= unkey(high), h, -float("inf")))  # one value is left between the two
    left = needed - tl.sum(tl.where(h > cut, e, 0.0))
    tied = h == cut
    mass = tl.cumsum(tl.where(tied, e, 0.0), 0)
    before = mass - tl.where(tied, e, 0.0)
    return cut, tl.max(tl.where(tied & (before < left), ids, -1))


@triton.jit
def threshold(z, KIND: tl.constexpr):
    """η of sparsemax, Σ(z − η)_+ = 1, or of 1.5-entmax, Σ((z/2 − η)_+)² = 1: Newton's method from the left.

    Both sums are convex and fall with η, and are at least 1 at the start: no step passes the root.
    """
    eta = tl.full([], -1.0, tl.float64)
    moved = tl.full([], 1.0, tl.float64)
    rounds = 0
    while (moved > 1e-9) & (rounds < 64):
        if KIND == SPARSEMAX:
            above = tl.maximum(z.to(tl.float64) - eta, 0.0)
            moved = (tl.sum(above) - 1.0) / tl.sum((above > 0).to(tl.float64))
        else:
            above = tl.maximum(z.to(tl.float64) * 0.5 - eta, 0.0)
            square = tl.sum(above * above)
            norm = tl.sqrt(square)
            moved = (norm - 1.0) * norm / tl.sum(above)
        eta += moved
        rounds += 1
    return eta.to(tl.float32)


@triton.jit
def solve_head(
    at, size, peak, g, bound, best, slope, mass_slope, count, share, mass, u, slots, numbers, levels, steps,
    KIND: tl.constexpr, RULE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(cut, last tied id, η, flag, mass, token, log q) from the groups with a maximum above `bound`, at most GROUPS.

    Of the entries above the bound none is missing; the flag says that they do not suffice.
    """
    hot = peak > bound
    place = tl.cumsum(hot.to(tl.int32), 0) - 1
    tl.debug_barrier()  # an earlier, narrower head may still be reading
    tl.store(slots + place, g, mask=hot & (place < GROUPS))
    tl.debug_barrier()
    lane = tl.arange(0, GROUPS * GROUP)
    held = (lane // GROUP) < tl.sum(hot.to(tl.int32))
    ids = tl.load(slots + lane // GROUP, mask=held, other=0) * GROUP + lane % GROUP
    held = held & (ids < size)
    h = tl.load(at + ids, mask=held, other=-float("inf")).to(tl.float32)
    ids = tl.where(held, ids, 2147483647)
    sure = h > bound
    cut = -float("inf")
    tie = tl.full([], 2147483647, tl.int32)
    eta = 0.0
    flag = tl.full([], 0, tl.int32)
    if tl.sum(sure.to(tl.int32)) == 0:  # ties at the best can leave the head empty
        flag = tl.full([], 1, tl.int32)
    if KIND == TOP_K:
        if tl.sum(sure.to(tl.int32)) < count:
            flag = tl.full([], 1, tl.int32)
        cut, tie = best_k(h, ids, count, bound, best)
    if (KIND == BOK or KIND == BEST) and RULE == TOP_M:
        if tl.sum(sure.to(tl.int32)) > count:  # otherwise the whole head is among the m best, and nothing else matters
            cut, tie = best_k(h, ids, count, bound, best)
    if KIND == TOP_P:
        e = tl.where(sure, tl.exp2((h - best) * (mass_slope * LOG2E)), 0.0).to(tl.float64)
        needed = share * mass
        if (share >= 1.0) | (tl.sum(e) < needed):
            flag = tl.full([], 1, tl.int32)
        cut, tie = nucleus(h, ids, e, needed, bound, best)
    if KIND == SPARSEMAX or KIND == ENTMAX:
        eta = threshold(tl.where(sure, (h - best) * slope, -float("inf")), KIND)
        limit = eta if KIND == SPARSEMAX else 2 * eta
        if (bound - best) * slope > limit:
            flag = tl.full([], 1, tl.int32)
    if KIND == BOK or KIND == BEST:
        z, kept, log_weights = tl.where(sure, h - best, -float("inf")), among(h, ids, cut, tie), h
        lacking = flag
        if KIND == BOK:
            log_weights, eta, flag = climb_head(z, kept, slope, mass, bound - best, numbers, levels, steps, RULE)
        else:
            log_weights, eta, flag = optimum_head(z, kept, slope, mass, bound - best, numbers, levels, RULE)
        flag = tl.maximum(flag, lacking)
        w = tl.where(sure, tl.exp(log_weights), 0.0)
    else:
        w = tl.where(sure, weigh(h, ids, best, slope, cut, tie, eta, numbers, levels, steps, KIND, RULE), 0.0)
    token, log_weight = draw_head(w, ids, u)
    # the mass of the cut is needed again where the head did not suffice
    total = tl.where(flag == 0, tl.sum(w.to(tl.float64)), mass)
    return cut, tie, eta, flag, total, token, log_weight
