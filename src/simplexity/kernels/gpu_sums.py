"""Several sums over the lanes of a program in one reduction.

A reduction is latency, a chain of shuffles and barriers that takes as long for one number as for four.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

import os

import triton
import triton.language as tl

# the interpreter would add lane by lane, in Python
TOGETHER = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() not in ("1", "true", "yes", "on", "y"))


@triton.jit
def _two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _sum_and_largest(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit
def _three_and_largest(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, tl.maximum(d, h)


@triton.jit
def two_sums(a, b, AXIS: tl.constexpr = 0):
    """(Σ a, Σ b)."""
    if TOGETHER:
        first, second = tl.reduce((a, b), AXIS, _two)
    else:
        first, second = tl.sum(a, AXIS), tl.sum(b, AXIS)
    return first, second


@triton.jit
def three_sums(a, b, c):
    """(Σ a, Σ b, Σ c)."""
    if TOGETHER:
        first, second, third = tl.reduce((a, b, c), 0, _three)
    else:
        first, second, third = tl.sum(a), tl.sum(b), tl.sum(c)
    return first, second, third


@triton.jit
def sum_and_largest(a, b):
    """(Σ a, max b)."""
    if TOGETHER:
        first, second = tl.reduce((a, b), 0, _sum_and_largest)
    else:
        first, second = tl.sum(a), tl.max(b)
    return first, second


@triton.jit
def three_sums_and_largest(a, b, c, d):
    """(Σ a, Σ b, Σ c, max d)."""
    if TOGETHER:
        first, second, third, fourth = tl.reduce((a, b, c, d), 0, _three_and_largest)
    else:
        first, second, third, fourth = tl.sum(a), tl.sum(b), tl.sum(c), tl.max(d)
    return first, second, third, fourth
