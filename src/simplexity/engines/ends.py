"""Where texts end, and why: by their end token or a stop string, or by the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria


class Ends(StoppingCriteriaList):
    """The stopping criteria, with a record of where each row ended for another reason than its length."""

    def __init__(self, criteria: Sequence[Any] = ()) -> None:
        super().__init__(criteria)
        self.lengths: Tensor | None = None  # [rows], tokens in all; 0: not ended

    def __call__(self, input_ids: Tensor, scores: Any, **rest: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Which rows are done."""
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        full = done.clone()
        for rule in self:
            judge: Any = rule
            if isinstance(rule, MaxLengthCriteria | MaxTimeCriteria):
                full = full | judge(input_ids, scores, **rest)
            else:
                done = done | judge(input_ids, scores, **rest)
        if self.lengths is None:
            self.lengths = torch.zeros(len(input_ids), dtype=torch.int64, device=input_ids.device)
        self.lengths = torch.where((self.lengths == 0) & done, input_ids.shape[1], self.lengths)
        return done | full

    def live(self) -> Tensor | None:
        """Which rows have not ended, `[rows]`; None before the first token."""
        return None if self.lengths is None else self.lengths == 0
