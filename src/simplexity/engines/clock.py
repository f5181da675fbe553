"""Seconds spent in a model; on a GPU told by events, so that nothing waits for them."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Runs from each start to the stop after it; on a GPU it tells how long the work took that was queued between."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []

    def start(self) -> None:
        """The model begins."""
        self.marks.append(self._now())

    def stop(self) -> None:
        """The model is done."""
        self.marks.append(self._now())

    def seconds(self) -> float:
        """The sum so far, from when it was last asked for; a GPU is waited for."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=False))
        self.marks = []
        if not self.cuda:
            return sum(end - start for start, end in pairs)
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in pairs) / 1e3

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
