"""Disjoint sets of tokens, and sums over them: what bounds on groups and group norms share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

GroupSpec = Sequence[Sequence[int]] | Tensor


class Groups:
    """Disjoint sets of tokens: lists of ids, or an index `[V]` with each token's group, −1 for none.

    The tokens in no group form a last group of their own, number `count`.

    >>> Groups([[0, 2], [1]]).index(torch.zeros(4))
    tensor([0, 1, 0, 2])
    """

    def __init__(self, groups: "GroupSpec | Groups", name: str = "groups") -> None:
        self.name = name
        if isinstance(groups, Groups):
            self.count, self.size, self.last, self._index = groups.count, groups.size, groups.last, groups._index
            self._ids, self._owner = groups._ids, groups._owner
            return
        self._index: dict[tuple[int, torch.device], Tensor] = {}
        if isinstance(groups, Tensor):
            if (
                groups.ndim != 1
                or groups.is_floating_point()
                or groups.dtype == torch.bool
                or bool((groups < -1).any())
            ):
                raise ValueError(
                    f"{name}: an index of groups must be whole numbers [V], −1 for tokens in none, "
                    f"got {groups.dtype} {list(groups.shape)}"
                )
            self.size: int | None = len(groups)
            self._ids, self._owner = torch.arange(len(groups)), groups.cpu().to(torch.int64)
            self.count, self.last = int(self._owner.max()) + 1 if len(groups) else 0, len(groups) - 1
            return
        if not isinstance(groups, (list, tuple)) or not all(_is_ids(ids) for ids in groups):
            raise ValueError(f"{name}: groups must be lists of token ids >= 0 or an index [V], got {groups!r}")
        self.size, self.count = None, len(groups)
        self.last = max((token for ids in groups for token in ids), default=-1)
        flat = [(token, g) for g, ids in enumerate(groups) for token in ids]
        table = torch.tensor(flat, dtype=torch.int64).reshape(-1, 2)
        self._ids, self._owner = table[:, 0], table[:, 1]
        tokens, times = self._ids.unique(return_counts=True)
        if bool((times > 1).any()):
            raise ValueError(f"{name}: groups must not overlap, but token {tokens[times > 1][0].item()} is named twice")

    def _check(self, size: int) -> None:
        if self.size is not None and self.size != size:
            raise ValueError(f"{self.name}: the index of groups has {self.size} tokens, the scores have {size}")
        if self.last >= size:
            raise ValueError(f"{self.name}: token ids must be in [0, {size}), got {self.last}")

    def index(self, like: Tensor) -> Tensor:
        """The group of each token of `like` `[..., V]`, int64 `[V]`; a ValueError where they do not fit."""
        key = like.shape[-1], like.device
        if key not in self._index:  # kept: a copy to a GPU waits for it
            self._check(like.shape[-1])
            owner = torch.where(self._owner < 0, self.count, self._owner)
            table = torch.full((like.shape[-1],), self.count, dtype=torch.int64)
            self._index[key] = table.scatter_(0, self._ids, owner).to(like.device)
        return self._index[key]


def group_sums(x: Tensor, index: Tensor, groups: int) -> Tensor:
    """Sums of x `[..., V]` over each group, float64 `[..., groups]`."""
    sums = torch.zeros(*x.shape[:-1], groups, dtype=torch.float64, device=x.device)
    return sums.scatter_add_(-1, index.expand(x.shape), x.double())


def group_peaks(x: Tensor, index: Tensor, groups: int) -> Tensor:
    """The largest entry of x `[..., V]` in each group, `[..., groups]`; −inf in an empty one."""
    peaks = torch.full((*x.shape[:-1], groups), -torch.inf, dtype=x.dtype, device=x.device)
    return peaks.scatter_reduce_(-1, index.expand(x.shape), x, "amax")


def _is_ids(ids: Any) -> bool:
    return isinstance(ids, (list, tuple)) and all(type(token) is int and token >= 0 for token in ids)
