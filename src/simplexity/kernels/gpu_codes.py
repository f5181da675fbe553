"""Codes of coupled draws on a GPU: one launch where torch takes thirty, each as long as a hundredth of a small draw.

What `simplexity.coupling.Codes` does, up to the last digits of a token's width, which comes as its logarithm.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplexity.coupling import NODE, OWN, Codes
from simplexity.kernels.gpu_weights import uniform
from simplexity.siblings import Siblings

BLOCK = 256
LARGEST = 128  # samples of a group, all pairs of which one program looks at
OWN_STREAM, NODE_STREAM = tl.constexpr(OWN), tl.constexpr(NODE)


@triton.jit
def _moved(places, log_q, seeds, step, step_stride, out, count, BLOCK: tl.constexpr):
    """`Codes.move_on` where the codes lay at `places` of intervals as wide as q."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < count
    grain = tl.full([], 1.1102230246251565e-16, tl.float64)
    fresh = uniform(
        tl.load(seeds + row, mask=here, other=0), tl.load(step + row * step_stride, mask=here, other=0), OWN_STREAM
    )
    width = tl.exp(tl.load(log_q + row, mask=here, other=0.0).to(tl.float64))
    rest = tl.load(places + row, mask=here, other=0.0)
    code = tl.where(width > grain, rest + grain / width * fresh, fresh)
    tl.store(out + row, tl.minimum(tl.maximum(code, 0.0), 1.0 - grain), mask=here)


@triton.jit
def _respread(same, seeds, step, step_stride, counts, out, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """`Codes.respread` and `Siblings.count` of one group."""
    group = tl.program_id(0).to(tl.int64)
    own, others = tl.arange(0, PADDED)[:, None], tl.arange(0, PADDED)[None, :]
    inside = (own < SIZE) & (others < SIZE)
    together = tl.load(same + group * SIZE * SIZE + own * SIZE + others, mask=inside, other=0) != 0
    count = tl.sum(together.to(tl.int64), 1)
    rank = tl.sum((together & (others < own)).to(tl.int64), 1)
    first = tl.min(tl.where(together, others, PADDED), 1)
    row = tl.arange(0, PADDED)
    here = row < SIZE
    u = uniform(
        tl.load(seeds + group * SIZE + first, mask=here, other=0),
        tl.load(step + (group * SIZE + row) * step_stride, mask=here, other=0),
        NODE_STREAM,
    )
    code = u + rank.to(tl.float64) / tl.maximum(count, 1).to(tl.float64)
    tl.store(out + group * SIZE + row, code - tl.floor(code), mask=here)
    tl.store(counts + group * SIZE + row, count, mask=here)


moved: Any = _moved
spread_again: Any = _respread


def move_on(codes: Codes, places: Tensor, log_q: Tensor) -> None:
    """To the next token, where the codes lay at `places` of intervals as wide as q."""
    out, (step, stride) = torch.empty_like(codes.code), _step(codes)
    if out.numel():
        grid = (triton.cdiv(out.numel(), BLOCK),)
        tables = places.contiguous(), log_q.contiguous(), codes.seeds.contiguous()
        moved[grid](*tables, step, stride, out, out.numel(), BLOCK=BLOCK)
    codes.code, codes.step = out, codes.step + 1


def respread(codes: Codes, siblings: Siblings) -> Tensor:
    """`Codes.respread`; returns how many samples share each row's text, int64 `[rows]`."""
    out, (step, stride) = torch.empty_like(codes.code), _step(codes)
    counts = torch.empty_like(codes.seeds)
    if out.numel():
        same, padded = siblings.same.contiguous(), triton.next_power_of_2(siblings.size)
        spread_again[(len(same),)](
            same, codes.seeds.contiguous(), step, stride, counts, out, SIZE=siblings.size, PADDED=padded
        )
    codes.code = out
    return counts


def _step(codes: Codes) -> tuple[Tensor, int]:
    """The step in memory of the device, and the stride from row to row."""
    if isinstance(codes.step, Tensor):
        step = codes.step.to(codes.code.device).reshape(-1)
        return step, 0 if len(step) == 1 else step.stride(0)
    return torch.full((1,), codes.step, device=codes.code.device), 0
