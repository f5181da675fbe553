"""Regularisers of a search: how unevenly a text spreads its information over its tokens.

After Meister, Vieira and Cotterell (2020), who find that beam search acts as if it maximised log p(y) − λ·R(y) with an
R that keeps the surprisals u_t = −log p(y_t | y_<t) even:

    greedy    Σ_t (u_t − min_v u_t(v))²        0 for the greedy text alone
    variance  1/T·Σ_t (u_t − mean u)²
    max       max_t u_t
    squared   Σ_t u_t²
    local     Σ_{t≥2} (u_t − u_{t−1})²
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Surprisals:
    """Those of the texts so far, float64 `[rows, t]`."""

    chosen: Tensor  # of the tokens written
    least: Tensor  # of the likeliest tokens in their places

    @classmethod
    def none(cls) -> Surprisals:
        """Of the one text that has no tokens yet."""
        nothing = torch.empty(1, 0, dtype=torch.float64)
        return cls(nothing, nothing)

    def to(self, device: torch.device) -> Surprisals:
        """The same on another device."""
        return Surprisals(self.chosen.to(device), self.least.to(device))

    def extended(self, u: Tensor, rows: Tensor, tokens: Tensor) -> Surprisals:
        """Those of the texts `rows` `[n]`, each with its own one of the next tokens, whose surprisals are u."""
        chosen, least = u[rows, tokens].unsqueeze(-1), u.amin(-1)[rows].unsqueeze(-1)
        return Surprisals(torch.cat([self.chosen[rows], chosen], -1), torch.cat([self.least[rows], least], -1))


@dataclass(frozen=True)
class Regulariser:
    """R ≥ 0 of a text, worked out for all next tokens at once.

    after: after(past, u) is R of every text longer by one token, `[rows, V]`; u `[rows, V]` are the surprisals of the
           next tokens, +inf where a token cannot come
    grows: R never falls as a text grows, so that what it is now bounds what it will be and a search may stop earlier
    """

    after: Callable[[Surprisals, Tensor], Tensor]
    grows: bool = False


def _greedy(past: Surprisals, u: Tensor) -> Tensor:
    return (past.chosen - past.least).square().sum(-1, keepdim=True) + (u - u.amin(-1, keepdim=True)).square()


def _variance(past: Surprisals, u: Tensor) -> Tensor:
    t = past.chosen.shape[1]
    if t == 0:
        return torch.zeros_like(u)
    mean = past.chosen.mean(-1, keepdim=True)
    spread = (past.chosen - mean).square().sum(-1, keepdim=True)
    return (spread + (u - mean).square() * t / (t + 1)) / (t + 1)  # Welford's step


def _max(past: Surprisals, u: Tensor) -> Tensor:
    return torch.cat([past.chosen, torch.zeros_like(u[:, :1])], -1).amax(-1, keepdim=True).maximum(u)


def _squared(past: Surprisals, u: Tensor) -> Tensor:
    return past.chosen.square().sum(-1, keepdim=True) + u.square()


def _local(past: Surprisals, u: Tensor) -> Tensor:
    if not past.chosen.shape[1]:
        return torch.zeros_like(u)
    return past.chosen.diff().square().sum(-1, keepdim=True) + (u - past.chosen[:, -1:]).square()


REGULARISERS = {
    "greedy": Regulariser(_greedy, grows=True),
    "variance": Regulariser(_variance),
    "max": Regulariser(_max, grows=True),
    "squared": Regulariser(_squared, grows=True),
    "local": Regulariser(_local, grows=True),
}
