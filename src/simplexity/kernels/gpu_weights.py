"""What the Triton kernels share: q up to its normaliser, a row's random number, and draws by inverse CDF."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

import triton
import triton.language as tl

from simplexity.kernels.gpu_coverage import climb, optimum
from simplexity.kernels.gpu_sums import sum_and_largest, two_sums

SOFTMAX = tl.constexpr(0)  # exp(a·x)
TOP_K = tl.constexpr(1)  # the same, x among the k best
TOP_P = tl.constexpr(2)  # the same, x in the nucleus
SPARSEMAX = tl.constexpr(3)  # (a·x − η)_+
ENTMAX = tl.constexpr(4)  # ((a·x/2 − η)_+)²
BOK = tl.constexpr(5)  # Best-of-K after a few steps
BEST = tl.constexpr(6)  # Best-of-K, the optimum
PAIR = tl.constexpr(7)  # exp(a·x + b·y), y another model's logits
MIN_P = tl.constexpr(8)  # exp(a·x), x near enough to the best
LOG2E = tl.constexpr(1.4426950408889634)
STAGES = tl.constexpr(3)  # tiles of a sweep that are on their way at once


@triton.jit
def floor_of(best, share, mass_slope):
    """The least score of min-p: that of a token `share` times as probable as the best."""
    return best + (tl.log(share) / mass_slope).to(tl.float32)


@triton.jit
def among(x, ids, cut, tie):
    """Whether a token is among the best: above the cut, or equal to it and early enough."""
    return (x > cut) | ((x == cut) & (ids <= tie))


@triton.jit
def weigh(x, ids, best, slope, cut, tie, eta, numbers, levels, steps, KIND: tl.constexpr, RULE: tl.constexpr):
    """q up to the row's normaliser, for scores x of the tokens `ids`."""
    z = (x - best) * slope
    if KIND == SPARSEMAX:
        w = tl.maximum(z - eta, 0.0)
    elif KIND == ENTMAX:
        root = tl.maximum(z * 0.5 - eta, 0.0)
        w = root * root
    elif KIND == BOK:
        w = tl.exp(climb(x - best, among(x, ids, cut, tie), slope, numbers, levels, steps, RULE) - eta)
    elif KIND == BEST:
        w = tl.exp(optimum(x - best, among(x, ids, cut, tie), slope, numbers, levels, eta, RULE))
    else:
        w = tl.exp2(z * LOG2E)
        if KIND == TOP_K or KIND == TOP_P or KIND == MIN_P:
            w = tl.where(among(x, ids, cut, tie), w, 0.0)
    return w


@triton.jit
def uniform(seed, step, STREAM: tl.constexpr = 0):
    """A number in [0, 1) with 53 random bits for a seed and a step: SplitMix64's finaliser, as `simplexity.draw`."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    z = mix(seed.to(tl.uint64) + golden)
    z = mix(z + step.to(tl.uint64) * golden)
    z = mix(z + STREAM * golden)
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
def load_scores(row_at, other_at, own, others, tile, size, KIND: tl.constexpr, TILE: tl.constexpr):
    """(ids, scores) of one tile; of two models together where there are two."""
    ids, x = load_tile(row_at, tile, size, TILE)
    if KIND == PAIR:
        y = tl.load(other_at + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
        x = x * own + tl.where(y == -float("inf"), y, y * others)  # 0·y where only x counts
    return ids, x


@triton.jit
def within(target, before, weight):
    """Where in a token's interval of cumulative weight the target lies, from 0 to just below 1."""
    most = tl.full([], 0.9999999999999999, tl.float64)  # a plain number would be a float32, 1.0
    return tl.minimum(tl.maximum((target - before) / weight, 0.0), most)


@triton.jit
def draw_from(
    row_at, other_at, own, others, size, best, slope, cut, tie, eta, u, masses, tile_ids, numbers, levels, steps,
    KIND: tl.constexpr, RULE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(token, log q, where in its interval u lies, Σ): a tile by its mass, then a token of that tile, by a number u."""
    total, last = sum_and_largest(masses, tl.where(masses > 0, tile_ids, 0))
    ends = tl.cumsum(masses, 0)
    target = u * total
    chosen = tl.minimum(tl.sum((ends <= target).to(tl.int32)), last)
    mass, before = two_sums(tl.where(tile_ids == chosen, masses, 0.0), tl.where(tile_ids < chosen, masses, 0.0))
    share = tl.maximum((target - before) / mass, 0.0)
    ids, x = load_scores(row_at, other_at, own, others, chosen, size, KIND, TILE)
    w = weigh(x, ids, best, slope, cut, tie, eta, numbers, levels, steps, KIND, RULE).to(tl.float64)
    w = tl.where(ids < size, w, 0.0)
    inside = tl.cumsum(w, 0)
    full, final = sum_and_largest(w, tl.where(w > 0, ids, 0))
    token = tl.minimum(chosen * TILE + tl.sum((inside <= share * full).to(tl.int32)), final)
    weight, passed = two_sums(tl.where(ids == token, w, 0.0), tl.where(ids < token, w, 0.0))
    return token, tl.log((weight / total).to(tl.float32)), within(share * full, passed, weight), total


@triton.jit
def draw_head(w, ids, u):
    """(token, log q, where in its interval u lies, Σ w) from the weights of a head, whose ids ascend."""
    w = w.to(tl.float64)
    total, final = sum_and_largest(w, tl.where(w > 0, ids, -1))
    passed = tl.cumsum(w, 0) <= u * total
    token = tl.minimum(tl.min(tl.where(passed | (w <= 0), 2147483647, ids)), final)
    weight, before = two_sums(tl.where(ids == token, w, 0.0), tl.where(ids < token, w, 0.0))
    return token, tl.log((weight / total).to(tl.float32)), within(u * total, before, weight), total
