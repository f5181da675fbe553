"""Triton kernels: from a row of logits to a token, one read of the logits and one tile more.

K1 `tiles`   each program reads one tile of a row once and leaves its sum of exp(a·x) and the maxima of short groups.
K2 `solve`   one program a row merges these, reads again the few groups with the best maxima (the head: one tile at
             most), finds what the row's q depends on (a normaliser, a cut, a multiplier) and draws. Softmax has no
             head: it picks a tile by its mass and reads that one again. A row whose head does not suffice is swept
             as often as it takes, and reported.
K3 `write`   writes q or log q, where an engine wants that.

q is a function of the score and of a few numbers of its row, so every kernel computes it alike: `weigh`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

import triton
import triton.language as tl

SOFTMAX = tl.constexpr(0)  # exp(a·x)
TOP_K = tl.constexpr(1)  # the same, x among the k best
TOP_P = tl.constexpr(2)  # the same, x in the nucleus
SPARSEMAX = tl.constexpr(3)  # (a·x − η)_+
ENTMAX = tl.constexpr(4)  # ((a·x/2 − η)_+)²

OK, NAN, INFINITE, FORBIDDEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SCALARS = 8  # numbers a row keeps: best, cut, last tied id, multiplier, mass, …

LOG2E = tl.constexpr(1.4426950408889634)
GROUP = 64  # neighbouring tokens that share a maximum: 1.6% of the logits
GROUPS, NARROW = 128, 32  # groups of a head, and of the narrow one that is tried first


@triton.jit
def weigh(x, ids, best, slope, cut, tie, eta, KIND: tl.constexpr):
    """q up to the row's normaliser, for scores x of the tokens `ids`."""
    z = (x - best) * slope
    if KIND == SPARSEMAX:
        return tl.maximum(z - eta, 0.0)
    if KIND == ENTMAX:
        root = tl.maximum(z * 0.5 - eta, 0.0)
        return root * root
    e = tl.exp2(z * LOG2E)
    if KIND != SOFTMAX:
        e = tl.where((x > cut) | ((x == cut) & (ids <= tie)), e, 0.0)
    return e


@triton.jit
def uniform(seed, step):
    """A number in [0, 1) with 53 random bits for a seed and a step: SplitMix64's finaliser, as `simplexity.draw`."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    z = mix(seed.to(tl.uint64) + golden)
    z = mix(z + step.to(tl.uint64) * golden)
    z = mix(z)  # stream 0
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def number(uniforms, row, seeds, seed_stride, step, step_stride, SEEDED: tl.constexpr):
    """The row's number in [0, 1): from its seed and step, or given."""
    # two returns would be compiled both, whatever SEEDED is
    if SEEDED:
        u = uniform(tl.load(seeds + row * seed_stride), tl.load(step + row * step_stride))
    else:
        u = tl.load(uniforms + row)
    return u


@triton.jit
def mix(z):
    """SplitMix64's finaliser."""
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def key(x):
    """A whole number in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)  # int64: the difference of two must fit


@triton.jit
def unkey(k):
    """The float of a key."""
    k = k.to(tl.int32)
    return tl.where(k < 0, k ^ 0x7FFFFFFF, k).to(tl.float32, bitcast=True)


@triton.jit
def load_tile(row_at, tile, size, TILE: tl.constexpr):
    """(ids, scores) of one tile."""
    ids = tile * TILE + tl.arange(0, TILE)
    return ids, tl.load(row_at + ids, mask=ids < size, other=-float("inf")).to(tl.float32)


@triton.jit
def tiles(
    logits, row_stride, size, lam, lam_stride, tau, tau_stride, maxima, sums, peaks,
    KIND: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """K1: the maximum, the sum and the group maxima of one tile."""
    t, row = tl.program_id(0), tl.program_id(1)
    slope = 1.0 / tl.load(lam + row * lam_stride)
    if KIND == TOP_P:
        slope = 1.0 / tl.load(tau + row * tau_stride)  # the mass that tells the cut
    at = row * NT + t
    row_at = logits + row.to(tl.int64) * row_stride
    if KIND == SOFTMAX:
        ids, x = load_tile(row_at, t, size, TILE)
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
        if KIND == TOP_P:
            base = tl.where(best > -float("inf"), best, 0.0)
            tl.store(sums + at, tl.sum(tl.sum(tl.exp2((x - base) * (slope * LOG2E)), 1), 0))
        tl.store(maxima + at, best)
        tl.store(peaks + at * COUNT + groups, peak)


@triton.jit
def draw_from(
    logits_row, size, best, slope, cut, tie, eta, u, masses, tile_ids, KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(token, log q): a tile by its mass, then a token of that tile, by one number u."""
    total = tl.sum(masses)
    ends = tl.cumsum(masses, 0)
    target = u * total
    last = tl.max(tl.where(masses > 0, tile_ids, 0))
    chosen = tl.minimum(tl.sum((ends <= target).to(tl.int32)), last)
    mass = tl.sum(tl.where(tile_ids == chosen, masses, 0.0))
    before = tl.sum(tl.where(tile_ids < chosen, masses, 0.0))
    share = tl.maximum((target - before) / mass, 0.0)
    ids = chosen * TILE + tl.arange(0, TILE)
    x = tl.load(logits_row + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
    w = weigh(x, ids, best, slope, cut, tie, eta, KIND).to(tl.float64)
    w = tl.where(ids < size, w, 0.0)
    inside = tl.cumsum(w, 0)
    full = tl.sum(w)
    final = tl.max(tl.where(w > 0, ids, 0))
    token = tl.minimum(chosen * TILE + tl.sum((inside <= share * full).to(tl.int32)), final)
    weight = tl.sum(tl.where(ids == token, w, 0.0))
    return token, tl.log(weight / total)


@triton.jit
def draw_head(w, ids, u):
    """(token, log q) from the weights of a head, whose ids ascend."""
    w = w.to(tl.float64)
    total = tl.sum(w)
    final = tl.max(tl.where(w > 0, ids, -1))
    passed = tl.cumsum(w, 0) <= u * total
    token = tl.minimum(tl.min(tl.where(passed | (w <= 0), 2147483647, ids)), final)
    weight = tl.sum(tl.where(ids == token, w, 0.0))
    return token, tl.log(weight / total)


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
def above_cut(row_at, size, cut, best, slope, MASS: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr):
    """How many entries of the row lie above the cut, or what Σ exp(slope·x) they have."""
    found = tl.full([], 0.0, tl.float64)
    for tile in range(NT):
        _, x = load_tile(row_at, tile, size, TILE)
        if MASS:
            e = tl.exp2((x - best) * (slope * LOG2E))
            found += tl.sum(tl.where(x > cut, e, 0.0).to(tl.float64))
        else:
            found += tl.sum((x > cut).to(tl.float64))
    return found


@triton.jit
def sweep_cut(row_at, size, wanted, best, slope, MASS: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr):
    """(cut, last tied id) of the fewest best entries whose count, or mass, reaches `wanted`; all if none do."""
    lowest = -float("inf")
    cut, tie = lowest, tl.full([], 2147483647, tl.int32)
    if above_cut(row_at, size, lowest, best, slope, MASS, TILE, NT) > wanted:
        low, high = key(tl.full([], lowest, tl.float32)), key(best)
        while high - low > 1:
            middle = low + (high - low) // 2
            enough = above_cut(row_at, size, unkey(middle), best, slope, MASS, TILE, NT) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        cut = unkey(high)
        left = wanted - above_cut(row_at, size, cut, best, slope, MASS, TILE, NT)
        before = tl.full([], 0.0, tl.float64)
        tie = tl.full([], -1, tl.int32)
        for tile in range(NT):
            ids, x = load_tile(row_at, tile, size, TILE)
            tied = x == cut
            worth = tl.where(tied, 1.0, 0.0).to(tl.float64)
            if MASS:
                worth = tl.where(tied, tl.exp2((x - best) * (slope * LOG2E)), 0.0).to(tl.float64)
            start = before + tl.cumsum(worth, 0) - worth
            tie = tl.maximum(tie, tl.max(tl.where(tied & (start < left), ids, -1)))
            before += tl.sum(worth)
    return cut, tie


@triton.jit
def sweep_threshold(row_at, size, best, slope, KIND: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr):
    """`threshold` over a whole row."""
    eta = tl.full([], -1.0, tl.float64)
    moved = tl.full([], 1.0, tl.float64)
    rounds = 0
    while (moved > 1e-9) & (rounds < 64):
        first, second = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
        for tile in range(NT):
            _, x = load_tile(row_at, tile, size, TILE)
            z = ((x - best) * slope).to(tl.float64)
            if KIND == SPARSEMAX:
                above = tl.maximum(z - eta, 0.0)
                first += tl.sum(above)
                second += tl.sum((above > 0).to(tl.float64))
            else:
                above = tl.maximum(z * 0.5 - eta, 0.0)
                first += tl.sum(above * above)
                second += tl.sum(above)
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
    row_at, size, best, slope, mass_slope, count, share, t, KIND: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr,
    NTP: tl.constexpr,
):  # fmt: skip
    """(cut, last tied id, η, mass of each tile) from all scores of a row, read as often as it takes."""
    cut, tie, eta = -float("inf"), tl.full([], 2147483647, tl.int32), 0.0
    if KIND == TOP_K:
        cut, tie = sweep_cut(row_at, size, count.to(tl.float64), best, slope, False, TILE, NT)
    if KIND == TOP_P:
        full = above_cut(row_at, size, -float("inf"), best, mass_slope, True, TILE, NT)
        wanted = tl.where(share >= 1.0, float("inf"), share * full)
        cut, tie = sweep_cut(row_at, size, wanted, best, mass_slope, True, TILE, NT)
    if KIND == SPARSEMAX or KIND == ENTMAX:
        eta = sweep_threshold(row_at, size, best, slope, KIND, TILE, NT)
    masses = tl.zeros([NTP], tl.float64)
    for tile in range(NT):
        ids, x = load_tile(row_at, tile, size, TILE)
        w = weigh(x, ids, best, slope, cut, tie, eta, KIND)
        masses += tl.where(t == tile, tl.sum(tl.where(ids < size, w, 0.0).to(tl.float64)), 0.0)
    return cut, tie, eta, masses


@triton.jit
def has_nan(row_at, size, TILE: tl.constexpr, NT: tl.constexpr):
    """Whether any score of the row is NaN."""
    found = 0
    for tile in range(NT):
        _, x = load_tile(row_at, tile, size, TILE)
        found += tl.sum((x != x).to(tl.int32))
    return found > 0


@triton.jit
def solve_head(
    at, size, peak, g, bound, best, slope, mass_slope, count, share, mass, u, slots,
    KIND: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
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
    w = tl.where(sure, weigh(h, ids, best, slope, cut, tie, eta, KIND), 0.0)
    token, log_weight = draw_head(w, ids, u)
    # the mass of the cut is needed again where the head did not suffice
    total = tl.where(flag == 0, tl.sum(w.to(tl.float64)), mass)
    return cut, tie, eta, flag, total, token, log_weight


@triton.jit
def solve(
    logits, row_stride, size, lam, lam_stride, tau, tau_stride, p, p_stride, k, k_stride, uniforms, seeds, seed_stride,
    step, step_stride, maxima, sums, peaks, chosen, scalars, tokens, log_q, status, flags,
    KIND: tl.constexpr, TILE: tl.constexpr, NT: tl.constexpr, NTP: tl.constexpr, NG: tl.constexpr, NGP: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, NARROW: tl.constexpr, DRAW: tl.constexpr, SEEDED: tl.constexpr,
    SCALARS: tl.constexpr,
):  # fmt: skip
    """K2: one row from its tiles."""
    row = tl.program_id(0)
    t = tl.arange(0, NTP)
    m = tl.load(maxima + row * NT + t, mask=t < NT, other=-float("inf"))
    best = tl.max(m)
    slope = 1.0 / tl.load(lam + row * lam_stride)
    mass_slope = slope
    if KIND == TOP_P:
        mass_slope = 1.0 / tl.load(tau + row * tau_stride)
    at = logits + row.to(tl.int64) * row_stride
    state = tl.full([], 0, tl.int32)
    if best == float("inf"):
        state = tl.where(has_nan(at, size, TILE, NT), 1, 2)
    if best == -float("inf"):
        state = tl.full([], 3, tl.int32)
    tl.store(status + row, state.to(tl.int8))
    flag = tl.full([], 0, tl.int32)
    base = scalars + row * SCALARS
    if state != 0:
        if DRAW:
            tl.store(tokens + row, tl.full([], -1, tl.int64))
            tl.store(log_q + row, -float("inf"))
    else:
        cut = -float("inf")
        tie = tl.full([], 2147483647, tl.int32)
        eta = 0.0
        u = tl.full([], 0.0, tl.float64)
        if DRAW:
            u = number(uniforms, row, seeds, seed_stride, step, step_stride, SEEDED)
        total = tl.full([], 0.0, tl.float64)
        masses = tl.zeros([NTP], tl.float64)
        if KIND == SOFTMAX or KIND == TOP_P:
            s = tl.load(sums + row * NT + t, mask=t < NT, other=0.0).to(tl.float64)
            masses = tl.where(s > 0, s * tl.exp2((m - best) * (mass_slope * LOG2E)).to(tl.float64), 0.0)
            total = tl.sum(masses)
        if KIND == SOFTMAX:
            if DRAW:
                token, log_weight = draw_from(at, size, best, slope, cut, tie, eta, u, masses, t, KIND, TILE)
                tl.store(tokens + row, token.to(tl.int64))
                tl.store(log_q + row, log_weight.to(tl.float32))
        else:
            g = tl.arange(0, NGP)
            peak = tl.load(peaks + row * NG + g, mask=g < NG, other=-float("inf"))
            count = tl.minimum(tl.load(k + row * k_stride), size)
            share = tl.load(p + row * p_stride)
            reach = 7.0 / mass_slope  # e^−7 of the best: deep enough for most nuclei
            if KIND == TOP_K:
                reach = float("inf")
            if KIND == SPARSEMAX:
                reach = 1.0 / slope
            if KIND == ENTMAX:
                reach = 2.0 / slope
            flag = tl.full([], 1, tl.int32)
            slots = chosen + row * GROUPS
            token = tl.full([], 0, tl.int32)
            log_weight = tl.full([], 0.0, tl.float64)
            # most rows need few groups: a narrow head first, one tile only where that does not do
            bound = best - reach
            if tl.sum((peak > bound).to(tl.int32)) <= NARROW:
                cut, tie, eta, flag, total, token, log_weight = solve_head(
                    at,
                    size,
                    peak,
                    g,
                    bound,
                    best,
                    slope,
                    mass_slope,
                    count,
                    share,
                    total,
                    u,
                    slots,
                    KIND,
                    NARROW,
                    GROUP,
                )
            if flag != 0:
                bound = head_groups(peak, best, 16.0 / mass_slope if KIND == TOP_P else reach, GROUPS)
                cut, tie, eta, flag, total, token, log_weight = solve_head(
                    at,
                    size,
                    peak,
                    g,
                    bound,
                    best,
                    slope,
                    mass_slope,
                    count,
                    share,
                    total,
                    u,
                    slots,
                    KIND,
                    GROUPS,
                    GROUP,
                )
            if flag != 0:
                cut, tie, eta, masses = sweep_row(
                    at, size, best, slope, mass_slope, count, share, t, KIND, TILE, NT, NTP
                )
                total = tl.sum(masses)
                token, log_weight = draw_from(at, size, best, slope, cut, tie, eta, u, masses, t, KIND, TILE)
            if DRAW:
                tl.store(tokens + row, token.to(tl.int64))
                tl.store(log_q + row, log_weight.to(tl.float32))
        tl.store(base, best)
        tl.store(base + 1, cut)
        tl.store(base + 2, tie.to(tl.float32, bitcast=True))
        tl.store(base + 3, eta)
        tl.store(base + 4, total.to(tl.float32))
    tl.store(flags + row, flag)


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
def write(
    logits, row_stride, size, lam, lam_stride, scalars, status, out, out_stride,
    KIND: tl.constexpr, TILE: tl.constexpr, SCALARS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """K3: q, or log q, of one tile; zero, or −inf, in rows that cannot be solved."""
    tile, row = tl.program_id(0), tl.program_id(1)
    ids, x = load_tile(logits + row.to(tl.int64) * row_stride, tile, size, TILE)
    base = scalars + row * SCALARS
    slope = 1.0 / tl.load(lam + row * lam_stride)
    tie = tl.load(base + 2).to(tl.int32, bitcast=True)
    w = weigh(x, ids, tl.load(base), slope, tl.load(base + 1), tie, tl.load(base + 3), KIND)
    q = tl.where(tl.load(status + row) == 0, w / tl.load(base + 4), 0.0)
    if LOG:
        q = tl.log(q)
    tl.store(out + row.to(tl.int64) * out_stride + ids, q.to(out.dtype.element_ty), mask=ids < size)
