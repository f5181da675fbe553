"""Rows solved from their head: the few groups of tokens with the best maxima, one tile at most."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

import triton
import triton.language as tl

from simplexity.kernels.gpu_coverage import TOP_M
from simplexity.kernels.gpu_coverage_rows import climb_head, optimum_head
from simplexity.kernels.gpu_sums import three_sums
from simplexity.kernels.gpu_weights import (
    BEST,
    BOK,
    ENTMAX,
    LOG2E,
    MIN_P,
    SPARSEMAX,
    TOP_K,
    TOP_P,
    among,
    draw_head,
    floor_of,
    key,
    unkey,
    weigh,
)


@triton.jit
def counts_above(x, a, b, c, d):
    """How many entries of x lie above each of four numbers: one sum for four, 16 bits each."""
    one = tl.full([], 1, tl.int64)
    packed = tl.where(x > a, one, 0) + tl.where(x > b, one << 16, 0)
    packed += tl.where(x > c, one << 32, 0) + tl.where(x > d, one << 48, 0)
    found = tl.sum(packed)
    mask = 0xFFFF
    return found & mask, (found >> 16) & mask, (found >> 32) & mask, (found >> 48) & mask


@triton.jit
def narrower(x, low, high, a, b, c, d, least, most):
    """(low, high, found): the part of a bracket in which at most `most` entries of x begin to lie above."""
    na, nb, nc, nd = counts_above(x, a, b, c, d)
    low = tl.where(nd > most, d, tl.where(nc > most, c, tl.where(nb > most, b, tl.where(na > most, a, low))))
    count = tl.where(nd <= most, nd, 0)
    high = tl.where(nd <= most, d, high)
    high, count = tl.where(nc <= most, c, high), tl.where(nc <= most, nc, count)
    high, count = tl.where(nb <= most, b, high), tl.where(nb <= most, nb, count)
    high, count = tl.where(na <= most, a, high), tl.where(na <= most, na, count)
    return low, high, (count >= least).to(tl.int32)


@triton.jit
def cut_between(x, low, high, least, most):
    """A number above which `least` to `most` entries of x lie, or where ties allow none, fewer.

    More than `most` lie above `low`, fewer than `least` above `high`. Five parts a round: equal ones first, then, for
    what these do not tell apart, by the order of the floats.
    """
    found, rounds = tl.full([], 0, tl.int32), 0
    while (found == 0) & (rounds < 6):
        part = tl.where(low > -1e30, (high - low) * 0.2, 0.0)
        low, high, found = narrower(
            x, low, high, low + part, low + 2 * part, low + 3 * part, low + 4 * part, least, most
        )
        rounds += 1
    left, right = key(low), key(high)
    while (found == 0) & (right - left > 1):
        part = tl.maximum((right - left) // 5, 1)
        a, b = left + part, tl.minimum(left + 2 * part, right)
        c, d = tl.minimum(left + 3 * part, right), tl.minimum(left + 4 * part, right)
        low, high, found = narrower(x, low, high, unkey(a), unkey(b), unkey(c), unkey(d), least, most)
        left, right = key(low), key(high)
    return high


@triton.jit
def head_groups(peak, best, reach, span, least, GROUPS: tl.constexpr):
    """A cut above which at most GROUPS groups have their maximum: `reach` below the best, or less deep.

    `span`: a guess at how deep it may lie.
    """
    cut = best - reach
    if tl.sum((peak > cut).to(tl.int32)) > GROUPS:
        low = tl.maximum(best - span, cut)
        low = tl.where(tl.sum((peak > low).to(tl.int32)) > GROUPS, low, cut)
        cut = cut_between(peak, low, best, least, GROUPS)
    return cut


@triton.jit
def best_k(h, ids, kept, bound, best):
    """(cut, last tied id): the value of the k-th best entry, and the last id kept among those equal to it."""
    # at most `kept` lie above this number, fewer only where the k-th best is tied with the next
    above = cut_between(h, bound, best, kept, kept)
    enough = tl.sum((h > above).to(tl.int32)) == kept
    # the k-th best itself: the least of exactly k, or the value at which ties begin
    cut = tl.where(enough, tl.min(tl.where(h > above, h, float("inf"))), above)
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
    PART: tl.constexpr = 1.0 / 16384.0
    pair = e + UNIT
    more, fewer = tl.floor(tl.sum(tl.where(h > bound, pair, 0.0)) * PART), tl.full([], 0.0, tl.float64)
    while (high - low > 1) & (more - fewer > 1):
        part = tl.maximum((high - low) // 4, 1)
        a, b, c = low + part, tl.minimum(low + 2 * part, high - 1), tl.minimum(low + 3 * part, high - 1)
        at_a, at_b, at_c = three_sums(
            tl.where(h > unkey(a), pair, 0.0), tl.where(h > unkey(b), pair, 0.0), tl.where(h > unkey(c), pair, 0.0)
        )
        in_a, in_b, in_c = tl.floor(at_a * PART), tl.floor(at_b * PART), tl.floor(at_c * PART)
        a_does, b_does = at_a - in_a * UNIT >= needed, at_b - in_b * UNIT >= needed
        c_does = at_c - in_c * UNIT >= needed
        high = tl.where(a_does, tl.where(b_does, tl.where(c_does, high, c), b), a)
        fewer = tl.where(a_does, tl.where(b_does, tl.where(c_does, fewer, in_c), in_b), in_a)
        low = tl.where(c_does, c, tl.where(b_does, b, tl.where(a_does, a, low)))
        more = tl.where(c_does, in_c, tl.where(b_does, in_b, tl.where(a_does, in_a, more)))
    cut = tl.max(tl.where(h <= unkey(high), h, -float("inf")))  # one value is left between the two
    # none where all together hold a rounding less than is needed
    cut = tl.where(cut > -float("inf"), cut, tl.min(tl.where(h > bound, h, float("inf"))))
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
def gather(at, size, peak, g, bound, groups, slots, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """(scores, ids, whether above `bound`, how many are) of the `groups` with a maximum above it; ids ascend."""
    hot = peak > bound
    place = tl.cumsum(hot.to(tl.int32), 0) - 1
    tl.debug_barrier()  # an earlier, narrower head may still be reading
    tl.store(slots + place, g, mask=hot & (place < GROUPS))
    tl.debug_barrier()
    lane = tl.arange(0, GROUPS * GROUP)
    held = (lane // GROUP) < groups
    ids = tl.load(slots + lane // GROUP, mask=held, other=0) * GROUP + lane % GROUP
    held = held & (ids < size)
    h = tl.load(at + ids, mask=held, other=-float("inf")).to(tl.float32)
    return h, tl.where(held, ids, 2147483647), h > bound, tl.sum((h > bound).to(tl.int32))


@triton.jit
def pack(h, ids, sure, number, room, PACK: tl.constexpr):
    """(scores, ids, whether there is one) of the `number` sure entries side by side, written down at `room`."""
    place = tl.cumsum(sure.to(tl.int32), 0) - 1
    fits = sure & (place < PACK)
    tl.debug_barrier()  # all have read what lies there
    write_down(room, place, h, ids, fits, PACK)
    return written_down(room, number, PACK)


@triton.jit
def write_down(room, place, h, ids, fits, ROOM: tl.constexpr):
    """Scores and ids side by side, for all threads to read."""
    tl.store(room + place, h, mask=fits)
    tl.store(room + ROOM + place, ids.to(tl.float32, bitcast=True), mask=fits)


@triton.jit
def written_down(room, number, ROOM: tl.constexpr):
    """(scores, ids, whether there is one) of what was."""
    tl.debug_barrier()
    lane = tl.arange(0, ROOM)
    held = lane < number
    h = tl.load(room + lane, mask=held, other=-float("inf"))
    ids = tl.load(room + ROOM + lane, mask=held, other=0.0).to(tl.int32, bitcast=True)
    return h, tl.where(held, ids, 2147483647), held


@triton.jit
def solve_head(
    h, ids, sure, number, bound, best, slope, mass_slope, count, share, mass, second, u, numbers, levels, steps,
    KIND: tl.constexpr, RULE: tl.constexpr, TAILS: tl.constexpr = False,
):  # fmt: skip
    """(cut, last tied id, η, flag, mass, token, log q, where in its interval u lies) from the scores above `bound`.

    Of these, `number` of them, none is missing; the flag says that they do not suffice. With TAILS `sweep_tails` has
    been there; a flag of 2 then says that they do, but for the draw.
    """
    cut = -float("inf")
    tie = tl.full([], 2147483647, tl.int32)
    eta = 0.0
    flag = tl.full([], 0, tl.int32)
    if number == 0:  # ties at the best can leave the head empty
        flag = tl.full([], 1, tl.int32)
    if KIND == TOP_K:
        if number < count:
            flag = tl.full([], 1, tl.int32)
        cut, tie = best_k(h, ids, count, bound, best)
    if (KIND == BOK or KIND == BEST) and RULE == TOP_M:
        if number > count:  # otherwise the whole head is among the m best, and nothing else matters
            cut, tie = best_k(h, ids, count, bound, best)
    if KIND == TOP_P:
        e = tl.where(sure, tl.exp2((h - best) * (mass_slope * LOG2E)), 0.0).to(tl.float64)
        needed = share * mass
        if (share >= 1.0) | (tl.sum(e) < needed):
            flag = tl.full([], 1, tl.int32)
        cut, tie = nucleus(h, ids, e, needed, bound, best)
    if KIND == MIN_P:
        cut = floor_of(best, share, mass_slope)
        if bound >= cut:
            flag = tl.full([], 1, tl.int32)
    if KIND == SPARSEMAX or KIND == ENTMAX:
        eta = threshold(tl.where(sure, (h - best) * slope, -float("inf")), KIND)
        limit = eta if KIND == SPARSEMAX else 2 * eta
        if (bound - best) * slope > limit:
            flag = tl.full([], 1, tl.int32)
    if KIND == BOK or KIND == BEST:
        z, kept, log_weights = tl.where(sure, h - best, -float("inf")), among(h, ids, cut, tie), h
        lacking = flag
        if KIND == BOK:
            log_weights, eta, flag = climb_head(
                z, kept, slope, mass, second, bound - best, numbers, levels, steps, RULE, TAILS
            )
        else:
            log_weights, eta, flag = optimum_head(z, kept, slope, mass, second, bound - best, numbers, levels, RULE)
        flag = tl.where(lacking == 0, flag, 1)
        w = tl.where(sure, tl.exp(log_weights), 0.0)
    else:
        w = tl.where(sure, weigh(h, ids, best, slope, cut, tie, eta, numbers, levels, steps, KIND, RULE), 0.0)
    token, log_weight, rest, total = draw_head(w, ids, u)
    total = tl.where(flag == 0, total, mass)  # which is needed again where the head did not suffice
    return cut, tie, eta, flag, total, token, log_weight, rest
