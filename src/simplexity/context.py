"""What some decoders need beyond the scores of the current step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.rows import covers, fits


@dataclass(frozen=True, eq=False)
class Context:
    """The surroundings of one decoding step. Every field may be absent.

    tokens:   `[..., T]` the tokens so far, prompt included, padded on the left with −1
    step:     the index of the token being chosen, a number or one per row `[...]`
    seeds:    `[...]` one seed per row
    siblings: `[...]` how many samples of the row's group still share its prefix, itself included
    other:    `[..., V]` another model's logits for the same step (an anchor, a contrast)
    rewards:  `[..., V]` what choosing a token is worth (a value function, a classifier)
    mask:     `[..., V]` True where a token may be chosen (a grammar, a schema)
    """

    tokens: Tensor | None = None
    step: int | Tensor = 0
    seeds: Tensor | None = None
    siblings: Tensor | None = None
    other: Tensor | None = None
    rewards: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "siblings", "other", "rewards", "mask"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Tensor):
                raise ValueError(f"context.{name} must be a torch.Tensor, got {type(given).__name__}")

    def restrict(self, scores: Tensor) -> Tensor:
        """The scores with the tokens outside `mask` forbidden."""
        if self.mask is None:
            return scores
        if self.mask.dtype != torch.bool or not fits(self.mask, scores):
            raise ValueError(
                f"context.mask must be bool {list(scores.shape)}, got {self.mask.dtype} {list(self.mask.shape)}"
            )
        return scores.masked_fill(~self.mask, -torch.inf)

    def fits(self, scores: Tensor) -> bool:
        """Whether the other model's logits are given and have the shape of the scores."""
        return self.other is not None and fits(self.other, scores)

    def other_like(self, scores: Tensor) -> Tensor | None:
        """The other model's logits, in the dtype and on the device of the scores."""
        return self.like("other", scores)

    def siblings_like(self, scores: Tensor) -> Tensor | None:
        """How many samples share each row's text, a whole number `[..., 1]` on the device of the scores."""
        if self.siblings is None:
            return None
        if self.siblings.is_floating_point() or not covers(self.siblings.shape, scores.shape[:-1]):
            raise ValueError(
                f"context.siblings must be whole numbers {list(scores.shape[:-1])}, "
                f"got {self.siblings.dtype} {list(self.siblings.shape)}"
            )
        if self.siblings.device.type == "cpu" and self.siblings.numel() and int(self.siblings.min()) < 1:
            raise ValueError("context.siblings must be at least 1: a row shares its text with itself")
        # a GPU's numbers are not read
        return self.siblings.to(scores.device).clamp_min(1).expand(scores.shape[:-1]).unsqueeze(-1)

    def like(self, name: str, scores: Tensor) -> Tensor | None:
        """A field `[..., V]` in the dtype and on the device of the scores."""
        given: Tensor | None = getattr(self, name)
        if given is not None and not fits(given, scores):
            raise ValueError(f"context.{name} must be {list(scores.shape)}, got {list(given.shape)}")
        return None if given is None else given.detach().to(scores)


NEEDED = {
    "other": "another model's logits for the same step: Context(other=…), or other=OtherModel(…) inside transformers",
    "rewards": "a reward for every token: Context(rewards=…), or rewards=… inside transformers",
}


def required(context: Context | None, name: str, scores: Tensor, by: str) -> Tensor:
    """A field that the decoder `by` cannot do without, `[..., V]` like the scores."""
    given = None if context is None else context.like(name, scores)
    if given is None:
        raise ValueError(f"{by} needs {NEEDED[name]}")
    return given
