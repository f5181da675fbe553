"""A temperature for each row, solved for so that q has a wanted entropy.

The entropy of q grows with the temperature for every decoder here that looks at one model alone; where it jumps
(top-p lets one more token in), the temperature is the one just before the jump.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from simplexity import measures
from simplexity.context import Context
from simplexity.problem import Status
from simplexity.roots import find_root
from simplexity.rows import per_row
from simplexity.solvers import find_solution

if TYPE_CHECKING:
    from simplexity.decoding import Decoder

EXTREMES = log(1e-29), log(1e29)


def solve_temperature(
    decoder: Decoder, scores: Tensor, context: Context | None, validate: bool
) -> tuple[Tensor, Tensor]:
    """(temperature `[..., 1]`, status `[...]`: UNREACHABLE where no temperature gives the target)."""
    x = scores - scores.amax(-1, keepdim=True)
    if decoder.entropy is not None:
        target = per_row(decoder.entropy, scores, "entropy")
        target = torch.zeros_like(x[..., :1], dtype=torch.float64) + target
    else:
        sharp = per_row(decoder.effective_temperature, scores, "effective_temperature")  # pyright: ignore[reportArgumentType]
        target = measures.entropy_at(x, sharp).unsqueeze(-1)

    def missing(log_temperature: Tensor) -> Tensor:
        tried = decoder._with(
            {"temperature": log_temperature.exp().to(x.dtype), "entropy": None, "effective_temperature": None}
        )
        problem = tried.problem(scores, context)
        solution = find_solution(problem, tried.method(problem), validate)
        return target - measures.entropy(solution.q).unsqueeze(-1)

    # below `coldest` all mass is on the maxima, above `hottest` the row is flat to rounding; a problem takes both as λ
    finite = x > -torch.inf
    spread = (-x.masked_fill(~finite, 0.0).amin(-1, keepdim=True)).double()
    step = (-x.masked_fill(~finite | (x == 0), -torch.inf).amax(-1, keepdim=True)).double()
    coldest = torch.where(step.isfinite() & (step > 0), step / 60.0, 1.0).log()
    hottest = torch.where(spread > 0, spread * 1e6, 1.0).log()
    coldest, hottest = coldest.clamp(*EXTREMES), torch.maximum(hottest, coldest + 1.0).clamp(*EXTREMES)
    slack = 1e-9 if x.dtype == torch.float64 else 1e-4
    reachable = (missing(coldest) > -slack) & (missing(hottest) < slack)
    reads = validate and x.device.type == "cpu"
    found = find_root(missing, coldest, hottest, reads, before=True).exp().to(x.dtype)
    # one allowed token leaves nothing to solve for, and nothing to complain about
    reachable = reachable | (finite.sum(-1, keepdim=True) == 1)
    return found, torch.where(reachable.squeeze(-1), Status.OK, Status.UNREACHABLE).to(torch.int8)
