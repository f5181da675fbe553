"""Ω, the taste of a decoder: convex functions of a distribution q on the simplex.

The master problem is  max <q, s> − λ·Ω(q). A regulariser states Ω and its gradient and knows no solver;
one that is separable, Ω(q) = Σ_v φ_v(q_v), can be inverted token by token and is solved exactly.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf, log
from typing import Any

import torch
from torch import Tensor

from simplexity.coverage import Geometry, curvature
from simplexity.groups import Groups, GroupSpec, group_peaks, group_sums
from simplexity.rows import covers, exp_, first_rows, fits, is_number, is_whole, power, tiny

HUGE = 1e38


class Regulariser(ABC):
    """A convex Ω. `value` is all a new one must write; each further method unlocks something.

    Sums and non-negative multiples are regularisers: `KL(p) + 0.01 * Coverage(8, p)`.
    """

    separable: bool = False
    """Ω(q) = Σ_v φ_v(q_v): unlocks the exact dual solver."""

    strict: bool = True
    """Strictly convex in every token, so that φ' has an inverse."""

    columnwise: bool = False
    """`take` gives the same Ω on some of the tokens: unlocks solving on the few columns that matter."""

    reach: float | Tensor = inf
    """φ'(1) − φ'(0): tokens further than λ·reach below the best score get exactly zero."""

    @abstractmethod
    def value(self, q: Tensor) -> Tensor:
        """Ω(q), `[..., V] -> [...]`."""

    def grad(self, q: Tensor) -> Tensor:
        """∇Ω(q), by automatic differentiation of `value` unless a subclass knows better.

        Evaluated at max(q, tiny): the slope of q·log q at zero is −inf and would turn into NaN.
        """
        with torch.inference_mode(False), torch.enable_grad():
            point = q.detach().clone().clamp_min_(tiny(q.dtype)).requires_grad_()
            (slope,) = torch.autograd.grad(self.value(point).sum(), point)
        return slope

    def inverse_grad(self, x: Tensor) -> Tensor | None:
        """q in [0, 1] with φ'(q) = x, token by token; None where the solver must search for it.

        0 where x is below φ'(0); anything from 1 up where x is above φ'(1).
        """
        return None

    def smoothness(self, geometry: Geometry) -> float | Tensor | None:
        """L such that L·ψ − Ω is convex, ψ the geometry's potential; None when no such L is known."""
        return None

    def restrict(self, scores: Tensor) -> Tensor:
        """The scores, −inf where q_v > 0 would make Ω infinite. Raises where Ω has tensors that do not fit them."""
        return scores

    def check(self) -> None:
        """Raise a ValueError where the parameters make no convex Ω. May read values."""

    def take(self, ids: Tensor) -> "Regulariser":
        """The same Ω on the tokens `ids` `[..., n]` alone; only asked for where `columnwise`."""
        return self

    def cast(self, dtype: torch.dtype) -> "Regulariser":
        """The same Ω with its tensors in the dtype of the scores."""
        return self

    def __add__(self, other: "Regulariser") -> "Regulariser":
        return _sum((*_terms(self), *_terms(as_regulariser(other))))

    def __mul__(self, factor: float | Tensor) -> "Regulariser":
        if isinstance(factor, Tensor):
            _check_column(factor, "the factor of a regulariser")
        elif not is_number(factor) or not 0 <= factor < inf:
            raise ValueError(
                f"a regulariser is multiplied by a finite number >= 0 (else Ω is not convex), got {factor!r}"
            )
        return _sum(tuple((factor * c, term) for c, term in _terms(self)))

    __rmul__ = __mul__


@dataclass(frozen=True, eq=False)
class Zero(Regulariser):
    """Ω = 0: nothing but the score counts."""

    columnwise = True

    def value(self, q: Tensor) -> Tensor:
        return torch.zeros_like(q[..., 0])

    def grad(self, q: Tensor) -> Tensor:
        return torch.zeros_like(q)

    def smoothness(self, geometry: Geometry) -> float:
        return 0.0


@dataclass(frozen=True, eq=False)
class NegEntropy(Regulariser):
    """Ω(q) = Σ q log q.

    >>> NegEntropy().value(torch.tensor([0.5, 0.5]))
    tensor(-0.6931)
    """

    separable = columnwise = True

    def value(self, q: Tensor) -> Tensor:
        return torch.xlogy(q, q).sum(-1)

    def grad(self, q: Tensor) -> Tensor:
        return q.clamp_min(tiny(q.dtype)).log_().add_(1.0)

    def inverse_grad(self, x: Tensor) -> Tensor:
        return torch.exp(x - 1.0)

    def smoothness(self, geometry: Geometry) -> float | None:
        return 1.0 if geometry == "entropic" else None


@dataclass(frozen=True, eq=False)
class KL(Regulariser):
    """Ω(q) = KL(q ‖ r) = Σ q log(q / r), r a reference distribution `[..., V]`, perhaps another model's.

    `log_reference` is log r; −inf forbids a token.

    >>> KL.to(torch.tensor([0.5, 0.5])).value(torch.tensor([1.0, 0.0]))
    tensor(0.6931)
    """

    log_reference: Tensor
    separable = columnwise = True

    @classmethod
    def to(cls, reference: Tensor) -> "KL":
        """The divergence to probabilities instead of log-probabilities."""
        return cls(reference.log())

    def value(self, q: Tensor) -> Tensor:
        linear = torch.where(q > 0, q * self.log_reference, 0.0)
        return (torch.xlogy(q, q) - linear).sum(-1)

    def grad(self, q: Tensor) -> Tensor:
        return q.clamp_min(tiny(q.dtype)).log_().add_(1.0) - self.log_reference

    def inverse_grad(self, x: Tensor) -> Tensor:
        return torch.exp(x - 1.0 + self.log_reference)

    def smoothness(self, geometry: Geometry) -> float | None:
        return 1.0 if geometry == "entropic" else None

    def restrict(self, scores: Tensor) -> Tensor:
        _check_fit(self.log_reference, scores, "KL: the reference")
        # log r + HUGE is −inf where log r is and far above any score elsewhere; float arithmetic on a
        # whole vocabulary is several times faster than building a mask
        return torch.minimum(scores, self.log_reference.to(scores.dtype) + HUGE)

    def check(self) -> None:
        top = self.log_reference.amax(-1)
        if bool((bad := ~top.isfinite()).any()):
            raise ValueError(f"KL: the reference distribution holds NaN or no mass in {first_rows(bad)}")

    def take(self, ids: Tensor) -> "KL":
        return KL(_take(self.log_reference, ids))

    def cast(self, dtype: torch.dtype) -> "KL":
        return self if self.log_reference.dtype == dtype else KL(self.log_reference.to(dtype))


@dataclass(frozen=True, eq=False)
class JS(Regulariser):
    """Ω(q) = JS(q ‖ r) = ½KL(q ‖ m) + ½KL(r ‖ m), m = (q + r)/2: symmetric, and never above log 2.

    `log_reference` is log r `[..., V]`; −inf forbids a token, because Ω is linear there and its optimum not unique.

    >>> JS.to(torch.tensor([0.5, 0.5])).value(torch.tensor([1.0, 0.0]))
    tensor(0.2158)
    """

    log_reference: Tensor
    separable = columnwise = True

    @classmethod
    def to(cls, reference: Tensor) -> "JS":
        """The divergence to probabilities instead of log-probabilities."""
        return cls(reference.log())

    @cached_property
    def reference(self) -> Tensor:
        """r."""
        return self.log_reference.exp()

    def value(self, q: Tensor) -> Tensor:
        r, mean = self.reference, (q + self.reference) / 2
        return (torch.xlogy(q, q) + torch.xlogy(r, r)).sum(-1) / 2 - torch.xlogy(mean, mean).sum(-1)

    def grad(self, q: Tensor) -> Tensor:
        q = q.clamp_min(tiny(q.dtype))
        return (q / (q + self.reference)).mul_(2.0).log_().div_(2.0)  # ½ log(q/m)

    def inverse_grad(self, x: Tensor) -> Tensor:
        # ½ log(q/m) = x  ⇔  q = r·y/(1 − y), y = ½e^{2x} < 1; no q is large enough from y = 1 on
        log_y = 2.0 * x - log(2.0)
        reached = log_y < 0
        above = exp_(log_y + self.log_reference)  # not r·y: far below the best that product is subnormal, and slow
        return torch.where(reached, above / (1.0 - exp_(log_y)), inf)

    def smoothness(self, geometry: Geometry) -> float | None:
        return 0.5 if geometry == "entropic" else None  # φ'' = ½r/(q(q + r)) <= ½/q

    def restrict(self, scores: Tensor) -> Tensor:
        _check_fit(self.log_reference, scores, "JS: the reference")
        return KL(self.log_reference).restrict(scores)

    def check(self) -> None:
        top = self.log_reference.amax(-1)
        if bool((bad := ~top.isfinite()).any()):
            raise ValueError(f"JS: the reference distribution holds NaN or no mass in {first_rows(bad)}")

    def take(self, ids: Tensor) -> "JS":
        return JS(_take(self.log_reference, ids))

    def cast(self, dtype: torch.dtype) -> "JS":
        return self if self.log_reference.dtype == dtype else JS(self.log_reference.to(dtype))


@dataclass(frozen=True, eq=False)
class HalfSquare(Regulariser):
    """Ω(q) = ½‖q‖².

    >>> HalfSquare().value(torch.tensor([0.5, 0.5]))
    tensor(0.2500)
    """

    separable = columnwise = True
    reach = 1.0

    def value(self, q: Tensor) -> Tensor:
        return q.square().sum(-1) / 2

    def grad(self, q: Tensor) -> Tensor:
        return q.clone()  # not q itself: whoever asked may go on in place

    def inverse_grad(self, x: Tensor) -> Tensor:
        return x.clamp_min(0.0)

    def smoothness(self, geometry: Geometry) -> float:
        return 1.0  # φ'' = 1 <= 1/q, the curvature of the entropic potential


@dataclass(frozen=True, eq=False)
class Tsallis(Regulariser):
    """Ω(q) = Σ (q^α − q) / (α(α−1)), α > 1: the family of α-entmax. α = 2 is ½‖q‖² up to a constant.

    >>> Tsallis(2.0).value(torch.tensor([0.5, 0.5]))
    tensor(-0.2500)
    """

    alpha: float | Tensor
    separable = columnwise = True

    def __post_init__(self) -> None:
        if isinstance(self.alpha, Tensor):
            _check_column(self.alpha, "Tsallis: alpha")
        elif not is_number(self.alpha) or not 1 < self.alpha < inf:
            raise ValueError(f"Tsallis: alpha must be finite and above 1, got {self.alpha!r} (alpha = 1 is NegEntropy)")

    @property
    def reach(self) -> float | Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1.0 / (self.alpha - 1.0)

    def value(self, q: Tensor) -> Tensor:
        return ((q.pow(self.alpha) - q) / (self.alpha * (self.alpha - 1.0))).sum(-1)

    def grad(self, q: Tensor) -> Tensor:
        # (q^(α−1) − 1/α)/(α−1), written so that α near 1 loses no digits; at q = 0 it is −1/(α(α−1))
        return torch.expm1((self.alpha - 1.0) * q.log()) / (self.alpha - 1.0) + 1.0 / self.alpha

    def inverse_grad(self, x: Tensor) -> Tensor:
        # ((α−1)x + 1/α)_+^{1/(α−1)}, written so that α near 1 loses no digits
        base = (self.alpha - 1.0) * (x - 1.0 / self.alpha)
        return torch.exp(torch.log1p(base.clamp_min(-1.0)) / (self.alpha - 1.0))

    def smoothness(self, geometry: Geometry) -> float | None:
        if geometry == "entropic":
            return 1.0  # φ'' = q^(α−2) <= 1/q
        return 1.0 if is_number(self.alpha) and self.alpha >= 2 else None

    def restrict(self, scores: Tensor) -> Tensor:
        _check_rows(self.alpha, scores, "Tsallis: alpha")
        return scores

    def check(self) -> None:
        _check_entries(
            self.alpha, lambda alpha: (alpha > 1) & (alpha < inf), "Tsallis: alpha must be finite and above 1"
        )


@dataclass(frozen=True, eq=False)
class Coverage(Regulariser):
    """Ω(q) = −Σ w·(1 − (1−q)^K): minus the weighted number of tokens seen at least once in K draws.

    `weights` w >= 0: a number or `[..., V]`. `k` may be a tensor `[..., 1]`, one K for each row.

    >>> Coverage(2).value(torch.tensor([0.5, 0.5]))
    tensor(-1.5000)
    """

    k: int | Tensor
    weights: float | Tensor = 1.0
    separable = columnwise = True

    @property
    def strict(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # linear where K = 1 or w = 0, and per-token weights may hold a zero
        return is_number(self.k) and self.k > 1 and is_number(self.weights) and self.weights > 0

    def __post_init__(self) -> None:
        if isinstance(self.k, Tensor):
            _check_column(self.k, "Coverage: k")
        elif not is_whole(self.k) or self.k < 1:
            raise ValueError(f"Coverage: k must be a whole number >= 1, got {self.k!r}")

    def value(self, q: Tensor) -> Tensor:
        missed = power((1.0 - q).clamp_min(0.0), self.k)
        return -(self.weights * (1.0 - missed)).sum(-1)

    def grad(self, q: Tensor) -> Tensor:
        return -(self.weights * self.k) * power((1.0 - q).clamp_min(0.0), self.k - 1)

    def smoothness(self, geometry: Geometry) -> float | Tensor:
        w = self.weights.amax(-1, keepdim=True) if isinstance(self.weights, Tensor) else self.weights
        return w * curvature(self.k, geometry)

    def restrict(self, scores: Tensor) -> Tensor:
        _check_rows(self.k, scores, "Coverage: k")
        _check_fit(self.weights, scores, "Coverage: weights")
        return scores

    def check(self) -> None:
        _check_entries(
            self.k, lambda k: (k >= 1) & (k < inf) & (k == k.round()), "Coverage: k must be a whole number >= 1"
        )
        if isinstance(self.weights, Tensor):
            ends = torch.stack(self.weights.aminmax(dim=-1), -1)  # NaN where there is one
            _check_entries(ends, lambda w: (w >= 0) & (w < inf), "Coverage: weights must be finite and >= 0")
        elif not is_number(self.weights) or not 0 <= self.weights < inf:
            raise ValueError(f"Coverage: weights must be finite and >= 0, got {self.weights!r}")

    def take(self, ids: Tensor) -> "Coverage":
        return Coverage(self.k, _take(self.weights, ids)) if isinstance(self.weights, Tensor) else self

    def cast(self, dtype: torch.dtype) -> "Coverage":
        return Coverage(self.k, self.weights.to(dtype)) if isinstance(self.weights, Tensor) else self


@dataclass(frozen=True, eq=False)
class Sum(Regulariser):
    """Ω = Σ_i c_i·Ω_i with c_i >= 0; written `a + 2 * b`."""

    terms: tuple[tuple[float | Tensor, Regulariser], ...]

    @property
    def separable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(t.separable for _, t in self.terms)

    @property
    def strict(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(t.strict for _, t in self.terms)

    @property
    def columnwise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(t.columnwise for _, t in self.terms)

    def value(self, q: Tensor) -> Tensor:
        return torch.stack([_row(c) * term.value(q) for c, term in self.terms]).sum(0)

    def grad(self, q: Tensor) -> Tensor:
        slope = torch.zeros_like(q)
        for c, term in self.terms:
            slope = slope + c * term.grad(q)
        return slope

    def smoothness(self, geometry: Geometry) -> float | Tensor | None:
        parts = [(c, term.smoothness(geometry)) for c, term in self.terms]
        if any(part is None for _, part in parts):
            return None
        return sum(c * part for c, part in parts if part is not None)

    def restrict(self, scores: Tensor) -> Tensor:
        for c, term in self.terms:
            _check_rows(c, scores, "the factor of a regulariser")
            scores = term.restrict(scores)
        return scores

    def check(self) -> None:
        for c, term in self.terms:
            _check_entries(c, lambda c: (c >= 0) & (c < inf), "the factor of a regulariser must be finite and >= 0")
            term.check()

    def take(self, ids: Tensor) -> "Sum":
        return Sum(tuple((c, term.take(ids)) for c, term in self.terms))

    def cast(self, dtype: torch.dtype) -> "Sum":
        return Sum(tuple((c.to(dtype) if isinstance(c, Tensor) else c, t.cast(dtype)) for c, t in self.terms))


@dataclass(frozen=True, eq=False)
class Adapted(Regulariser):
    """A user's own object with `value(q)`: what else it has is used, what it lacks is supplied."""

    own: Any

    def __post_init__(self) -> None:
        for name in ("strict", "columnwise", "reach", "grad", "inverse_grad", "smoothness", "restrict", "check"):
            if hasattr(self.own, name):
                object.__setattr__(self, name, getattr(self.own, name))
        separable = getattr(self.own, "separable", hasattr(self.own, "inverse_grad"))
        object.__setattr__(self, "separable", separable)

    def value(self, q: Tensor) -> Tensor:
        return self.own.value(q)

    def take(self, ids: Tensor) -> Regulariser:
        return as_regulariser(self.own.take(ids)) if hasattr(self.own, "take") else self


def as_regulariser(omega: Any) -> Regulariser:
    """Ω as the solvers see it: a Regulariser as it is, any object with `value(q)` wrapped."""
    if isinstance(omega, Regulariser):
        return omega
    if callable(getattr(omega, "value", None)) and not isinstance(omega, (Tensor, type)):
        return Adapted(omega)
    raise ValueError(f"a regulariser is an object with value(q), got {omega!r}")


def _sum(terms: tuple[tuple[float | Tensor, Regulariser], ...]) -> Regulariser:
    """The sum of the terms that count."""
    kept = tuple((c, t) for c, t in terms if not isinstance(t, Zero) and not (is_number(c) and c == 0))
    if not kept:
        return Zero()
    return kept[0][1] if len(kept) == 1 and is_number(kept[0][0]) and kept[0][0] == 1 else Sum(kept)


def _check_column(value: Tensor, name: str) -> None:
    if value.ndim and value.shape[-1] != 1:
        raise ValueError(f"{name} must be a number or a column [..., 1], one per row, got shape {list(value.shape)}")


def _check_entries(value: float | Tensor, test: Callable[[Tensor], Tensor], complaint: str) -> None:
    """Raise a ValueError that names the rows of a tensor `[..., n]` in which an entry fails the test."""
    if isinstance(value, Tensor) and bool((bad := ~test(value)).any()):
        raise ValueError(f"{complaint}, but not in {first_rows(bad.any(-1) if bad.ndim else bad)}")


def _check_rows(value: float | Tensor, scores: Tensor, name: str) -> None:
    if isinstance(value, Tensor) and value.ndim and not covers(value.shape[:-1], scores.shape[:-1]):
        raise ValueError(f"{name} must be a number or {[*scores.shape[:-1], 1]}, got shape {list(value.shape)}")


def _check_fit(value: float | Tensor, scores: Tensor, name: str) -> None:
    if isinstance(value, Tensor) and not fits(value, scores):
        raise ValueError(f"{name} must be {list(scores.shape)} like the scores, got {list(value.shape)}")


def _terms(regulariser: Regulariser) -> tuple[tuple[float | Tensor, Regulariser], ...]:
    return regulariser.terms if isinstance(regulariser, Sum) else ((1.0, regulariser),)


def _row(c: float | Tensor) -> float | Tensor:
    return c.squeeze(-1) if isinstance(c, Tensor) and c.ndim else c


def _take(x: Tensor, ids: Tensor) -> Tensor:
    return x.expand(*ids.shape[:-1], x.shape[-1]).gather(-1, ids)


@dataclass(frozen=True, eq=False)
class GroupNorm(Regulariser):
    """Ω(q) = Σ_g ‖q_g‖₂, the norms of disjoint groups: mass gathers in few groups and spreads out inside them.

    groups: lists of token ids, or an index `[V]` with the group of each token, −1 for none; such tokens count nothing

    It is not strictly convex: add an entropy or a square. A group that vanishes has no one slope; the one taken there
    is that of equal parts.

    >>> GroupNorm([[0, 1], [2]]).value(torch.tensor([0.3, 0.4, 0.3]))
    tensor(0.8000)
    """

    groups: GroupSpec | Groups
    strict = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", Groups(self.groups, "GroupNorm"))

    def value(self, q: Tensor) -> Tensor:
        return self._norms(q)[1][..., :-1].sum(-1).to(q.dtype)

    def grad(self, q: Tensor) -> Tensor:
        index, norms = self._norms(q.clamp_min(tiny(q.dtype)))
        counted = index < norms.shape[-1] - 1
        return torch.where(counted, q.clamp_min(tiny(q.dtype)) / norms.index_select(-1, index), 0.0).to(q.dtype)

    def smoothness(self, geometry: Geometry) -> float | None:
        return 1.0 if geometry == "entropic" else None  # ∇²‖x‖ <= I/‖x‖, and ‖x‖ is at least every x_v

    def _norms(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(the group of each token `[V]`, the norm of each group `[..., G + 1]`); no square underflows."""
        assert isinstance(self.groups, Groups)
        index, count = self.groups.index(q), self.groups.count + 1
        largest = group_peaks(q, index, count).double().clamp_min(tiny(torch.float64))
        return index, largest * group_sums((q / largest.index_select(-1, index)).square(), index, count).sqrt()
