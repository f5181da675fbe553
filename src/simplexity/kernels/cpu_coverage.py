"""Draws from Best-of-K anchored to the model: the paper's J steps, or the optimum.

With x = s − max s and p = softmax(s/τ) every iterate is  log q_j = a_j·x + λβK·w·S_j − L_j:

    a_j = 1/τ + C_j,    C_{j+1} = ρC_j + step,    S_{j+1} = ρS_j + step·(1−q_j)^{K−1},    ρ = 1 − step·λ

and the optimum obeys  log q = (1/λ + 1/τ)·x − η + βwK·(1−q)^{K−1}. Where scores are peaked, a few hundred tokens hold
all the mass after the first step and the rest is never looked at again. Where they are flat, only the tokens whose
S_j differs from C_j by more than rounding take part in the recursion; the others give one sum for each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simplexity.anchor import AnchorCoverage, AnchorKL
from simplexity.draw import Pick
from simplexity.narrow import Entries, Narrowed, crowded, entries_above, narrow_above
from simplexity.problem import Problem
from simplexity.rows import exp_, exp_totals, power, total
from simplexity.solvers import MirrorAscent
from simplexity.solvers.coverage_root import TOLERANCES, Head, newton
from simplexity.supports import TopK, best_scores

GENTLE = 3.0  # beyond, the tail as a difference of sums loses digits
AT_ONCE = 2**19  # numbers that stay in a processor's cache
DROPPED = 1e-5  # what may be left out of a log q
STRONGEST = 20.0  # log of what coverage may multiply a probability by, for exponentials without a peak to subtract


@dataclass(frozen=True, eq=False)
class Task:
    """The numbers of one problem; `best` `[..., 1]` is max s."""

    scores: Tensor
    peaks: Tensor
    best: Tensor
    lam: float
    slope: float  # 1/τ
    pull: float  # βK
    k: int
    rule: str
    m: int

    @property
    def rounding(self) -> float:
        """log of what all tokens together must weigh less than to be left out."""
        return math.log(torch.finfo(self.scores.dtype).eps / self.scores.shape[-1])

    def first_mass(self) -> Tensor:
        """Σ exp(x/τ), `[..., 1]`: what turns exp(x/τ) into p."""
        return exp_totals(self.scores, self.best, 1.0 / self.slope)[0]

    def spread(self) -> Tensor:
        """exp(x/τ), `[..., V]`."""
        return exp_(torch.sub(self.scores, self.best).mul_(self.slope))

    def weights(self, columns: Narrowed | Entries, x: Tensor, mass: Tensor | None) -> float | Tensor:
        """w on some columns, among them the m best tokens."""
        if self.rule == "probs":
            assert mass is not None
            return torch.exp(x * self.slope).div_(columns.each(mass))
        if self.rule == "uniform":
            return 1.0
        if isinstance(columns, Narrowed):
            return TopK(self.m).mask(columns.scores).double()
        return columns.listed(TopK(self.m).mask(columns.table(columns.scores, -torch.inf))).double()


def draw_coverage(problem: Problem, solver: Any, peaks: Tensor, pick: Pick) -> Tensor | None:
    """Tokens `[...]`; see `Kernel`."""
    task = _task(problem, peaks)
    if task is None or solver is None:
        return None if task is None else draw_optimum(task, pick)
    climb = _climb(task, solver)
    return None if climb is None else draw_steps(climb, pick)


def log_q_coverage(problem: Problem, solver: Any, peaks: Tensor, out: Tensor | None) -> Tensor | None:
    """log q `[..., V]` after the paper's steps, in `out` where given; None where they are taken some other way."""
    task = _task(problem, peaks)
    climb = None if task is None or solver is None else _climb(task, solver)
    if climb is None or climb.boost >= GENTLE:
        return None
    if (middle := solve_middle(climb)) is not None:
        entries, exact = middle
        norm = entries.totals(exact).log_()
        slope = climb.task.slope + climb.levels[-1]
        level = climb.elsewhere * climb.levels[-1] - norm - climb.task.best.double() * slope
        log_q = torch.add(level.to(problem.scores.dtype), problem.scores, alpha=slope, out=out)
        return entries.put_(log_q, exact.log_().sub_(entries.each(norm)).to(log_q.dtype))
    last, head, exact, rest = solve_wide(climb, log=True)
    norm = exact.sum(-1, keepdim=True).add_(rest).log_()
    log_q = torch.sub(last, norm.to(last.dtype), out=last if out is None else out)
    return head.raise_(head.drop_(log_q, -torch.inf), exact.log_().sub_(norm).to(last.dtype))


def _task(problem: Problem, peaks: Tensor) -> Task | None:
    (c, kl), (beta, cover) = problem.regulariser.terms  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(kl, AnchorKL)
    assert isinstance(cover, AnchorCoverage)
    lam, tau, k = problem.lam, kl.anchor.temperature, cover.k
    if isinstance(lam, Tensor) or isinstance(tau, Tensor) or isinstance(beta, Tensor) or isinstance(k, Tensor):
        return None
    if cover.anchor is not kl.anchor or kl.anchor.scores is not problem.scores:
        return None
    if c != 1 or lam == 0 or cover.rule not in ("probs", "top-m", "uniform"):
        return None
    best = peaks.amax(-1, keepdim=True)
    return Task(problem.scores, peaks, best, lam, 1.0 / tau, beta * k, k, cover.rule, cover.m)


def _climb(task: Task, solver: Any) -> Climb | None:
    usual = isinstance(solver, MirrorAscent) and solver.geometry == "entropic" and solver.start == "reference"
    if not usual or not solver.steps or not isinstance(solver.step, float) or solver.step * task.lam > 1:
        return None
    return Climb(task, solver.steps, solver.step)


def draw_optimum(task: Task, pick: Pick) -> Tensor | None:
    """The exact optimum, on the columns that weigh."""
    a = 1.0 / task.lam + task.slope
    floor = task.best + (task.rounding - task.pull) / a
    if task.pull > STRONGEST or crowded(task.scores, floor):
        return None
    columns = narrow_above(task.scores, floor, task.peaks)
    x = (columns.scores - task.best).double()
    w = task.weights(columns, x, task.first_mass() if task.rule == "probs" else None)
    x = x.mul_(a)
    gain = w * task.pull if isinstance(w, Tensor) else torch.full_like(x, task.pull)
    low = x.logsumexp(-1, keepdim=True)
    head = Head(x, gain, task.k, torch.zeros_like(low), low)
    _, q = newton(head, TOLERANCES[task.scores.dtype])
    return columns.tokens(pick(q))


@dataclass(frozen=True)
class Climb:
    """C_0 … C_J and what goes with them."""

    task: Task
    steps: int
    step: float

    @property
    def rho(self) -> float:
        """What a step leaves of the levels before it."""
        return 1.0 - self.step * self.task.lam

    @property
    def levels(self) -> list[float]:
        """C_0 … C_J."""
        levels = [0.0]
        for _ in range(self.steps):
            levels.append(self.rho * levels[-1] + self.step)
        return levels

    @property
    def boost(self) -> float:
        """The most that coverage can add to log q."""
        return self.task.lam * self.task.pull * self.levels[-1]

    @property
    def elsewhere(self) -> float:
        """λβK·w of the tokens that matter little: w is 1 for all, or next to nothing."""
        return self.task.lam * self.task.pull if self.task.rule == "uniform" else 0.0

    def run(
        self, columns: Narrowed | Entries, x: Tensor, mass: Tensor, tails: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        """exp(log q_J + L_J) on some columns, in float64; `tails` are the sums of the other columns, None for nothing.

        x: s − max s there. mass: `Task.first_mass`.
        """
        task, covered = self.task, None
        gain = task.weights(columns, x, mass) * (task.lam * task.pull)
        q = torch.exp(x * task.slope).div_(columns.each(mass))
        e = q
        for j, level in enumerate(self.levels[1:]):
            seen = power(1.0 - q, task.k - 1).mul_(self.step)
            covered = seen if covered is None else seen.add_(covered, alpha=self.rho)
            e = torch.add(covered * gain, x, alpha=task.slope + level).exp_()
            if j + 1 < self.steps:
                tail = None if tails is None else tails[j]
                q = e / (columns.sums(e) if tail is None else columns.sums(e).add_(columns.each(tail)))
        return e


def draw_steps(climb: Climb, pick: Pick) -> Tensor | None:
    """Algorithm 1: on the columns that weigh after the first step, or, where those are many, on the felt ones."""
    task, levels, boost = climb.task, climb.levels, climb.boost
    if boost > STRONGEST:
        return None
    floor = task.best + (task.rounding - boost) / (task.slope + levels[1])
    if not crowded(task.scores, floor, widest=boost < GENTLE):
        columns = narrow_above(task.scores, floor, task.peaks)
        x = (columns.scores - task.best).double()
        return columns.tokens(pick(climb.run(columns, x, task.first_mass())))
    if boost >= GENTLE:
        return None
    middle = solve_middle(climb)
    if middle is None:
        return draw_wide(climb, pick)
    entries, e = middle
    return entries.narrowed().tokens(pick(entries.table(e, 0.0)))


def solve_middle(climb: Climb) -> tuple[Entries, Tensor] | None:
    """Algorithm 1 where the tokens that weigh after the second step are few: these, and q_J up to a factor there.

    All others together only show in the normalisers of q_0 and q_1, two sums over the row, and they feel coverage as if
    nothing were covered yet.
    """
    task, levels = climb.task, climb.levels
    if climb.steps < 2:
        return None
    rounding, own = task.rounding, task.rule == "probs"
    felt = math.log(max(climb.boost * (task.k - 1), 1e-300)) - math.log(torch.finfo(task.scores.dtype).eps / 2)
    depth = max(
        (climb.boost - rounding) / (task.slope + levels[2]),
        (felt + 2 * climb.boost) / (task.slope * (1 + own)),  # the bend of log q_J is below rounding
        math.log(max(climb.boost, 1e-300) / DROPPED) / task.slope if own else 0.0,  # and so is what w adds to it
    )
    floor = task.best - depth
    if task.rule == "top-m":
        least = best_scores(task.scores, min(task.m, task.scores.shape[-1]), task.peaks)[0][..., -1:]
        floor = torch.minimum(floor, torch.nextafter(least, torch.full_like(least, -torch.inf)))
    if crowded(task.scores, floor):
        return None
    entries = entries_above(task.scores, floor, task.peaks)
    first = task.slope + levels[1]
    mass, *sums = exp_totals(task.scores, task.best, 1.0 / task.slope, squares=first == 2 * task.slope)
    (everything,) = sums or exp_totals(task.scores, task.best, 1.0 / first)
    x = (entries.scores - entries.each(task.best)).double()
    others = (everything - entries.totals(torch.exp(x * first))).clamp_min_(0.0)
    tails = [others * math.exp(climb.elsewhere * levels[1])] + [None] * (climb.steps - 1)
    return entries, climb.run(entries, x, mass, tails)


def draw_wide(climb: Climb, pick: Pick) -> Tensor:
    """Algorithm 1 on rows with mass everywhere."""
    last, head, exact, _ = solve_wide(climb)
    # a padded column repeats an id with nothing to add: first erase, then add
    return pick(head.add_(head.drop_(last), exact.to(last.dtype)))


def solve_wide(climb: Climb, log: bool = False) -> tuple[Tensor, Narrowed, Tensor, Tensor]:
    """The recursion for the tokens that feel it, sums for all others.

    q_J up to its normaliser, or the logarithm of that, right outside the head; the head; the same there, in float64;
    and the sum of what lies outside.
    """
    task, levels, boost = climb.task, climb.levels, climb.boost
    e = task.spread()
    mass = total(e)
    w = e.mul_(mass.reciprocal().to(e.dtype)) if task.rule == "probs" else None
    x = torch.sub(task.scores, task.best)
    shift = 0.0 if task.rule == "top-m" else 1.0  # w of the tail where it is one number
    gain = task.lam * task.pull

    def relaxed(x: Tensor, w: Tensor | None, levels: Tensor) -> Tensor:
        """log q_j + L_j, `[J, ..., V]`, for tokens with q so small that S_j = C_j."""
        y = x * (levels + task.slope)
        return y.add_(levels * (shift * gain)) if w is None else y.addcmul_(w, levels * gain)

    # small rows: all steps at once, for the fewest operations; large ones: step by step, for the least memory
    steps = torch.tensor(levels[1:], dtype=x.dtype).view(-1, *[1] * x.ndim)
    parts, last = [], x
    for some in steps.split(max(1, AT_ONCE // x.numel())):
        tail = relaxed(x, w, some)
        last = tail[-1].clone() if log else last
        e = exp_(tail)
        parts.append(total(e))
        last = last if log else e[-1]
    sums = parts[0] if len(parts) == 1 else torch.cat(parts)  # [J, ..., 1]
    if task.rule == "top-m":
        floor = best_scores(task.scores, min(task.m, x.shape[-1]), task.peaks)[0][..., -1:]
        floor = torch.nextafter(floor, torch.full_like(floor, -torch.inf))
    else:
        # outside the head log q_J feels less than rounding: boost·(K−1)·w·q_j < eps/2, with
        # q_j <= exp(a_j·x + 2·boost) / sum_j
        steepness = math.log(max(boost * (task.k - 1), 1e-300)) - math.log(torch.finfo(x.dtype).eps / 2) + 2 * boost
        own = task.rule == "probs"  # then w falls with x too
        logs = torch.cat([mass.unsqueeze(0), sums[:-1]]).log_()
        rates = torch.cat([steps.new_zeros(1, *steps.shape[1:]), steps[:-1]]).add_((1 + own) * task.slope)
        depth = ((steepness - (logs + logs[0] if own else logs)) / rates).amax(0).clamp_min_(0.0)
        floor = task.best - (depth * (1 + 1e-6) + 1e-6).to(x.dtype) - 1e-6 * task.best.abs()
    head = narrow_above(task.scores, floor, task.peaks)
    inside = head.scores - task.best
    w_head = None if w is None else head.take(w)
    tails = (sums - total(exp_(relaxed(inside, w_head, steps)))).unbind(0)
    inside = inside.double()
    exact = climb.run(head, inside, mass, tails)
    return last, head, exact, tails[-1]
