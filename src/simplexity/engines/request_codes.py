"""Coupled draws across requests: each names its group, its place there and the group's size, and holds its own code.

An engine may ask for a token and throw it away (a prompt read in parts), or forget a text and take it up again in its
middle. So a code knows the step it was last used for. A step asked for again starts from the same code; a text taken up
again goes on with a new one, which is as uniform: still an exact draw, but no longer spread beside its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simplexity.coupling import Codes
from simplexity.draw import uniform

NAMES = ("group", "index", "size")
LARGEST = 2**20  # samples of a group
AGAIN = 3  # a stream of random numbers beside those of `coupling`


@dataclass
class RequestCode:
    """The code of one request; every field `[]`, on the device of the logits."""

    seed: Tensor
    before: Tensor  # what the last token was drawn with
    after: Tensor
    last: Tensor  # the step of that token; −1: none yet


def place_of(given: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(group, index, size) that a request names, None where it names none; a ValueError where they make no sense."""
    values = {name: given.get(name) for name in NAMES}
    if all(value is None for value in values.values()):
        return None
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values.values()):
        raise ValueError(f"coupled draws need three whole numbers: group, index and size, got {values}")
    group, index, size = (int(given[name]) for name in NAMES)
    if not (1 <= size <= LARGEST and 0 <= index < size):
        raise ValueError(f"coupled draws need 0 <= index < size <= {LARGEST}, got index={index} and size={size}")
    return group, index, size


def request_code(place: tuple[int, int, int], device: torch.device) -> RequestCode:
    """The code with which a sample begins, the same as in `Codes.spread`."""
    codes = Codes.at(*place)
    # filled on the device: a copy from the host would wait for it
    code = torch.full((), codes.code.item(), dtype=torch.float64, device=device)
    seed = torch.full((), int(codes.seeds.item()), dtype=torch.int64, device=device)
    return RequestCode(seed, code, code, torch.full((), -1, dtype=torch.int64, device=device))


class Drawing:
    """The codes of some requests for one draw, at steps `[rows]`; below 0 the token will be thrown away."""

    def __init__(self, requests: Sequence[RequestCode], steps: Tensor) -> None:
        self.requests, self.steps = requests, steps
        self.seeds, self.before, self.after, self.last = (
            torch.stack([getattr(request, name) for request in requests])
            for name in ("seed", "before", "after", "last")
        )
        known = torch.where(steps == self.last, self.before, self.after)
        follows = (steps == self.last) | (steps == self.last + 1) | (steps < 0)
        self.start = torch.where(follows, known, uniform(self.seeds, steps, AGAIN))
        self.codes = Codes(self.start, self.seeds, steps)

    def keep(self) -> None:
        """Note what the draw has left of the codes."""
        real = self.steps >= 0
        noted = (
            torch.where(real, self.start, self.before),
            torch.where(real, self.codes.code, self.after),
            torch.where(real, self.steps, self.last),
        )
        rows = zip(*(column.unbind() for column in noted), strict=True)
        for request, (before, after, last) in zip(self.requests, rows, strict=True):
            request.before, request.after, request.last = before, after, last
