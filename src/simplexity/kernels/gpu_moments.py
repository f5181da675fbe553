"""Sums over a row that its effective temperature is found from, in one read of the scores as they are.

Σ e,   Σ y·e,   Σ y²·e        y = β·(s − max s),  e = exp y,  over the tokens below the maximum
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
LEAST = -87.0  # e to this is a normal number in float32


@triton.jit
def moments(scores, stride, size, rows, tops, betas, out, TILE: tl.constexpr, LEAST: tl.constexpr):
    """One tile of one row; what it finds is added up outside."""
    place, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place)
    column = tile * TILE + tl.arange(0, TILE)
    score = tl.load(scores + row.to(tl.int64) * stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    x = score - tl.load(tops + row)
    y = tl.maximum(x * tl.load(betas + place), LEAST)
    e = tl.where((x < 0) & (score > float("-inf")), tl.exp(y), 0.0)
    first = out + (place * tl.num_programs(1) + tile) * 3
    tl.store(first, tl.sum(e, 0))
    tl.store(first + 1, tl.sum(e * y, 0))
    tl.store(first + 2, tl.sum(e * y * y, 0))


class MomentsOnGPU:
    """See `measures.Moments`; scores `[B, V]` in any precision up to float32."""

    close = 1e-6

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.tops = scores, scores.amax(-1).float()
        self.rows = torch.arange(len(scores), device=scores.device)

    def keep(self, rows: Tensor) -> None:
        """Only these rows are asked for from now on."""
        self.rows = self.rows[rows]

    def at(self, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sums at β `[rows]`, float64."""
        size, count = self.scores.shape[-1], len(self.rows)
        tile = min(TILE, max(16, 1 << (size - 1).bit_length()))
        out = torch.empty(count, -(-size // tile), 3, dtype=torch.float32, device=beta.device)
        run: Any = moments
        if count:
            run[(count, out.shape[1])](
                self.scores,
                self.scores.stride(0),
                size,
                self.rows,
                self.tops,
                beta.float(),
                out,
                TILE=tile,
                LEAST=LEAST,
            )
        rest, drift, square = out.double().sum(1).unbind(-1)
        return rest, drift, square
