"""Fused draws: from scores to tokens without writing q.

A table keyed by the problem, the types of its regularisers and of its support, says which kernel knows it.
A problem that is not in the table, or a kernel that declines, takes the general path: solve, then draw.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplexity.anchor import AnchorCoverage, AnchorKL
from simplexity.coupling import Codes
from simplexity.draw import Pick
from simplexity.kernels.cpu_coverage import draw_coverage, log_q_coverage
from simplexity.kernels.cpu_entropic import draw_entropic
from simplexity.kernels.plans import Plan, plan_for
from simplexity.measures import Moments
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy, Sum
from simplexity.siblings import Siblings
from simplexity.supports import Everything, TopK, TopP

Kernel = Callable[[Problem, Any, Tensor, Pick], Tensor | None]
"""(problem, solver, block maxima of its scores, what picks by mass) -> tokens `[...]`, or None: not this one."""

CPU: dict[tuple[tuple[type, ...], type], Kernel] = {
    ((NegEntropy,), Everything): draw_entropic,
    ((NegEntropy,), TopK): draw_entropic,
    ((NegEntropy,), TopP): draw_entropic,
    ((AnchorKL,), Everything): draw_entropic,
    ((AnchorKL, AnchorCoverage), Everything): draw_coverage,
}


@cache
def has_triton() -> bool:
    """Whether the kernels for GPUs can be loaded; looked up only when a GPU asks."""
    return importlib.util.find_spec("triton") is not None


def gpu_plan(logits: Tensor, problem: Problem, solver: Any) -> Plan | None:
    """How the Triton kernels would draw from logits `[..., V]`; None where they do not serve.

    `problem` need only say what is asked of the scores, not hold them.
    """
    usable = logits.stride(-1) == 1 and logits.shape[-1] <= LARGEST and has_triton()
    return plan_for(problem, solver) if usable else None


class OnGPU(NamedTuple):
    """What a fused draw tells of each row, `[...]`: token, log q, a `Status`, where in its interval the number lay."""

    tokens: Tensor
    log_q: Tensor
    status: Tensor
    places: Tensor | None


def draw_on_gpu(
    logits: Tensor, plan: Plan, seeds: Tensor | None, step: int | Tensor, u: Tensor | None, places: bool = False
) -> OnGPU:
    """A token for each row of logits `[..., V]` on a GPU, without host synchronisation.

    By the seeds `[B]` and the step, or by the numbers `u` `[B]`; `places` asks where these lay.
    """
    from simplexity.kernels.gpu import fused_draw

    rows = logits.shape[:-1]
    step = step.expand(rows).reshape(-1) if isinstance(step, Tensor) else step
    drawn = fused_draw(logits.reshape(-1, logits.shape[-1]), plan.expand(rows), seeds, step, u, places)
    found = (drawn.tokens, drawn.log_q, drawn.status, drawn.places)
    return OnGPU(*(None if table is None else table.view(rows) for table in found))  # pyright: ignore[reportArgumentType]


def move_on_gpu(codes: Codes, places: Tensor, log_q: Tensor) -> None:
    """The codes move on to the next token after a fused draw: see `Codes.move_on`."""
    from simplexity.kernels.gpu_codes import move_on

    move_on(codes, places, log_q)


def respread(codes: Codes | None, siblings: Siblings) -> Tensor:
    """How many samples share each row's text, int64 `[rows]`; codes, where there are any, are spread anew over them."""
    if codes is not None and codes.code.is_cuda and has_triton():
        from simplexity.kernels import gpu_codes

        if siblings.size <= gpu_codes.LARGEST:
            return gpu_codes.respread(codes, siblings)
    if codes is not None:
        codes.respread(siblings)
    return siblings.count


def swept_rows(device: torch.device | str = "cuda") -> tuple[int, int]:
    """(rows that were swept, all rows) that the fused kernels of a GPU were given so far, be it to draw or to write q.

    A row whose best few thousand tokens do not tell its q, because it is flat, say, is read as often as it takes: the
    same draw, some hundred times slower. Reads from the GPU.
    """
    from simplexity.kernels.gpu import tally

    every, swept = tally(torch.empty(0, device=device).device).tolist()
    return swept, every


def log_q_on_gpu(logits: Tensor, plan: Plan, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(log q `[..., V]`, status `[...]`) of logits on a GPU; rows that cannot be solved keep what `out` holds."""
    from simplexity.kernels.gpu import fused_distribution

    rows, size = logits.shape[:-1], logits.shape[-1]
    into = None if out is None else out.view(-1, size)
    log_q, drawn = fused_distribution(logits.reshape(-1, size), plan.expand(rows), log=True, out=into)
    return log_q.view(logits.shape), drawn.status.view(rows)


def moments_on_gpu(scores: Tensor) -> Moments | None:
    """What `effective_temperature` sums over scores `[B, V]` on a GPU; None where the kernel does not serve."""
    plain = scores.ndim == 2 and scores.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not (scores.is_cuda and plain and scores.stride(-1) == 1 and has_triton()):
        return None
    from simplexity.kernels.gpu_moments import MomentsOnGPU

    return MomentsOnGPU(scores)


LARGEST = 2**20  # tokens whose group maxima one program can hold
SMALL = 1024  # vocabularies for which the general path is as fast


def log_q_fused(problem: Problem, solver: Any, peaks: Tensor, out: Tensor | None) -> Tensor | None:
    """log q `[..., V]` of a problem on the CPU whose scores are known to be sound; None where no kernel serves.

    In `out`, where given: of the scores' shape and type, perhaps the scores themselves.
    """
    covers = _terms(problem) == (AnchorKL, AnchorCoverage) and type(problem.support) is Everything
    small = problem.scores.shape[-1] < SMALL or problem.scores.numel() == 0
    return None if small or not covers or problem.constraints else log_q_coverage(problem, solver, peaks, out)


def draw_fused(problem: Problem, solver: Any, peaks: Tensor, pick: Pick) -> Tensor | None:
    """Tokens `[...]` of a problem on the CPU whose scores are known to be sound; None where no kernel serves."""
    if problem.scores.device.type != "cpu" or problem.constraints:
        return None
    kernel = CPU.get((_terms(problem), type(problem.support)))
    if kernel is None or problem.scores.shape[-1] < SMALL or problem.scores.numel() == 0:
        return None
    return kernel(problem, solver, peaks, pick)


def _terms(problem: Problem) -> tuple[type, ...]:
    omega = problem.regulariser
    return tuple(type(term) for _, term in omega.terms) if isinstance(omega, Sum) else (type(omega),)
