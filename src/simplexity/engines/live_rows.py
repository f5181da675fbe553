"""The texts that are being written at once: what is known of each, and which of them have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from simplexity.context import Context
from simplexity.coupling import Codes
from simplexity.draw import derive_seeds
from simplexity.siblings import Siblings

if TYPE_CHECKING:
    from simplexity.decoding import Decoder


@dataclass
class Rows:
    """What is known of the texts: by place in the batch, groups side by side, or by slot, where they lie."""

    live: int  # they stand in the first places
    group: int  # so many leave together: a text that others are counted with stays as long as they do
    alive: Tensor  # as many as are live, on the device
    seeds: Tensor
    over: Tensor  # whether it has ended: it waits for the others of its group, or for the next look
    written: Tensor  # `[slots, limit]`
    ended: Tensor  # by slot
    stops: Tensor
    step: Tensor
    unsolved: Tensor
    codes: Codes | None
    siblings: Siblings | None
    counts: Tensor | None  # how many shared a text when its newest token was drawn
    before: Tensor | None  # the prompts, by slot, where a decoder looks at them

    @classmethod
    def of(
        cls,
        prompts: list[list[int]],
        chosen: Decoder,
        n: int,
        limit: int,
        seeds: Tensor,
        ends: list[int],
        coupled: bool,
        room: int,
    ) -> Rows:
        """n texts of up to `limit` tokens for each prompt and its seed, in tables for `room` texts."""
        count, device = len(prompts) * n, seeds.device
        related = chosen.reads("siblings")
        group = n if related else 1
        codes = Codes.spread(seeds, n, device) if coupled else None
        if codes is not None:
            codes = Codes(_filled(codes.code, room, 0.0), _filled(codes.seeds, room, 0))
        return cls(
            live=count,
            group=group,
            alive=torch.tensor(count, device=device),
            seeds=_filled(derive_seeds(seeds, n), room, 0),
            over=_filled(torch.zeros(count, dtype=torch.bool, device=device), room, True),
            written=torch.zeros(room, limit, dtype=torch.int64, device=device),
            ended=torch.full((room,), limit, dtype=torch.int64, device=device),
            stops=torch.tensor(ends, dtype=torch.int64, device=device),
            step=torch.zeros((), dtype=torch.int64, device=device),
            unsolved=torch.zeros((), dtype=torch.bool, device=device),
            codes=codes,
            siblings=Siblings(room // group * group, group, device) if related else None,
            counts=torch.zeros(room, dtype=torch.int64, device=device) if related else None,
            before=_padded(prompts, n, device) if chosen.penalises() else None,
        )

    def alike(self) -> bool:
        """Whether every step does the same to the same tensors, so that a graph can repeat it."""
        return self.before is None

    def whole(self, places: int) -> int:
        """How many of the first places hold whole groups."""
        return places // self.group * self.group

    def context(self, slots: Tensor, size: int, step: int | Tensor) -> Context:
        """What a decoder may know of the texts in the first `size` places, when their token of this step is drawn."""
        tokens = None
        if self.before is not None:
            tokens = torch.cat([self.before[slots[:size]], self.written[slots[:size], :step]], 1)
        return Context(tokens, step, self.seeds[:size], None if self.counts is None else self.counts[:size])

    def codes_of(self, size: int) -> Codes | None:
        """Those of the first places, for this step."""
        return None if self.codes is None else Codes(self.codes.code[:size], self.codes.seeds[:size], self.step)

    def siblings_of(self, size: int) -> Siblings | None:
        """Those of the first places, in the same memory."""
        return None if self.siblings is None else self.siblings.first(size)

    def tables(self) -> list[Tensor]:
        """What moves with a text to another place."""
        return [self.seeds, self.over] + ([] if self.codes is None else [self.codes.code, self.codes.seeds])

    def keep(self, live: int, order: Tensor) -> None:
        """Only so many rows go on; they stand in the first places now, moved there by `order`."""
        self.live = live
        self.alive.fill_(live)
        if self.siblings is not None:
            groups = order[:: self.group] // self.group
            self.siblings.same[: len(groups)] = self.siblings.same[groups]


class Leaving:
    """Which rows had ended when it was last asked.

    The answer of a GPU is read at the next question, when it has long been there: a GPU that is waited for is idle
    until it is told what to do next.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.asked: tuple[Tensor, Any] | None = None

    def ask(self, over: Tensor) -> None:
        """These are the rows, `[live]`."""
        flags = torch.empty(over.shape, dtype=torch.bool, pin_memory=self.cuda)
        self.asked = flags.copy_(over, non_blocking=True), None
        if self.cuda:
            event = torch.cuda.Event()
            event.record()
            self.asked = flags, event

    def answer(self) -> Tensor | None:
        """Which of them had ended, on the host; None where nothing was asked yet."""
        if self.asked is None:
            return None
        flags, event = self.asked
        if event is not None:
            event.synchronize()
        return flags


def _filled(first: Tensor, size: int, value: Any) -> Tensor:
    """A longer tensor that begins like this one."""
    return torch.cat([first, first.new_full((size - len(first),), value)])


def _padded(prompts: list[list[int]], n: int, device: torch.device) -> Tensor:
    """The prompts of the n texts each, padded on the left with −1."""
    longest = max(map(len, prompts))
    table = torch.tensor([[-1] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    return table.repeat_interleave(n, 0)
