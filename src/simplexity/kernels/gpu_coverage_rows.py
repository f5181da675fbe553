"""What Best-of-K needs to know of a row, from its head or from all scores: the normalisers, or the multiplier."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

import triton
import triton.language as tl

from simplexity.kernels.gpu_coverage import (
    BEND,
    FIRST,
    LAM,
    PACE,
    PROBS,
    STEP,
    TOP_M,
    climb,
    implicit,
    missed,
    pulled,
    reward,
    second_rate,
    weight,
)
from simplexity.kernels.gpu_sums import three_sums_and_largest, two_sums
from simplexity.kernels.gpu_weights import STAGES, among, load_tile

LOST = tl.constexpr(2e-6)  # mass that a head may leave out
FAINT = tl.constexpr(1e-9)  # mass that nobody will miss
STRONG = tl.constexpr(60.0)  # beyond, exp(log q + L) would not fit
LEAST = tl.constexpr(-80.0)  # e^−80 is still a normal number
ROUNDS, SEARCHES = tl.constexpr(12), tl.constexpr(60)


@triton.jit
def begin(mass, numbers, levels, RULE: tl.constexpr):
    """(log Σ exp(x/τ), largest weight, step), the first and the last written down."""
    log_mass = tl.log(mass.to(tl.float32))
    largest = tl.exp(-log_mass) if RULE == PROBS else log_mass * 0.0 + 1.0
    pace = tl.load(numbers + STEP)
    safe = 1.0 / tl.maximum(tl.load(numbers + LAM) * (1.0 + tl.load(numbers + BEND) * largest), 1.0)
    pace = tl.where(pace == 0.0, safe, pace)
    tl.store(levels + PACE, pace)
    tl.store(levels + FIRST, log_mass)
    return log_mass, largest, pace


@triton.jit
def left_out(rest, depth, rate, boost):
    """Bound on what the tokens below `depth` add to a sum, relative to the best token.

    They have `rest` of another sum; the exponents asked about are steeper than there by `rate` at least, and raised by
    `boost` at most. None where they are less steep.
    """
    return tl.where(rate >= 0.0, rest * tl.exp(rate * depth + boost), float("inf"))


@triton.jit
def rests(z, slope, steep, mass, second):
    """What a head leaves of Σ exp(slope·x) and of Σ exp(steep·x), and at least as much of each as its rounding."""
    held, also_held = two_sums(tl.exp(z * slope).to(tl.float64), tl.exp(z * steep).to(tl.float64))
    lost, also_lost = mass - held, second - also_held
    least, also_least = tl.maximum(lost, 2e-7 * mass), tl.maximum(also_lost, 2e-7 * second)
    return least.to(tl.float32), tl.maximum(also_lost, 0.0).to(tl.float32), also_least.to(tl.float32)


@triton.jit
def weight_outside(kept, slope, log_mass, depth, RULE: tl.constexpr):
    """The largest weight below `depth`; where all tokens of a head are kept, others may be as well."""
    if RULE == PROBS:
        w = tl.exp(depth * slope - log_mass)
    elif RULE == TOP_M:
        w = tl.where(tl.min(kept.to(tl.int32)) == 1, 1.0, 0.0)
    else:
        w = depth * 0.0 + 1.0
    return w


@triton.jit
def climb_head(z, kept, slope, mass, second, depth, numbers, levels, steps, RULE: tl.constexpr, TAILS: tl.constexpr):
    """(log q_J + L_J − η, η, flag) on a head, whose tokens are all those above `depth`; the levels are written down.

    The tokens below are missing in every L_j. In L_1 they are put back from `second` where that has the very exponents
    of the first step; all others are steeper, and what is missing there is bounded. With TAILS all of it lies at the
    levels already; the flag is 2 if these are right and the tokens below too heavy to be left out of a draw.
    """
    log_mass, largest, pace = begin(mass, numbers, levels, RULE)
    lam, most, n = reward(numbers)
    rho = 1.0 - pace * lam
    level, lowest, highest = pace, lam * 0.0 + 3e38, pace
    for _ in range(1, steps):
        level = rho * level + pace
        lowest, highest = tl.minimum(lowest, level), tl.maximum(highest, level)
    lowest = tl.where(steps == 1, pace, lowest)
    highest = tl.where(rho < 0.0, pace * steps, highest)  # what steps overshoot by adds up
    outside = most * highest * weight_outside(kept, slope, log_mass, depth, RULE)
    # and may lower the best token, against which all is measured
    outside = tl.where(rho < 0.0, most * highest * largest, outside)
    rate = second_rate(numbers, False)
    flat_rest, rest, steep_rest = rests(z, slope, slope + rate, mass, second)
    known = pace == rate
    # of the first normaliser: all, or what the reward of these tokens adds; 2e-7 of a sum is its rounding
    first = left_out(steep_rest, depth, pace - rate, outside)
    first = tl.where(known, rest * (tl.exp(tl.minimum(outside, 80.0)) - 1.0) + 2e-7 * second.to(tl.float32), first)
    first = tl.minimum(first, left_out(flat_rest, depth, pace, outside))
    later = left_out(steep_rest, depth, lowest - rate, outside)
    later = tl.minimum(later, left_out(flat_rest, depth, lowest, outside))
    # an error of a normaliser is felt by the next ones, boost times as much at most
    boost = most * largest * highest
    felt = (1.0 + boost) * (1.0 + boost)
    flag = ((first + later) * felt > LOST).to(tl.int32)
    rest = tl.where(known, rest, 0.0)
    if TAILS:
        level, share, shares = lam * 0.0, lam * 0.0, lam * 0.0
        likely = tl.exp(depth * slope - log_mass)  # no token below `depth` is more so, at any step
        for j in range(steps):
            tail = tl.load(levels + FIRST + 1 + j)
            level = rho * level + pace
            share = tail / (1.0 + tail)
            shares += share
            likely = tl.maximum(likely, tl.exp(depth * (slope + level) + outside) / (1.0 + tail))
        # their reward was added as if they were never drawn; whether the m best tokens are among them is not known
        drawn = lam * 0.0 + 1.0 if RULE == TOP_M else tl.minimum(n.to(tl.float32) * likely, 1.0)
        right = (shares * (tl.exp(tl.minimum(outside, 80.0)) - 1.0) * drawn * felt <= LOST) & (rho >= 0.0)
        flag = tl.where(right, tl.where(share <= LOST, 0, 2), 1)
    gain = most * weight(z, slope, log_mass, kept, RULE)
    y = z * slope
    seen = tl.zeros_like(z)
    level, norm, shift = lam * 0.0, log_mass, log_mass * 0.0
    if flag != 1:
        for j in range(steps):
            if TAILS:
                rest = tl.load(levels + FIRST + 1 + j)
                tl.debug_barrier()  # all threads have read what is now written over
            seen = rho * seen + pace * missed(tl.exp(y - norm), n)
            level = rho * level + pace
            y = z * (slope + level) + gain * seen
            if boost > STRONG:
                shift = tl.max(y)
            norm = shift + tl.log(tl.sum(tl.exp(y - shift)) + rest * tl.exp(-shift))
            rest = rest * 0.0
            tl.store(levels + FIRST + 1 + j, norm)
    return y - shift, shift, flag


@triton.jit
def optimum_head(z, kept, slope, mass, second, depth, numbers, levels, RULE: tl.constexpr):
    """(log q, η, flag) on a head: Newton's method on η and all log q together.

    Linearised, log q moves by (r − δ)/D, r the residual of its equation and D its slope, and the mass by
    Σ qr/D − δ·Σ q/D: one division gives the step δ of η.
    """
    log_mass, largest, _ = begin(mass, numbers, levels, RULE)
    lam, most, n = reward(numbers)
    boost = most / lam * largest
    outside = most / lam * weight_outside(kept, slope, log_mass, depth, RULE)
    flat_rest, _, steep_rest = rests(z, slope, slope + second_rate(numbers, True), mass, second)
    lost = tl.minimum(left_out(steep_rest, depth, 0.0, outside), left_out(flat_rest, depth, 1.0 / lam, outside))
    flag = (lost > LOST).to(tl.int32)
    gain = most / lam * weight(z, slope, log_mass, kept, RULE)
    a = z * (1.0 / lam + slope)
    eta = log_mass * 0.0
    y = a
    if flag == 0:
        shift = tl.max(a + gain)
        eta = shift + tl.log(tl.sum(tl.exp(a + gain - shift).to(tl.float64))).to(tl.float32)
        y = tl.minimum(tl.maximum(a + gain - eta, LEAST), 0.0)
        off = log_mass * 0.0 + 1.0
        rounds = 0
        while (off > 2e-6) & (rounds < ROUNDS):
            q = tl.exp(y)
            lower = missed(q, tl.maximum(n - 1, 0))
            pull = gain * tl.where(n > 0, lower * tl.maximum(1.0 - q, 0.0), 1.0)
            # what weighs nothing holds up nobody
            residual = tl.where(a + gain - eta < LEAST, 0.0, a - eta + pull - y)
            tilt = 1.0 / (1.0 + gain * n.to(tl.float32) * lower * q)
            held, drift, felt, off = three_sums_and_largest(
                q, q * tilt * residual, q * tilt, tl.abs(residual) / (1.0 - y)
            )
            over = held - 1.0
            off += tl.abs(over)
            delta = (over + drift) / felt
            if off > 2e-6:
                eta += delta
                y = tl.minimum(tl.maximum(y + (residual - delta) * tilt, LEAST), 0.0)
                y = tl.where(a + gain - eta < LEAST, LEAST, y)
            rounds += 1
        if not (off <= 2e-5):  # strong coverage: slower, and sure
            low = tl.log(tl.sum(tl.exp(a).to(tl.float64))).to(tl.float32)
            left, right = low, low + boost
            eta, moving, rounds = right, left == left, 0
            while moving & (rounds < SEARCHES):
                q = tl.exp(implicit(a - eta, gain, n, boost))
                tilt = 1.0 + gain * n.to(tl.float32) * q * missed(q, tl.maximum(n - 1, 0))
                eta, left, right, moving = approach(
                    eta, left, right, tl.sum(q.to(tl.float64)), tl.sum((q / tilt).to(tl.float64))
                )
                rounds += 1
            y = implicit(a - eta, gain, n, boost)
    return y, eta, flag


@triton.jit
def approach(eta, left, right, mass, felt):
    """(η, bracket, whether it moved): a Newton step on log Σ q(η) = 0, or a bisection where that leaves the bracket."""
    error = tl.log(mass).to(tl.float32)
    left, right = tl.where(error >= 0, eta, left), tl.where(error <= 0, eta, right)
    better = eta + error * (mass / felt).to(tl.float32)
    better = tl.where((better >= left) & (better <= right), better, (left + right) / 2)
    moving = (tl.abs(error) > 1e-6) & (tl.abs(better - eta) > 1e-7 * tl.abs(eta))
    return tl.where(moving, better, eta), left, right, moving


@triton.jit
def sweep_tails(
    row_at, size, best, bound, slope, numbers, levels, steps, RULE: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr
):
    """What the tokens not above `bound` add to each L_j, left where the levels will lie.

    They are taken to be so unlikely that (1−q)^{K−1} = 1 and S_j = C_j, and not to be among the m best.
    """
    tl.debug_barrier()  # what one thread wrote down all others read
    pace, log_mass = tl.load(levels + PACE), tl.load(levels + FIRST)
    lam, most, _ = reward(numbers)
    rho = 1.0 - pace * lam
    level, tail = lam * 0.0, lam * 0.0 + 1.0
    # where no reward makes up for a score, at the bound or below, each is smaller than the last
    falls = (rho >= 0.0) & (bound - best + most * weight(bound - best, slope, log_mass, bound > best, RULE) <= 0.0)
    for j in range(steps):
        level = rho * level + pace
        if (tail > FAINT) | ~falls:
            found = tl.zeros([TILE], tl.float32)
            for tile in tl.range(NT, num_stages=STAGES):
                ids, x = load_tile(row_at, tile, size, TILE)
                z, below = x - best, (x <= bound) & (ids < size)
                y = z * (slope + level) + (most * level) * weight(z, slope, log_mass, z > 0.0, RULE)
                found += tl.where(below, tl.exp(y), 0.0)
            tail = tl.sum(found.to(tl.float64)).to(tl.float32)
        tl.store(levels + FIRST + 1 + j, tail)
    tl.debug_barrier()


@triton.jit
def sweep_climb(
    row_at, size, best, slope, cut, tie, mass, numbers, levels, steps,
    RULE: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """η = max(log q_J + L_J), the levels written down: one sweep for each step."""
    log_mass, largest, pace = begin(mass, numbers, levels, RULE)
    boost = reward(numbers)[1] * largest * pace * steps
    peak = log_mass * 0.0
    for j in range(steps):
        tl.debug_barrier()  # what one thread writes down all others read
        if boost > STRONG:
            highest = tl.zeros([TILE], tl.float32) - float("inf")
            for tile in tl.range(NT, num_stages=STAGES):
                ids, x = load_tile(row_at, tile, size, TILE)
                y = climb(x - best, among(x, ids, cut, tie), slope, numbers, levels, j + 1, RULE)
                highest = tl.maximum(highest, tl.where(ids < size, y, -float("inf")))
            peak = tl.max(highest)
        found = tl.zeros([TILE], tl.float64)  # one sum over threads in the end, not one for each tile
        for tile in tl.range(NT, num_stages=STAGES):
            ids, x = load_tile(row_at, tile, size, TILE)
            y = climb(x - best, among(x, ids, cut, tie), slope, numbers, levels, j + 1, RULE)
            found += tl.where(ids < size, tl.exp(y - peak), 0.0).to(tl.float64)
        tl.store(levels + FIRST + 1 + j, peak + tl.log(tl.sum(found)).to(tl.float32))
    tl.debug_barrier()
    return peak


@triton.jit
def sweep_optimum(
    row_at, size, best, slope, cut, tie, mass, numbers, levels, RULE: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr
):
    """η: Newton's method on log Σ q(η) = 0, with bisection wherever it leaves the bracket."""
    _, largest, _ = begin(mass, numbers, levels, RULE)
    tl.debug_barrier()
    lam, most, n = reward(numbers)
    low = tl.zeros([TILE], tl.float64)
    for tile in tl.range(NT, num_stages=STAGES):
        ids, x = load_tile(row_at, tile, size, TILE)
        low += tl.exp((x - best) * (1.0 / lam + slope)).to(tl.float64)
    left = tl.log(tl.sum(low)).to(tl.float32)
    right = left + most / lam * largest
    eta = right
    moving = left == left
    rounds = 0
    while moving & (rounds < SEARCHES):
        sums, shares = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
        for tile in tl.range(NT, num_stages=STAGES):
            ids, x = load_tile(row_at, tile, size, TILE)
            a, gain, most_gain = pulled(x - best, among(x, ids, cut, tie), slope, numbers, levels, RULE)
            q = tl.where(ids < size, tl.exp(implicit(a - eta, gain, n, most_gain)), 0.0)
            tilt = 1.0 + gain * n.to(tl.float32) * q * missed(q, tl.maximum(n - 1, 0))
            sums += q.to(tl.float64)
            shares += (q / tilt).to(tl.float64)
        eta, left, right, moving = approach(eta, left, right, tl.sum(sums), tl.sum(shares))
        rounds += 1
    return eta
