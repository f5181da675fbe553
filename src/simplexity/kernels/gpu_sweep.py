"""Rows whose head does not suffice (flat scores, ties, a wide nucleus): solved from all of their scores."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

import triton
import triton.language as tl

from simplexity.kernels.gpu_coverage import TOP_M
from simplexity.kernels.gpu_coverage_rows import sweep_climb, sweep_optimum
from simplexity.kernels.gpu_weights import (
    BEST,
    BOK,
    ENTMAX,
    LOG2E,
    MIN_P,
    SPARSEMAX,
    TOP_K,
    TOP_P,
    floor_of,
    key,
    load_scores,
    load_tile,
    unkey,
    weigh,
)

PARTED = tl.constexpr(6)  # sweeps that part a bracket evenly: to a 15,000th


@triton.jit
def above_cut(row_at, size, cut, best, slope, MASS: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr):
    """How many entries of the row lie above the cut, or what Σ exp(slope·x) they have."""
    found = tl.zeros([TILE], tl.float64)  # one sum over threads in the end, not one for each tile
    for tile in range(NT):
        _, x = load_tile(row_at, tile, size, TILE)
        if MASS:
            e = tl.exp2((x - best) * (slope * LOG2E))
            found += tl.where(x > cut, e, 0.0).to(tl.float64)
        else:
            found += tl.where(x > cut, 1.0, 0.0).to(tl.float64)
    return tl.sum(found)


@triton.jit
def least_finite(row_at, size, TILE: tl.constexpr, NT: tl.constexpr):
    """The smallest score of the row that is not −inf."""
    found = tl.full([TILE], float("inf"), tl.float32)
    for tile in range(NT):
        _, x = load_tile(row_at, tile, size, TILE)
        found = tl.minimum(found, tl.where(x > -float("inf"), x, float("inf")))
    return tl.min(found)


@triton.jit
def narrowed(
    row_at, size, low, high, a, b, c, d, wanted, best, slope,
    MASS: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """(low, high): the part of a bracket in which what lies above it stops to reach `wanted`. Four cuts a sweep."""
    first, second = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    third, fourth = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for tile in range(NT):
        _, x = load_tile(row_at, tile, size, TILE)
        e = tl.full([TILE], 1.0, tl.float32)
        if MASS:
            e = tl.exp2((x - best) * (slope * LOG2E))
        first += tl.where(x > a, e, 0.0)
        second += tl.where(x > b, e, 0.0)
        third += tl.where(x > c, e, 0.0)
        fourth += tl.where(x > d, e, 0.0)
    at_a, at_b = tl.sum(first.to(tl.float64)) >= wanted, tl.sum(second.to(tl.float64)) >= wanted
    at_c, at_d = tl.sum(third.to(tl.float64)) >= wanted, tl.sum(fourth.to(tl.float64)) >= wanted
    low = tl.where(at_d, d, tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, low))))
    high = tl.where(at_a, tl.where(at_b, tl.where(at_c, tl.where(at_d, high, d), c), b), a)
    return low, high


@triton.jit
def sweep_cut(row_at, size, wanted, best, slope, MASS: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr):
    """(cut, last tied id) of the fewest best entries whose count, or mass, reaches `wanted`; all if none do.

    Five parts a sweep: equal ones first, then, for what these do not tell apart, by the order of the floats.
    """
    cut, tie = -float("inf"), tl.full([], 2147483647, tl.int32)
    if above_cut(row_at, size, -float("inf"), best, slope, MASS, TILE, NT) > wanted:
        low, high = unkey(key(least_finite(row_at, size, TILE, NT)) - 1), best
        for _ in range(PARTED):
            part = tl.where(low > -1e30, (high - low) * 0.2, 0.0)  # what some mask with would make it infinite
            low, high = narrowed(
                row_at, size, low, high, low + part, low + 2 * part, low + 3 * part, low + 4 * part, wanted, best,
                slope, MASS, TILE, NT,
            )  # fmt: skip
        left, right = key(low), key(high)
        while right - left > 1:
            part = tl.maximum((right - left) // 5, 1)
            a, b = left + part, tl.minimum(left + 2 * part, right)
            c, d = tl.minimum(left + 3 * part, right), tl.minimum(left + 4 * part, right)
            low, high = narrowed(
                row_at, size, low, high, unkey(a), unkey(b), unkey(c), unkey(d), wanted, best, slope, MASS, TILE, NT
            )
            left, right = key(low), key(high)
        cut = high
        room = wanted - above_cut(row_at, size, cut, best, slope, MASS, TILE, NT)
        before = tl.full([], 0.0, tl.float64)
        tie = tl.full([], -1, tl.int32)
        for tile in range(NT):
            ids, x = load_tile(row_at, tile, size, TILE)
            tied = x == cut
            worth = tl.where(tied, 1.0, 0.0).to(tl.float64)
            if MASS:
                worth = tl.where(tied, tl.exp2((x - best) * (slope * LOG2E)), 0.0).to(tl.float64)
            start = before + tl.cumsum(worth, 0) - worth
            tie = tl.maximum(tie, tl.max(tl.where(tied & (start < room), ids, -1)))
            before += tl.sum(worth)
    return cut, tie


@triton.jit
def sweep_threshold(row_at, size, best, slope, KIND: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr):
    """`threshold` over a whole row."""
    eta = tl.full([], -1.0, tl.float64)
    moved = tl.full([], 1.0, tl.float64)
    rounds = 0
    while (moved > 1e-9) & (rounds < 64):
        ones, twos = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
        for tile in range(NT):
            _, x = load_tile(row_at, tile, size, TILE)
            z = ((x - best) * slope).to(tl.float64)
            if KIND == SPARSEMAX:
                above = tl.maximum(z - eta, 0.0)
                ones += above
                twos += (above > 0).to(tl.float64)
            else:
                above = tl.maximum(z * 0.5 - eta, 0.0)
                ones += above * above
                twos += above
        first, second = tl.sum(ones), tl.sum(twos)
        if KIND == SPARSEMAX:
            moved = (first - 1.0) / second
        else:
            norm = tl.sqrt(first)
            moved = (norm - 1.0) * norm / second
        eta += moved
        rounds += 1
    return eta.to(tl.float32)


@triton.jit
def sweep_row(
    row_at, size, best, slope, mass_slope, count, share, mass, t, numbers, levels, steps,
    KIND: tl.constexpr, RULE: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr, NTP: tl.constexpr,
):  # fmt: skip
    """(cut, last tied id, η, mass of each tile) from all scores of a row, read as often as it takes."""
    cut, tie, eta = -float("inf"), tl.full([], 2147483647, tl.int32), 0.0
    if KIND == TOP_K or ((KIND == BOK or KIND == BEST) and RULE == TOP_M):
        cut, tie = sweep_cut(row_at, size, count.to(tl.float64), best, slope, False, TILE, NT)
    if KIND == TOP_P:
        full = above_cut(row_at, size, -float("inf"), best, mass_slope, True, TILE, NT)
        wanted = tl.where(share >= 1.0, float("inf"), share * full)
        cut, tie = sweep_cut(row_at, size, wanted, best, mass_slope, True, TILE, NT)
    if KIND == MIN_P:
        cut = floor_of(best, share, mass_slope)
    if KIND == SPARSEMAX or KIND == ENTMAX:
        eta = sweep_threshold(row_at, size, best, slope, KIND, TILE, NT)
    if KIND == BOK:
        eta = sweep_climb(row_at, size, best, slope, cut, tie, mass, numbers, levels, steps, RULE, TILE, NT)
    if KIND == BEST:
        eta = sweep_optimum(row_at, size, best, slope, cut, tie, mass, numbers, levels, RULE, TILE, NT)
    masses = tl.zeros([NTP], tl.float64)
    for tile in range(NT):
        ids, x = load_tile(row_at, tile, size, TILE)
        w = weigh(x, ids, best, slope, cut, tie, eta, numbers, levels, steps, KIND, RULE)
        masses += tl.where(t == tile, tl.sum(tl.where(ids < size, w, 0.0).to(tl.float64)), 0.0)
    return cut, tie, eta, masses


@triton.jit
def has_nan(row_at, other_at, own, others, size, KIND: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr):
    """Whether any score of the row is NaN."""
    found = 0
    for tile in range(NT):
        _, x = load_scores(row_at, other_at, own, others, tile, size, KIND, TILE)
        found += tl.sum((x != x).to(tl.int32))
    return found > 0
