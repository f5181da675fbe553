"""The model's own distribution p = softmax(s/τ) as an anchor: written down, and computed only where a solver asks.

A fused draw recognises these terms and works from the scores; every other solver sees plain tensors.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from simplexity.regularisers import KL, Coverage
from simplexity.rows import log_softmax_and_softmax


class Anchor:
    """p = softmax(s/τ) for scores `[..., V]`."""

    def __init__(self, scores: Tensor, temperature: float | Tensor) -> None:
        self.scores, self.temperature = scores, temperature

    @cached_property
    def both(self) -> tuple[Tensor, Tensor]:
        """(log p, p)."""
        # centred before the division, or a common offset of the scores would cost digits
        best = self.scores.amax(-1, keepdim=True)
        return log_softmax_and_softmax(torch.sub(self.scores, best).div_(self.temperature))


class AnchorKL(KL):
    """Ω(q) = KL(q ‖ p)."""

    def __init__(self, anchor: Anchor) -> None:
        object.__setattr__(self, "anchor", anchor)

    anchor: Anchor

    @property
    def log_reference(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """log p."""
        return self.anchor.both[0]


class AnchorCoverage(Coverage):
    """K-sample coverage whose weights are a function of the anchor: `weigh(anchor)`, known by the name `rule`."""

    anchor: Anchor
    rule: str
    m: int | Tensor

    def __init__(
        self, k: int | Tensor, anchor: Anchor, weigh: Callable[[Anchor], float | Tensor], rule: str, m: int | Tensor = 0
    ) -> None:
        for name, value in {"k": k, "anchor": anchor, "_weigh": weigh, "rule": rule, "m": m}.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    @cached_property
    def weights(self) -> float | Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """w, a number or `[..., V]`."""
        return getattr(self, "_weigh")(self.anchor)  # noqa: B009
