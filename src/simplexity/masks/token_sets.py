"""Token sets from a retriever or a tool: whatever a function says, row by row and step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from simplexity.supports import Allowed


class TokenSets:
    """A masker that asks `choose(row, written)` for the ids that may come next in a row; None: any may.

    >>> masker = TokenSets(lambda row, written: [1] if row == 0 else None)
    >>> masker.mask(torch.zeros(2, 0, dtype=torch.int64), torch.tensor([True, True]), 3)
    tensor([[False,  True, False],
            [ True,  True,  True]])
    """

    def __init__(self, choose: Callable[[int, list[int]], Iterable[int] | None]) -> None:
        self.choose = choose

    def mask(self, written: Tensor, live: Tensor, size: int) -> Tensor:
        """See `Masker`."""
        rows = zip(written.tolist(), live.tolist(), strict=True)
        sets = [self.choose(i, row) if alive else None for i, (row, alive) in enumerate(rows)]
        rule = Allowed([[] if ids is None else list(ids) for ids in sets])
        blank = torch.zeros(len(sets), size, device=written.device)
        rule.check(blank)
        free = torch.tensor([ids is None for ids in sets], device=written.device)
        return rule.mask(blank) | free.unsqueeze(-1)
