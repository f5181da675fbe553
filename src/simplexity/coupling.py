"""Samples that cover: the draws of a group made with evenly spread codes instead of independent numbers.

Arithmetic sampling (Vilnis et al., 2023). A code in [0, 1) is read like arithmetic coding: the token is the one whose
cumulative interval holds it, and where in that interval it lay is the code for the next token. A uniform code is an
exact draw of the whole text. Sample i of a group of K has the code (u + i/K) mod 1 with one u for all: each one alone
is still uniform, together they are spread over the tree of texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from simplexity.draw import GRAIN, Seeds, as_seeds, derive_seeds, derived_seed, locate, uniform
from simplexity.siblings import Siblings

SHARED, OWN, NODE = 1, 2, 4  # streams of random numbers beside that of plain draws


@dataclass
class Codes:
    """The codes of some rows, float64 `[rows]`, which every token uses up a little.

    A code has 53 bits and a token takes log2(1/q) of them. What is taken at the top is put back at the bottom from the
    row's own stream of numbers, so that a text of any length is an exact draw. A row's codes depend on the seed of its
    group, its place there and its own distributions alone.
    """

    code: Tensor
    seeds: Tensor
    step: int | Tensor = 0  # of the next token; one for each row where their texts began at different times

    @classmethod
    def spread(cls, seeds: Seeds, size: int, device: torch.device | str = "cpu") -> Codes:
        """The codes of groups of `size` samples, side by side; one seed for each group.

        >>> codes = Codes.spread(7, 4).code.sort().values
        >>> codes[1:] - codes[:-1]
        tensor([0.2500, 0.2500, 0.2500], dtype=torch.float64)
        """
        if size < 1:
            raise ValueError(f"a group has at least one sample, got {size}")
        one = isinstance(seeds, int) or (isinstance(seeds, Tensor) and seeds.ndim == 0)
        count = 1 if one else len(seeds)  # pyright: ignore[reportArgumentType]
        groups = as_seeds([seeds] if one else seeds, torch.Size([count]), torch.device(device))  # pyright: ignore[reportArgumentType]
        shared = uniform(groups, 0, SHARED).unsqueeze(-1)
        places = torch.arange(size, device=groups.device, dtype=torch.float64) / size
        return cls(((shared + places) % 1.0).flatten(), derive_seeds(groups, size))

    @classmethod
    def at(cls, group: int, index: int, size: int) -> Codes:
        """That of one sample alone, the same as in `spread`."""
        seed = as_seeds([group], torch.Size([1]), torch.device("cpu"))
        place = torch.tensor([index])
        return cls((uniform(seed, 0, SHARED) + place.double() / size) % 1.0, derived_seed(seed, place))

    def respread(self, siblings: Siblings) -> None:
        """New codes, evenly spread over the samples that share a text; for decoders that look at how many do.

        Whether samples stay together is decided by their codes, so that what is left of a code is no longer uniform
        for whoever knows that. A new number for each text and step is, and each token is an exact draw from its q.
        """
        first, rank = siblings.places()
        seeds = self.seeds.view(-1, siblings.size).gather(-1, first).flatten()
        self.code = (uniform(seeds, self.step, NODE) + rank.flatten().double() / siblings.count) % 1.0

    def draw(self, q: Tensor) -> Tensor:
        """One token per row of q `[rows, n]`, int64 `[rows]`; the codes move on."""
        self.check(q.shape[:-1])
        token, rest, width = locate(q, self.code)
        self.move_on(rest, width)
        return token

    def check(self, rows: torch.Size) -> None:
        """A ValueError unless there is a code for each row."""
        if rows != self.code.shape:
            raise ValueError(f"{len(self.code)} codes need as many rows, got {list(rows)}")

    def move_on(self, rest: Tensor, width: Tensor) -> None:
        """To the next token, where the codes lay at `rest`, from 0 to 1, of intervals so wide."""
        fresh = uniform(self.seeds, self.step, OWN)
        # what was the last bit of the code is GRAIN / width after the stretch; where no bit is left all are new
        self.code = torch.where(width > GRAIN, rest + GRAIN / width * fresh, fresh).clamp_(0.0, 1.0 - GRAIN)
        self.step = self.step + 1
