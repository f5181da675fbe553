"""Triton kernels: from a row of logits to a token, one read of the logits and 8,192 of them once more.

K1 `tiles`   each program reads one tile of a row once and leaves its sum of exp(a·x), for Best-of-K that of the next
             iterate too, and the maxima of short groups.
K2 `solve`   one program a row merges these, reads again the few groups with the best maxima (the head: 8,192 tokens at
             most), finds what the row's q depends on (a normaliser, a cut, a multiplier) and draws. Softmax has no
             head: it picks a tile by its mass and reads that one again. A row whose head does not suffice is swept
             as often as it takes, and reported.
K3 `write`   writes q or log q, where an engine wants that.

q is a function of the score and of a few numbers of its row, so every kernel computes it alike: `weigh`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOptionalCall=false, reportOperatorIssue=false

import triton
import triton.language as tl

from simplexity.kernels.gpu_coverage import BETA, DRAWS, LAM, reward, second_rate
from simplexity.kernels.gpu_coverage_rows import begin, sweep_tails
from simplexity.kernels.gpu_head import gather, head_groups, pack, solve_head
from simplexity.kernels.gpu_sums import two_sums
from simplexity.kernels.gpu_sweep import has_nan, sweep_row
from simplexity.kernels.gpu_weights import (
    BEST,
    BOK,
    ENTMAX,
    LOG2E,
    MIN_P,
    PAIR,
    SOFTMAX,
    SPARSEMAX,
    TOP_K,
    TOP_P,
    draw_from,
    floor_of,
    load_scores,
    number,
    weigh,
)

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton that does not know it launches the kernels one after the other
    gdc_launch_dependents = gdc_wait = None

SCALARS = 5  # numbers a row keeps: best, cut, last tied id, multiplier, mass; then its levels
GROUP = 64  # neighbouring tokens that share a maximum: 1.6% of the logits
GROUPS = 128  # groups of a head
# groups of the narrow one that is tried first, and tokens of it that are worth moving together for what follows
NARROW = {
    TOP_P: (32, 0),
    MIN_P: (32, 0),
    SPARSEMAX: (32, 0),
    ENTMAX: (32, 0),
    BEST: (32, 256),
    BOK: (64, 256),
    TOP_K: (64, 256),
}


@triton.jit
def is_greedy(lam, lam_stride, coverage, coverage_stride, row, KIND: tl.constexpr):
    """Whether the row's λ is 0: nothing but the score counts."""
    if KIND == BEST:
        alone = tl.load(coverage + row * coverage_stride + LAM) == 0.0
    else:
        alone = tl.load(lam + row * lam_stride) == 0.0
    return alone


@triton.jit
def tiles(
    logits, row_stride, other, other_stride, size, lam, lam_stride, tau, tau_stride, coverage, coverage_stride,
    maxima, sums, seconds, peaks,
    KIND: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr, GROUP: tl.constexpr, GREEDY: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """K1: the maximum, the sum and the group maxima of one tile."""
    if EARLY:  # as soon as every tile has begun: `solve` then waits where it runs, not to be launched
        gdc_launch_dependents()
    t, row = tl.program_id(0), tl.program_id(1)
    slope = 1.0 / tl.load(lam + row * lam_stride)
    others = 1.0 / tl.load(tau + row * tau_stride)
    if GREEDY:
        alone = is_greedy(lam, lam_stride, coverage, coverage_stride, row, KIND)
        slope, others = tl.where(alone, 1.0, slope), tl.where(alone, 0.0, others)
    if KIND == TOP_P:
        slope = others  # the mass that tells the cut
    at = row * NT + t
    row_at = logits + row.to(tl.int64) * row_stride
    if KIND == SOFTMAX or KIND == PAIR:
        ids, x = load_scores(row_at, other + row.to(tl.int64) * other_stride, slope, others, t, size, KIND, TILE)
        if KIND == PAIR:
            slope = 1.0
        best = tl.max(tl.where(x != x, float("inf"), x), 0)  # a NaN shows as +inf
        base = tl.where(best > -float("inf"), best, 0.0)
        tl.store(sums + at, tl.sum(tl.exp2((x - base) * (slope * LOG2E)), 0))
        tl.store(maxima + at, best)
    else:
        COUNT: tl.constexpr = TILE // GROUP
        groups = tl.arange(0, COUNT)
        ids = t * TILE + groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(row_at + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
        peak = tl.max(tl.where(x != x, float("inf"), x), 1)
        best = tl.max(peak, 0)
        if KIND == TOP_P or KIND == BOK or KIND == BEST:
            base = tl.where(best > -float("inf"), best, 0.0)
            e = tl.exp2((x - base) * (slope * LOG2E))
            if KIND == TOP_P:
                tl.store(sums + at, tl.sum(tl.sum(e, 1), 0))
            else:
                steep = slope + second_rate(coverage + row * coverage_stride, KIND == BEST)
                by_group, steeper = two_sums(e, tl.exp2((x - base) * (steep * LOG2E)), 1)
                first, second = two_sums(by_group, steeper)
                tl.store(sums + at, first)
                tl.store(seconds + at, second)
        tl.store(maxima + at, best)
        tl.store(peaks + at * COUNT + groups, peak)


@triton.jit
def solve(
    logits, row_stride, other, other_stride, size, lam, lam_stride, tau, tau_stride, p, p_stride, k, k_stride, uniforms,
    seeds, seed_stride, step, step_stride, coverage, coverage_stride, maxima, sums, seconds, peaks, chosen,
    scalars, tokens, log_q, places, status, flags, tally,
    KIND: tl.constexpr, RULE: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr,
    NTP: tl.constexpr, NG: tl.constexpr, NGP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    NARROW: tl.constexpr, PACK: tl.constexpr, DRAW: tl.constexpr, SEEDED: tl.constexpr, SCALARS: tl.constexpr,
    ROOM: tl.constexpr, PLACES: tl.constexpr, GREEDY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """K2: one row from its tiles."""
    row = tl.program_id(0)
    t = tl.arange(0, NTP)
    slope = 1.0 / tl.load(lam + row * lam_stride)
    mass_slope = slope
    own, others = slope, 1.0 / tl.load(tau + row * tau_stride)
    if GREEDY:
        alone = is_greedy(lam, lam_stride, coverage, coverage_stride, row, KIND)
        own, others = tl.where(alone, 1.0, own), tl.where(alone, 0.0, others)
    if KIND == TOP_P or KIND == MIN_P:
        mass_slope = others
    if KIND == PAIR:
        slope, mass_slope = 1.0, 1.0
    at, other_at = logits + row.to(tl.int64) * row_stride, other + row.to(tl.int64) * other_stride
    numbers, base = coverage + row * coverage_stride, scalars + row * SCALARS
    levels = base + 5
    u = tl.full([], 0.0, tl.float64)
    if DRAW:
        u = number(uniforms, row, seeds, seed_stride, step, step_stride, SEEDED)
    if EARLY:  # up to here nothing was read that the tiles leave
        gdc_wait()
    m = tl.load(maxima + row * NT + t, mask=t < NT, other=-float("inf"))
    best = tl.max(m)
    state = tl.full([], 0, tl.int32)
    if best == float("inf"):
        state = tl.where(has_nan(at, other_at, own, others, size, KIND, TILE, NT), 1, 2)
    if best == -float("inf"):
        state = tl.full([], 3, tl.int32)
    tl.store(status + row, state.to(tl.int8))
    flag, swept = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    done = state != 0
    if done:
        if DRAW:
            tl.store(tokens + row, tl.full([], -1, tl.int64))
            tl.store(log_q + row, -float("inf"))
            if PLACES:
                tl.store(places + row, tl.full([], 0.0, tl.float64))
    if GREEDY:
        if alone & (state == 0):  # the first of the best tokens
            ids, x = load_scores(at, other_at, own, others, tl.min(tl.where(m == best, t, NT)), size, KIND, TILE)
            first = tl.min(tl.where(x == best, ids, 2147483647))
            tl.store(base, best)
            tl.store(base + 2, first.to(tl.float32, bitcast=True))
            if DRAW:
                tl.store(tokens + row, first.to(tl.int64))
                tl.store(log_q + row, 0.0)
                if PLACES:
                    tl.store(places + row, u)
        done = done | alone
    if not done:
        cut = -float("inf")
        tie = tl.full([], 2147483647, tl.int32)
        eta = 0.0
        total = tl.full([], 0.0, tl.float64)
        masses = tl.zeros([NTP], tl.float64)
        if KIND == SOFTMAX or KIND == PAIR or KIND == TOP_P or KIND == BOK or KIND == BEST:
            s = tl.load(sums + row * NT + t, mask=t < NT, other=0.0).to(tl.float64)
            masses = tl.where(s > 0, s * tl.exp2((m - best) * (mass_slope * LOG2E)).to(tl.float64), 0.0)
        second = total
        if KIND == TOP_P:
            total = tl.sum(masses)
        if KIND == BOK or KIND == BEST:
            steep = slope + second_rate(numbers, KIND == BEST)
            s = tl.load(seconds + row * NT + t, mask=t < NT, other=0.0).to(tl.float64)
            steeper = tl.where(s > 0, s * tl.exp2((m - best) * (steep * LOG2E)).to(tl.float64), 0.0)
            total, second = two_sums(masses, steeper)
        if KIND == SOFTMAX or KIND == PAIR:
            if DRAW:
                token, log_weight, rest, total = draw_from(
                    at, other_at, own, others, size, best, slope, cut, tie, eta, u, masses, t, numbers, levels, STEPS,
                    KIND, RULE, TILE,
                )  # fmt: skip
                tl.store(tokens + row, token.to(tl.int64))
                tl.store(log_q + row, log_weight)
                if PLACES:
                    tl.store(places + row, rest)
            else:
                total = tl.sum(masses)
        else:
            g = tl.arange(0, NGP)
            peak = tl.load(peaks + row * NG + g, mask=g < NG, other=-float("inf"))
            count = tl.minimum(tl.load(k + row * k_stride), size)
            share = tl.load(p + row * p_stride)
            # how deep below the best a head must reach: for a first try, and at most
            reach, depth = 7.0 / mass_slope, 16.0 / mass_slope
            if KIND == TOP_K:
                reach, depth = float("inf"), float("inf")
            if KIND == MIN_P:  # a little deeper than the floor, which is kept
                reach = (best - floor_of(best, share, mass_slope)) * 1.000001 + 1e-6 * tl.maximum(tl.abs(best), 1.0)
                depth = reach
            if KIND == SPARSEMAX:
                reach, depth = 1.0 / slope, 1.0 / slope
            if KIND == ENTMAX:
                reach, depth = 2.0 / slope, 2.0 / slope
            if KIND == BOK:
                _, largest, pace = begin(total, numbers, levels, RULE)
                boost = reward(numbers)[1] * largest * pace * STEPS
                reach = (7.0 + boost) / pace
                depth = (14.0 + 3.0 * boost + tl.log(total.to(tl.float32))) / pace
            if KIND == BEST:  # what is left out must weigh 1e−6 at most
                boost = tl.load(numbers + BETA) * tl.load(numbers + DRAWS)
                reach = tl.load(numbers + LAM) * (14.0 + boost + tl.log(total.to(tl.float32)))
                depth = reach
            flag = tl.full([], 1, tl.int32)
            slots = chosen + row * GROUPS
            token = tl.full([], 0, tl.int32)
            log_weight, rest = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float64)
            # most rows need few groups, and few tokens of these: one tile only where that does not do
            bound, least, span = best - reach, GROUPS // 2, depth
            if KIND == TOP_K:
                span = 2.0 * (best - tl.min(tl.where(t < NT, m, best)))
                least = tl.minimum(count, GROUPS)
                bound = head_groups(peak, best, reach, span, tl.minimum(count, NARROW), NARROW)
            groups = tl.sum((peak > bound).to(tl.int32))
            if groups <= NARROW:
                near, near_ids, close, number_close = gather(at, size, peak, g, bound, groups, slots, NARROW, GROUP)
                if PACK == 0:
                    cut, tie, eta, flag, total, token, log_weight, rest = solve_head(
                        near, near_ids, close, number_close, bound, best, slope, mass_slope, count, share, total,
                        second, u, numbers, levels, STEPS, KIND, RULE,
                    )  # fmt: skip
                elif number_close <= PACK:
                    few, few_ids, held = pack(near, near_ids, close, number_close, peaks + row * NG, PACK)
                    cut, tie, eta, flag, total, token, log_weight, rest = solve_head(
                        few, few_ids, held, number_close, bound, best, slope, mass_slope, count, share, total,
                        second, u, numbers, levels, STEPS, KIND, RULE,
                    )  # fmt: skip
            if flag != 0:
                bound = head_groups(peak, best, depth, span, least, GROUPS)
                groups = tl.minimum(tl.sum((peak > bound).to(tl.int32)), GROUPS)
                h, ids, sure, number_sure = gather(at, size, peak, g, bound, groups, slots, GROUPS, GROUP)
                cut, tie, eta, flag, total, token, log_weight, rest = solve_head(
                    h, ids, sure, number_sure, bound, best, slope, mass_slope, count, share, total,
                    second, u, numbers, levels, STEPS, KIND, RULE,
                )  # fmt: skip
                if KIND == BOK:
                    if flag != 0:
                        swept = flag
                        sweep_tails(at, size, best, bound, slope, numbers, levels, STEPS, RULE, TILE, NT)
                        cut, tie, eta, flag, total, token, log_weight, rest = solve_head(
                            h, ids, sure, number_sure, bound, best, slope, mass_slope, count, share, total,
                            second, u, numbers, levels, STEPS, KIND, RULE, True,
                        )  # fmt: skip
            if flag != 0:
                swept = flag
                cut, tie, eta, masses = sweep_row(
                    at, size, best, slope, mass_slope, count, share, total, cut, tie, eta, flag, t, numbers, levels,
                    peaks + row * NG, STEPS, KIND, RULE, ROOM, TILE, NT, NTP,
                )  # fmt: skip
                token, log_weight, rest, total = draw_from(
                    at, other_at, own, others, size, best, slope, cut, tie, eta, u, masses, t, numbers, levels, STEPS,
                    KIND, RULE, TILE,
                )  # fmt: skip
            if DRAW:
                tl.store(tokens + row, token.to(tl.int64))
                tl.store(log_q + row, log_weight)
                if PLACES:
                    tl.store(places + row, rest)
        tl.store(base, best)
        tl.store(base + 1, cut)
        tl.store(base + 2, tie.to(tl.float32, bitcast=True))
        tl.store(base + 3, eta)
        tl.store(base + 4, total.to(tl.float32))
    tl.store(flags + row, (swept != 0).to(tl.int32))
    if row == 0:
        tl.atomic_add(tally, tl.num_programs(0).to(tl.int64), sem="relaxed")
    if swept != 0:
        tl.atomic_add(tally + 1, tl.full([], 1, tl.int64), sem="relaxed")


@triton.jit
def write(
    logits, row_stride, other, other_stride, size, lam, lam_stride, tau, tau_stride, coverage, coverage_stride,
    scalars, status, out, out_stride,
    KIND: tl.constexpr, RULE: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, SCALARS: tl.constexpr,
    LOG: tl.constexpr, KEEP: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """K3: q, or log q, of one tile; rows that cannot be solved get zero, or −inf, or keep what is there."""
    tile, row = tl.program_id(0), tl.program_id(1)
    slope = 1.0 / tl.load(lam + row * lam_stride)
    others = 1.0 / tl.load(tau + row * tau_stride)
    if GREEDY:
        alone = is_greedy(lam, lam_stride, coverage, coverage_stride, row, KIND)
        slope, others = tl.where(alone, 1.0, slope), tl.where(alone, 0.0, others)
    row_at, other_at = logits + row.to(tl.int64) * row_stride, other + row.to(tl.int64) * other_stride
    ids, x = load_scores(row_at, other_at, slope, others, tile, size, KIND, TILE)
    if KIND == PAIR:
        slope = 1.0
    base, numbers = scalars + row * SCALARS, coverage + row * coverage_stride
    tie = tl.load(base + 2).to(tl.int32, bitcast=True)
    w = weigh(
        x, ids, tl.load(base), slope, tl.load(base + 1), tie, tl.load(base + 3), numbers, base + 5, STEPS, KIND, RULE
    )
    solved = tl.load(status + row) == 0
    q = tl.where(solved, w / tl.load(base + 4), 0.0)
    if GREEDY:
        q = tl.where(alone, tl.where(solved & (ids == tie), 1.0, 0.0), q)
    if LOG:
        q = tl.log(q)
    inside = ids < size
    if KEEP:
        inside = inside & solved
    tl.store(out + row.to(tl.int64) * out_stride + ids, q.to(out.dtype.element_ty), mask=inside)
