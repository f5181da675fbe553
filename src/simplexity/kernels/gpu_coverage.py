"""Best-of-K token by token: log q after j steps of Algorithm 1, or at the optimum, from a few numbers of the row.

With x = s − max s and the normalisers L_0 … L_{j−1} of the steps before,

    log q_j = (1/τ + C_j)·x + λβK·w·S_j − L_j,   C_{j+1} = ρC_j + step,   S_{j+1} = ρS_j + step·(1−q_j)^{K−1}

and the optimum obeys  log q = (1/λ + 1/τ)·x − η + βK·w·(1−q)^{K−1}.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

import triton
import triton.language as tl

# `numbers` of a row: λ, β, K, the step or 0, and β times coverage's curvature
LAM, BETA, DRAWS, STEP, BEND = (tl.constexpr(i) for i in range(5))
# what a row writes down at `levels`: the step it takes, then L_0, L_1 …
PACE, FIRST = (tl.constexpr(i) for i in range(2))
PROBS, TOP_M, UNIFORM = (tl.constexpr(i) for i in range(3))


@triton.jit
def missed(q, n):
    """(1−q)^n, the chance that n draws miss a token, for a whole n >= 0: by squaring, and right to the last digits."""
    short = tl.maximum(1.0 - q, 0.0)
    lost = (1.0 - short) - q  # what rounding took from 1 − q
    power = tl.where(short > 1e-6, 1.0 + n.to(tl.float32) * lost / tl.maximum(short, 1e-6), 1.0)
    square = short
    while n > 0:
        power = tl.where(n % 2 == 1, power * square, power)
        square = square * square
        n = n // 2
    return power


@triton.jit
def weight(z, slope, log_mass, kept, RULE: tl.constexpr):
    """w: the model's probability, 1 for the kept tokens, or 1."""
    if RULE == PROBS:
        w = tl.exp(z * slope - log_mass)
    elif RULE == TOP_M:
        w = tl.where(kept, 1.0, 0.0)
    else:
        w = tl.zeros_like(z) + 1.0
    return w


@triton.jit
def reward(numbers):
    """(λ, λβK, K − 1)."""
    lam, draws = tl.load(numbers + LAM), tl.load(numbers + DRAWS)
    return lam, lam * tl.load(numbers + BETA) * draws, draws.to(tl.int32) - 1


@triton.jit
def second_rate(numbers, EXACT: tl.constexpr):
    """By how much log q is steeper than x/τ: at the optimum, or after one step, the shortest that may be taken."""
    lam = tl.load(numbers + LAM)
    if EXACT:
        rate = 1.0 / lam
    else:
        given = tl.load(numbers + STEP)
        rate = tl.where(given == 0.0, 1.0 / tl.maximum(lam * (1.0 + tl.load(numbers + BEND)), 1.0), given)
    return rate


@triton.jit
def climb(z, kept, slope, numbers, levels, steps, RULE: tl.constexpr):
    """log q_j + L_j after `steps` steps, from x = `z`."""
    lam, most, n = reward(numbers)
    pace = tl.load(levels + PACE)
    rho = 1.0 - pace * lam
    gain = most * weight(z, slope, tl.load(levels + FIRST), kept, RULE)
    y = z * slope
    seen = tl.zeros_like(z)
    level = lam * 0.0
    for j in range(steps):
        q = tl.exp(y - tl.load(levels + FIRST + j))
        seen = rho * seen + pace * missed(q, n)
        level = rho * level + pace
        y = z * (slope + level) + gain * seen
    return y


@triton.jit
def implicit(t, gain, n, largest):
    """y = log q with  y − gain·(1 − e^y)^n = t, t <= 0: Newton's method from the point of inflection.

    Left of it the function is convex and the start above the root, right of it concave and below: no step overshoots.
    About log(gain·n) steps lead near the root and five more to the last digit; `largest` is the largest gain.
    """
    steep = n.to(tl.float32)
    t = tl.minimum(tl.maximum(t, -1e9), 0.0)
    above = tl.minimum(t + gain, 0.0)
    y = tl.minimum(tl.maximum(t, -tl.log(tl.maximum(steep, 1.0))), above)
    y = tl.where(n > 0, y, above)
    left = 6 + tl.log(1.0 + largest * steep).to(tl.int32)
    while left > 0:
        q = tl.exp(y)
        lower = missed(q, tl.maximum(n - 1, 0))
        pull = tl.where(n > 0, lower * tl.maximum(1.0 - q, 0.0), 1.0)
        better = y - (y - gain * pull - t) / (1.0 + gain * steep * lower * q)
        y = tl.minimum(tl.maximum(better, t), above)
        left -= 1
    return y


@triton.jit
def pulled(z, kept, slope, numbers, levels, RULE: tl.constexpr):
    """(a, g, the largest g) of log q = a − η + g·(1−q)^{K−1}."""
    strength, log_mass = tl.load(numbers + BETA) * tl.load(numbers + DRAWS), tl.load(levels + FIRST)
    largest = strength * tl.exp(-log_mass) if RULE == PROBS else strength
    steep = 1.0 / tl.load(numbers + LAM) + slope
    return z * steep, strength * weight(z, slope, log_mass, kept, RULE), largest


@triton.jit
def optimum(z, kept, slope, numbers, levels, eta, RULE: tl.constexpr):
    """log q at the optimum, where the multiplier is η."""
    a, gain, largest = pulled(z, kept, slope, numbers, levels, RULE)
    return implicit(a - eta, gain, tl.load(numbers + DRAWS).to(tl.int32) - 1, largest)
