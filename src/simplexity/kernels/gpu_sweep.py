"""Rows whose head does not suffice (flat scores, ties, a wide nucleus): solved from all of their scores."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

import triton
import triton.language as tl

from simplexity.kernels.gpu_coverage import TOP_M
from simplexity.kernels.gpu_coverage_rows import sweep_climb, sweep_optimum
from simplexity.kernels.gpu_head import best_k, nucleus, write_down, written_down
from simplexity.kernels.gpu_sums import two_sums
from simplexity.kernels.gpu_weights import (
    BEST,
    BOK,
    ENTMAX,
    LOG2E,
    MIN_P,
    SPARSEMAX,
    STAGES,
    TOP_K,
    TOP_P,
    floor_of,
    key,
    load_scores,
    load_tile,
    unkey,
    weigh,
)

PARTED = tl.constexpr(9)  # sweeps that part a bracket by the numbers in it


@triton.jit
def finite(row_at, size, TILE: tl.constexpr, NT: tl.constexpr):
    """How many entries of the row are not −inf."""
    found = tl.zeros([TILE], tl.float32)  # one sum over threads in the end, not one for each tile
    for tile in tl.range(NT, num_stages=STAGES):
        _, x = load_tile(row_at, tile, size, TILE)
        found += tl.where(x > -float("inf"), 1.0, 0.0)
    return tl.sum(found.to(tl.float64))


@triton.jit
def least_finite(row_at, size, TILE: tl.constexpr, NT: tl.constexpr):
    """The smallest score of the row that is not −inf."""
    found = tl.full([TILE], float("inf"), tl.float32)
    for tile in tl.range(NT, num_stages=STAGES):
        _, x = load_tile(row_at, tile, size, TILE)
        found = tl.minimum(found, tl.where(x > -float("inf"), x, float("inf")))
    return tl.min(found)


@triton.jit
def narrowed(
    row_at, size, low, high, at_low, at_high, a, b, c, d, wanted, best, slope,
    MASS: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """(low, high, what lies above them): the part of a bracket where that passes `wanted`, by four cuts a sweep."""
    first, second = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    third, fourth = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for tile in tl.range(NT, num_stages=STAGES):
        _, x = load_tile(row_at, tile, size, TILE)
        e = tl.full([TILE], 1.0, tl.float32)
        if MASS:
            e = tl.exp2((x - best) * (slope * LOG2E))
        first += tl.where(x > a, e, 0.0)
        second += tl.where(x > b, e, 0.0)
        third += tl.where(x > c, e, 0.0)
        fourth += tl.where(x > d, e, 0.0)
    at_a, at_b = two_sums(first.to(tl.float64), second.to(tl.float64))
    at_c, at_d = two_sums(third.to(tl.float64), fourth.to(tl.float64))
    low, at_low = tl.where(at_a >= wanted, a, low), tl.where(at_a >= wanted, at_a, at_low)
    low, at_low = tl.where(at_b >= wanted, b, low), tl.where(at_b >= wanted, at_b, at_low)
    low, at_low = tl.where(at_c >= wanted, c, low), tl.where(at_c >= wanted, at_c, at_low)
    low, at_low = tl.where(at_d >= wanted, d, low), tl.where(at_d >= wanted, at_d, at_low)
    high, at_high = tl.where(at_d < wanted, d, high), tl.where(at_d < wanted, at_d, at_high)
    high, at_high = tl.where(at_c < wanted, c, high), tl.where(at_c < wanted, at_c, at_high)
    high, at_high = tl.where(at_b < wanted, b, high), tl.where(at_b < wanted, at_b, at_high)
    high, at_high = tl.where(at_a < wanted, a, high), tl.where(at_a < wanted, at_a, at_high)
    return low, high, at_low, at_high


@triton.jit
def between(row_at, size, low, high, room, ROOM: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr):
    """(scores, ids, how many, the lowest, the highest) of the entries above `low` and not above `high`; ids ascend.

    They are written down at `room`. Where there are more than ROOM the first two are of no use.
    """
    number = tl.full([], 0, tl.int32)
    lowest, highest = tl.full([TILE], float("inf"), tl.float32), tl.full([TILE], -float("inf"), tl.float32)
    tl.debug_barrier()  # all have read what lies there
    for tile in range(NT):
        ids, x = load_tile(row_at, tile, size, TILE)
        hit = (x > low) & (x <= high)
        lowest = tl.minimum(lowest, tl.where(hit, x, float("inf")))
        highest = tl.maximum(highest, tl.where(hit, x, -float("inf")))
        here = tl.sum(hit.to(tl.int32))
        if (here > 0) & (number + here <= ROOM):
            place = number + tl.cumsum(hit.to(tl.int32), 0) - 1
            write_down(room, place, x, ids, hit, ROOM)
        number += here
    x, ids, _ = written_down(room, number, ROOM)
    return x, ids, number, tl.min(lowest), tl.max(highest)


@triton.jit
def sweep_cut(
    row_at, size, wanted, mass, best, slope, room,
    MASS: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """(cut, last tied id) of the fewest best entries whose count, or mass, reaches `wanted`; all if none do.

    Four cuts a sweep. In the first few they stand in equal distances, or close to where a straight line between the
    ends of the bracket says; what these do not tell apart is parted by the order of the floats. Once ROOM holds what
    lies between the ends, that is searched instead of the row.
    """
    cut, tie = -float("inf"), tl.full([], 2147483647, tl.int32)
    every = mass if MASS else finite(row_at, size, TILE, NT)
    if every > wanted:
        if MASS:  # tokens further down than this hold less, all together, than is to be left out
            spare = tl.maximum((every - wanted).to(tl.float32), 1e-30)
            low = best + (tl.log(spare / size) - 0.01) / slope - 1e-6 * tl.abs(best)
        else:
            low = unkey(key(least_finite(row_at, size, TILE, NT)) - 1)
        high, at_low, at_high = best, every, every * 0.0
        left, right, rounds = key(low), key(high), 0
        searching = left == left
        while searching & (right - left > 1):
            part = tl.maximum((right - left) // 5, 1)
            a, b = left + part, tl.minimum(left + 2 * part, right - 1)
            c, d = tl.minimum(left + 3 * part, right - 1), tl.minimum(left + 4 * part, right - 1)
            if (rounds < PARTED) & (low > -1e30):  # what some mask with has no useful middle
                width = high - low
                line = low + width * ((at_low - wanted) / (at_low - at_high)).to(tl.float32)
                even = rounds % 3 == 0
                a = inside(tl.where(even, low + 0.2 * width, line - 0.06 * width), left, right)
                b = inside(tl.where(even, low + 0.4 * width, line - 0.003 * width), left, right)
                c = inside(tl.where(even, low + 0.6 * width, line + 0.003 * width), left, right)
                d = inside(tl.where(even, low + 0.8 * width, line + 0.06 * width), left, right)
            low, high, at_low, at_high = narrowed(
                row_at, size, low, high, at_low, at_high, unkey(a), unkey(b), unkey(c), unkey(d), wanted, best, slope,
                MASS, TILE, NT,
            )  # fmt: skip
            left, right = key(low), key(high)
            rounds += 1
            if ROOM > 1:
                if (rounds == 3) | (rounds == 5) | (rounds == 8):
                    x, ids, number, lowest, highest = between(row_at, size, low, high, room, ROOM, TILE, NT)
                    if number <= ROOM:
                        if MASS:
                            e = tl.where(x > low, tl.exp2((x - best) * (slope * LOG2E)), 0.0).to(tl.float64)
                            cut, tie = nucleus(x, ids, e, wanted - at_high, low, high)
                        else:
                            cut, tie = best_k(x, ids, (wanted - at_high).to(tl.int32), low, high)
                        searching = searching & (number < 0)
                    elif number > 0:  # ties: scores in half precision have few values
                        low, high = unkey(key(lowest) - 1), highest
                        left, right = key(low), key(high)
        if searching:
            cut, tie = high, tl.full([], -1, tl.int32)
            left_over, before = wanted - at_high, at_high * 0.0
            for tile in range(NT):
                ids, x = load_tile(row_at, tile, size, TILE)
                tied = x == cut
                worth = tl.where(tied, 1.0, 0.0).to(tl.float64)
                if MASS:
                    worth = tl.where(tied, tl.exp2((x - best) * (slope * LOG2E)), 0.0).to(tl.float64)
                start = before + tl.cumsum(worth, 0) - worth
                tie = tl.maximum(tie, tl.max(tl.where(tied & (start < left_over), ids, -1)))
                before += tl.sum(worth)
    return cut, tie


@triton.jit
def inside(x, left, right):
    """The key of a float, or the nearest that lies between two others."""
    return tl.minimum(tl.maximum(key(x), left + 1), right - 1)


@triton.jit
def sweep_threshold(row_at, size, best, slope, KIND: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr):
    """`threshold` over a whole row."""
    eta = tl.full([], -1.0, tl.float64)
    moved = tl.full([], 1.0, tl.float64)
    rounds = 0
    while (moved > 1e-9) & (rounds < 64):
        ones, twos = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
        for tile in tl.range(NT, num_stages=STAGES):
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
    row_at, size, best, slope, mass_slope, count, share, mass, cut, tie, eta, flag, t, numbers, levels, room, steps,
    KIND: tl.constexpr, RULE: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr,
    NTP: tl.constexpr,
):  # fmt: skip
    """(cut, last tied id, η, mass of each tile) from all scores of a row, read as often as it takes.

    With a flag of 2 the first three are known.
    """
    if KIND == TOP_K or (KIND == BEST and RULE == TOP_M):
        cut, tie = sweep_cut(row_at, size, count.to(tl.float64), mass, best, slope, room, False, ROOM, TILE, NT)
    if KIND == TOP_P:
        wanted = tl.where(share >= 1.0, float("inf"), share * mass)
        cut, tie = sweep_cut(row_at, size, wanted, mass, best, mass_slope, room, True, ROOM, TILE, NT)
    if KIND == MIN_P:
        cut = floor_of(best, share, mass_slope)
    if KIND == SPARSEMAX or KIND == ENTMAX:
        eta = sweep_threshold(row_at, size, best, slope, KIND, TILE, NT)
    if KIND == BOK:
        if flag != 2:
            if RULE == TOP_M:
                cut, tie = sweep_cut(row_at, size, count.to(tl.float64), mass, best, slope, room, False, ROOM, TILE, NT)
            eta = sweep_climb(row_at, size, best, slope, cut, tie, mass, numbers, levels, steps, RULE, TILE, NT)
    if KIND == BEST:
        eta = sweep_optimum(row_at, size, best, slope, cut, tie, mass, numbers, levels, RULE, TILE, NT)
    tl.debug_barrier()  # what one thread wrote down all others read
    masses = tl.zeros([NTP], tl.float64)
    for tile in tl.range(NT, num_stages=STAGES):
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
