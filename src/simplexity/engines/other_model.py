"""A second model of transformers that reads along: its own prompt, its own cache, one forward pass a step."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from simplexity.engines.roomy_cache import roomy_cache


@dataclass(frozen=True, eq=False)
class OtherModel:
    """Another model beside the one that writes, or the same one under another prompt: the weights are not copied.

    model:          a causal language model of transformers whose token ids mean the same
    input_ids:      `[prompts, length]` what it reads first, padded on the left; one prompt, or one for each
    attention_mask: `[prompts, length]` 0 for the padding
    """

    model: Any
    input_ids: Tensor
    attention_mask: Tensor | None = None

    def __post_init__(self) -> None:
        ids, mask = self.input_ids, self.attention_mask
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise ValueError(f"the other model's input_ids must be [prompts, length], got {list(ids.shape)}")
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(f"the other model's attention_mask must be {list(ids.shape)}, got {list(mask.shape)}")

    def repeated(self, prompts: int, n: int) -> OtherModel:
        """With n rows for each of the prompts, those of a prompt side by side, as transformers has them."""
        if len(self.input_ids) not in (1, prompts):
            raise ValueError(
                f"the other model has {len(self.input_ids)} prompts for {prompts}: give it one, or one for each"
            )
        times = n * prompts // len(self.input_ids)
        mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        return replace(
            self, input_ids=self.input_ids.repeat_interleave(times, 0), attention_mask=mask.repeat_interleave(times, 0)
        )


class Reading:
    """One text as the other model reads it: `[rows, t]` new tokens in, `[rows, V]` logits of the next one out."""

    def __init__(self, other: OtherModel, rows: int) -> None:
        self.model, other = other.model, other.repeated(rows, 1)
        self.cache = roomy_cache(self.model.config)
        self.device = self.model.device
        assert other.attention_mask is not None
        self.mask = other.attention_mask[:, :0].to(self.device)
        self.start = other.input_ids, other.attention_mask
        self.takes = inspect.signature(self.model.forward).parameters

    @torch.no_grad()
    def after(self, written: Tensor) -> Tensor:
        """The logits `[rows, V]` of the token that follows `written` `[rows, T]`, one longer than at the last call."""
        new, there = self.start if not written.shape[1] else (written[:, -1:], torch.ones_like(written[:, -1:]))
        self.mask = torch.cat([self.mask, there.to(self.mask)], -1)
        # left padding has no place of its own: the first token of every prompt stands at 0
        places = (self.mask.cumsum(-1) - 1).clamp_min(0)[:, -new.shape[1] :]
        wanted = {"position_ids": places, "logits_to_keep": 1}
        output = self.model(
            input_ids=new.to(self.device),
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
            **{name: value for name, value in wanted.items() if name in self.takes},
        )
        return output.logits[:, -1].float()
