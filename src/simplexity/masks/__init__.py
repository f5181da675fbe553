"""Supports that change by step from outside: what may come next, told from what has been written.

A masker gives a bool mask at every step, several are and-ed, and the result is `Context.mask`: every decoder solves its
problem on the tokens that are left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from simplexity.rows import first_rows


class Masker(Protocol):
    """Anything that knows which tokens may come next."""

    def mask(self, written: Tensor, live: Tensor, size: int) -> Tensor | None:
        """True where a token may come next, bool `[rows, V]`, `[1, V]` or `[V]`; None: any token may.

        written: `[rows, step]` the tokens so far, without the prompt; a text begins with a call at step 0
        live:    `[rows]` False for the rows that have ended, where the mask does not matter
        size:    V; a mask that is narrower forbids the tokens it does not know
        """
        ...


def allowed(maskers: Sequence[Masker], written: Tensor, live: Tensor, size: int) -> Tensor | None:
    """What all maskers allow, bool `[rows, size]`; everything in rows that have ended.

    A row for which nothing is left is a ValueError that names the masker, or says that only together they forbid it.
    """
    found: Tensor | None = None
    for masker in maskers:
        one = masker.mask(written, live, size)
        if one is None:
            continue
        if one.dtype != torch.bool or one.ndim not in (1, 2) or (one.ndim == 2 and len(one) not in (1, len(written))):
            raise ValueError(
                f"{_name(masker)}: a mask must be bool [{len(written)}, {size}], got {one.dtype} {list(one.shape)}"
            )
        one = _wide(one.to(written.device), size).expand(len(written), size)
        _check(one, live, written, f"{_name(masker)} allows no token")
        found = one if found is None else found & one
    if found is None:
        return None
    if len(maskers) > 1:
        _check(found, live, written, f"{', '.join(map(_name, maskers))} together allow no token")
    return found | ~live.unsqueeze(-1)


def _check(mask: Tensor, live: Tensor, written: Tensor, complaint: str) -> None:
    if bool((dead := live & ~mask.any(-1)).any()):
        raise ValueError(f"{first_rows(dead)}: {complaint} after {written.shape[1]} written ones: a dead end")


def _wide(mask: Tensor, size: int) -> Tensor:
    mask = mask[..., :size]
    return torch.nn.functional.pad(mask, (0, size - mask.shape[-1]), value=False)


def _name(masker: Any) -> str:
    return type(masker).__name__


class RowMasker(ABC):
    """A masker that reads the tokens of each row one by one and remembers where it stands.

    A subclass says how a row begins and goes on. The state of a row that has ended is dropped.
    """

    states: list[Any]
    """One for each row; None: the row has ended."""

    def __init__(self) -> None:
        self.states, self.seen = [], 0

    @abstractmethod
    def begin(self) -> Any:
        """The state of a row with nothing written."""

    @abstractmethod
    def follow(self, state: Any, token: int) -> Any:
        """The state after one more token; None where the row ends with it."""

    @abstractmethod
    def masks(self, size: int) -> Tensor:
        """True where a token may come next, bool `[rows, V]`, from the states."""

    def mask(self, written: Tensor, live: Tensor, size: int) -> Tensor:
        """See `Masker`."""
        rows, length = written.shape
        if length != self.seen + 1 or rows != len(self.states):  # a new text, or one picked up in its middle
            self.states, self.seen = [self.begin() for _ in range(rows)], 0
        new, self.seen = written[:, self.seen :].tolist(), length
        for i, alive in enumerate(live.tolist()):
            self.states[i] = self.states[i] if alive else None
            for token in new[i]:
                if self.states[i] is not None:
                    self.states[i] = self.follow(self.states[i], token)
        return self.masks(size)
