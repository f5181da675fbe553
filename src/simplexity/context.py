"""What some decoders need beyond the scores of the current step."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Context:
    """The surroundings of one decoding step. Every field may be absent.

    tokens:   `[..., T]` the tokens so far, prompt included, padded on the left with −1
    step:     the index of the token being chosen, a number or one per row `[...]`
    seeds:    `[...]` one seed per row
    siblings: `[...]` how many samples of the row's group still share its prefix, itself included
    other:    `[..., V]` another model's logits for the same step (an anchor, a contrast)
    mask:     `[..., V]` True where a token may be chosen (a grammar, a schema)
    """

    tokens: Tensor | None = None
    step: int | Tensor = 0
    seeds: Tensor | None = None
    siblings: Tensor | None = None
    other: Tensor | None = None
    mask: Tensor | None = None

    def restrict(self, scores: Tensor) -> Tensor:
        """The scores with the tokens outside `mask` forbidden."""
        if self.mask is None:
            return scores
        if self.mask.dtype != torch.bool or self.mask.shape[-1] != scores.shape[-1]:
            raise ValueError(
                f"context.mask must be bool [..., {scores.shape[-1]}], got {self.mask.dtype} {list(self.mask.shape)}"
            )
        return scores.masked_fill(~self.mask, -torch.inf)

    def with_step(self, step: "int | Tensor", seeds: "Tensor | None") -> "Context":
        """The same surroundings at another step."""
        return replace(self, step=step, seeds=self.seeds if seeds is None else seeds)
