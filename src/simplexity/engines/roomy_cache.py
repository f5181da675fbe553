"""A cache for transformers whose keys and values grow in place, in memory taken ahead.

Its own one makes a new tensor of all tokens so far at every step: at 64 rows and 500 tokens of a small model that is
two gigabytes a step, and on a CPU it takes ten times as long as the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """One layer's keys and values `[rows, heads, tokens, size]`: views of buffers with room for more tokens."""

    buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind the others; all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        if self.buffers is None or not self._holds(after):
            self.buffers = (self._roomy(self.keys, key_states, after), self._roomy(self.values, value_states, after))
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., before:after, :] = new
        self.keys, self.values = (buffer[..., :after, :] for buffer in self.buffers)
        return self.keys, self.values

    def _holds(self, length: int) -> bool:
        """Whether there is room, and the keys still lie in the buffer: whoever reorders rows leaves it."""
        assert self.buffers is not None
        assert self.keys is not None
        there = self.buffers[0]
        return there.shape[-2] >= length and self.keys.data_ptr() == there.data_ptr() and len(self.keys) == len(there)

    def _roomy(self, old: Tensor, new: Tensor, length: int) -> Tensor:
        made = torch.empty(
            *new.shape[:-2], length + max(128, length // 2), new.shape[-1], dtype=new.dtype, device=new.device
        )
        if old.numel():
            made[..., : old.shape[-2], :] = old
        return made


def roomy_cache(config: Any) -> DynamicCache:
    """An empty cache for a model with this configuration; layers of other kinds, such as sliding windows, stay."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
