"""What a sum of regularisers amounts to: the shapes that some solver knows a shortcut for."""

from typing import Any

from torch import Tensor

from simplexity.regularisers import KL, Coverage, HalfSquare, NegEntropy, Regulariser, Sum, Tsallis
from simplexity.rows import is_number


def entropic(regulariser: Regulariser) -> tuple[Any, Any] | None:
    """(c, log r) when Ω(q) = c·KL(q ‖ r) up to a constant: negative entropy, KL, and their sums."""
    if isinstance(regulariser, NegEntropy):
        return 1.0, 0.0
    if isinstance(regulariser, KL):
        return 1.0, regulariser.log_reference
    if not isinstance(regulariser, Sum):
        return None
    parts = [(c, entropic(term)) for c, term in regulariser.terms]
    if not parts or any(part is None for _, part in parts):
        return None
    weight = sum(c for c, _ in parts)
    if is_number(weight) and weight == 0:
        return None
    return weight, sum(c * part[1] for c, part in parts if part is not None) / weight


def entropic_power(regulariser: Regulariser) -> tuple[Any, Any, Any, float, float] | None:
    """(c, log r, b, α, d) when Ω = c·KL(q ‖ r) + b·(Σ q^α/(α(α−1)) − d·Σ q), up to a constant."""
    if not isinstance(regulariser, Sum):
        return None
    powers = [(b, term) for b, term in regulariser.terms if isinstance(term, (HalfSquare, Tsallis))]
    base = entropic(Sum(tuple(part for part in regulariser.terms if not isinstance(part[1], (HalfSquare, Tsallis)))))
    if len(powers) != 1 or base is None:
        return None
    ((b, term),) = powers
    if isinstance(term, HalfSquare):
        return *base, b, 2.0, 0.0
    return None if isinstance(term.alpha, Tensor) else (*base, b, term.alpha, 1.0 / (term.alpha * (term.alpha - 1.0)))


def entropic_coverage(regulariser: Regulariser) -> tuple[Any, Any, Any, Coverage] | None:
    """(c, log r, b, coverage) when Ω = c·KL(q ‖ r) + b·coverage, up to a constant."""
    if not isinstance(regulariser, Sum):
        return None
    covers = [(b, term) for b, term in regulariser.terms if isinstance(term, Coverage)]
    others = tuple((c, term) for c, term in regulariser.terms if not isinstance(term, Coverage))
    base = entropic(others[0][1] if len(others) == 1 and is_number(others[0][0]) and others[0][0] == 1 else Sum(others))
    return None if len(covers) != 1 or base is None else (*base, *covers[0])
