"""Convex sets that q must lie in, besides the simplex on a support.

    q_v <= c_v                                 caps on tokens
    l_g <= Σ_{v∈g} q_v <= u_g                  bounds on the mass of disjoint groups
    Σ −q log q >= h,  or  KL(q ‖ r) <= ε       a ball around the uniform distribution, or around a reference

Caps and bounds on groups together are one polytope (`Bounds`), over which a linear objective is maximised by filling
tokens best first. A ball is R(q) <= b for a divergence R (`Ball`); its multiplier adds R to the objective.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simplexity.groups import Groups, GroupSpec, group_sums
from simplexity.regularisers import KL, NegEntropy, Regulariser
from simplexity.rows import covers, first_rows, is_number, log_total, per_row, total

SLACK = 1e-6  # bounds whose sums miss what is possible by this much count as possible: 0.9 + 0.1 in float32 is below 1


class Constraint:
    """A convex set. Each kind may stand once among a problem's constraints."""

    def check(self, scores: Tensor) -> None:
        """Raise a ValueError where the parameters do not fit the scores. May read values."""

    def restrict(self, scores: Tensor) -> Tensor:
        """The scores, −inf where the set leaves a token nothing."""
        return scores


@dataclass(frozen=True, eq=False)
class Caps(Constraint):
    """q_v <= cap: a number, one per row `[...]` or `[..., 1]`, or one per token `[V]` or `[..., V]`.

    V numbers in a line are one per token, even where there are V rows: a column is never mistaken.

    >>> from simplexity import NegEntropy, Problem, solve
    >>> solve(Problem(torch.tensor([3.0, 2.0, 0.0]), NegEntropy(), constraints=(Caps(0.5),)))
    tensor([0.5000, 0.4404, 0.0596])
    """

    cap: float | Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.cap, Tensor) and not (is_number(self.cap) and 0 < self.cap <= 1):
            raise ValueError(f"Caps: cap must be in (0, 1], got {self.cap!r}")

    def check(self, scores: Tensor) -> None:
        if isinstance(self.cap, Tensor) and not bool(((self.cap >= 0) & (self.cap <= 1)).all()):
            raise ValueError("Caps: cap must be in [0, 1] everywhere")

    def on(self, scores: Tensor) -> Tensor:
        """The caps, `[..., V]` or `[..., 1]`."""
        if isinstance(self.cap, Tensor) and self.cap.ndim and self.cap.shape[-1] == scores.shape[-1] > 1:
            if not covers(self.cap.shape[:-1], scores.shape[:-1]):
                raise ValueError(f"Caps: cap must be [V] or {list(scores.shape)}, got {list(self.cap.shape)}")
            return self.cap.to(scores).expand(scores.shape)
        cap = per_row(self.cap, scores, "Caps: cap")
        return cap.to(scores.dtype) if isinstance(cap, Tensor) else torch.full_like(scores[..., :1], cap)


@dataclass(frozen=True, eq=False)
class GroupBounds(Constraint):
    """lower <= the mass of each group <= upper; the groups must not overlap.

    groups: lists of token ids, or an index `[V]` with the group of each token, −1 for none
    lower:  a number for all groups, one per group `[G]`, or one per row and group `[..., G]`
    upper:  the same

    >>> from simplexity import NegEntropy, Problem, solve
    >>> scores = torch.tensor([3.0, 2.0, 0.0, 0.0])
    >>> solve(Problem(scores, NegEntropy(), constraints=(GroupBounds([[0, 1]], upper=0.5),)))
    tensor([0.3655, 0.1345, 0.2500, 0.2500])
    """

    groups: GroupSpec | Groups
    lower: float | Sequence[float] | Tensor = 0.0
    upper: float | Sequence[float] | Tensor = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", groups := Groups(self.groups, "GroupBounds"))
        count = groups.count
        for name in ("lower", "upper"):
            value: Any = getattr(self, name)
            if isinstance(value, Tensor):
                continue
            numbers = list(value) if isinstance(value, (list, tuple)) else [value]
            if not all(is_number(x) and 0 <= x <= 1 for x in numbers):
                raise ValueError(f"GroupBounds: {name} must be in [0, 1], got {value!r}")
            if len(numbers) not in (1, count):
                raise ValueError(
                    f"GroupBounds: {name} must be one number or one for each of {count} groups, got {value!r}"
                )
            object.__setattr__(self, name, torch.tensor(numbers, dtype=torch.float64))

    def check(self, scores: Tensor) -> None:
        lower, upper = self.on(scores)
        if bool((bad := ~((lower >= 0) & (lower <= upper))).any()):
            raise ValueError(f"GroupBounds: 0 <= lower <= upper must hold in every group, but not in {_places(bad)}")

    def on(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(lower, upper), float64 `[..., G + 1]`, the last for the tokens in no group."""
        assert isinstance(self.groups, Groups)
        rows, count = scores.shape[:-1], self.groups.count
        tables = []
        for name, rest in (("lower", 0.0), ("upper", 1.0)):
            bound: Any = getattr(self, name)
            bound = bound.unsqueeze(0) if bound.ndim == 0 else bound
            if bound.shape[-1] not in (1, count) or not covers(bound.shape[:-1], rows):
                raise ValueError(
                    f"GroupBounds: {name} must be a number, one per group [{count}], or one per row and group "
                    f"{[*rows, count]}, got shape {list(bound.shape)}"
                )
            bound = bound.to(scores.device, torch.float64).expand(*rows, count)
            tables.append(torch.nn.functional.pad(bound, (0, 1), value=rest))
        return tables[0], tables[1]


@dataclass(frozen=True, eq=False)
class EntropyFloor(Constraint):
    """The entropy of q is at least h nats, a number or one per row.

    >>> from simplexity import Problem, Zero, entropy, solve
    >>> entropy(solve(Problem(torch.tensor([3.0, 2.0, 0.0]).double(), Zero(), constraints=(EntropyFloor(0.5),))))
    tensor(0.5000, dtype=torch.float64)
    """

    h: float | Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.h, Tensor) and not (is_number(self.h) and 0 <= self.h < torch.inf):
            raise ValueError(f"EntropyFloor: h must be a number of nats >= 0, got {self.h!r}")

    def check(self, scores: Tensor) -> None:
        if isinstance(self.h, Tensor) and not bool((self.h >= 0).all()):
            raise ValueError("EntropyFloor: h must be >= 0 in every row")

    def on(self, scores: Tensor) -> "Ball":
        """−Σ q log q >= h as R(q) <= −h."""
        return Ball(NegEntropy(), 0.0, _column(self.h, scores, "EntropyFloor: h").neg())


@dataclass(frozen=True, eq=False)
class KLBall(Constraint):
    """KL(q ‖ r) <= epsilon, a number or one per row; r = softmax(log_reference) `[..., V]`.

    `log_reference` may be log-probabilities or logits, the model's own or another's; −inf forbids a token.

    >>> from simplexity import Problem, Zero, solve
    >>> scores = torch.tensor([1.0, 0.0])
    >>> solve(Problem(scores, Zero(), constraints=(KLBall(0.1, torch.zeros(2)),)))
    tensor([0.7198, 0.2802])
    """

    epsilon: float | Tensor
    log_reference: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.epsilon, Tensor) and not (is_number(self.epsilon) and 0 <= self.epsilon < torch.inf):
            raise ValueError(f"KLBall: epsilon must be a number >= 0, got {self.epsilon!r}")
        if not isinstance(self.log_reference, Tensor) or not self.log_reference.is_floating_point():
            raise ValueError("KLBall: log_reference must be a floating-point tensor of log-probabilities or logits")

    def check(self, scores: Tensor) -> None:
        if isinstance(self.epsilon, Tensor) and not bool((self.epsilon >= 0).all()):
            raise ValueError("KLBall: epsilon must be >= 0 in every row")
        log_r = self.log_reference
        if log_r.shape[-1] != scores.shape[-1] or not covers(log_r.shape[:-1], scores.shape[:-1]):
            raise ValueError(f"KLBall: log_reference must be {list(scores.shape)}, got {list(log_r.shape)}")
        KL(log_r).check()

    def restrict(self, scores: Tensor) -> Tensor:
        return KL(self.log_reference).restrict(scores)

    def on(self, scores: Tensor) -> "Ball":
        """The same as R(q) <= ε, its reference normalised over the whole vocabulary."""
        log_r = self.log_reference.detach().to(scores)
        log_r = log_r - log_total(log_r)
        return Ball(KL(log_r), log_r, _column(self.epsilon, scores, "KLBall: epsilon"))


@dataclass(frozen=True, eq=False)
class Ball:
    """R(q) <= bound, R(q) = Σ q log(q/r); r = 1 for an entropy."""

    regulariser: Regulariser  # R
    log_r: float | Tensor  # `[..., V]`
    bound: Tensor  # float64 `[..., 1]`

    def value(self, q: Tensor) -> Tensor:
        """R(q), float64 `[..., 1]`."""
        linear = torch.where(q > 0, q * self.log_r, 0.0) if isinstance(self.log_r, Tensor) else 0.0
        return total(torch.xlogy(q, q) - linear)

    def least(self, allowed: Tensor) -> Tensor:
        """The smallest R on the simplex of the allowed tokens, −log r(allowed), float64 `[..., 1]`."""
        if not isinstance(self.log_r, Tensor):
            return -allowed.sum(-1, keepdim=True).double().log()
        return -log_total(self.log_r.masked_fill(~allowed, -torch.inf)).double()


@dataclass(frozen=True, eq=False)
class Bounds:
    """q_v <= cap_v and lower_g <= Σ_{v∈g} q_v <= upper_g on the allowed tokens, ready for arithmetic.

    Without groups all tokens are one group. Its methods know `[..., V]` and tables `[..., G]`, one entry per group.
    """

    allowed: Tensor  # bool `[..., V]`: tokens that may get anything
    cap: Tensor | None  # `[..., V]` or `[..., 1]`; None: no token is capped
    index: Tensor | None  # int64 `[V]`, the group of each token; None: one group
    lower: Tensor  # float64 `[..., G]`
    upper: Tensor  # float64 `[..., G]`, at most what the tokens of the group can hold

    def sums(self, x: Tensor) -> Tensor:
        """The sum of x over each group, float64 `[..., G]`."""
        return total(x) if self.index is None else group_sums(x, self.index, self.lower.shape[-1])

    def to_tokens(self, table: Tensor) -> Tensor:
        """The entry of each token's group, `[..., V]`, or `[..., 1]` without groups."""
        return table if self.index is None else table.index_select(-1, self.index)

    def fill(self, g: Tensor) -> Tensor:
        """argmax <g, u> over the set: lower bounds first, then what is left, best tokens first, lowest ids in a tie."""
        g = g.masked_fill(~self.allowed, -torch.inf)
        most = self.allowed.to(torch.float64)
        most = most if self.cap is None else most * self.cap
        best_first = g.argsort(dim=-1, descending=True, stable=True)
        if self.index is None:
            return _poured(most, torch.ones_like(self.upper), best_first).to(g.dtype)
        # the same order group by group: what lies before a token, less what lies before the first of its group
        by_group = best_first.gather(-1, self.index[best_first].argsort(dim=-1, stable=True))
        room = most.gather(-1, by_group)
        ends, own = _running(room), self.index[by_group]
        groups = torch.arange(self.lower.shape[-1], device=g.device).expand_as(self.lower)
        first = torch.searchsorted(own, groups.contiguous())
        starts = torch.nn.functional.pad(ends, (1, 0)).gather(-1, first)
        before = ends - room - starts.gather(-1, own)
        least, upto = (
            torch.empty_like(room).scatter_(
                -1, by_group, torch.minimum((bound.gather(-1, own) - before).clamp_min_(0.0), room)
            )
            for bound in (self.lower, self.upper)
        )
        left = (1.0 - self.lower.sum(-1, keepdim=True)).clamp_min_(0.0)
        return (least + _poured(upto - least, left, best_first)).to(g.dtype)

    def violation(self, q: Tensor) -> Tensor:
        """The largest amount by which q breaks a cap or a bound, float64 `[...]`."""
        sums = self.sums(q)
        over = torch.maximum(sums - self.upper, self.lower - sums).amax(-1)
        if self.cap is None:
            return over.clamp_min(0.0)
        return torch.maximum(over, (q - self.cap).amax(-1)).clamp_min(0.0)


def _poured(room: Tensor, amount: Tensor, order: Tensor) -> Tensor:
    """`amount` `[..., 1]` poured into vessels that hold `room` `[..., V]`, in this order."""
    room = room.gather(-1, order)
    got = torch.minimum((amount - (_running(room) - room)).clamp_min_(0.0), room)
    return torch.empty_like(got).scatter_(-1, order, got)


def _running(x: Tensor) -> Tensor:
    """Running sums of numbers in [0, 1], `[..., V]`, in whole numbers, which add up without rounding.

    150,000 equal floats are all rounded the same way, and are 1e-7 off in the end.
    """
    unit = 2.0 ** (62 - x.shape[-1].bit_length())
    return (x * unit).round().to(torch.int64).cumsum(-1).double().div_(unit)


def as_constraints(constraints: Any) -> tuple[Constraint, ...]:
    """One constraint, or several of different kinds, as a tuple."""
    found = (constraints,) if isinstance(constraints, Constraint) else tuple(constraints)
    for c in found:
        if not isinstance(c, (Caps, GroupBounds, EntropyFloor, KLBall)):
            raise ValueError(f"a constraint is Caps, GroupBounds, EntropyFloor or KLBall, got {c!r}")
    kinds = ["EntropyFloor or KLBall" if isinstance(c, (EntropyFloor, KLBall)) else type(c).__name__ for c in found]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"at most one {kind} can stand among the constraints, got {kinds.count(kind)}")
    return found


def bounds_of(constraints: Iterable[Constraint], allowed: Tensor, like: Tensor) -> Bounds | None:
    """The caps and group bounds among the constraints on `like` `[..., V]`; None without any."""
    caps = next((c for c in constraints if isinstance(c, Caps)), None)
    groups = next((c for c in constraints if isinstance(c, GroupBounds)), None)
    if caps is None and groups is None:
        return None
    cap = None if caps is None else caps.on(like)
    allowed = allowed if cap is None else allowed & (cap > 0)
    most = allowed.to(like.dtype) if cap is None else allowed * cap
    if groups is None:
        room = total(most)
        return Bounds(allowed, cap, None, torch.zeros_like(room), room)
    assert isinstance(groups.groups, Groups)
    index, (lower, upper) = groups.groups.index(like), groups.on(like)
    allowed = allowed & (upper > 0).index_select(-1, index)
    upper = torch.minimum(upper, group_sums(most, index, lower.shape[-1]))
    return Bounds(allowed, cap, index, lower, upper)


def ball_of(constraints: Iterable[Constraint], like: Tensor) -> Ball | None:
    """The entropy floor or the KL ball among the constraints on `like` `[..., V]`; None without any."""
    return next((c.on(like) for c in constraints if isinstance(c, (EntropyFloor, KLBall))), None)


def has_ball(constraints: Iterable[Constraint]) -> bool:
    """Whether an entropy floor or a KL ball is among the constraints."""
    return any(isinstance(c, (EntropyFloor, KLBall)) for c in constraints)


def unmet(constraints: tuple[Constraint, ...], allowed: Tensor, like: Tensor) -> list[tuple[Tensor, str]]:
    """Why no q on the allowed tokens meets the constraints: (bad rows `[...]`, reason) pairs. Reads nothing.

    That caps and a ball are each possible but not both is only known to whoever looks for the point nearest to the
    ball.
    """
    found = []
    if (bounds := bounds_of(constraints, allowed, like)) is not None:
        room, floor = bounds.upper.sum(-1), bounds.lower.sum(-1)
        found = [
            (~(room >= 1 - SLACK), "the caps and upper bounds of the allowed tokens leave room for less than 1 in all"),
            (~(floor <= 1 + SLACK), "the lower bounds of the groups sum to more than 1"),
            (
                ~(bounds.lower <= bounds.upper + SLACK).all(-1),
                "a group's lower bound is above its upper one, or above what its allowed tokens can hold",
            ),
        ]
    if (ball := ball_of(constraints, like)) is not None:
        why = (
            "the allowed tokens are all too far from the reference for this epsilon"
            if isinstance(ball.log_r, Tensor)
            else "an entropy of h is more than the allowed tokens can have, the logarithm of their number"
        )
        found.append((~(ball.least(allowed) <= ball.bound + SLACK).squeeze(-1), why))
    return found


def violation(constraints: Iterable[Constraint], q: Tensor, allowed: Tensor) -> Tensor:
    """The largest amount by which q `[..., V]` breaks a constraint, float64 `[...]`; 0 without any."""
    most = torch.zeros_like(q[..., 0], dtype=torch.float64)
    if (bounds := bounds_of(constraints, allowed, q)) is not None:
        most = bounds.violation(q)
    if (ball := ball_of(constraints, q)) is not None:
        most = torch.maximum(most, (ball.value(q) - ball.bound).squeeze(-1))
    return most


def unless_alone(value: float | Tensor, scores: Tensor, alone: float) -> Tensor:
    """A parameter, `[..., 1]`; `alone` in rows with one allowed token, which has all mass whatever is asked."""
    column = torch.zeros_like(scores[..., :1]) + value
    return column.masked_fill((scores > -torch.inf).sum(-1, keepdim=True) == 1, alone)


def _column(value: float | Tensor, scores: Tensor, name: str) -> Tensor:
    column = per_row(value, scores, name)
    column = column if isinstance(column, Tensor) else torch.full_like(scores[..., :1], column, dtype=torch.float64)
    return column.double().expand(*scores.shape[:-1], 1)


def _places(bad: Tensor) -> str:
    """The groups at fault, and their rows where those differ."""
    groups = bad.reshape(-1, bad.shape[-1]).any(0)
    return f"group {first_rows(groups).removeprefix('rows ').removeprefix('row ')}"
