"""The tree that a group of samples grows: which of them still share all that they have written."""

from __future__ import annotations

import torch
from torch import Tensor


class Siblings:
    """Groups of `size` samples, side by side, `[groups·size]` rows in all.

    >>> siblings = Siblings(4, 4)
    >>> siblings.follow(torch.tensor([5, 5, 7, 5]))
    >>> siblings.count
    tensor([3, 3, 1, 3])
    """

    def __init__(self, rows: int, size: int, device: torch.device | str = "cpu") -> None:
        if size < 1 or rows % size:
            raise ValueError(f"{rows} rows are not groups of {size}")
        self.size = size
        self.same = torch.ones(rows // size, size, size, dtype=torch.bool, device=device)

    def first(self, rows: int) -> Siblings:
        """The first `rows`, whole groups, in the same memory."""
        part = Siblings(0, self.size)
        part.same = self.same[: rows // self.size]
        return part

    def follow(self, tokens: Tensor) -> None:
        """Each row has written one more token, `[rows]`."""
        own = tokens.view(-1, self.size)
        self.same &= own.unsqueeze(-1) == own.unsqueeze(-2)

    @property
    def count(self) -> Tensor:
        """How many samples of the row's group share its text, itself included, int64 `[rows]`."""
        return self.same.sum(-1).flatten()

    def places(self) -> tuple[Tensor, Tensor]:
        """(the first sample of the group that shares a row's text; how many before the row do), `[groups, size]`."""
        before = torch.ones_like(self.same[0]).tril(-1)
        return self.same.int().argmax(-1), (self.same & before).sum(-1)
